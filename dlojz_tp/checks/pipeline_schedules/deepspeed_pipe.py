"""Balise 6: what DeepSpeed is given, judged with a stand-in for its module; and a step, where it is installed."""

import contextlib
import importlib.util
import math
import sys
from functools import cache
from types import ModuleType
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn

from dlojz_tp import launch
from dlojz_tp.checking import Wrong, close, pretended
from dlojz_tp.works.balise import BaliseNotDone

HINTS = {
    "layers-built": "A layer was built before the PipelineModule asked for it, so every rank would have the whole "
                    "model in memory. Give LayerSpec the class and its arguments, not a module.",
    "not-specs": "Return a list of LayerSpec, each with a layer's class and its arguments.",
    "cannot-be-built": "A layer cannot be built from its LayerSpec: {error}. It takes the class, then the class's arguments one by one, as the class "
    "itself does.",
    "sizes-changed": "You changed the list of sizes. Leave it as it is: the caller still uses it.",
    "wrong-layers": "The layers are {found}, but {wanted} were expected.",
    "gelu-at-the-end": "After the last linear layer there must be no GELU: the loss takes that layer's outputs.",
    "no-pipeline-module": "Return a PipelineModule.",
    "stages-not-passed": "The PipelineModule was made for {found} stages, but {wanted} were asked for: set num_stages.",
    "specs-changed": "The PipelineModule got other layers than the given specs.",
    "loss-not-passed": "The PipelineModule needs the loss function: the last stage calls it.",
    "not-a-dictionary": "Return a dictionary.",
    "clipping-left-on": "Newer versions of DeepSpeed clip gradients to 1.0 by default: set gradient_clipping to 0.0.",
    "micro-batch-is-batch": "train_micro_batch_size_per_gpu is the size of one micro-batch in one pipeline, in samples: {wanted}, not "
    "{found}.",
    "key-ignored": "`{name}` is not a key of DeepSpeed's, which silently ignores keys it does not know. The keys "
                   "for the sizes are {names}.",
    "no-accumulation": "gradient_accumulation_steps is the number of micro-batches: {wanted}, not {found}.",
    "replicas-forgotten": "train_batch_size counts all replicas: micro-batch × accumulation steps × replicas must give {wanted}.",
    "even-refused": "{batch} samples are {m} micro-batches × {n} replicas of {wanted} each, but you raised a "
                    "ValueError.",
    "uneven-accepted": "{batch} samples do not divide by {m} micro-batches × {n} replicas: raise a ValueError.",
    "zero-in-a-pipeline": "A pipeline does not work with ZeRO 2 or 3: gradients stay whole over its micro-batches.",
    "optimizer-in-config": "The optimizer does not belong in the configuration, since DeepSpeed would compile one "
                           "of its own. Pass it to deepspeed.initialize.",
    "half-precision": "The step must be the plain one, in float32: use neither fp16 nor bf16.",
    "another-training": "With this, DeepSpeed does not change the weights as a single process does with the mean "
                        "loss and plain SGD.",
}  # fmt: skip

SIZES = (([4, 8, 3], 2), ([6, 5, 7, 5, 2], 3), ([3, 4], 1))
CONFIGS = ((64, 8, 1), (64, 4, 4), (12, 12, 1), (96, 3, 2))


def balise_6(layer_specs, pipeline_module, deepspeed_config):
    """Specs and module with a stand-in of deepspeed.pipe; the configuration; a true step if deepspeed is there."""
    yield "layer specs: nothing is built, and the right layers are in the right order"
    answers = layer_specs, pipeline_module, deepspeed_config
    with _stand_in(*answers) as pipe:
        for sizes, n_stages in SIZES:
            specs = _right_specs(layer_specs, sizes, pipe)
            _right_module(pipeline_module, specs, n_stages, pipe)
    yield "the configuration: sizes whose product is right, no clipping"
    for case in CONFIGS:
        _right_config(deepspeed_config, *case)
    for batch, m, n in ((10, 4, 1), (24, 4, 4)):
        try:
            found = deepspeed_config(batch, m, n)
        except ValueError:
            continue
        except BaliseNotDone:
            raise
        except Exception as error:
            found = repr(error)
        raise Wrong("uneven-accepted", expected="ValueError", got=found, batch=batch, m=m, n=n)
    if importlib.util.find_spec("deepspeed") is None:
        yield "not checked here, as deepspeed is not installed: a step by DeepSpeed itself"
        return
    yield "a step of DeepSpeed on 2 ranks changes the weights as a single process does"
    _right_training(*answers)


