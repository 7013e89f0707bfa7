"""Answers to balise 8 of 18_long_sequences_and_experts: experts without a loop."""

import torch.nn.functional as F

from tests.answers.bank import Bank

bank = Bank("18_long_sequences_and_experts", 8, whole=True)
hint, slip, variant = bank.hint, bank.slip, bank.variant

# tables by a mask, filled and read row by row
BY_MASK = """
def grouped_product(x, weights, counts):
    longest = int(counts.max())
    filled = torch.arange(longest, device=x.device) < counts[:, None]
    tables = torch.zeros(*filled.shape, x.shape[1], dtype=x.dtype, device=x.device)
    tables[filled] = x
    return torch.matmul(tables, weights)[filled]
"""
# tables by a flat number, and a product that is written as a sum
FLAT = """
def grouped_product(x, weights, counts):
    count, longest = len(weights), int(counts.max())
    before = torch.cumsum(counts, 0) - counts
    shift = torch.repeat_interleave(torch.arange(count, device=x.device) * longest - before, counts)
    where = torch.arange(x.shape[0], device=x.device) + shift
    tables = torch.zeros(count * longest, x.shape[1], device=x.device, dtype=x.dtype).index_copy(0, where, x)
    results = torch.einsum("end,edf->enf", tables.view(count, longest, x.shape[1]), weights)
    return results.reshape(count * longest, weights.shape[2]).index_select(0, where)
"""
PLACE = "torch.arange(len(x), device=x.device) - (counts.cumsum(0) - counts)[expert]"
TABLES = "x.new_zeros(len(weights), int(counts.max()), x.shape[1]).index_put((expert, place), x)"
SOLUTION = "return torch.bmm(tables, weights)[expert, place]"

bank.text(None, BY_MASK)
bank.text(None, FLAT)
slip(None, (PLACE, "torch.arange(len(x), device=x.device) - counts.cumsum(0)[expert]"))  # negative: from the end
if hasattr(F, "grouped_mm"):  # PyTorch 2.10 and later
    slip(None, (SOLUTION, "return F.grouped_mm(x, weights, offs=counts.cumsum(0).to(torch.int32))"))

hint("product-form", "Return (n, f): the rows in the order in which they came, without the padding.")
slip("product-form", ("[expert, place]\n", "\n"))
slip("product-form", (SOLUTION, "return torch.bmm(tables, weights).flatten(0, 1)"))
variant("product-form", BY_MASK, ("weights)[filled]", "weights)"))

hint("wrong-product", "A row isn't multiplied by the matrix of its expert. Its place in the table is its number minus "
                         "the rows of all earlier experts, and it is read again from the same place.")  # fmt: skip
slip("wrong-product", (PLACE, "expert"))
slip("wrong-product", (SOLUTION, "return torch.bmm(tables, weights).flatten(0, 1)[: len(x)]"))
slip("wrong-product", (PLACE, "torch.zeros_like(expert)"))
variant("wrong-product", BY_MASK, ("counts[:, None]", "counts.flip(0)[:, None]"))
variant("wrong-product", FLAT, (".index_select(0, where)", "[: len(x)]"))

hint("no-gradient", "The rows or the matrices don't get the right gradients. Copy the rows with autograd: no "
                       "`detach`, no `.data`.")  # fmt: skip
slip("no-gradient", ("place), x)", "place), x.detach())"))
slip("no-gradient", ("torch.bmm(tables, weights)", "torch.bmm(tables, weights.data)"))
variant("no-gradient", BY_MASK, ("tables[filled] = x", "tables[filled] = x.data"))

hint("empty-experts", "This fails for {where}. An expert may have no rows, and so may all of them.", edge=True)
slip("empty-experts", ("int(counts.max())", "int(place.max()) + 1"))
slip(
    "empty-experts",
    (
        "    expert =",
        "    weights = weights[: int((counts > 0).nonzero().max()) + 1]\n    counts = counts[: len(weights)]\n    expert =",
    ),
)
variant("empty-experts", BY_MASK, ("longest = int(counts.max())", "longest = int(counts[counts > 0].max())"))

hint("loops", "With 64 experts, this starts {n} operations more than with 4: there is a loop over the experts. Put all "
                 "rows into one tensor, and multiply once.")  # fmt: skip
slip("loops", (SOLUTION, "return looped_product(x, weights, counts)"))
slip(
    "loops",
    ("torch.bmm(tables, weights)", "torch.stack([table @ weight for table, weight in zip(tables, weights)])"),
)
slip("loops", (TABLES, "nn.utils.rnn.pad_sequence(x.split(counts.tolist()), batch_first=True)"))
variant(
    "loops",
    BY_MASK,
    (
        "    tables[filled] = x\n",
        "    for e, rows in enumerate(x.split(counts.tolist())):\n        tables[e, : len(rows)] = rows\n",
    ),
)

hint("padded-to-all", "You multiply {n} times as much as the rows need. Pad each table to the largest count; no expert "
                         "computes rows of others.")  # fmt: skip
slip("padded-to-all", ("int(counts.max())", "len(x)"))
slip(
    "padded-to-all",
    (SOLUTION, "return torch.einsum('nd,edf->enf', x, weights)[expert, torch.arange(len(x), device=x.device)]"),
)
variant("padded-to-all", FLAT, ("int(counts.max())", "int(counts.sum())"))

hint("copies-weights", "You held {n} times the bytes of the rows and their results. Don't copy a matrix for each row: "
                          "put the rows into tables, one for each matrix.")  # fmt: skip
slip("copies-weights", (SOLUTION, "return torch.bmm(x[:, None], weights[expert])[:, 0]"))
variant(
    "copies-weights",
    FLAT,
    (
        "    return results",
        "    results = (weights[:, None].expand(-1, longest, -1, -1) * tables.view(count, longest, -1, 1)).sum(2)\n    return results",
    ),
)

hint(
    "other-dtype",
    "With rows in bfloat16, you return {got}. Make the tables in the dtype of x, with `x.new_zeros`.",
    edge=True,
)
slip(
    "other-dtype",
    (
        "x.new_zeros(len(weights), int(counts.max()), x.shape[1])",
        "torch.zeros(len(weights), int(counts.max()), x.shape[1], device=x.device)",
    ),
)
variant("other-dtype", BY_MASK, ("dtype=x.dtype, ", ""))
variant(
    "other-dtype",
    FLAT,
    (
        "tables.view(count, longest, x.shape[1]), weights)",
        "tables.view(count, longest, x.shape[1]).float(), weights.float())",
    ),
)

hint("other-device", "On a GPU, a tensor that you make is on the CPU: {error}. Make it with `device=x.device`, or with "
                        "`x.new_zeros`.", edge=True)  # fmt: skip
slip(
    "other-device",
    (
        "x.new_zeros(len(weights), int(counts.max()), x.shape[1])",
        "torch.zeros(len(weights), int(counts.max()), x.shape[1], dtype=x.dtype)",
    ),
)
slip("other-device", ("place = torch.arange(len(x), device=x.device)", "place = torch.arange(len(x))"))
variant("other-device", BY_MASK, ("dtype=x.dtype, device=x.device", "dtype=x.dtype"))
