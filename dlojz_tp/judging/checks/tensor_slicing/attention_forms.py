"""The forms in which a rank may hold its part of an attention."""

from dlojz_tp.judging.checks.tensor_slicing.common import Form


def attention_forms(head: int, prefix: str = "") -> list[Form]:
    """What a rank holds of an attention: query, key and value by columns, alone or stacked; the output by rows.

    Stacked: the three one after the other, or head by head, as Megatron-LM holds them, or number by number.
    head: the size of a head.
    """
    three = [f"{prefix}{name}" for name in ("query", "key", "value")]
    forms = [Form((f"{name}.{part}",), 0) for name in three for part in ("weight", "bias")]
    for size in (None, head, 1):
        forms += [Form(tuple(f"{name}.{part}" for name in three), 0, head=size) for part in ("weight", "bias")]
    return [*forms, Form((f"{prefix}output.weight",), 1), Form((f"{prefix}output.bias",), None, optional=True)]
