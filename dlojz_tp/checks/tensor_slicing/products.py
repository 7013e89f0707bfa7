"""Count what a rank multiplies, beside what it sends."""

import math

from dlojz_tp.probes.traffic import GroupTraffic


class Work(GroupTraffic):
    """GroupTraffic that also counts the multiplications of matrix products. `products`: their number."""

    def __init__(self):
        super().__init__()
        self.products = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = super().__torch_dispatch__(func, types, args, kwargs)
        name = func.overloadpacket._qualified_op_name
        if name in ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm"):
            first = args[1] if "add" in name else args[0]
            self.products += math.prod(out.shape) * first.shape[-1]
        return out