@cache
def _modules() -> dict[str, ModuleType]:
    """Modules `deepspeed`, `deepspeed.pipe` and so on that keep what they are given; the same in all checks."""

    class LayerSpec:
        def __init__(self, typename, *module_args, **module_kwargs):
            if not (isinstance(typename, type) and issubclass(typename, nn.Module)):
                raise Wrong("layers-built" if isinstance(typename, nn.Module) else "not-specs", got=repr(typename))
            self.typename, self.module_args, self.module_kwargs = typename, module_args, module_kwargs

        def build(self, log=False):
            return self.typename(*self.module_args, **self.module_kwargs)

    class PipelineModule(nn.Module):
        def __init__(self, layers, num_stages=None, topology=None, loss_fn=None, **options):
            super().__init__()
            self.given = {"layers": list(layers), "num_stages": num_stages, "topology": topology, "loss_fn": loss_fn}

    class ProcessTopology:
        def __init__(self, axes, dims):
            self.axes, self.dims = list(axes), list(dims)

        def get_dim(self, axis):
            return dict(zip(self.axes, self.dims)).get(axis, 0)

    class PipeDataParallelTopology(ProcessTopology):
        def __init__(self, num_pp, num_dp):
            super().__init__(["pipe", "data"], [num_pp, num_dp])

    pipe, package, runtime, inner, topologies = (ModuleType(name) for name in (
        "deepspeed.pipe", "deepspeed", "deepspeed.runtime", "deepspeed.runtime.pipe", "deepspeed.runtime.pipe.topology"))  # fmt: skip
    for module in (pipe, inner, package):
        module.LayerSpec, module.PipelineModule = LayerSpec, PipelineModule
    for module in (topologies, inner):
        module.ProcessTopology, module.PipeDataParallelTopology = ProcessTopology, PipeDataParallelTopology
    package.pipe, package.runtime, runtime.pipe, inner.topology = pipe, runtime, inner, topologies
    package.__path__ = runtime.__path__ = inner.__path__ = []
    return {
        "deepspeed": package, "deepspeed.pipe": pipe, "deepspeed.runtime": runtime, "deepspeed.runtime.pipe": inner,
        "deepspeed.runtime.pipe.module": inner, "deepspeed.runtime.pipe.topology": topologies,
    }  # fmt: skip


@contextlib.contextmanager
def _stand_in(*answers):
    """Stand-ins in the place of deepspeed's modules, also for answers that hold what the real ones have."""
    names = _modules()
    real = [(sys.modules[name], module) for name, module in names.items() if name in sys.modules]
    changes = [
        (held, name, value)
        for held, module in real
        for name, value in vars(module).items()
        if isinstance(value, type) and hasattr(held, name)
    ]
    with mock.patch.dict(sys.modules, names), pretended(changes, *answers):
        yield names["deepspeed.pipe"]


@contextlib.contextmanager
def _nothing_built():
    begin = nn.Module.__init__

    def refused(self, *args, **kwargs):
        if isinstance(self, nn.Linear | nn.GELU | nn.Sequential):
            raise Wrong("layers-built", got=type(self).__name__)
        begin(self, *args, **kwargs)

    with mock.patch.object(nn.Module, "__init__", refused):
        yield


