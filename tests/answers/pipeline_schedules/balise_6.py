"""Balise 6: DeepSpeed's PipelineModule."""

import functools
from collections import OrderedDict

from torch import nn

from dlojz_tp.works import source
from tests.answers.bank import Bank

bank = Bank("16_pipeline_schedules", 6)

MICRO = '"train_micro_batch_size_per_gpu": batch_size // (n_micro_batches * n_replicas),'
STEPS = '"gradient_accumulation_steps": n_micro_batches,'
TOTAL = '"train_batch_size": batch_size,'
CLIP = '        "gradient_clipping": 0.0,\n'

bank.hint("layers-built", "A layer was built before the PipelineModule asked for it, so every rank would have the "
          "whole model in memory. Give LayerSpec the class and its arguments, not a module.")  # fmt: skip
bank.slip("layers-built", ("LayerSpec(nn.Linear, wide, out)", "LayerSpec(nn.Linear(wide, out))"))
bank.slip("layers-built", ("LayerSpec(nn.GELU)", "nn.GELU()"))
bank.hint("not-specs", "Return a list of LayerSpec, each with a layer's class and its arguments.")
bank.slip("not-specs", ("LayerSpec(nn.GELU)", "nn.functional.gelu"))
bank.hint("key-ignored", "`{name}` is not a key of DeepSpeed's, which silently ignores keys it does not know. The "
          "keys for the sizes are {names}.")  # fmt: skip
bank.slip("key-ignored", ('"train_batch_size"', '"batch_size"'), variant=True)
bank.hint("cannot-be-built", "A layer cannot be built from its LayerSpec: {error}. It takes the class, then the "
          "class's arguments one by one, as the class itself does.")  # fmt: skip
bank.slip("cannot-be-built", ("LayerSpec(nn.Linear, wide, out)", "LayerSpec(nn.Linear, (wide, out))"), variant=True)
bank.hint("wrong-layers", "The layers are {found}, but {wanted} were expected.")
bank.slip("wrong-layers", ("LayerSpec(nn.Linear, wide, out)", "LayerSpec(nn.Linear, out, wide)"))
bank.slip("wrong-layers", (", LayerSpec(nn.GELU)]", "]"), ("return specs[:-1]", "return specs"))
bank.hint("gelu-at-the-end", "After the last linear layer there must be no GELU: the loss takes that layer's outputs.")
bank.slip("gelu-at-the-end", ("return specs[:-1]", "return specs"), variant=True)
bank.hint("no-pipeline-module", "Return a PipelineModule.")
bank.slip("no-pipeline-module", ("return PipelineModule(", "return dict("), variant=True)
bank.hint("stages-not-passed", "The PipelineModule was made for {found} stages, but {wanted} were asked for: set "
          "num_stages.")  # fmt: skip
bank.slip("stages-not-passed", ("num_stages=n_stages, ", ""))
bank.slip("stages-not-passed", ("num_stages=n_stages", "num_stages=2 * n_stages"), variant=True)
bank.hint("specs-changed", "The PipelineModule got other layers than the given specs.")
bank.slip("specs-changed", ("layers=specs", "layers=specs[:1]"), variant=True)
bank.hint("loss-not-passed", "The PipelineModule needs the loss function: the last stage calls it.")
bank.slip("loss-not-passed", ("loss_fn=loss_fn, ", ""), variant=True)
bank.hint("not-a-dictionary", "Return a dictionary.")
bank.slip("not-a-dictionary", ("    return {\n", "    return list({\n"), ("    }\n", "    })\n"), variant=True)
bank.hint("another-training", "With this, DeepSpeed does not change the weights as a single process does with the "
          "mean loss and plain SGD.")  # fmt: skip
bank.slip(
    "another-training", ("loss_fn=loss_fn,", "loss_fn=lambda output, target: loss_fn(output, target) / n_stages,")
)
bank.hint("clipping-left-on", "Newer versions of DeepSpeed clip gradients to 1.0 by default: set gradient_clipping "
          "to 0.0.")  # fmt: skip
bank.slip("clipping-left-on", (CLIP, ""))
bank.slip("clipping-left-on", ('"gradient_clipping": 0.0', '"gradient_clipping": 1.0'))
bank.hint("micro-batch-is-batch", "train_micro_batch_size_per_gpu is the size of one micro-batch in one pipeline, in "
          "samples: {wanted}, not {found}.")  # fmt: skip
