"""Answers to balise 7 of 24_triton_kernels: a kernel as an operator."""

from tests.answers.bank import Bank

bank = Bank("24_triton_kernels", 7, whole=True)

# the library's lower level
BY_DEFINITION = """
def softmax_operator(name):
    space, own = name.split("::")
    torch.library.define(name, "(Tensor x) -> Tensor")
    torch.library.impl(name, ("cpu", "cuda"))(softmax)
    torch.library.register_fake(name)(lambda x: x.new_empty(x.shape))

    def keep(ctx, inputs, output):
        ctx.save_for_backward(output)

    def backward(ctx, grad):
        y = ctx.saved_tensors[0]
        product = y * grad
        return product - y * product.sum(dim=1, keepdim=True)

    torch.library.register_autograd(name, backward, setup_context=keep)
    return getattr(getattr(torch.ops, space), own)
"""
bank.text(None, BY_DEFINITION)

FAKE = """    @operator.register_fake
    def fake(x):
        return torch.empty(x.shape, dtype=x.dtype, device=x.device)

"""
EMPTY = "torch.empty(x.shape, dtype=x.dtype, device=x.device)"
BACKWARD = "y * (grad - (grad * y).sum(1, keepdim=True))"
bank.slip(None, (EMPTY, "torch.zeros_like(x, memory_format=torch.contiguous_format)"))
bank.slip(None, ("torch.library.custom_op", "torch.library.triton_op"), (FAKE, ""), ("return softmax(x)", "out = torch.empty(x.shape, dtype=x.dtype, device=x.device)\n        rows, n = x.shape\n        torch.library.wrap_triton(softmax_kernel)[(rows,)](x, out, n, x.stride(0), n, BLOCK=triton.next_power_of_2(n))\n        return out"))  # fmt: skip

bank.hint("no-fake", "The operator has no fake implementation. The compiler calls it with tensors that have a shape and no "
                        "values: register a function that returns an empty result.")  # fmt: skip
bank.slip("no-fake", (FAKE, ""))
bank.variant("no-fake", BY_DEFINITION, ("    torch.library.register_fake(name)(lambda x: x.new_empty(x.shape))\n", ""))

bank.hint("fake-computes", "The fake implementation reads values, and fake tensors have none. Return an empty tensor.")
bank.slip("fake-computes", (EMPTY, "softmax(x)"))
bank.variant("fake-computes", BY_DEFINITION, ("lambda x: x.new_empty(x.shape)", "lambda x: x.new_empty(x.shape) * x.max().item()"))  # fmt: skip

bank.hint("fake-form", "The fake result isn't what the kernel returns: the same shape, dtype and device as x, and "
                          "contiguous.", edge=True)  # fmt: skip
bank.slip("fake-form", (EMPTY, "torch.empty(x.shape, device=x.device)"))
bank.slip("fake-form", (EMPTY, "torch.empty(x.shape, dtype=x.dtype)"))
bank.slip("fake-form", (EMPTY, "torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=x.device)"))
bank.variant("fake-form", BY_DEFINITION, ("x.new_empty(x.shape)", "x.new_empty(x.shape[0])"))

bank.hint("no-gradient", "No gradient flows through the operator. Register a backward with `register_autograd`.")
bank.slip("no-gradient", ("    operator.register_autograd(backward, setup_context=keep)\n", ""))
bank.variant("no-gradient", BY_DEFINITION, ("    torch.library.register_autograd(name, backward, setup_context=keep)\n", ""))  # fmt: skip

bank.hint("wrong-gradient", "The gradient is wrong. Each output depends on all inputs of its row, so the sum of grad * y "
                               "over the row comes off.")  # fmt: skip
bank.slip("wrong-gradient", (BACKWARD, "y * grad"))
bank.slip("wrong-gradient", (BACKWARD, "grad * y * (1 - y)"))
bank.slip("wrong-gradient", (BACKWARD, "y * (grad - (grad * y).sum())"))
bank.variant("wrong-gradient", BY_DEFINITION, ("product - y * product.sum(dim=1, keepdim=True)", "product - y * product.mean(dim=1, keepdim=True)"))  # fmt: skip

bank.hint("no-operator", "No operator has this name. `torch.library.custom_op(name, ...)` makes one; return it.")
bank.slip("no-operator", ("    return operator", "    return softmax"), ('@torch.library.custom_op(name, mutates_args=())', '@torch.library.custom_op("mine::softmax", mutates_args=())'))  # fmt: skip
bank.variant("no-operator", BY_DEFINITION, ("space, own = name.split", "name = name + '_'\n    space, own = name.split"))  # fmt: skip

bank.hint("wrong-operator", "The operator doesn't return the softmax of x.")
bank.slip("wrong-operator", ("return softmax(x)", "return softmax(-x)"))
bank.variant("wrong-operator", BY_DEFINITION, ('"cuda"))(softmax)', '"cuda"))(lambda x: softmax(x.contiguous()) * 2)'))

bank.hint("opcheck", "`torch.library.opcheck` isn't content: {what}. Operators may neither return nor change what they "
                        "are given.", edge=True)  # fmt: skip
bank.slip("opcheck", ("return softmax(x)", "out = softmax(x)\n        x.mul_(0.5)\n        return out"))
bank.variant("opcheck", BY_DEFINITION, ('"cuda"))(softmax)', '"cuda"))(lambda x: (softmax(x), x.mul_(0.5))[0])'))
bank.slip("no-kernel", ("return softmax(x)", "return x.softmax(1)"))
