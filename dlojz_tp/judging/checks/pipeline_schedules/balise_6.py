"""Balise 6: what DeepSpeed is given, judged with a stand-in for its module; and a step, where it is installed."""

import contextlib
import functools
import importlib.util
import math
import sys
from types import ModuleType
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn

from dlojz_tp import launch
from dlojz_tp.judging.checking import Wrong, close, pretended
from dlojz_tp.judging.checking.looks import Look, at_most, judged, nothing, silent
from dlojz_tp.judging.probes.shared_looks import each_rank, mistake_look
from dlojz_tp.works.balise import BaliseNotDone

SIZES = (  # sizes, stages, layers
    ([4, 8, 3], 2, "Linear 4→8, GELU, Linear 8→3"),
    ([6, 5, 7, 5, 2], 3, "Linear 6→5, GELU, Linear 5→7, GELU, Linear 7→5, GELU, Linear 5→2"),
    ([3, 4], 1, "Linear 3→4"),
)
CONFIGS = ((64, 8, 1), (64, 4, 4), (12, 12, 1), (96, 3, 2))
UNEVEN = ((10, 4, 1), (24, 4, 4))
NAMES = ("train_micro_batch_size_per_gpu", "gradient_accumulation_steps", "train_batch_size")


@functools.cache
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


def _in_words(layer):
    """What a layer computes."""
    if isinstance(layer, nn.Linear):
        words = f"Linear {layer.in_features}→{layer.out_features}" + " without bias" * (layer.bias is None)
        return words if layer.weight.dtype == torch.float32 else f"{words} in {layer.weight.dtype}"
    other = isinstance(layer, nn.GELU) and layer.approximate != "none"
    return f"{type(layer).__name__} by {layer.approximate}" if other else type(layer).__name__


def observe_module(pipe, layer_specs, pipeline_module, sizes, n_stages):
    given = list(sizes)
    with _nothing_built():
        specs = layer_specs(given)
    yield {"sizes": None if specs is None else given}
    listed = specs if isinstance(specs, list | tuple) else [specs]
    kinds = [type(spec).__name__ for spec in listed if not isinstance(spec, pipe.LayerSpec)]
    yield {"kinds": kinds if isinstance(specs, list | tuple) else [*kinds, "no list"]}
    try:
        yield {"layers": ", ".join(_in_words(spec.build()) for spec in specs), "unbuilt": ""}
    except TypeError as error:
        yield {"unbuilt": str(error).split("\n")[0]}

    def loss_fn(output, target):
        return ((output - target) ** 2).mean()

    with _nothing_built():
        module = pipeline_module(list(specs), n_stages, loss_fn)
    yield {"module": "PipelineModule" if isinstance(module, pipe.PipelineModule) else module and type(module).__name__}
    layers, stages, topology, loss = module.given.values()
    yield {"stages": str(stages if topology is None else topology.get_dim("pipe")),
           "same": len(layers) == len(specs) and all(a is b for a, b in zip(layers, specs))}  # fmt: skip
    target = torch.ones(2, 2)
    yield {"loss": loss(3 * target, target) if callable(loss) else f"{loss} as loss function"}


def _both(seen, due):
    return {"found": seen, "wanted": due}


def _other_layers(seen, due):
    slug = "gelu-at-the-end" if seen == f"{due}, GELU" else "wrong-layers"
    return None if seen == due else (slug, _both(seen or "none", due) | silent(seen, due))


MODULE = [
    Look("layer specs: nothing is built, and the right layers are in the right order",
         "sizes", lambda at: at[0], "sizes-changed"),
    Look("", "kinds", [], "not-specs", fields={"expected": ""}),
    Look("", "unbuilt", "", "cannot-be-built", fields=lambda seen, due: {"error": seen} | silent(seen, due)),
    mistake_look("", "layers", lambda at: at[2], _other_layers),
    Look("", "module", "PipelineModule", "no-pipeline-module"),
    Look("", "stages", lambda at: str(at[1]), "stages-not-passed", fields=_both),
    Look("", "same", True, "specs-changed"),
    Look("", "loss", 4.0, lambda seen, _: "loss-not-passed" if isinstance(seen, str) else "another-training"),
]  # fmt: skip


def observe_config(deepspeed_config, batch, m, n):
    """The entries of a configuration that a pipeline depends on."""
    try:
        config, refused = deepspeed_config(batch, m, n), ""
    except ValueError as error:
        config, refused = {}, repr(error)
    yield {"refused": refused, "kind": "dict" if isinstance(config, dict) else config and type(config).__name__}
    clipping = config.get("gradient_clipping", "left out")
    yield {
        "clipping": "0.0" if clipping == 0 else repr(clipping),
        "ignored": [key for key in config if key not in NAMES and ("batch" in key or "accumulation" in key)],
        "sizes": tuple(config.get(name) for name in NAMES),
        "zero": (config.get("zero_optimization") or {}).get("stage", 0),
        "optimizer": str(config.get("optimizer", "none")),
        "half": [name for name in ("fp16", "bf16", "bfloat16", "amp") if (config.get(name) or {}).get("enabled")],
        "scheduler": str(config.get("scheduler", "none")),  # it changes the learning rate
    }  # fmt: skip


