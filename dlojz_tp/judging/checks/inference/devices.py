"""On a GPU that is not there: whether what an answer makes lies where its queries lie (balises 1 and 3)."""

from dlojz_tp.judging.checking.looks import Look
from dlojz_tp.judging.probes.shared_looks import said

HINTS = {
    "other-device": "A tensor that you make here, such as the mask, is on the CPU, but the queries are on a GPU: "
    "{error}. Make it with `device=q.device`."
}

# waits are not asked for here: an answer may read a length
STAYS = Look("on a GPU: new tensors are on the queries' device", "device", None, "other-device", holds=lambda seen, due: seen[0] != "elsewhere",
             fields=said)  # fmt: skip
