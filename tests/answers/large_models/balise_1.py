"""Answers to balise 1 of 12_large_models: patches, class token, positions."""

from tests.answers.bank import Bank

bank = Bank("12_large_models", 1, whole=True)

# windows instead of axes, and a product of two tensors with several axes
WINDOWS = """
def cut_patches(images, size):
    if images.shape[-2] % size != 0 or images.shape[-1] % size != 0:
        raise ValueError(f"height {images.shape[-2]}, width {images.shape[-1]}, patch {size}")
    windows = images.unfold(2, size, size).unfold(3, size, size)
    return windows.permute(0, 2, 3, 1, 4, 5).reshape(len(images), -1, images.shape[1] * size * size)


def embed_image(images, weight, bias, class_token, positions):
    seen = cut_patches(images, weight.shape[2]).unflatten(2, weight.shape[1:])
    if positions.size(1) != 1 + seen.size(1):
        raise ValueError(f"tokens: {1 + seen.size(1)}, positions: {positions.size(1)}")
    tokens = torch.einsum("npcij,wcij->npw", seen, weight) + bias
    first = class_token.repeat(images.size(0), 1, 1) + positions[:, :1]
    return torch.cat((first, tokens + positions[:, 1:]), 1)
"""
bank.text(None, WINDOWS)

# a ready-made rearrangement, and an output that is filled
FILLED = """
def cut_patches(images, size):
    rest = images.shape[-2] % size + images.shape[-1] % size
    if rest:
        raise ValueError(f"images of {tuple(images.shape)}, patches of {size}")
    return F.pixel_unshuffle(images, size).flatten(2).mT


def embed_image(images, weight, bias, class_token, positions):
    patches = cut_patches(images, weight.shape[-1])
    n, count = patches.shape[:2]
    if positions.shape[1] != count + 1:
        raise ValueError(f"{count + 1} tokens, {positions.shape[1]} positions")
    tokens = patches.new_empty(n, count + 1, len(weight))
    tokens[:, 0] = class_token[0]
    tokens[:, 1:] = patches @ weight.reshape(len(weight), -1).T + bias
    return tokens + positions
"""
bank.text(None, FILLED)
bank.slip(None, ("permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2)", "permute(0, 2, 4, 1, 3, 5).reshape(n, -1, channels * size**2)"))  # fmt: skip

CUT = "squares.permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2)"
WINDOW_CUT = "windows.permute(0, 2, 3, 1, 4, 5)"
bank.slip("nothing-returned", (f"    return {CUT}\n", f"    {CUT}\n"))

bank.hint("patches-form", "cut_patches returns (n, patches, channels · size²), in the dtype of the images.")
bank.slip("patches-form", (CUT, "squares.permute(0, 2, 4, 1, 3, 5).flatten(3)"))
bank.slip("patches-form", (CUT, "squares.permute(0, 1, 2, 4, 3, 5).flatten(4).flatten(1, 3)"))
bank.variant("patches-form", WINDOWS, ("len(images), -1, images.shape[1] * size * size", "-1, images.shape[1] * size * size"))  # fmt: skip
bank.variant("patches-form", FILLED, (".flatten(2).mT", ".flatten(2)"))

bank.hint("wrong-patches", "The shape is right, but not every vector holds the pixels of one square in the "
                              "expected order.")  # fmt: skip
bank.slip("wrong-patches", (CUT, "squares.permute(0, 2, 4, 1, 3, 5).flip(1).flatten(3).flatten(1, 2)"))
bank.variant("wrong-patches", WINDOWS, (WINDOW_CUT, WINDOW_CUT + ".roll(1, 0)"))

bank.hint("only-reshaped", "The pixels were regrouped in the order they have in memory: a vector holds pieces "
                              "of rows, not a square. A reshape alone moves nothing. First bring the axes of the "
                              "grid to the front.")  # fmt: skip
