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
parameter), 4 % of the memory kept free, tensor ranks within a node, sequence parallelism with them, {attention}
attention, hierarchical collectives, communication beside computing where it can be, FSDP's prefetching and root that
stays for ZeRO 3, balanced experts. Products reach {products:.2g} of the peak. On published runs such predictions were
off by 9 % on average, on mixtures of experts by 16 % (benchmarks/plan.py); each doubling of the nodes costs 0.8 %, with
ZeRO 3 2 %, as published runs have it."""
HOUR, KWH = 3600, 3.6e6


def main(argv: list[str]) -> int:
    """Run the command; 0 for a table, 1 where nothing divides or fits, 2 for arguments that cannot be understood."""
    args = _arguments(argv)
    try:
        card = planner.read_card(args.gpu)
        cluster = planner.Cluster(card, args.node)
        model = _model(args)
        if args.serve:
            print(_serving(model, cluster, args.gpus))
            return 0
        only = _only(args.only) | _axes(args)
        found = planner.search(model, cluster, args.gpus, args.batch or args.gpus, only=only)
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
    shape = parser.add_argument_group("the model: by name, from a file, or GPT-2's layer of these sizes")
    shape.add_argument("--model", help=f"one of {', '.join(planner.MODELS)}")
    shape.add_argument("--config", metavar="config.json", help="of a model on Hugging Face")
    shape.add_argument("--hidden", type=_count, help="hidden size")
    shape.add_argument("--layers", type=_count)
    shape.add_argument("--heads", type=_count, help="attention heads [of 128 each, or the nearest that divides]")
    shape.add_argument("--sequence", type=_count, help="tokens of a sequence [2048, or as the model has it]")
    shape.add_argument("--vocabulary", type=_count, help="words [51200, or as the model has it]")
    shape.add_argument("--plain-attention", action="store_true", help="scores are written out (no FlashAttention)")
    parser.add_argument("--gpus", type=_count, required=True)
    names = ", ".join(planner.CARDS)
    parser.add_argument("--gpu", default="H100", help=f"{names}, or a .toml or .json file with a card [%(default)s]")
    parser.add_argument("--batch", type=_count, help="sequences of a step [one a GPU]")
    parser.add_argument("--node", type=_count, help="GPUs of a node [8, or as the card has it]")
    parser.add_argument("--context", type=_count, help="ranks that share a sequence [tried]")
    parser.add_argument("--experts", type=_count, help="ranks that share the experts [tried]")
    parser.add_argument(
        "--only", action="append", default=[], metavar="NAME=VALUE",
        help=f"look only at such layouts; again for more; NAME is one of {', '.join(FIELDS)}",
    )  # fmt: skip
    parser.add_argument(
        "--serve", action="store_true", help="no training: what the GPUs, tensor ranks, hold and answer"
    )
    cost = parser.add_argument_group("the cost of a run with the best layout")
    cost.add_argument("--tokens", type=_amount, help="tokens to train on; without them no cost is shown")
    cost.add_argument("--price", type=_amount, default=2.5, help="dollars an hour and GPU [%(default)s, an assumption]")
    cost.add_argument("--watts", type=_amount, default=1300, help="of a GPU with its share of the node [%(default)s]")
    cost.add_argument("--grid", type=_amount, default=0.4, help="kg of CO2 a kWh [%(default)s; France about 0.05]")
    parser.add_argument("--top", type=_count, default=10, help="layouts to show [%(default)s]")
    parser.add_argument("--json", action="store_true", help="print JSON: bytes, seconds, shares from 0 to 1")
    parser.add_argument("--figure", metavar="FILE.png", help="write a figure as well")
    parser.error = lambda message: parser.exit(2, f"dlojz_tp plan: {message} (--help shows all)\n")
    return parser.parse_args(argv)


def _model(args: argparse.Namespace) -> planner.GPT:
    """The model that was asked for; raises ValueError for none, or for two."""
    sizes = args.hidden, args.layers
    if [args.model is not None, args.config is not None, any(sizes)].count(True) != 1:
        raise ValueError("give one of --model, --config, and --hidden with --layers")
    fused = {"fused_attention": not args.plain_attention}
    given = {name: getattr(args, name) for name in ("sequence", "vocabulary") if getattr(args, name)}
    if args.model or args.config:
        return dataclasses.replace(planner.read_model(args.model or args.config), **given, **fused)
    if not all(sizes):
        raise ValueError("--hidden and --layers go together")
    return planner.GPT(args.hidden, args.layers, args.heads or _heads(args.hidden), **given, **fused)


def _axes(args: argparse.Namespace) -> dict[str, int]:
    return {name: value for name, value in (("context", args.context), ("expert", args.experts)) if value}


def _count(text: str) -> int:
    if not text.isascii() or not text.isdigit() or not 1 <= int(text) <= 10**7:
        raise argparse.ArgumentTypeError(f"must be a whole number from 1 to 10000000, got {text!r}")
    return int(text)


def _amount(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"must be a number of 0 or more, got {text!r}")
    return value


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
        f"{_said(model)}; batch {sequences}",
        f"{args.gpus} {card.name}, {cluster.node} a node: {card.memory / 1e9:g} GB, {cluster.peak / 1e12:.0f} TFLOP/s, "
        f"{links} (source: {card.source})",
        _assumed(cluster, model.fused_attention),
        *([f"only: {', '.join(args.only)}"] if args.only else []),
        "",
        "tensor context pipeline  data expert  micro-batch  schedule        ZeRO  recomputation        GB  seconds"
        "    MFU  binds",
    ]
    for plan in best:
        x, binds = plan.layout, plan.time.binds
        schedule = f"{x.schedule} x {x.chunks}" if x.chunks > 1 else x.schedule
        axes = f"{x.tensor:6} {x.context:7} {x.pipeline:8} {x.data:5} {x.expert:6} {x.micro_batch:12}  {schedule:<16}"
        costs = f"{plan.memory.total / 1e9:6.1f} {plan.time.total:8.3f} {100 * plan.mfu:5.1f}%"
        share = 100 * getattr(plan.time, binds) / plan.time.total
        lines.append(f"{axes}{x.zero:4}  {x.recomputation:<17}{costs}  {binds} {share:.0f} %")
    near = sum(plan.time.total <= 1.01 * found[0].time.total for plan in found) - 1
    lines += ["", f"{len(found)} layouts divide and fit; {near or 'none'} beside the best within 1 % of its time"]
    lines.append("binds: the largest part of the time beside the products, and its share")
    if args.tokens:
        cost = _cost(args, model, best[0])
        lines.append(
            f"{args.tokens:.3g} tokens with the first: {cost['days']:,.1f} days, {cost['gpu_hours']:,.0f} GPU hours, "
            f"{cost['dollars']:,.0f} dollars at {args.price:g} an hour, {cost['kwh']:,.0f} kWh at {args.watts:g} W, "
            f"{cost['kg_co2']:,.0f} kg CO2 at {args.grid:g} kg a kWh; without failures and restarts"
        )
    return "\n".join(lines)


def _said(model: planner.GPT) -> str:
    size = f"{model.n_parameters / 1e9:.1f} billion parameters"
    if model.experts:
        size += f", {model.active_parameters / 1e9:.1f} of them for a token, {model.experts} experts"
    return (
        f"GPT of {size}: hidden {model.width}, {model.layers} layers, {model.heads} heads, {model.sequence} tokens, "
        f"{model.vocabulary} words"
    )


def _cost(args: argparse.Namespace, model: planner.GPT, plan: planner.Plan) -> dict[str, float]:
    """Days, GPU hours, dollars, kWh and kg of CO2 of a run over `--tokens`."""
    seconds = args.tokens / (plan.layout.batch * model.sequence) * plan.time.total
    hours = seconds * args.gpus / HOUR
    kwh = seconds * args.gpus * args.watts / KWH
    return {
        "days": seconds / HOUR / 24, "gpu_hours": hours, "dollars": hours * args.price, "kwh": kwh,
        "kg_co2": kwh * args.grid,
    }  # fmt: skip


def _serving(model: planner.GPT, cluster: planner.Cluster, cards: int) -> str:
    """What a node's cards hold and answer."""
    found = planner.serving(model, cluster, cards)
    lines = [
        f"{_said(model)}; served by {cards} {cluster.card.name}, each weight and cached number in 2 bytes (predicted)",
        f"a card holds {found.weights / 1e9:.1f} GB of weights; {found.rows} rows of {model.sequence} tokens fit, each "
        f"{found.row / 1e9:.2f} GB a card",
        f"prompts: {found.prefill:,.0f} tokens/s",
    ]
    return "\n".join(lines + [f"answers, {n} rows at once: {speed:,.0f} tokens/s" for n, speed in found.decode.items()])


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
    shape = dataclasses.asdict(model) | {"parameters": model.n_parameters}
    cost = {"cost": _cost(args, model, best[0])} if args.tokens else {}
    head = {"model": shape, "gpus": args.gpus, "cluster": dataclasses.asdict(cluster), "layouts_that_fit": count}
    return json.dumps(head | cost | {"plans": rows}, indent=1)
