"""Known pipeline schedules as data: for each rank, its actions in order, as `simulate` reads them."""


def gpipe(n_stages: int, n_micro_batches: int) -> list[list[tuple[str, int]]]:
    """All forwards, then all backwards, the last micro-batch first.

    Raises ValueError for numbers under 1.
    Source: Huang et al. 2019, "GPipe: efficient training of giant neural networks using pipeline parallelism".
    """
    _positive(n_stages, n_micro_batches)
    numbers = range(n_micro_batches)
    return [[("F", k) for k in numbers] + [("B", k) for k in reversed(numbers)] for _ in range(n_stages)]


def one_f_one_b(n_stages: int, n_micro_batches: int) -> list[list[tuple[str, int]]]:
    """1F1B: after a few forwards to fill the pipeline, one forward and one backward in turn.

    Stage s keeps at most `n_stages - s` micro-batches. Raises ValueError for numbers under 1.
    Source: Fan et al. 2021, "DAPPLE: a pipelined data parallel approach for training large models".
    """
    _positive(n_stages, n_micro_batches)
    orders = []
    for stage in range(n_stages):
        warm_up = min(n_stages - stage - 1, n_micro_batches)
        order = [("F", k) for k in range(warm_up)]
        for k in range(n_micro_batches - warm_up):
            order += [("F", warm_up + k), ("B", k)]
        orders.append(order + [("B", k) for k in range(n_micro_batches - warm_up, n_micro_batches)])
    return orders


def interleaved_1f1b(n_ranks: int, n_micro_batches: int, n_chunks: int) -> list[list[tuple[str, int, int]]]:
    """1F1B over `n_ranks * n_chunks` stages; rank r holds stages r, r + n_ranks, r + 2 n_ranks, ...

    Raises ValueError for numbers under 1, or micro-batches that are no multiple of the ranks.
    Source: Narayanan et al. 2021, "Efficient large-scale language model training on GPU clusters using Megatron-LM",
    §2.2.
    """
    _positive(n_ranks, n_micro_batches, n_chunks)
    if n_micro_batches % n_ranks:
        raise ValueError(f"{n_micro_batches} micro-batches are no multiple of {n_ranks} ranks")
    total, group = n_micro_batches * n_chunks, n_ranks * n_chunks
    orders = []
    for rank in range(n_ranks):

        def action(kind, step, rank=rank):
            chunk = step % group // n_ranks
            chunk = chunk if kind == "F" else n_chunks - 1 - chunk
            return kind, step // group * n_ranks + step % n_ranks, chunk * n_ranks + rank

        warm_up = min(2 * (n_ranks - rank - 1) + (n_chunks - 1) * n_ranks, total)
        order = [action("F", step) for step in range(warm_up)]
        for step in range(total - warm_up):
            order += [action("F", warm_up + step), action("B", step)]
        orders.append(order + [action("B", step) for step in range(total - warm_up, total)])
    return orders


def zero_bubble_h1(n_ranks: int, n_micro_batches: int) -> list[list[tuple[str, int]]]:
    """ZB-H1: 1F1B with the backward in two halves; rank r puts its weight gradients off by r micro-batches.

    Keeps at most `n_ranks` micro-batches a rank, as 1F1B's first stage. Raises ValueError for numbers under 1.
    Source: Qi et al. 2023, "Zero bubble pipeline parallelism", §2.1.
    """
    orders = []
    for rank, order in enumerate(one_f_one_b(n_ranks, n_micro_batches)):
        split = []
        for kind, k in order:
            split.append((kind if kind == "F" else "I", k))
            if kind == "B" and k >= rank:
                split.append(("W", k - rank))
        orders.append(split + [("W", k) for k in range(max(0, n_micro_batches - rank), n_micro_batches)])
    return orders


def _positive(*numbers: int) -> None:
    if not all(isinstance(number, int) and number >= 1 for number in numbers):
        raise ValueError(f"a pipeline has stages, micro-batches and chunks, whole numbers of 1 or more, not {numbers}")
