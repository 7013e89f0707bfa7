"""The sampler of balise 11: the same samples in a tensor group, disjoint shares for the data ranks."""

from dlojz_tp.judging.checking.looks import tried

SAMPLES = (12, 13, 3)  # sizes of the data sets


def sampled(make_sampler, grid) -> dict:
    """On a rank: {size of the data set: indices, or None where nothing was returned}. No sample equals its index."""
    return {n: _plain_list(make_sampler(range(n, 2 * n), grid)) for n in SAMPLES}


def _plain_list(sampler):
    """Numbers, but for what is none."""
    return None if sampler is None else [tried(int, i) if hasattr(i, "__index__") else i for i in sampler]


def mistake_in_samples(n, got):
    """What `recognised` asks for, of the shares of n samples that the ranks of a grid have "drawn"."""
    shares, world, tensor = [drawn[n] for drawn in got["drawn"]], got["size"], got["tensor"]
    text = {"got": "; ".join(f"rank {r}: {share}" for r, share in enumerate(shares)), "where": f"{n} samples"}
    if any(share is None for share in shares):
        return "nothing-returned", text
    strange = [i for share in shares for i in share if i not in range(n)]
    if strange:
        return "sampler-not-indices", text | {"last": n - 1, "what": str(strange[0])[:60]}
    columns = [shares[k::tensor] for k in range(tensor)]  # ranks that hold the same slice
    for first in range(0, world, tensor):
        group = shares[first : first + tensor]
        if any(share != group[0] for share in group):
            slug = "sampler-by-global-rank"
            if all(share == column[0] for column in columns for share in column):
                slug = "sampler-by-tensor-rank" if world > tensor else slug
            whole = min(map(len, group)) >= n // (world // tensor)  # of a data rank, not of a rank of the world
            if all(sorted(share) == sorted(group[0]) for share in group) or (
                whole and slug == "sampler-by-global-rank"
            ):
                slug = "sampler-shuffles-differ"
            return slug, text | {"peers": " and ".join(map(str, range(first, first + tensor)))}
    data = columns[0]
    lengths = [len(share) for share in data]
    if len(set(lengths)) > 1:
        return "sampler-lengths", text | {"lengths": lengths}
    if len(data) > 1 and n >= len(data) and any(set(share) == set(range(n)) for share in data):
        return "sampler-no-share", text
    flat = [index for share in data for index in share]
    complete = set(flat) == set(range(n)) and len(flat) < n + len(data)
    if not complete and not (n % len(data) and len(flat) == len(set(flat)) == n - n % len(data)):
        return "sampler-incomplete", text
    return None