bank.slip("only-reshaped", (CUT, "squares.reshape(n, -1, channels * size * size)"))
bank.variant("only-reshaped", WINDOWS, (f"{WINDOW_CUT}.", "images."))

bank.hint("axes-joined-wrongly", "You joined axes that are not side by side: channels and grid are in the wrong "
                                    "order. Before the flatten, the axes must be: image, row of the grid, column "
                                    "of the grid, channel, row in the square, column in the square.")  # fmt: skip
bank.slip("axes-joined-wrongly", (CUT, "squares.permute(0, 1, 2, 4, 3, 5).reshape(n, -1, channels * size**2)"))
bank.variant("axes-joined-wrongly", WINDOWS, (f"{WINDOW_CUT}.", "windows."))

bank.hint("column-by-column", "The squares come column by column. They are expected row by row: the column of "
                                 "the grid changes fastest.")  # fmt: skip
bank.slip("column-by-column", ("permute(0, 2, 4,", "permute(0, 4, 2,"))
bank.variant("column-by-column", WINDOWS, ("permute(0, 2, 3,", "permute(0, 3, 2,"))

bank.hint("square-turned", "The pixels of a square come column by column: its rows and columns are swapped.")
bank.slip("square-turned", ("1, 3, 5)", "1, 5, 3)"))
bank.variant("square-turned", WINDOWS, ("1, 4, 5)", "1, 5, 4)"))

bank.hint("channels-behind", "In a vector, the channels change fastest. A convolution's kernel is (channels, "
                                "size, size): all pixels of one channel, then those of the next.")  # fmt: skip
bank.slip("channels-behind", ("1, 3, 5)", "3, 5, 1)"))
bank.variant("channels-behind", WINDOWS, ("1, 4, 5)", "4, 5, 1)"))

bank.hint("remainder", "An image that does not divide into patches was accepted. If its border is dropped, "
                          "nobody notices. Raise a ValueError when the height does not divide, and when the width "
                          "does not.")  # fmt: skip
bank.slip("remainder", (
    "    if height % size or width % size:\n        raise ValueError(f\"{height} × {width} pixels do not divide into patches of {size} × {size}\")\n",
    "    images = images[:, :, : height // size * size, : width // size * size]\n"))  # fmt: skip
bank.slip("remainder", ("if height % size or width % size:", "if height % size:"), ("    squares =", "    images = images[..., : width // size * size]\n    squares ="))  # fmt: skip
bank.variant("remainder", WINDOWS, ("if images.shape[-2] % size != 0 or images.shape[-1] % size != 0:", "if images.shape[-2] < size:"))  # fmt: skip

bank.hint("other-error", "A size that does not divide ends in a {got} from somewhere inside. The caller should "
                            "read what is wrong in a ValueError.")  # fmt: skip
bank.slip("other-error", ("if height % size or width % size:", "if False:"))
bank.slip("other-error", (
    "    if height % size or width % size:\n        raise ValueError(f\"{height} × {width} pixels do not divide into patches of {size} × {size}\")\n",
    '    assert height % size == 0 and width % size == 0, f"{height} {width} {size}"\n'))  # fmt: skip
bank.variant("other-error", FILLED, ("    if rest:\n        raise ValueError(f\"images of {tuple(images.shape)}, patches of {size}\")\n", ""))  # fmt: skip

bank.hint(
    "sizes-unnamed", "The message leaves the reader guessing: name the height, the width and the size of a patch."
)
bank.slip(
    "sizes-unnamed", ('f"{height} × {width} pixels do not divide into patches of {size} × {size}"', '"wrong size"')
)
bank.variant("sizes-unnamed", WINDOWS, ('f"height {images.shape[-2]}, width {images.shape[-1]}, patch {size}"', 'f"patch {size}"'))  # fmt: skip

