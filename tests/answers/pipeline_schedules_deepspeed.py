"""Balise 6: DeepSpeed's PipelineModule."""

from torch import nn

from tests.answers.bank import Bank

bank = Bank("16_pipeline_schedules")

MICRO = '"train_micro_batch_size_per_gpu": batch_size // (n_micro_batches * n_replicas),'
STEPS = '"gradient_accumulation_steps": n_micro_batches,'
TOTAL = '"train_batch_size": batch_size,'
CLIP = '        "gradient_clipping": 0.0,\n'

bank.slip(6, "layers-built", ("LayerSpec(nn.Linear, wide, out)", "LayerSpec(nn.Linear(wide, out))"))
bank.slip(6, "layers-built", ("LayerSpec(nn.GELU)", "nn.GELU()"))
bank.slip(6, "not-specs", ("LayerSpec(nn.GELU)", "nn.functional.gelu"))
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


bank.several(6, None, specs_by_index, module_plain, config_of_two)
bank.several(6, None, specs_from_runtime, module_by_parameters, config_of_total)