def _wrong_sizes(seen, at):
    """(hint, found, wanted) where the sizes are wrong, else None. at: samples, micro-batches, replicas."""
    (micro, steps, total), (batch, m, n) = seen, at
    share = batch // m // n
    if any(not isinstance(number, int | None) for number in seen):
        return "micro-batch-is-batch", micro, f"{share} (an int)"
    if seen.count(None) > 1:  # two of the three are enough for DeepSpeed: it computes the third
        return ("no-accumulation", "left out", m) if steps is None else ("micro-batch-is-batch", "left out", share)
    steps = total / micro / n if steps is None else steps
    micro = total / steps / n if micro is None else micro
    if steps != m:
        return "no-accumulation", steps, m
    if micro != share:
        return ("replicas-forgotten", micro, batch) if micro == batch // m else ("micro-batch-is-batch", micro, share)
    return None if total is None or total == batch else ("replicas-forgotten", total, batch)


def _sizes(seen, at):
    wrong = _wrong_sizes(seen, at)
    return wrong and (wrong[0], _both(*wrong[1:]) | silent(seen, at))


def _of_case(seen, at):
    batch, m, n = at
    return {"batch": batch, "m": m, "n": n, "wanted": batch // m // n, "expected": ""}


CONFIG = [
    Look("the configuration: sizes whose product is right, no clipping", "refused", lambda at: at, "even-refused",
         holds=nothing, fields=_of_case),
    Look("", "kind", "dict", "not-a-dictionary"),
    Look("", "clipping", "0.0", "clipping-left-on"),
    Look("", "ignored", [], "key-ignored",
         fields=lambda seen, due: {"name": seen[0], "names": ", ".join(NAMES)} | silent(seen, due)),
    mistake_look("", "sizes", lambda at: at, _sizes),
    Look("", "zero", 1, "zero-in-a-pipeline", holds=at_most, fields=silent),
    Look("", "optimizer", "none", "optimizer-in-config"),
    Look("", "half", [], "half-precision", fields=silent),
    Look("", "scheduler", "none", "another-training"),
]  # fmt: skip


def observe_uneven(deepspeed_config, *case):
    try:
        yield {"answer": repr(deepspeed_config(*case))}
    except ValueError:
        yield {"answer": "ValueError"}
    except BaliseNotDone:
        raise
    except Exception as error:
        yield {"answer": repr(error)}


def _accepted(seen, at):
    about = _of_case(seen, at) | {"expected": "ValueError"}
    return None if seen == "ValueError" else ("uneven-accepted", about)


REFUSED = [mistake_look(CONFIG[0].claim, "answer", lambda at: at, _accepted)]


def observe_step(layer_specs, pipeline_module, deepspeed_config):
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
    weights = {n: layer.weight.detach().clone() for n, layer in layers if isinstance(layer, nn.Linear)}
    return {"loss": float(loss), "weights": weights}


def _fill(number, layer):
    if isinstance(layer, nn.Linear):
        generator = torch.Generator().manual_seed(number)
        with torch.no_grad():
            layer.weight.copy_(torch.randn(layer.weight.shape, generator=generator))
            layer.bias.zero_()


def _batch():
    generator = torch.Generator().manual_seed(0)
    return torch.randn(12, 5, generator=generator), torch.randint(3, (12,), generator=generator)


@functools.cache
def _truth():
    """One process: the loss, and {number of a linear layer: weights after a step}."""
    layers = [nn.Linear(5, 6), nn.GELU(), nn.Linear(6, 7), nn.GELU(), nn.Linear(7, 3)]
    for number, layer in enumerate(layers):
        _fill(number, layer)
    x, y = _batch()
    loss = nn.functional.cross_entropy(nn.Sequential(*layers)(x), y)
    loss.backward()
    linear = ((number, layer.weight) for number, layer in enumerate(layers) if isinstance(layer, nn.Linear))
    return loss.item(), {number: weight.detach() - 0.5 * weight.grad for number, weight in linear}


def _same_weights(got, due):
    return all(close(weight, due[number], 1e-4) for number, weight in got.items())


STEP = [
    each_rank("a step of DeepSpeed on 2 ranks changes the weights as a single process does",
              "loss", lambda _: _truth()[0], "another-training", holds=functools.partial(math.isclose, rel_tol=1e-4)),
    each_rank("", "weights", lambda _: _truth()[1], "another-training", holds=_same_weights),
]  # fmt: skip


def balise_6(layer_specs, pipeline_module, deepspeed_config):
    """Specs and module with a stand-in of deepspeed.pipe; the configuration; a true step if deepspeed is there."""
    answers = layer_specs, pipeline_module, deepspeed_config
    yield MODULE[0].claim
    with _stand_in(*answers) as pipe:
        for case in SIZES:
            yield from judged(MODULE, observe_module, pipe, *answers[:2], *case[:2], at=case, where=f"sizes {case[0]}")
    for looks, observe, cases in ((CONFIG, observe_config, CONFIGS), (REFUSED, observe_uneven, UNEVEN)):
        for case in cases:
            where = "{} samples, {} micro-batches, {} replicas".format(*case)
            yield from judged(looks, observe, deepspeed_config, *case, at=case, where=where)
    if importlib.util.find_spec("deepspeed") is None:
        yield "not checked here, as deepspeed is not installed: a step by DeepSpeed itself"
        return
    yield from judged(STEP, lambda: launch.ranks(observe_step, *answers, n=2, timeout=45))