def _right_specs(layer_specs, sizes, pipe):
    where = f"sizes {sizes}"
    given = list(sizes)
    with _nothing_built():
        specs = layer_specs(given)
    if specs is None:
        raise Wrong("nothing-returned")
    if given != sizes:
        raise Wrong("sizes-changed", expected=sizes, got=given)
    if not isinstance(specs, list | tuple) or not all(isinstance(spec, pipe.LayerSpec) for spec in specs):
        got = [type(spec).__name__ for spec in specs] if isinstance(specs, list | tuple) else type(specs).__name__
        raise Wrong("not-specs", got=str(got), where=where)
    wanted = [part for pair in zip(sizes, sizes[1:]) for part in (f"Linear {pair[0]}→{pair[1]}", "GELU")][:-1]
    found = []
    for spec in specs:
        try:
            layer = spec.build()
        except TypeError as error:
            raise Wrong("cannot-be-built", where=where, error=str(error).split("\n")[0]) from error
        linear = isinstance(layer, nn.Linear)
        found.append(f"Linear {layer.in_features}→{layer.out_features}" if linear else type(layer).__name__)
        if linear and layer.bias is None:
            found[-1] += " without bias"
        if linear and layer.weight.dtype != torch.float32:
            found[-1] += f" in {layer.weight.dtype}"
        if isinstance(layer, nn.GELU) and layer.approximate != "none":
            found[-1] += f" by {layer.approximate}"
    if found != wanted:
        slug = "gelu-at-the-end" if found == [*wanted, "GELU"] else "wrong-layers"
        raise Wrong(slug, where=where, found=", ".join(found) or "none", wanted=", ".join(wanted))
    return specs


def _right_module(pipeline_module, specs, n_stages, pipe):
    def loss_fn(output, target):
        return ((output - target) ** 2).mean()

    with _nothing_built():
        module = pipeline_module(list(specs), n_stages, loss_fn)
    if module is None:
        raise Wrong("nothing-returned")
    if not isinstance(module, pipe.PipelineModule):
        raise Wrong("no-pipeline-module", got=type(module).__name__)
    given = module.given
    stages = given["num_stages"] if given["topology"] is None else given["topology"].get_dim("pipe")
    if stages != n_stages:
        raise Wrong("stages-not-passed", found=stages, wanted=n_stages)
    if len(given["layers"]) != len(specs) or any(a is not b for a, b in zip(given["layers"], specs)):
        raise Wrong("specs-changed", expected=f"{len(specs)} specs", got=f"{len(given['layers'])} layers")
    if given["loss_fn"] is not loss_fn:
        target = torch.ones(2, 2)
        if not callable(given["loss_fn"]):
            raise Wrong("loss-not-passed", got=given["loss_fn"])
        if not close(given["loss_fn"](3 * target, target), 4.0):
            raise Wrong(
                "another-training", expected=4.0, got=given["loss_fn"](3 * target, target), where="the loss function"
            )