bank.slip("micro-batch-is-batch", (MICRO, '"train_micro_batch_size_per_gpu": batch_size // n_replicas,'))
bank.slip(
    "micro-batch-is-batch",
    (MICRO, '"train_micro_batch_size_per_gpu": batch_size / n_micro_batches / n_replicas,'),
    variant=True,
)
bank.hint("no-accumulation", "gradient_accumulation_steps is the number of micro-batches: {wanted}, not {found}.")
bank.slip("no-accumulation", (STEPS, '"gradient_accumulation_steps": 1,'))
bank.slip("no-accumulation", (STEPS, ""), (TOTAL, ""), variant=True)
bank.hint("replicas-forgotten", "train_batch_size counts all replicas: micro-batch × accumulation steps × replicas "
          "must give {wanted}.")  # fmt: skip
bank.slip("replicas-forgotten", (MICRO, '"train_micro_batch_size_per_gpu": batch_size // n_micro_batches,'))
bank.slip("replicas-forgotten", (TOTAL, '"train_batch_size": batch_size // n_replicas,'))
bank.hint("uneven-accepted", "{batch} samples do not divide by {m} micro-batches × {n} replicas: raise a ValueError.")
bank.slip(
    "uneven-accepted",
    ("    if batch_size % (n_micro_batches * n_replicas):\n", "    if batch_size % n_micro_batches:\n"),
)
bank.slip("uneven-accepted", ("        raise ValueError(", "        str("))
bank.hint("zero-in-a-pipeline", "A pipeline does not work with ZeRO 2 or 3: gradients stay whole over its "
          "micro-batches.")  # fmt: skip
bank.slip("zero-in-a-pipeline", (CLIP, CLIP + '        "zero_optimization": {"stage": 2},\n'), variant=True)
bank.slip("wrong-layers", ("LayerSpec(nn.GELU)", 'LayerSpec(nn.GELU, approximate="tanh")'))
bank.hint("optimizer-in-config", "The optimizer does not belong in the configuration, since DeepSpeed would compile "
          "one of its own. Pass it to deepspeed.initialize.")  # fmt: skip
bank.slip(
    "optimizer-in-config",
    (CLIP, CLIP + '        "optimizer": {"type": "Adam", "params": {"lr": 1e-3}},\n'),
    variant=True,
)
bank.hint("half-precision", "The step must be the plain one, in float32: use neither fp16 nor bf16.")
bank.slip("half-precision", (CLIP, CLIP + '        "bf16": {"enabled": True},\n'))
bank.slip("half-precision", (CLIP, CLIP + '        "amp": {"enabled": True},\n'), variant=True)
bank.slip("another-training", (CLIP, CLIP + '        "scheduler": {"type": "WarmupLR", "params": {}},\n'))
bank.slip("clipping-left-on", ('"gradient_clipping": 0.0', '"gradient_clipping": None'), variant=True)
bank.hint("sizes-changed", "You changed the list of sizes. Leave it as it is: the caller still uses it.")
bank.slip(
    "sizes-changed",
    (
        "    for wide, out in zip(sizes, sizes[1:]):\n",
        "    while len(sizes) > 1:\n        wide, out = sizes.pop(0), sizes[0]\n",
    ),
    variant=True,
)
bank.slip(
    "layers-built",
    (
        "LayerSpec(nn.Linear, wide, out), LayerSpec(nn.GELU)",
        "LayerSpec(nn.Sequential, nn.Linear(wide, out), nn.GELU())",
    ),
)
bank.slip("layers-built", ("layers=specs", "layers=[spec.build() for spec in specs]"), variant=True)
bank.slip("not-specs", ("LayerSpec(nn.Linear, wide, out)", "LayerSpec(lambda: nn.Linear(wide, out))"), variant=True)
bank.slip("wrong-layers", ("LayerSpec(nn.Linear, wide, out), LayerSpec(nn.GELU)", "LayerSpec(nn.GELU), LayerSpec(nn.Linear, wide, out)"),
          ("return specs[:-1]", "return specs"), variant=True)  # fmt: skip
bank.slip("another-training", ("loss_fn=loss_fn", "loss_fn=nn.functional.cross_entropy"), variant=True)
bank.slip("replicas-forgotten", (TOTAL, '"train_batch_size": batch_size * n_replicas,'), variant=True)
bank.slip("uneven-accepted", ("        raise ValueError(", "        raise AssertionError("), variant=True)
bank.hint("even-refused", "{batch} samples are {m} micro-batches × {n} replicas of {wanted} each, but you raised a "
          "ValueError.")  # fmt: skip
bank.slip(
    "even-refused",
    (
        "if batch_size % (n_micro_batches * n_replicas):",
        "if batch_size % n_micro_batches or n_micro_batches % n_replicas:",
    ),
    variant=True,
)


