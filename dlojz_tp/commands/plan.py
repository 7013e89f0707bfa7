"""`python -m dlojz_tp plan`: the best layouts of a large model over many GPUs, predicted."""

import argparse
import dataclasses
import json
import math
import sys
from pathlib import Path

from dlojz_tp import planner

FIELDS = {field.name: field.type for field in dataclasses.fields(planner.Layout)}
ASSUMED = """\
assumed unless --only says otherwise: bfloat16 with Adam and float32 master weights, float32 gradients (18 bytes a
parameter), 10 % of the memory kept free, tensor ranks within a node, sequence parallelism with them, {attention}
attention, hierarchical collectives, communication beside computing where it can be, FSDP's prefetching and root that
stays for ZeRO 3. Links and memory run at their data sheets' speed; products reach {products:.3g} of the peak, the
rest moves a layer's activations {traffic:.3g} times: constants chosen from two published
runs on A100, optimistic elsewhere."""


def main(argv: list[str]) -> int:
    """Run the command; 0 for a table, 1 where nothing divides or fits, 2 for arguments that cannot be understood."""
    args = _arguments(argv)
    try:
        card = planner.read_card(args.gpu)
        cluster = planner.Cluster(card, args.node)
        heads = args.heads or _heads(args.hidden)
        model = planner.GPT(args.hidden, args.layers, heads, args.sequence, args.vocabulary, not args.plain_attention)
        found = planner.search(model, cluster, args.gpus, args.batch or args.gpus, only=_only(args.only))
    except ValueError as error:
        print(f"dlojz_tp plan: {' '.join(str(error).split())}", file=sys.stderr)
        return 1 if isinstance(error, planner.NoLayout) else 2
    best = found[: args.top]
    if args.figure:
        from dlojz_tp.report import plans

        Path(args.figure).write_bytes(plans(best, card.memory).png())
    print(_json(model, cluster, args, best, len(found)) if args.json else _text(model, cluster, args, best, found))
    return 0


def _arguments(argv: list[str]) -> argparse.Namespace:
    defaults = _assumed(planner.Cluster(planner.H100), True)
    parser = argparse.ArgumentParser(
        prog="dlojz_tp plan", description=f"{__doc__.splitlines()[0]}\n\n{defaults}",
        formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False,
    )  # fmt: skip
    parser.add_argument("--hidden", type=_count, required=True, help="hidden size of the GPT")
    parser.add_argument("--layers", type=_count, required=True)
    parser.add_argument("--gpus", type=_count, required=True)
    names = ", ".join(planner.CARDS)
    parser.add_argument("--gpu", default="H100", help=f"{names}, or a .toml or .json file with a card [%(default)s]")
    parser.add_argument("--heads", type=_count, help="attention heads [of 128 each, or the nearest that divides]")
    parser.add_argument("--sequence", type=_count, default=2048, help="tokens of a sequence [%(default)s]")
    parser.add_argument("--vocabulary", type=_count, default=51200, help="words [%(default)s]")
    parser.add_argument("--batch", type=_count, help="sequences of a step [one a GPU]")
    parser.add_argument("--node", type=_count, default=8, help="GPUs of a node [%(default)s]")
    parser.add_argument("--plain-attention", action="store_true", help="scores are written out (no FlashAttention)")
    parser.add_argument(
        "--only", action="append", default=[], metavar="NAME=VALUE",
        help=f"look only at such layouts; again for more; NAME is one of {', '.join(FIELDS)}",
    )  # fmt: skip
    parser.add_argument("--top", type=_count, default=10, help="layouts to show [%(default)s]")
    parser.add_argument("--json", action="store_true", help="print JSON: bytes, seconds, shares from 0 to 1")
    parser.add_argument("--figure", metavar="FILE.png", help="write a figure as well")
    parser.error = lambda message: parser.exit(2, f"dlojz_tp plan: {message} (--help shows all)\n")
    return parser.parse_args(argv)


