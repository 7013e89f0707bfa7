"""Answers to balise 7 of 21_fine_tuning: NF4 by blocks, with double quantization."""

from tests.answers.bank import Bank

bank = Bank("21_fine_tuning", 7, whole=True)

# block by block; the nearest value is the one with the least error, whatever the sign of the scale; low half first
BY_BLOCKS = """
def to_nf4(weights):
    flat = weights.detach().float().reshape(-1)
    blocks = list(flat.split(BLOCK)) if len(flat) else []
    largest = torch.tensor([block.abs().max() for block in blocks])
    mean = largest.sum() / max(1, len(largest))
    steps, scales, codes = [], [], []
    for group in largest.split(GROUP) if len(largest) else []:
        step = (group - mean).abs().max() / 127
        steps.append(step.item())
        scales.append(torch.round((group - mean) / (step if step > 0 else 1)).to(torch.int8))
    steps = torch.tensor(steps)
    scales = torch.cat(scales) if scales else torch.zeros(0, dtype=torch.int8)
    for k, block in enumerate(blocks):
        scale = scales[k].float() * steps[k // GROUP] + mean
        codes.append((scale * NF4[None] - block[:, None]).abs().argmin(1))
        codes[-1][block == 0] = 7
    codes = torch.cat(codes + [torch.zeros(len(flat) % 2, dtype=torch.int64)]).byte()
    return Packed((codes[1::2] << 4) + codes[::2], scales, steps, mean, weights.shape)


def from_nf4(packed):
    out = torch.empty(math.prod(packed.shape))
    low, high = NF4[(packed.codes & 15).long()], NF4[(packed.codes >> 4).long()]
    values = torch.empty(2 * len(low))
    values[::2], values[1::2] = low, high
    for k in range(len(packed.scales)):
        scale = packed.scales[k] * packed.steps[k // GROUP] + packed.mean
        out[k * BLOCK : (k + 1) * BLOCK] = values[: len(out)][k * BLOCK : (k + 1) * BLOCK] * scale
    return out.reshape(packed.shape)
"""
bank.text(None, BY_BLOCKS)

# numpy, in float64 until it is written down
IN_NUMPY = """
import numpy as np


def scales_seen(scales, steps, mean):
    return scales.astype(np.float64) * np.repeat(steps, GROUP)[: len(scales)] + mean


def to_nf4(weights):
    flat = weights.detach().double().contiguous().view(-1).numpy()
    starts = np.arange(0, len(flat), BLOCK)
    largest = np.maximum.reduceat(np.abs(flat), starts) if len(flat) else np.zeros(0)
    mean = largest.mean() if len(flat) else 0.0
    steps = np.array([np.abs(largest[k : k + GROUP] - mean).max() / 127 for k in range(0, len(largest), GROUP)])
    safe = np.repeat(np.where(steps > 0, steps, 1.0), GROUP)[: len(largest)]
    scales = np.rint((largest - mean) / safe).astype(np.int8)
    again = np.repeat(scales_seen(scales, steps, mean), BLOCK)[: len(flat)]
    table = NF4.double().numpy()
    codes = np.abs(again[:, None] * table - flat[:, None]).argmin(1)
    codes = np.where(flat == 0, 7, codes)
    codes = np.append(codes, [0] * (len(codes) % 2)).astype(np.uint8)
    return Packed(torch.from_numpy(codes[::2] * 16 + codes[1::2]), torch.from_numpy(scales),
                  torch.from_numpy(steps).float(), torch.tensor(mean, dtype=torch.float32), list(weights.shape))


def from_nf4(packed):
    count = int(np.prod(packed.shape))
    codes = np.stack([packed.codes.numpy() // 16, packed.codes.numpy() % 16], 1).ravel()[:count]
    again = np.repeat(scales_seen(packed.scales.numpy(), packed.steps.numpy(), packed.mean.item()), BLOCK)[:count]
    return torch.from_numpy((NF4.numpy()[codes] * again).astype(np.float32)).reshape(packed.shape)
"""
bank.text(None, IN_NUMPY)
bank.slip(None, ("(scales.float() * steps.repeat_interleave(GROUP)[: len(scales)] + mean).clamp(min=0)", "torch.relu(torch.addcmul(mean, scales.float(), steps.repeat_interleave(GROUP)[: len(scales)]))"))  # fmt: skip
bank.slip(None, ("codes[0::2] << 4 | codes[1::2]", "codes[1::2] << 4 | codes[0::2]"), ("[packed.codes >> 4, packed.codes & 15]", "[packed.codes & 15, packed.codes >> 4]"))  # fmt: skip

bank.slip("nothing-returned", ("    return Packed(", "    Packed("))
bank.slip("nothing-returned", ("return (values[", "(values["))

