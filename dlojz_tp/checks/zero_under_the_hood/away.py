"""Tensors that say they live on a GPU, on a machine without one: they compute on the CPU and count what crosses the bus."""

import contextlib
import weakref
from unittest import mock

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

GPU, CPU = torch.device("cuda", 0), torch.device("cpu")
_DEVICE = torch.ops.prim.device.default


class Away(torch.Tensor):
    """A tensor on the pretended GPU; `inner` is where its values really are. `place`: what it says of its device."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, inner, place=GPU):
        """A wrapper without memory of its own; its device is asked of `__torch_dispatch__`."""
        return torch.Tensor._make_wrapper_subclass(
            cls, inner.shape, strides=inner.stride(), storage_offset=inner.storage_offset(), dtype=inner.dtype,
            device="meta", dispatch_device=True,
        )  # fmt: skip

    def __init__(self, inner, place=GPU):
        self.inner, self.place = inner, place

    def __repr__(self):
        return repr(self.inner)

    @property
    def data(self):
        return self.detach()

    @data.setter
    def data(self, other):
        """`p.data = other` moves p to other's memory, and to its device."""
        self.inner, self.place = (other.inner, other.place) if isinstance(other, Away) else (other.detach(), CPU)

    def untyped_storage(self):
        return self.inner.untyped_storage()

    def data_ptr(self):
        return self.inner.data_ptr()

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func is _DEVICE:
            return args[0].place
        raise RuntimeError("a tensor of the pretended GPU is used outside of it")


class Bus(TorchDispatchMode):
    """Inside, `cuda` is the pretended GPU. crossed: bytes "to cpu" and "to gpu", as PyTorch sends
    them. wide: which way more than two bytes an element crossed.

    Values are converted on the GPU's side only where the program says so: a copy into another dtype sends the
    source's bytes to the CPU and the target's bytes to the GPU; one that does not block is converted on the GPU (ATen's
    copy_kernel_cuda), so that the CPU's dtype crosses both ways. A copy to the CPU that does not block, into pinned memory,
    arrives with the next synchronisation; until then there are NaNs.
    """

    def __init__(self):
        super().__init__()
        self.begin()
        self._storages: dict[int, weakref.ref] = {}
        self._pinned: dict[int, weakref.ref] = {}
        self._arriving: list[tuple] = []

    def begin(self):
        """Count anew."""
        self.crossed, self.wide = {"to cpu": 0, "to gpu": 0}, set()

    def held(self) -> int:
        """Bytes that live on the pretended GPU."""
        alive = {key: ref() for key, ref in self._storages.items()}
        return sum(storage.nbytes() for storage in alive.values() if storage is not None)

    def away(self, tensor) -> Away:
        """This CPU tensor's values, on the pretended GPU."""
        storage = tensor.untyped_storage()
        self._storages[storage._cdata] = weakref.ref(storage)
        return Away(tensor)

    def arrive(self, *_, **__):
        """What a synchronisation does."""
        for target, values in self._arriving:
            target.copy_(values)
        self._arriving.clear()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if func is _DEVICE:
            return args[0].place
        name = func.overloadpacket._qualified_op_name
        pin = kwargs.pop("pin_memory", None)
        given = [t for t in tree_flatten((args, kwargs))[0] if isinstance(t, torch.Tensor)]
        there = [t for t in given if _away(t)]
        target = kwargs.pop("device", None)
        given_lists = args[:2]
        args, plain = tree_map(_inside, args), tree_map(_inside, kwargs)
        if name in ("aten::_pin_memory", "aten::pin_memory"):
            out, pin = args[0].clone(), True
        elif name == "aten::is_pinned":
            return args[0].untyped_storage()._cdata in self._pinned
        elif name == "aten::copy_":
            return self._copy(func, given, args, plain)
        elif name == "aten::_foreach_copy_":
            for to, source in zip(*given_lists, strict=True):
                self._copy(torch.ops.aten.copy_.default, (to, source), (_inside(to), _inside(source)), {})
            return None
        elif name == "aten::_to_copy":
            return self._to_copy(func, given[0], args, plain, target)
        else:
            here = [t for t in given if not _away(t) and t.dim()]
            if there and here and "barrier" not in name:
                raise RuntimeError(
                    "Expected all tensors to be on the same device, but found at least two devices, cuda:0 and cpu!"
                    + " (in collective)" * name.startswith("c10d")
                )
            if target is not None and torch.device(target).type == "cpu":
                plain["device"] = CPU
            out = func(*args, **plain)
        if name.startswith("c10d"):
            return out
        if pin:
            self._pinned[out.untyped_storage()._cdata] = weakref.ref(out.untyped_storage())
        on_gpu = torch.device(target).type == "cuda" if target is not None else bool(there)
        if not on_gpu:
            return out
        return tree_map(lambda t: self._again(t, given), out)

    def _again(self, out, given):
        """What came out, wrapped; an operation in place gives back the tensor that it was given."""
        if not isinstance(out, torch.Tensor):
            return out
        for t in given:
            if isinstance(t, Away) and t.inner is out:
                return t
        return self.away(out)

    def _copy(self, func, given, args, kwargs):
        to, source = given[:2]
        up, down = _away(to), _away(source)
        blocking = not (args[2] if len(args) > 2 else kwargs.get("non_blocking", False))
        if down and not up:
            self._crosses("to cpu", source if blocking else args[0])
            if not blocking and args[0].untyped_storage()._cdata in self._pinned:
                self._late(args[0], args[1].to(args[0].dtype))
                return to
        elif up and not down and source.dim():
            self._crosses("to gpu", to if blocking else source)
        func(*args, **kwargs)
        return to

    def _to_copy(self, func, source, args, kwargs, target):
        was = _away(source)
        will = was if target is None else torch.device(target).type == "cuda"
        late = kwargs.pop("non_blocking", False)
        out = func(*args, **kwargs)
        if was != will:
            # converted on the CPU where it blocks, else on the GPU
            self._crosses("to gpu" if will else "to cpu", source if will == late else out)
            if was and late:  # PyTorch makes its target in pinned memory
                self._late(out, out.clone())
        return self.away(out) if will else out

    def _crosses(self, way, tensor):
        self.crossed[way] += tensor.numel() * tensor.element_size()
        if tensor.element_size() > 2 and tensor.dim():
            self.wide.add(way)

    def _late(self, target, values):
        self._arriving.append((target, values.clone()))
        target.fill_(float("nan"))


