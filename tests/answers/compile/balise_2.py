"""Answers to 06_compile, balise 2: memory traffic."""

import math

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.answers.bank import Bank

bank = Bank("06_compile", 2)


READ = "sum(map(held, tensors((args, kwargs))))"
WRITTEN = "sum(map(held, tensors(result)))\n            return"
HELD = "tensor.itemsize * math.prod(size for size, stride in zip(tensor.shape, tensor.stride()) if stride)"
RETURN = "return counting.moved, sum(map(held, tensors(inputs))) + held(result)"

bank.slip("nothing-returned", ("    return counting.moved", "    counting.moved"))
bank.hint("not-two-numbers", "Return two numbers of bytes: (unfused, fused).")
bank.slip("not-two-numbers", (RETURN, "return counting.moved"))
bank.slip("not-two-numbers", (RETURN, 'return f"{counting.moved} bytes", 0'), variant=True)
bank.hint("swapped", "The two numbers are swapped: first operation by operation, then as one kernel.")
bank.slip("swapped", (RETURN, "return sum(map(held, tensors(inputs))) + held(result), counting.moved"), variant=True)
bank.hint("ran-again", "You ran the function {n} times. Run it once: it may change its inputs.", edge=True)
bank.slip("ran-again", ("    with Counting()", "    function(*inputs)\n    with Counting()"), variant=True)
bank.hint("elements-not-bytes", "These are numbers of elements. Each element has `tensor.itemsize` bytes.")
bank.slip("elements-not-bytes", ("tensor.itemsize * ", ""), variant=True)
bank.hint("four-bytes", "Not every number has 4 bytes: bfloat16 has 2, float64 has 8, the result of a comparison has 1.", edge=True)  # fmt: skip
bank.slip("four-bytes", ("tensor.itemsize * ", "4 * "))
bank.hint("reads-only", "You count only what is read. Each operation also writes its result.")
bank.slip("reads-only", (f"{READ} + {WRITTEN}", f"{READ}\n            return"), variant=True)
bank.hint("writes-only", "You count only what is written. Each operation reads its operands first.")
bank.slip("writes-only", (f"{READ} + {WRITTEN}", f"{WRITTEN}"), variant=True)
bank.hint("views-counted", "A view moves nothing: it is another description of the same memory.")
bank.slip("views-counted", ("if not operation.is_view:", "if True:"))
NAMES = "view, t, transpose, permute, expand, slice, select, unsqueeze, squeeze, as_strided, detach, alias"
bank.slip(
    "views-counted",
    ("if not operation.is_view:", f'if operation.__name__.split(".")[0] not in "{NAMES}".split(", "):'),
    variant=True,
)
bank.hint("read-twice", "A tensor that appears twice among the operands was counted twice.", edge=True)
bank.slip("read-twice", ("{id(leaf): leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)}.values()",
                            "[leaf for leaf in tree_leaves(tree) if isinstance(leaf, torch.Tensor)]"), variant=True)  # fmt: skip
bank.hint("broadcast-counted", "You counted a broadcast operand at the size of the result. It holds fewer numbers, and "
          "only those are read.", edge=True)  # fmt: skip
bank.slip(
    "broadcast-counted", (READ, "sum(max(held(t), *map(held, tensors(result))) for t in tensors((args, kwargs)))")
)
bank.hint("expanded-counted", "You counted an expanded tensor at its full shape. Along an expanded dimension the "
          "stride is 0: the same number is read again and again, but is stored only once.", edge=True)  # fmt: skip
bank.slip("expanded-counted", (HELD, "tensor.itemsize * tensor.numel()"))
bank.slip("expanded-counted", (HELD, "tensor.numel() * tensor.element_size()"))
bank.hint("lists-missed", "You missed operands that are in a list or passed by name: torch.cat([a, b]), torch.add(a, "
          "other=b).", edge=True)  # fmt: skip
bank.slip(
    "lists-missed", (READ, "sum(held(t) for t in {id(a): a for a in args if isinstance(a, torch.Tensor)}.values())")
)
bank.hint("results-missed", "An operation that returns several tensors writes them all.", edge=True)
bank.slip("results-missed", (WRITTEN, "(held(result) if isinstance(result, torch.Tensor) else 0)\n            return"))
bank.slip(
    "results-missed",
    (WRITTEN, "held(result if isinstance(result, torch.Tensor) else result[0])\n            return"),
    variant=True,
)
bank.hint("in-place-free", "You counted an in-place operation as free, or only as a read. It reads its tensor and "
          "writes it back.", edge=True)  # fmt: skip
bank.slip("in-place-free", ("if not operation.is_view:", 'if not operation.is_view and "_." not in str(operation):'))
bank.slip(
    "in-place-free",
    (WRITTEN, "sum(map(held, tensors(result))) * (result is not args[0])\n            return"),
    variant=True,
)
bank.slip("lists-missed", ("tensors((args, kwargs))", "tensors(args)"), variant=True)
bank.hint("not-bytes", "Return bytes, not thousands or millions of them.")
bank.slip("not-bytes", ("return counting.moved,", "return counting.moved / 1e6,"), variant=True)
bank.hint("nothing-seen", "No operation was counted. Does the function run inside a `with` block of your mode, and do "
          "you count the operations that are *not* views?")  # fmt: skip