bank.hint("packed-form", "to_nf4 returns a Packed: codes uint8 (bytes,), scales int8 (blocks,), steps float32 "
                            "(groups,), mean as a float32 tensor without dimensions, and the shape of the weights. "
                            "Compare the two lines below.")  # fmt: skip
bank.slip("packed-form", ("return Packed(codes[0::2] << 4 | codes[1::2], scales, steps, mean, tuple(weights.shape))", "return codes[0::2] << 4 | codes[1::2], scales, steps, mean, tuple(weights.shape)"))  # fmt: skip
bank.slip("packed-form", ("tuple(weights.shape))", "tuple(flat.shape))"))
bank.slip("packed-form", ("scales, steps, mean, tuple", "scales, steps, mean[None], tuple"))
bank.slip("packed-form", ("weights.detach().float().flatten()", "weights.detach().flatten()"))
bank.slip("packed-form", ("codes[0::2] << 4 | codes[1::2], scales", "(codes[0::2] << 4 | codes[1::2]).int(), scales"))  # fmt: skip
bank.slip("packed-form", ("codes.flatten()[: len(flat) + len(flat) % 2]", "codes.flatten()"))
bank.variant("packed-form", BY_BLOCKS, ("mean, weights.shape", "mean, flat.shape"))

bank.hint("one-a-byte", "You store one code per byte, so half of its bits are wasted. A code has four bits: "
                           "shift one of two codes by 4 and join them with `|`.")  # fmt: skip
bank.slip("one-a-byte", ("codes[0::2] << 4 | codes[1::2], scales", "codes[: len(flat)], scales"), ("torch.stack([packed.codes >> 4, packed.codes & 15], 1).flatten().long()", "packed.codes.long()"))  # fmt: skip
bank.variant("one-a-byte", BY_BLOCKS, ("(codes[1::2] << 4) + codes[::2]", "codes[: len(flat)]"))

bank.hint("scales-form", "`scales` needs one int8 for each block of 64 weights, and one for a short last block.")
bank.slip("scales-form", (".round().to(torch.int8).flatten()", ".round().flatten()"))
bank.slip("scales-form", ("scales, steps, mean, tuple", "largest, steps, mean, tuple"))
bank.slip("scales-form", ("blocks.abs().amax(1)", "blocks.abs().amax()[None]"))
bank.variant("scales-form", BY_BLOCKS, (".to(torch.int8)", ""))
bank.variant("scales-form", BY_BLOCKS, ("largest = torch.tensor([block.abs().max() for block in blocks])", "largest = torch.tensor([block.abs().max() for block in blocks if len(block) == BLOCK])"), ("enumerate(blocks)", "enumerate(blocks[: len(largest)])"), ("len(flat) % 2", "0"))  # fmt: skip

bank.hint("weights-changed", "You changed the weights that you were given. They belong to the caller. Compute "
                                "on new tensors.")  # fmt: skip
bank.slip("weights-changed", ("    blocks = F.pad", "    flat[flat.abs() < 1e-3] = 0\n    blocks = F.pad"))
bank.slip("weights-changed", ("    return Packed(", "    weights /= weights.abs().max().clamp(min=1e-9)\n    return Packed("))  # fmt: skip
bank.variant("weights-changed", BY_BLOCKS, ("        codes.append(", "        block /= scale if scale != 0 else 1\n        codes.append("), ("(scale * NF4[None]", "(NF4[None]"))  # fmt: skip

bank.hint("no-abs", "Your scale is the largest value of its block, not the largest magnitude. Take `abs()` "
                       "before the maximum.")  # fmt: skip
bank.slip("no-abs", ("blocks.abs().amax(1)", "blocks.amax(1)"))
bank.variant("no-abs", BY_BLOCKS, ("block.abs().max()", "block.max()"))

bank.hint("wrong-mean", "`mean` is the mean of the scales of all blocks, where a scale is the largest magnitude of its block of 64 weights in order.")  # fmt: skip
bank.slip("wrong-mean", ("mean = largest.mean() if", "mean = flat.abs().mean() if"))
bank.slip("wrong-mean", ("mean = largest.mean() if len(largest) else largest.sum()", "mean = torch.zeros(())"))
bank.slip("wrong-mean", ("mean = largest.mean() if len(largest) else largest.sum()", "mean = F.pad(largest, (0, -len(largest) % GROUP)).sum() / max(1, len(largest) + -len(largest) % GROUP)"))  # fmt: skip
bank.slip("wrong-mean", ("largest.mean() if len(largest)", "largest.median() if len(largest)"))
bank.slip("wrong-mean", ("weights.detach().float().flatten()", "weights.detach().float().t().flatten() if weights.dim() == 2 else weights.detach().float().flatten()"))  # fmt: skip
bank.variant("wrong-mean", BY_BLOCKS, ("mean = largest.sum() / max(1, len(largest))", "mean = torch.zeros(())"))