def _away(tensor) -> bool:
    return isinstance(tensor, Away) and tensor.place == GPU


def _inside(value):
    return value.inner if isinstance(value, Away) else value


class _Stream:
    """A stream or an event: any way to wait for it lets what is under way arrive."""

    def __init__(self, arrive):
        self.synchronize = self.wait = arrive
        self.query = lambda: arrive() or True

    def __enter__(self):
        return self

    def __exit__(self, *error):
        return False

    def __getattr__(self, name):
        return lambda *_, **__: self  # record, wait_stream, wait_event, ...


@contextlib.contextmanager
def pretended_gpu():
    """Inside, on a rank: tensors can be put on `cuda`; gives the Bus. For processes that end soon: ranks of a check."""
    bus = Bus()
    getattr(torch._C, "_ensureCUDADeviceGuardSet", lambda: None)()
    replaced = {
        "_lazy_init": lambda: None, "is_available": lambda: True, "device_count": lambda: 1,
        "current_device": lambda: 0, "set_device": lambda *_: None, "synchronize": bus.arrive, "empty_cache": lambda: None,
        "is_current_stream_capturing": lambda: False,
    }  # fmt: skip
    replaced |= dict.fromkeys(("current_stream", "default_stream", "Stream", "Event", "stream"),
                              lambda *_, **__: _Stream(bus.arrive))  # fmt: skip
    waits = mock.patch.object(torch.accelerator, "synchronize", bus.arrive)
    with mock.patch.multiple(torch.cuda, **replaced), waits, bus:
        yield bus