bank.slip("nothing-seen", ("if not operation.is_view:", "if operation.is_view:"))
bank.slip(
    "nothing-seen",
    (
        "    with Counting() as counting:\n        result = function(*inputs)\n",
        "    counting = Counting()\n    result = function(*inputs)\n",
    ),
    variant=True,
)
bank.hint("result-lost", "An operation inside your mode returned None: __torch_dispatch__ must return the operation's "
          "result.")  # fmt: skip
bank.slip("result-lost", ("            return result\n", ""), variant=True)
bank.hint("last-only", "You count only the last operation: add up over all of them.")
bank.slip("last-only", ("self.moved += ", "self.moved = "), variant=True)
bank.hint("wrong-unfused", "The bytes for one operation at a time are wrong.")
bank.slip("wrong-unfused", ("self.moved += ", "self.moved += 64 + "))
bank.hint("fused-inputs-only", "The fused kernel also has to write its result.")
bank.slip("fused-inputs-only", (" + held(result)\n", "\n"), variant=True)
bank.hint("fused-result-only", "The fused kernel also has to read its inputs.")
bank.slip("fused-result-only", ("sum(map(held, tensors(inputs))) + held(result)", "held(result)"), variant=True)
bank.hint("fused-as-result", "You let the fused kernel read each input at the size of the result. Count an input by "
          "the numbers that it holds.", edge=True)  # fmt: skip
bank.slip("fused-as-result", ("sum(map(held, tensors(inputs))) + held(result)", "(len(inputs) + 1) * held(result)"))
bank.hint("fused-same", "You counted the fused kernel like the chain. Its intermediate results stay in registers and "
          "move nothing.")  # fmt: skip
bank.slip("fused-same", (RETURN, "return counting.moved, counting.moved"), variant=True)
bank.hint("wrong-fused", "A fused kernel reads each input once and writes the result once.")
bank.slip("wrong-fused", ("held(result)\n", "2 * held(result)\n"), variant=True)
bank.slip("fused-as-result", (RETURN, "return counting.moved, (1 + len(inputs)) * held(result)"))
bank.hint("inputs-spoilt", "The inputs were changed, although the function does not change them.", edge=True)
bank.slip("inputs-spoilt", (RETURN, "inputs[0].zero_()\n    " + RETURN), variant=True)
bank.slip("raised", ("    with Counting()", "    inputs[0].numpy()\n    with Counting()"))

bank.slip(None, ("(kwargs or {})", "{**(kwargs or {})}"), ("moved = 0", "moved = 0.0"))
bank.slip(None, (RETURN, "return [counting.moved, sum(map(held, inputs)) + held(result)]"))


@bank.right()
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


@bank.right()
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


@bank.right()
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


bank.slip("fused-as-result", ("sum(map(held, tensors(inputs)))", "sum(t.nbytes for t in inputs)"), variant=True)
bank.hint("addresses", "On the meta device all tensors have the address 0, and elsewhere memory is reused: an address "
          "does not identify a tensor. The object does: use id().", edge=True)  # fmt: skip
bank.slip("addresses", ("{id(leaf): leaf for", "{leaf.data_ptr(): leaf for"), variant=True)

# expanded along the last dimension; a part of a tensor; operations that run twice
bank.slip(
    "expanded-counted",
    (HELD, "tensor.nbytes // (len(tensor) if tensor.dim() and not tensor.stride(0) else 1)"),
    variant=True,
)
bank.slip("wrong-unfused", (HELD, f"{HELD} * (tensor.dim() > 0)"))
bank.hint("storage-counted", "You counted a part of a tensor with the memory around it. Only its own numbers are read: "
          "its shape and strides tell which.", edge=True)  # fmt: skip
bank.slip("storage-counted", (HELD, "min(tensor.untyped_storage().nbytes(), tensor.nbytes + 10**9)"))
RUN = "            result = operation(*args, **(kwargs or {}))\n"
bank.hint("result-spoilt", "Inside your mode the function gives different numbers from those without it: run each "
          "operation once, with its arguments unchanged.")  # fmt: skip
bank.slip("result-spoilt", (RUN, RUN + "            result = operation(*args, **(kwargs or {}))\n"))

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
bank.text(None, BY_LIST)
bank.variant("four-bytes", BY_LIST, ("t.element_size()", "4"))
LEAVES = "*[held(leaf) for leaf in tree_leaves(out) if torch.is_tensor(leaf)]"
bank.variant("broadcast-counted", BY_LIST, ("moved.extend(held(t) for", f"moved.extend(max(held(t), {LEAVES}) for"))
bank.variant("result-spoilt", BY_LIST, ("            return out\n", "            return operation(*args, **kwargs)\n"))
SPAN = "(1 + sum((n - 1) * s for n, s in zip(t.shape, t.stride())))"
bank.variant("storage-counted", BY_LIST, ("math.prod(n for n, s in zip(t.shape, t.stride()) if s)", SPAN))
bank.slip("wrong-unfused", ("operation(*args, **(kwargs or {}))", "operation(*args)"), variant=True)