bank.hint(
    "tokens-form",
    "embed_image returns (n, 1 + patches, width), in the dtype of the images: the class token, then one token per "
    "patch.",
)
bank.slip("tokens-form", ("return tokens + positions", "return (tokens + positions)[:, 1:]"))
bank.slip("tokens-form", ("return tokens + positions", "return (tokens + positions).transpose(1, 2)"))
bank.variant("tokens-form", WINDOWS, ("torch.cat((first, tokens + positions[:, 1:]), 1)", "tokens + positions[:, 1:]"))  # fmt: skip

bank.hint("wrong-tokens", "The patches are right, but the tokens are not those of the convolution with class "
                             "token and positions.")  # fmt: skip
bank.slip("wrong-tokens", ("weight.flatten(1)", "weight.flatten(1).flip(1)"))
bank.variant("wrong-tokens", WINDOWS, ("npcij,wcij", "npcij,wcji"))

bank.hint("kernel-regrouped", "A reshape of the kernel to (channels · size², width) scrambles its numbers. "
                                 "Flatten it to one row for each number of a token, then transpose.")  # fmt: skip
bank.slip("kernel-regrouped", ("F.linear(cut_patches(images, weight.shape[-1]), weight.flatten(1), bias)", "cut_patches(images, weight.shape[-1]) @ weight.reshape(-1, len(weight)) + bias"))  # fmt: skip
bank.variant("kernel-regrouped", FILLED, ("weight.reshape(len(weight), -1).T", "weight.view(-1, weight.shape[0])"))

bank.hint("no-class-token", "The class token itself is missing: there are zeros, or a patch, in its place.")
bank.slip("no-class-token", ("class_token.expand(len(images), -1, -1)", "torch.zeros_like(tokens[:, :1])"))
bank.variant("no-class-token", FILLED, ("    tokens[:, 0] = class_token[0]\n", "    tokens[:, 0] = 0\n"))

bank.hint("class-last", "The class token is last. It must be the first token: positions[:, 0] belongs to it.")
bank.slip("class-last", ("[class_token.expand(len(images), -1, -1), tokens]", "[tokens, class_token.expand(len(images), -1, -1)]"))  # fmt: skip
bank.variant("class-last", WINDOWS, ("+ positions[:, :1]", "+ positions[:, -1:]"), ("(first, tokens + positions[:, 1:])", "(tokens + positions[:, :-1], first)"))  # fmt: skip

bank.hint("no-positions", "The positions are not added: attention could not tell where a square is.")
bank.slip("no-positions", ("return tokens + positions", "return tokens"))
bank.variant("no-positions", FILLED, ("return tokens + positions", "return tokens"))

bank.hint("class-without-position", "The class token has no position. positions has 1 + patches vectors; the "
                                       "first is for the class token.")  # fmt: skip
bank.slip("class-without-position", ("return tokens + positions", "return torch.cat([tokens[:, :1], (tokens + positions)[:, 1:]], 1)"))  # fmt: skip
bank.variant("class-without-position", WINDOWS, (" + positions[:, :1]", ""))

bank.hint("no-bias", "The bias of the convolution is missing.")
bank.slip("no-bias", (", weight.flatten(1), bias)", ", weight.flatten(1))"))
bank.variant("no-bias", WINDOWS, (" + bias", ""))

bank.hint("bias-on-class", "The bias was added to the class token too. It belongs to the convolution, so only "
                              "to the patches.")  # fmt: skip
bank.slip("bias-on-class", (", weight.flatten(1), bias)", ", weight.flatten(1))"), ("return tokens + positions", "return tokens + bias + positions"))  # fmt: skip
bank.variant("bias-on-class", WINDOWS, ("+ positions[:, :1]", "+ positions[:, :1] + bias"))

bank.hint("positions-spread", "A wrong number of positions was accepted: a single vector broadcasts to all "
                                 "tokens without an error, and surplus ones may be cut off. Compare the numbers, "
                                 "and raise a ValueError.")  # fmt: skip
