"""Balise 6: DeepSpeed's PipelineModule."""

import functools
from collections import OrderedDict

from torch import nn

from dlojz_tp.works import source
from tests.answers.bank import Bank

bank = Bank("16_pipeline_schedules")

MICRO = '"train_micro_batch_size_per_gpu": batch_size // (n_micro_batches * n_replicas),'
STEPS = '"gradient_accumulation_steps": n_micro_batches,'
TOTAL = '"train_batch_size": batch_size,'
CLIP = '        "gradient_clipping": 0.0,\n'

bank.slip(6, "layers-built", ("LayerSpec(nn.Linear, wide, out)", "LayerSpec(nn.Linear(wide, out))"))
bank.slip(6, "layers-built", ("LayerSpec(nn.GELU)", "nn.GELU()"))
bank.slip(6, "not-specs", ("LayerSpec(nn.GELU)", "nn.functional.gelu"))
bank.slip(6, "key-ignored", ('"train_batch_size"', '"batch_size"'))
bank.slip(6, "cannot-be-built", ("LayerSpec(nn.Linear, wide, out)", "LayerSpec(nn.Linear, (wide, out))"))
bank.slip(6, "wrong-layers", ("LayerSpec(nn.Linear, wide, out)", "LayerSpec(nn.Linear, out, wide)"))
bank.slip(6, "wrong-layers", (", LayerSpec(nn.GELU)]", "]"), ("return specs[:-1]", "return specs"))
bank.slip(6, "gelu-at-the-end", ("return specs[:-1]", "return specs"))
bank.slip(6, "no-pipeline-module", ("return PipelineModule(", "return dict("))
bank.slip(6, "stages-not-passed", ("num_stages=n_stages, ", ""))
bank.slip(6, "stages-not-passed", ("num_stages=n_stages", "num_stages=2 * n_stages"))
bank.slip(6, "specs-changed", ("layers=specs", "layers=specs[:1]"))
bank.slip(6, "loss-not-passed", ("loss_fn=loss_fn, ", ""))
bank.slip(6, "not-a-dictionary", ("    return {\n", "    return list({\n"), ("    }\n", "    })\n"))
bank.slip(
    6, "another-training", ("loss_fn=loss_fn,", "loss_fn=lambda output, target: loss_fn(output, target) / n_stages,")
)
bank.slip(6, "clipping-left-on", (CLIP, ""))
bank.slip(6, "clipping-left-on", ('"gradient_clipping": 0.0', '"gradient_clipping": 1.0'))
bank.slip(6, "micro-batch-is-batch", (MICRO, '"train_micro_batch_size_per_gpu": batch_size // n_replicas,'))
bank.slip(
    6, "micro-batch-is-batch", (MICRO, '"train_micro_batch_size_per_gpu": batch_size / n_micro_batches / n_replicas,')
)
bank.slip(6, "no-accumulation", (STEPS, '"gradient_accumulation_steps": 1,'))
bank.slip(6, "no-accumulation", (STEPS, ""), (TOTAL, ""))
bank.slip(6, "replicas-forgotten", (MICRO, '"train_micro_batch_size_per_gpu": batch_size // n_micro_batches,'))
bank.slip(6, "replicas-forgotten", (TOTAL, '"train_batch_size": batch_size // n_replicas,'))
bank.slip(
    6,
    "uneven-accepted",
    ("    if batch_size % (n_micro_batches * n_replicas):\n", "    if batch_size % n_micro_batches:\n"),
)
bank.slip(6, "uneven-accepted", ("        raise ValueError(", "        str("))
bank.slip(6, "zero-in-a-pipeline", (CLIP, CLIP + '        "zero_optimization": {"stage": 2},\n'))
bank.slip(6, "wrong-layers", ("LayerSpec(nn.GELU)", 'LayerSpec(nn.GELU, approximate="tanh")'))
bank.slip(6, "optimizer-in-config", (CLIP, CLIP + '        "optimizer": {"type": "Adam", "params": {"lr": 1e-3}},\n'))
bank.slip(6, "half-precision", (CLIP, CLIP + '        "bf16": {"enabled": True},\n'))
bank.slip(6, "half-precision", (CLIP, CLIP + '        "amp": {"enabled": True},\n'))
bank.slip(6, "another-training", (CLIP, CLIP + '        "scheduler": {"type": "WarmupLR", "params": {}},\n'))
bank.slip(6, "clipping-left-on", ('"gradient_clipping": 0.0', '"gradient_clipping": None'))
bank.slip(
    6,
    "sizes-changed",
    (
        "    for wide, out in zip(sizes, sizes[1:]):\n",
        "    while len(sizes) > 1:\n        wide, out = sizes.pop(0), sizes[0]\n",
    ),
)
bank.slip(
    6,
    "layers-built",
    (
        "LayerSpec(nn.Linear, wide, out), LayerSpec(nn.GELU)",
        "LayerSpec(nn.Sequential, nn.Linear(wide, out), nn.GELU())",
    ),
)
bank.slip(6, "layers-built", ("layers=specs", "layers=[spec.build() for spec in specs]"))
bank.slip(6, "not-specs", ("LayerSpec(nn.Linear, wide, out)", "LayerSpec(lambda: nn.Linear(wide, out))"))
bank.slip(6, "wrong-layers", ("LayerSpec(nn.Linear, wide, out), LayerSpec(nn.GELU)", "LayerSpec(nn.GELU), LayerSpec(nn.Linear, wide, out)"),
          ("return specs[:-1]", "return specs"))  # fmt: skip
bank.slip(6, "another-training", ("loss_fn=loss_fn", "loss_fn=nn.functional.cross_entropy"))
bank.slip(6, "replicas-forgotten", (TOTAL, '"train_batch_size": batch_size * n_replicas,'))
bank.slip(6, "uneven-accepted", ("        raise ValueError(", "        raise AssertionError("))
bank.slip(
    6,
    "even-refused",
    (
        "if batch_size % (n_micro_batches * n_replicas):",
        "if batch_size % n_micro_batches or n_micro_batches % n_replicas:",
    ),
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


bank.several(6, None, specs_by_slices, module_by_topology, config_in_steps)
bank.several(6, None, specs_by_index, module_of_a_class, config_in_steps)
bank.several(6, None, specs_by_index, module_plain, config_of_two)
bank.several(6, None, specs_from_runtime, module_by_parameters, config_of_total)
# Where deepspeed is installed, an answer may hold the real classes.
bank.text(
    6,
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
