"""The sampler of balise 11: the same samples in a tensor group, disjoint shares for the data ranks."""

from dlojz_tp.checking import Wrong
from dlojz_tp.checking.looks import tried

SAMPLES = (12, 13, 3)  # sizes of the data sets

HINTS = {
    "sampler-by-global-rank": "Ranks {peers} hold slices of one copy of the model but see different samples: their "
                              "partial sums do not belong together. Choose the share by the *data* rank: "
                              "grid.data.rank of grid.data.size.",
    "sampler-by-tensor-rank": "You choose the share by the tensor rank. All ranks of a tensor group must see the "
                              "same samples; split the samples over the data ranks.",
    "sampler-shuffles-differ": "Ranks {peers} hold slices of one copy of the model but see samples in different "
                               "orders: each shuffles differently. Use a seed that is the same on all ranks, "
                               "whatever their random state.",
    "sampler-no-share": "Every data rank sees all samples. Each should see only its share.",
    "sampler-lengths": "The data ranks see {lengths} samples. A rank with one more batch waits forever for the others.",
    "sampler-not-indices": "Yield an *index* for each sample, a number from 0 to {last}, as a sampler does for the "
                           "DataLoader. You yield {what}: samples, or batches.",
    "sampler-rank": "{error}. num_replicas and rank must be those of the data group: grid.data.size and "
                    "grid.data.rank.",
    "sampler-incomplete": "The data ranks' shares overlap, or leave samples out.",
}  # fmt: skip


def sampled(make_sampler, grid) -> dict:
    """On a rank: {size of the data set: indices, or None where nothing was returned}. No sample equals its index."""
    return {n: _plain_list(make_sampler(range(n, 2 * n), grid)) for n in SAMPLES}


def _plain_list(sampler):
    """Numbers, but for what is none."""
    return None if sampler is None else [tried(int, i) if hasattr(i, "__index__") else i for i in sampler]


def judge_samples(shares, n, world, tensor):
    """Raise Wrong where the ranks' `shares` of n samples are not right. tensor: ranks in a tensor group."""
    where = f"{world} ranks, {world // tensor} tensor groups of {tensor}, {n} samples"
    if any(share is None for share in shares):
        raise Wrong("nothing-returned", where=where)
    text = {"got": "; ".join(f"rank {r}: {share}" for r, share in enumerate(shares)), "where": where}
    strange = [i for share in shares for i in share if i not in range(n)]
    if strange:
        raise Wrong("sampler-not-indices", last=n - 1, what=str(strange[0])[:60], **text)
    columns = [shares[k::tensor] for k in range(tensor)]  # ranks that hold the same slice
    for first in range(0, world, tensor):
        group = shares[first : first + tensor]
        if any(share != group[0] for share in group):
            peers = " and ".join(map(str, range(first, first + tensor)))
            slug = "sampler-by-global-rank"
            if all(share == column[0] for column in columns for share in column):
                slug = "sampler-by-tensor-rank" if world > tensor else slug
            whole = min(map(len, group)) >= n // (world // tensor)  # of a data rank, not of a rank of the world
            if all(sorted(share) == sorted(group[0]) for share in group) or (whole and slug == "sampler-by-global-rank"):
                slug = "sampler-shuffles-differ"
            raise Wrong(slug, peers=peers, **text)
    data = columns[0]
    lengths = [len(share) for share in data]
    if len(set(lengths)) > 1:
        raise Wrong("sampler-lengths", lengths=lengths, **text)
    if len(data) > 1 and n >= len(data) and any(set(share) == set(range(n)) for share in data):
        raise Wrong("sampler-no-share", **text)
    flat = [index for share in data for index in share]
    complete = set(flat) == set(range(n)) and len(flat) < n + len(data)
    if not complete and not (n % len(data) and len(flat) == len(set(flat)) == n - n % len(data)):
        raise Wrong("sampler-incomplete", **text)