def _count(text: str) -> int:
    if not text.isascii() or not text.isdigit() or not 1 <= int(text) <= 10**7:
        raise argparse.ArgumentTypeError(f"must be a whole number from 1 to 10000000, got {text!r}")
    return int(text)


def _heads(hidden: int) -> int:
    """As many heads as give a size near 128 (by ratio)."""
    return min((k for k in range(1, hidden + 1) if hidden % k == 0), key=lambda k: abs(math.log(hidden / k / 128)))


def _only(given: list[str]) -> dict:
    """Fields of `Layout` from NAME=VALUE; raises ValueError."""
    found = {}
    for text in given:
        name, _, value = text.partition("=")
        if name not in FIELDS:
            raise ValueError(f"--only {text}: NAME is one of {', '.join(FIELDS)}")
        if FIELDS[name] is bool and value.lower() in ("true", "false"):
            found[name] = value.lower() == "true"
        elif FIELDS[name] is int and value.isascii() and value.isdigit():
            found[name] = int(value)
        elif FIELDS[name] is str:
            found[name] = value
        else:
            wanted = "true or false" if FIELDS[name] is bool else "a whole number"
            raise ValueError(f"--only {text}: {name} is {wanted}")
    return found


def _assumed(cluster: planner.Cluster, fused: bool) -> str:
    attention = "fused" if fused else "plain"
    return ASSUMED.format(products=cluster.products, traffic=cluster.traffic, attention=attention)


def _text(model, cluster, args, best, found) -> str:
    card, sequences = cluster.card, best[0].layout.batch
    links = f"{card.link / 1e9:g} GB/s in a node, {card.network / 1e9:g} between"
    lines = [
        f"GPT of {model.n_parameters / 1e9:.1f} billion parameters: hidden {model.width}, {model.layers} layers, "
        f"{model.heads} heads, {model.sequence} tokens, {model.vocabulary} words; batch {sequences}",
        f"{args.gpus} {card.name}, {cluster.node} a node: {card.memory / 1e9:g} GB, {cluster.peak / 1e12:.0f} TFLOP/s, "
        f"{links} (source: {card.source})",
        _assumed(cluster, model.fused_attention),
        *([f"only: {', '.join(args.only)}"] if args.only else []),
        "",
        "tensor pipeline  data  micro-batch  schedule        ZeRO  recomputation     GB  seconds    MFU  binds",
    ]
    for plan in best:
        x, binds = plan.layout, plan.time.binds
        schedule = f"{x.schedule} x {x.chunks}" if x.chunks > 1 else x.schedule
        axes = f"{x.tensor:6} {x.pipeline:8} {x.data:5} {x.micro_batch:12}  {schedule:<16}{x.zero:4}"
        costs = f"{plan.memory.total / 1e9:6.1f} {plan.time.total:8.3f} {100 * plan.mfu:5.1f}%"
        share = 100 * getattr(plan.time, binds) / plan.time.total
        lines.append(f"{axes}  {x.recomputation:<14}{costs}  {binds} {share:.0f} %")
    near = sum(plan.time.total <= 1.01 * found[0].time.total for plan in found) - 1
    lines += ["", f"{len(found)} layouts divide and fit; {near or 'none'} beside the best within 1 % of its time"]
    lines.append("binds: the largest part of the time beside the products, and its share")
    return "\n".join(lines)


def _json(model, cluster, args, best, count) -> str:
    rows = [
        {
            "layout": dataclasses.asdict(plan.layout),
            "bytes": dataclasses.asdict(plan.memory) | {"total": plan.memory.total},
            "seconds": dataclasses.asdict(plan.time) | {"total": plan.time.total},
            "mfu": plan.mfu,
            "binds": plan.time.binds,
        }
        for plan in best
    ]
    model = dataclasses.asdict(model) | {"parameters": model.n_parameters}
    head = {"model": model, "gpus": args.gpus, "cluster": dataclasses.asdict(cluster), "layouts_that_fit": count}
    return json.dumps(head | {"plans": rows}, indent=1)