bank.hint("wrong-steps", "There must be one step for each group of 256 blocks: the largest |scale − mean| of "
                            "that group, divided by 127.")  # fmt: skip
bank.slip("wrong-steps", ("steps = groups.abs().amax(1) / 127", "steps = groups.abs().amax()[None] / 127"), ("steps.repeat_interleave(GROUP)[: len(scales)]", "steps"))  # fmt: skip
bank.slip("wrong-steps", ("steps = groups.abs().amax(1) / 127", "steps = groups.abs().amax().expand(len(groups)) / 127 if len(groups) else groups[:, 0]"))  # fmt: skip
bank.slip("wrong-steps", ("steps = groups.abs().amax(1) / 127", "steps = groups.abs().amax(1) / 128"))
bank.slip("wrong-steps", ("steps = groups.abs().amax(1) / 127", "steps = groups.abs().amax(1)"))
bank.slip("wrong-steps", ("groups = F.pad(largest - mean, (0, -len(largest) % GROUP))", "groups = (F.pad(largest, (0, -len(largest) % GROUP)) - mean)"))  # fmt: skip
bank.variant("wrong-steps", BY_BLOCKS, ("(group - mean).abs().max() / 127", "(group - mean).max() / 127"))
bank.variant("wrong-steps", BY_BLOCKS, ("step = (group - mean).abs().max() / 127", "step = (largest - mean).abs().max() / 127"))  # fmt: skip

bank.hint("wrong-scales", "scales · step + mean must be within half a step of the largest magnitude of each "
                             "block. Round to the nearest step; truncating costs up to a full step. Nothing may "
                             "overflow int8.")  # fmt: skip
bank.slip("wrong-scales", (").round().to(torch.int8)", ").to(torch.int8)"))
bank.slip("wrong-scales", (").round().to(torch.int8)", ").floor().to(torch.int8)"))
bank.slip("wrong-scales", ("(groups / steps", "(F.pad(largest, (0, -len(largest) % GROUP)).view(-1, GROUP) / steps"))
bank.variant("wrong-scales", BY_BLOCKS, ("torch.round((group - mean) / (step if step > 0 else 1))", "((group - mean) / (step if step > 0 else 1))"))  # fmt: skip

bank.hint("back-form", "from_nf4 returns float32 in the shape of the weights. Cut off the padding of the last "
                          "byte and the last block, then `view(packed.shape)`.")  # fmt: skip
bank.slip("back-form", (".view(packed.shape)", ""))
bank.slip("back-form", ("values[:count] * again[:count]).view(packed.shape)", "values[:count] * again[:count]).double().view(packed.shape)"))  # fmt: skip
bank.variant("back-form", BY_BLOCKS, ("return out.reshape(packed.shape)", "return out"))

bank.hint("unrounded", "You choose the codes with the scales before rounding. from_nf4 sees the rounded ones, "
                          "so divide by scales · step + mean.")  # fmt: skip
bank.slip("unrounded", ("again = scale_of(scales, steps, mean)[:, None]", "again = largest[:, None]"))
bank.variant("unrounded", BY_BLOCKS, ("scale = scales[k].float() * steps[k // GROUP] + mean\n        codes", "scale = largest[k]\n        codes"))  # fmt: skip

bank.hint("not-nearest", "A weight gets the next value below or above it, not the nearest one. The border "
                            "between two codes is halfway between their values.")  # fmt: skip
bank.slip("not-nearest", ("((NF4[1:] + NF4[:-1]) / 2)", "NF4[1:]"))
bank.slip("not-nearest", ("((NF4[1:] + NF4[:-1]) / 2)", "NF4[:-1]"))
bank.variant("not-nearest", BY_BLOCKS, ("(scale * NF4[None] - block[:, None]).abs().argmin(1)", "(scale * NF4[None] <= block[:, None]).sum(1).clamp(1, 16) - 1"))  # fmt: skip

bank.hint("wrong-codes", "A weight doesn't come back as the nearest of the values of the table · scale. Look at "
                            "the borders between codes, at zero, and at the two halves of a byte, which must be "
                            "read as they were written.")  # fmt: skip
bank.slip("wrong-codes", ("codes[0::2] << 4 | codes[1::2]", "codes[1::2] << 4 | codes[0::2]"))
bank.slip("wrong-codes", ("NF4.to(codes.device)[codes]", "torch.linspace(-1, 1, 16)[codes]"), ("((NF4[1:] + NF4[:-1]) / 2)", "(torch.arange(-14, 15, 2) / 15)"))  # fmt: skip
bank.slip("wrong-codes", (".clamp(min=0)", ""), ("again.where(again > 0, 1.0)", "again.abs().clamp(min=1e-9)"))
bank.variant("wrong-codes", BY_BLOCKS, ("low, high = ", "high, low = "))