bank.slip("positions-spread", ("    if tokens.shape[1] != positions.shape[1]:\n        raise ValueError(f\"{positions.shape[1]} positions for {tokens.shape[1]} tokens\")\n", ""))  # fmt: skip
bank.slip("positions-spread", ("if tokens.shape[1] != positions.shape[1]", "if tokens.shape[1] > positions.shape[1] > 1"), ("return tokens + positions", "return tokens + positions[:, : tokens.shape[1]]"))  # fmt: skip
bank.variant("positions-spread", FILLED, ("!= count + 1", "not in (1, count + 1)"))

bank.hint(
    "counts-unnamed", "The message does not say how many positions there are, or how many tokens. Give both numbers."
)
bank.slip("counts-unnamed", ('f"{positions.shape[1]} positions for {tokens.shape[1]} tokens"', '"wrong number of positions"'))  # fmt: skip
bank.variant("counts-unnamed", WINDOWS, ('f"tokens: {1 + seen.size(1)}, positions: {positions.size(1)}"', 'f"positions: {positions.size(1)}"'))  # fmt: skip

bank.hint("no-gradient", "The values are right, but a gradient is wrong, that of: {what}. All five are learnt "
                            "or pass gradients on. Leave out detach, .data and no_grad.")  # fmt: skip
bank.slip("no-gradient", ("class_token.expand", "class_token.data.expand"))
bank.slip("no-gradient", ("return tokens + positions", "return tokens + positions.detach()"))
bank.variant("no-gradient", FILLED, ("= class_token[0]", "= class_token[0].detach()"))

bank.hint("borrowed", "{what} does the work here, and that is what your function is compared with. Cut with "
                         "reshape and permute, and multiply by the kernel as a matrix.")  # fmt: skip
bank.slip("borrowed", (CUT, "F.unfold(images, size, stride=size).transpose(1, 2)"))
bank.slip("borrowed", ("F.linear(cut_patches(images, weight.shape[-1]), weight.flatten(1), bias)", "F.conv2d(images, weight, bias, stride=weight.shape[-1]).flatten(2).mT"))  # fmt: skip
bank.variant("borrowed", FILLED, ("F.pixel_unshuffle(images, size).flatten(2).mT", "F.unfold(images, size, stride=size).mT"))  # fmt: skip

bank.hint("operators-grow", "64 patches take {n} more operators than 4: there is a loop over patches, or over "
                               "rows of them. Each operator launches a kernel; views and one product are enough "
                               "for all of them.")  # fmt: skip
LOOP = "torch.stack([images[:, :, y : y + size, x : x + size].flatten(1) for y in range(0, height, size) for x in range(0, width, size)], 1)"  # fmt: skip
bank.slip("operators-grow", (CUT, LOOP.replace("flatten(1)", "reshape(n, -1).clone()")))
bank.variant("operators-grow", FILLED, ("    tokens[:, 1:] = patches @ weight.reshape(len(weight), -1).T + bias\n",
             "    for k in range(count):\n        tokens[:, 1 + k] = patches[:, k] @ weight.reshape(len(weight), -1).T + bias\n"))  # fmt: skip

bank.hint("a-loop-over-images", "Six images of five channels take {n} more operators than two of two: there is "
                                   "a loop over images or channels. Views and one product are enough for all of "
                                   "them.")  # fmt: skip
bank.slip("a-loop-over-images", (CUT, "torch.stack([image.permute(1, 3, 0, 2, 4).flatten(2).flatten(0, 1) for image in squares])"))  # fmt: skip
bank.slip("a-loop-over-images", (CUT, "torch.cat([squares[:, c].permute(0, 1, 3, 2, 4).flatten(3).flatten(1, 2) for c in range(channels)], 2)"))  # fmt: skip
bank.variant("a-loop-over-images", FILLED, ("patches @ weight.reshape(len(weight), -1).T + bias", "torch.stack([one @ weight.reshape(len(weight), -1).T + bias for one in patches])"))  # fmt: skip
