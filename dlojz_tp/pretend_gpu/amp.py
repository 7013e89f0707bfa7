"""Autocast and random numbers: made for "cuda", done by the CPU's."""

import torch

from dlojz_tp.pretend_gpu.memory import CPU


def replaced(machine) -> list[tuple]:
    """(module, name, stand-in) of each."""
    here = machine.here
    cast_now, dtype_now = torch.is_autocast_enabled, torch.get_autocast_dtype

    class Autocast(torch.autocast):
        """autocast("cuda") is the CPU's, in CUDA's dtype where none is given; autocast("cpu") is for CPU tensors."""

        def __init__(self, device_type, dtype=None, enabled=True, cache_enabled=None):
            self.asked = device_type
            if device_type == "cuda":
                device_type, dtype = "cpu", dtype or dtype_now("cuda")
            super().__init__(device_type, dtype, enabled, cache_enabled)

        def __enter__(self):
            here.casts = (*getattr(here, "casts", ()), self.asked)
            if self.asked == "cuda":
                here.on_gpu = (*getattr(here, "on_gpu", ()), (self._enabled, self.fast_dtype))
            return super().__enter__()

        def __exit__(self, *error):
            here.casts, here.kept = here.casts[:-1], {}
            if self.asked == "cuda":
                here.on_gpu = here.on_gpu[:-1]
            return super().__exit__(*error)

    class CudaAutocast(Autocast):
        """torch.cuda.amp.autocast."""

        def __init__(self, enabled=True, dtype=torch.float16, cache_enabled=True):
            super().__init__("cuda", dtype, enabled, cache_enabled)

    def casts(device_type=None):
        asked = getattr(here, "casts", ())
        return cast_now("cpu") and (not asked or asked[-1] == (device_type or "cuda"))

    class Kind(type(torch.Generator)):
        def __instancecheck__(cls, value):
            return isinstance(value, torch._C.Generator)

    class Generator(torch.Generator, metaclass=Kind):
        """A generator that says that it is on a GPU; its numbers are a CPU generator's."""

        def __new__(cls, device="cpu"):
            self = torch._C.Generator.__new__(cls, CPU)
            self.place = machine.place(device)
            if self.place.type == "cuda":
                machine.generators[self._cdata] = self
            return self

        @property
        def device(self):
            return self.place

    places = (torch, torch.amp, torch.amp.autocast_mode)
    return [
        *((place, "autocast", Autocast) for place in places),
        (torch.cuda.amp, "autocast", CudaAutocast),
        (torch.cuda.amp.autocast_mode, "autocast", CudaAutocast),
        (torch, "is_autocast_enabled", casts),
        (torch, "get_autocast_dtype", lambda kind: dtype_now("cpu" if kind == "cuda" else kind)),
        (torch, "Generator", Generator),
    ]