def _right_config(deepspeed_config, batch, m, n):
    where = f"{batch} samples, {m} micro-batches, {n} replicas"
    try:
        config = deepspeed_config(batch, m, n)
    except ValueError as error:
        raise Wrong(
            "even-refused", got=repr(error), where=where, batch=batch, m=m, n=n, wanted=batch // m // n
        ) from error
    if config is None:
        raise Wrong("nothing-returned")
    if not isinstance(config, dict):
        raise Wrong("not-a-dictionary", got=type(config).__name__)
    if config.get("gradient_clipping", 1.0) != 0:
        got = repr(config["gradient_clipping"]) if "gradient_clipping" in config else "not set"
        raise Wrong("clipping-left-on", expected="gradient_clipping 0.0", got=got, where=where)
    names = ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "train_batch_size")
    ignored = [key for key in config if key not in names and ("batch" in key or "accumulation" in key)]
    if ignored:
        raise Wrong("key-ignored", where=where, got=str(config), name=ignored[0], names=", ".join(names))
    micro, steps, total = (config.get(name) for name in names)
    if any(not isinstance(number, int | None) for number in (micro, steps, total)):
        raise Wrong(
            "micro-batch-is-batch", where=where, got=str(config), found=micro, wanted=f"{batch // m // n} (an int)"
        )
    # two of the three are enough for DeepSpeed: it computes the third
    if [micro, steps, total].count(None) > 1:
        slug, name = ("no-accumulation", m) if steps is None else ("micro-batch-is-batch", batch // m // n)
        raise Wrong(slug, where=where, got=str(config), found="left out", wanted=name)
    steps = total / micro / n if steps is None else steps
    micro = total / steps / n if micro is None else micro
    total = micro * steps * n if total is None else total
    if steps != m:
        raise Wrong("no-accumulation", where=where, got=str(config), found=steps, wanted=m)
    if micro != batch // m // n:
        slug = "replicas-forgotten" if micro == batch // m else "micro-batch-is-batch"
        raise Wrong(slug, where=where, got=str(config), found=micro, wanted=batch if "rep" in slug else batch // m // n)
    if total != batch:
        raise Wrong("replicas-forgotten", where=where, got=str(config), wanted=batch)
    if (config.get("zero_optimization") or {}).get("stage", 0) > 1:
        raise Wrong("zero-in-a-pipeline", where=where)
    if "optimizer" in config:
        raise Wrong("optimizer-in-config", got=config["optimizer"], where=where)
    if any((config.get(name) or {}).get("enabled") for name in ("fp16", "bf16", "bfloat16", "amp")):
        raise Wrong("half-precision", where=where)
    if "scheduler" in config:  # it changes the learning rate
        raise Wrong("another-training", got=config["scheduler"], where=f"scheduler, {where}")


def _trained(layer_specs, pipeline_module, deepspeed_config):
    """On a rank: loss, and {number of a layer: weights} after one step of SGD by DeepSpeed."""
    import deepspeed
    from deepspeed.ops import __compatible_ops__ as operators

    operators["deepspeed_shm_comm"] = False
    deepspeed.init_distributed(dist_backend="gloo")
    module = pipeline_module(layer_specs([5, 6, 7, 3]), dist.get_world_size(), nn.functional.cross_entropy)
    layers = list(enumerate(module.forward_funcs, module._local_start))
    for number, layer in layers:
        _fill(number, layer)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.5)
    config = deepspeed_config(12, 4, 1)
    engine, *_ = deepspeed.initialize(model=module, optimizer=optimizer, config=config)
    x, y = _batch()
    loss = engine.train_batch(data_iter=iter(list(zip(x.chunk(4), y.chunk(4)))))
    return float(loss), {n: layer.weight.detach().clone() for n, layer in layers if isinstance(layer, nn.Linear)}


def _fill(number, layer):
    if isinstance(layer, nn.Linear):
        generator = torch.Generator().manual_seed(number)
        with torch.no_grad():
            layer.weight.copy_(torch.randn(layer.weight.shape, generator=generator))
            layer.bias.zero_()


def _batch():
    generator = torch.Generator().manual_seed(0)
    return torch.randn(12, 5, generator=generator), torch.randint(3, (12,), generator=generator)


def _right_training(*answers):
    found = launch.ranks(_trained, *answers, n=2, timeout=45)
    layers = [nn.Linear(5, 6), nn.GELU(), nn.Linear(6, 7), nn.GELU(), nn.Linear(7, 3)]
    for number, layer in enumerate(layers):
        _fill(number, layer)
    x, y = _batch()
    loss = nn.functional.cross_entropy(nn.Sequential(*layers)(x), y)
    loss.backward()
    for rank, (told, weights) in enumerate(found):
        if not math.isclose(told, loss.item(), rel_tol=1e-4):
            raise Wrong("another-training", expected=loss.item(), got=told, where=f"rank {rank} of 2, the loss")
        for number, weight in weights.items():
            wanted = layers[number].weight.detach() - 0.5 * layers[number].weight.grad
            if not close(weight, wanted, 1e-4):
                where = f"rank {rank} of 2, layer {number}"
                raise Wrong("another-training", expected=wanted, got=weight, where=where)
