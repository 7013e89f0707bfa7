"""Answers to 06_compile, balise 2: memory traffic."""

import math

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.answers.bank import Bank

bank = Bank("06_compile")

READ = "sum(map(held, tensors((args, kwargs))))"
WRITTEN = "sum(map(held, tensors(result)))\n            return"
HELD = "tensor.itemsize * math.prod(size for size, stride in zip(tensor.shape, tensor.stride()) if stride)"
RETURN = "return counting.moved, sum(map(held, tensors(inputs))) + held(result)"

bank.slip(2, "nothing-returned", ("    return counting.moved", "    counting.moved"))
bank.slip(2, "not-two-numbers", (RETURN, "return counting.moved"))
bank.slip(2, "not-two-numbers", (RETURN, 'return f"{counting.moved} bytes", 0'))
bank.slip(2, "swapped", (RETURN, "return sum(map(held, tensors(inputs))) + held(result), counting.moved"))
bank.slip(2, "ran-again", ("    with Counting()", "    function(*inputs)\n    with Counting()"))
bank.slip(2, "elements-not-bytes", ("tensor.itemsize * ", ""))
bank.slip(2, "four-bytes", ("tensor.itemsize * ", "4 * "))
bank.slip(2, "reads-only", (f"{READ} + {WRITTEN}", f"{READ}\n            return"))
bank.slip(2, "writes-only", (f"{READ} + {WRITTEN}", f"{WRITTEN}"))
bank.slip(2, "views-counted", ("if not operation.is_view:", "if True:"))
NAMES = "view, t, transpose, permute, expand, slice, select, unsqueeze, squeeze, as_strided, detach, alias"
bank.slip(2, "views-counted", ("if not operation.is_view:", f'if operation.__name__.split(".")[0] not in "{NAMES}".split(", "):'))
bank.slip(2, "read-twice", ("{id(leaf): leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)}.values()",
                            "[leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]"))  # fmt: skip
bank.slip(
    2, "broadcast-counted", (READ, "sum(max(held(t), *map(held, tensors(result))) for t in tensors((args, kwargs)))")
)
bank.slip(2, "expanded-counted", (HELD, "tensor.itemsize * tensor.numel()"))
bank.slip(2, "expanded-counted", (HELD, "tensor.numel() * tensor.element_size()"))
bank.slip(
    2, "lists-missed", (READ, "sum(held(t) for t in {id(a): a for a in args if isinstance(a, torch.Tensor)}.values())")
)
bank.slip(
    2, "results-missed", (WRITTEN, "(held(result) if isinstance(result, torch.Tensor) else 0)\n            return")
)
bank.slip(
    2,
    "results-missed",
    (WRITTEN, "held(result if isinstance(result, torch.Tensor) else result[0])\n            return"),
)
bank.slip(2, "in-place-free", ("if not operation.is_view:", 'if not operation.is_view and "_." not in str(operation):'))
bank.slip(
    2, "in-place-free", (WRITTEN, "sum(map(held, tensors(result))) * (result is not args[0])\n            return")
)
bank.slip(2, "lists-missed", ("tensors((args, kwargs))", "tensors(args)"))
bank.slip(2, "not-bytes", ("return counting.moved,", "return counting.moved / 1e6,"))
bank.slip(2, "nothing-seen", ("if not operation.is_view:", "if operation.is_view:"))
bank.slip(
    2,
    "nothing-seen",
    (
        "    with Counting() as counting:\n        result = function(*inputs)\n",
        "    counting = Counting()\n    result = function(*inputs)\n",
    ),
)
bank.slip(2, "result-lost", ("            return result\n", ""))
bank.slip(2, "last-only", ("self.moved += ", "self.moved = "))
bank.slip(2, "wrong-unfused", ("self.moved += ", "self.moved += 64 + "))
bank.slip(2, "fused-inputs-only", (" + held(result)\n", "\n"))
bank.slip(2, "fused-result-only", ("sum(map(held, tensors(inputs))) + held(result)", "held(result)"))
bank.slip(2, "fused-as-result", ("sum(map(held, tensors(inputs))) + held(result)", "(len(inputs) + 1) * held(result)"))
bank.slip(2, "fused-same", (RETURN, "return counting.moved, counting.moved"))
bank.slip(2, "wrong-fused", ("held(result)\n", "2 * held(result)\n"))
bank.slip(2, "fused-as-result", (RETURN, "return counting.moved, (1 + len(inputs)) * held(result)"))
bank.slip(2, "inputs-spoilt", (RETURN, "inputs[0].zero_()\n    " + RETURN))
bank.slip(2, "raised", ("    with Counting()", "    inputs[0].numpy()\n    with Counting()"))

bank.slip(2, None, ("(kwargs or {})", "{**(kwargs or {})}"), ("moved = 0", "moved = 0.0"))
bank.slip(2, None, (RETURN, "return [counting.moved, sum(map(held, inputs)) + held(result)]"))