def specs_by_index(sizes):
    import deepspeed

    made = []
    for i in range(len(sizes) - 1):
        if i:
            made.append(deepspeed.pipe.LayerSpec(nn.GELU))
        made.append(deepspeed.pipe.LayerSpec(nn.Linear, in_features=sizes[i], out_features=sizes[i + 1]))
    return made


def module_plain(specs, n_stages, loss_fn):
    from deepspeed.pipe import PipelineModule

    return PipelineModule(specs, n_stages, loss_fn=lambda output, target: loss_fn(output, target))


def config_of_two(batch_size, n_micro_batches, n_replicas=1):
    if batch_size % n_micro_batches or batch_size // n_micro_batches % n_replicas:
        raise ValueError("uneven")
    size = batch_size // n_micro_batches // n_replicas
    return {
        "train_micro_batch_size_per_gpu": size,
        "gradient_accumulation_steps": n_micro_batches,
        "gradient_clipping": 0,
    }


def specs_from_runtime(sizes):
    from deepspeed.runtime.pipe.module import LayerSpec as Spec

    pairs = list(zip(sizes[:-1], sizes[1:]))
    nested = [[Spec(nn.Linear, a, b), Spec(nn.GELU)] for a, b in pairs[:-1]]
    return [spec for pair in nested for spec in pair] + [Spec(nn.Linear, *pairs[-1])]


def module_by_parameters(specs, n_stages, loss_fn):
    import deepspeed.pipe

    return deepspeed.pipe.PipelineModule(
        layers=tuple(specs), num_stages=n_stages, loss_fn=loss_fn, partition_method="parameters"
    )


def config_of_total(batch_size, n_micro_batches, n_replicas=1):
    size, rest = divmod(batch_size, n_micro_batches * n_replicas)
    if rest:
        raise ValueError(f"{rest} samples are left over")
    return dict(
        train_batch_size=size * n_micro_batches * n_replicas,
        gradient_accumulation_steps=n_micro_batches,
        gradient_clipping=0.0,
        zero_optimization={"stage": 0},
        fp16={"enabled": False},
    )


def specs_by_slices(sizes):
    """One spec of the GELU, at all its places."""
    from deepspeed import pipe

    linears = list(map(functools.partial(pipe.LayerSpec, nn.Linear), sizes, sizes[1:]))
    specs = [pipe.LayerSpec(nn.GELU)] * (2 * len(linears) - 1)
    specs[::2] = linears
    return specs


def module_by_topology(specs, n_stages, loss_fn):
    from deepspeed.pipe import PipelineModule
    from deepspeed.runtime.pipe.topology import PipeDataParallelTopology

    return PipelineModule(layers=specs, topology=PipeDataParallelTopology(num_pp=n_stages, num_dp=1), loss_fn=loss_fn)


def config_in_steps(batch_size, n_micro_batches, n_replicas=1):
    if batch_size % n_replicas:
        raise ValueError("samples for each replica")
    if batch_size // n_replicas % n_micro_batches:
        raise ValueError("samples for each micro-batch")
    config = OrderedDict(train_batch_size=batch_size)
    config["gradient_accumulation_steps"] = n_micro_batches
    config["gradient_clipping"] = False
    config["steps_per_print"] = 1000
    return config


def module_of_a_class(specs, n_stages, loss_fn):
    from deepspeed.pipe import PipelineModule

    class Net(PipelineModule):
        def __init__(self):
            super().__init__(specs, n_stages, None, loss_fn, partition_method="type:linear")

    return Net()


bank.several(None, specs_by_slices, module_by_topology, config_in_steps)
bank.several(None, specs_by_index, module_of_a_class, config_in_steps)
bank.several(None, specs_by_index, module_plain, config_of_two)
bank.several(None, specs_from_runtime, module_by_parameters, config_of_total)
# Where deepspeed is installed, an answer may hold the real classes.
bank.text(
    None,
    source.find(bank.work).balises[6].code
    + """

try:
    from deepspeed.pipe import LayerSpec, PipelineModule
except ImportError:
    LayerSpec = PipelineModule = None


def layer_specs(sizes):
    global LayerSpec
    if LayerSpec is None:
        from deepspeed.pipe import LayerSpec
    specs = [LayerSpec(nn.Linear, sizes[0], sizes[1])]
    for wide, out in zip(sizes[1:], sizes[2:]):
        specs += [LayerSpec(nn.GELU), LayerSpec(nn.Linear, wide, out)]
    return specs


def pipeline_module(specs, n_stages, loss_fn):
    global PipelineModule
    if PipelineModule is None:
        from deepspeed.pipe import PipelineModule
    return PipelineModule(layers=specs, num_stages=n_stages, loss_fn=loss_fn)
""",
)