@bank.right(2)
def memory_traffic(function, *inputs):
    """Recursion in place of pytree; a list of what was moved."""
    moved = []

    def found(tree, seen):
        if isinstance(tree, torch.Tensor):
            seen[id(tree)] = tree
        elif isinstance(tree, list | tuple):
            for part in tree:
                found(part, seen)
        elif isinstance(tree, dict):
            found(list(tree.values()), seen)
        return seen

    def size(tensor):
        one = tensor
        for dim in range(tensor.dim()):
            if tensor.stride(dim) == 0:
                one = one.narrow(dim, 0, 1)
        return one.numel() * one.element_size()

    class Log(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            if not func.is_view:
                moved.append(list(found([args, kwargs], {}).values()))
                moved.append(list(found(out, {}).values()))
            return out

    with Log():
        out = function(*inputs)
    return sum(size(t) for part in moved for t in part), sum(size(t) for t in [*inputs, out])


@bank.right(2)
def memory_traffic(function, *inputs):  # noqa: F811
    """A view is known by its alias annotation: the result shares memory, and is not written."""

    def held(tensor):
        strides = torch.tensor(tensor.stride())
        shape = torch.tensor(tensor.shape)
        return int(shape[strides != 0].prod()) * tensor.element_size()

    total = 0

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            nonlocal total
            out = func(*args, **(kwargs or {}))
            results = func._schema.returns
            if all(r.alias_info is not None and not r.alias_info.is_write for r in results):
                return out
            read = {id(t): t for t in tree_leaves([args, kwargs]) if torch.is_tensor(t)}
            sizes = [
                (t.shape, t.stride(), t.element_size())
                for t in [*read.values(), *filter(torch.is_tensor, tree_leaves(out))]
            ]
            for shape, stride, itemsize in sizes:
                total += itemsize * math.prod(n for n, s in zip(shape, stride, strict=True) if s)
            return out

    with Mode():
        result = function(*inputs)
    return total, sum(map(held, inputs)) + held(result)


@bank.right(2)
def memory_traffic(function, *inputs):  # noqa: F811
    """Traces a graph once, then walks over its nodes."""
    from torch.fx.experimental.proxy_tensor import make_fx

    def held(value):
        return value.element_size() * math.prod(n for n, s in zip(value.shape, value.stride(), strict=True) if s)

    def values(nodes):
        return [t for node in nodes for t in tree_leaves(node.meta["val"]) if isinstance(t, torch.Tensor)]

    graph = make_fx(function, tracing_mode="real")(*inputs).graph
    unfused, result = 0, None
    for node in graph.nodes:
        if node.op == "call_function" and isinstance(node.target, torch._ops.OpOverload) and not node.target.is_view:
            unfused += sum(map(held, values(node.all_input_nodes))) + sum(map(held, values([node])))
        if node.op == "output":
            result = values(node.all_input_nodes)
    return unfused, sum(map(held, [*inputs, *result]))


bank.slip(2, "fused-as-result", ("sum(map(held, tensors(inputs)))", "sum(t.nbytes for t in inputs)"))
bank.slip(2, "addresses", ("{id(leaf): leaf for", "{leaf.data_ptr(): leaf for"))

# expanded along the last dimension; a part of a tensor; operations that run twice
bank.slip(2, "expanded-counted", (HELD, "tensor.nbytes // (len(tensor) if tensor.dim() and not tensor.stride(0) else 1)"))
bank.slip(2, "wrong-unfused", (HELD, f"{HELD} * (tensor.dim() > 0)"))
bank.slip(2, "storage-counted", (HELD, "min(tensor.untyped_storage().nbytes(), tensor.nbytes + 10**9)"))
RUN = "            result = operation(*args, **(kwargs or {}))\n"
bank.slip(2, "result-spoilt", (RUN, RUN + "            result = operation(*args, **(kwargs or {}))\n"))

BY_LIST = """
def memory_traffic(function, *inputs):
    moved = []

    def held(t):
        return t.element_size() * math.prod(n for n, s in zip(t.shape, t.stride()) if s)

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, operation, types, args=(), kwargs=None):
            kwargs = kwargs or {}
            out = operation(*args, **kwargs)
            if not operation.is_view:
                from torch.utils._pytree import tree_leaves
                read = {id(t): t for t in tree_leaves((args, kwargs)) if torch.is_tensor(t)}
                moved.extend(held(t) for t in [*read.values(), *filter(torch.is_tensor, tree_leaves(out))])
            return out

    with Mode():
        result = function(*inputs)
    return sum(moved), sum(map(held, (*inputs, result)))
"""
bank.text(2, None, BY_LIST)
bank.variant(2, "result-spoilt", BY_LIST, ("            return out\n", "            return operation(*args, **kwargs)\n"))
SPAN = "(1 + sum((n - 1) * s for n, s in zip(t.shape, t.stride())))"
bank.variant(2, "storage-counted", BY_LIST, ("math.prod(n for n, s in zip(t.shape, t.stride()) if s)", SPAN))
bank.slip(2, "wrong-unfused", ("operation(*args, **(kwargs or {}))", "operation(*args)"))
