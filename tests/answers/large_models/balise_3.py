"""Answers to balise 3."""

from tests.answers.bank import Bank

bank = Bank("12_large_models", 3, whole=True)

# as the table reads, a row each
BY_ROWS = """
def linear(a, b, places, bias=True):
    return a * b + b * bias, 2 * places * a * b


def attention_cost(c, d, n, heads, table):
    k = d // heads
    rows = [linear(c, d, n) for _ in range(3)] + [linear(d, d, n), (heads * table, 0)]
    rows += [(0, heads * 2 * n * k * n), (0, heads * 2 * n * n * k)]
    return tuple(map(sum, zip(*rows)))


def feed_forward_cost(d, f, n):
    return tuple(map(sum, zip(linear(d, f, n), linear(f, d, n))))


def mbconv_cost(c, d, height, width, stride):
    m, out = 4 * d, height * width // stride**2
    rows = [(2 * c, 0), linear(c, m, height * width, False), (2 * m, 0), (9 * m, 2 * out * 9 * m), (2 * m, 0)]
    rows += [linear(m, d // 4, 1), linear(d // 4, m, 1), linear(m, d, out)]
    if c != d:
        rows += [linear(c, d, out)]
    return tuple(map(sum, zip(*rows)))
"""
bank.text(None, BY_ROWS)

# from modules, counted: slower, and right
BY_MODULES = """
from torch import nn
from torch.utils.flop_counter import FlopCounterMode


def counted(layer, x):
    with FlopCounterMode(display=False) as counter:
        layer(x)
    return sum(p.numel() for p in layer.parameters()), counter.get_total_flops()


def attention_cost(c, d, n, heads, table):
    qkv, out = (nn.Linear(a, b, device="meta") for a, b in ((c, 3 * d), (d, d)))
    p, f = counted(qkv, torch.empty(n, c, device="meta"))
    q, g = counted(out, torch.empty(n, d, device="meta"))
    return p + q + heads * table, f + g + 4 * n**2 * d


def feed_forward_cost(d, f, n):
    layers = nn.Sequential(nn.Linear(d, f), nn.Linear(f, d)).to("meta")
    return counted(layers, torch.empty(n, d, device="meta"))


def mbconv_cost(c, d, height, width, stride):
    m = 4 * d
    pieces = [
        (nn.Sequential(nn.BatchNorm2d(c), nn.Conv2d(c, m, 1, bias=False), nn.BatchNorm2d(m),
                       nn.Conv2d(m, m, 3, stride, 1, groups=m, bias=False), nn.BatchNorm2d(m), nn.Conv2d(m, d, 1)), c, 0),
        (nn.Sequential(nn.Conv2d(m, d // 4, 1), nn.Conv2d(d // 4, m, 1)), m, 1),
    ] + [(nn.Conv2d(c, d, 1, stride), c, 0)] * (c != d)
    found = [counted(piece.to("meta"), torch.empty(1, a, *((1, 1) if one else (height, width)), device="meta"))
             for piece, a, one in pieces]
    return tuple(map(sum, zip(*found)))
"""
bank.text(None, BY_MODULES)
bank.slip(None, ("(height // stride) * (width // stride)", "height * width / stride**2"))  # whole numbers as floats

bank.hint("not-two", "Each of the three functions returns two numbers: (parameters, operations).")
bank.slip("not-two", ("return (d + 1) * f + (f + 1) * d, 2", "return 2"))
bank.variant(
    "not-two",
    BY_ROWS,
    ("return tuple(map(sum, zip(linear(d, f, n), linear(f, d, n))))", "return linear(d, f, n) + linear(f, d, n)"),
)

bank.hint(
    "biases-forgotten",
    "Parameters are missing, as many as the layers have biases. Each layer that has a bias according to the text "
    "has one for each output channel.",
)
bank.slip("biases-forgotten", ("3 * (c + 1) * d + (d + 1) * d", "3 * c * d + d * d"))
bank.slip("biases-forgotten", ("(d + 1) * f + (f + 1) * d", "2 * d * f"))
for there, without in (
    ("3 * (c + 1) * d", "3 * c * d"),
    ("(d + 1) * d + heads", "d * d + heads"),
    ("(f + 1) * d, 2", "f * d, 2"),
    ("(m + 1) * squeezed + (squeezed + 1) * m", "2 * m * squeezed"),
    ("(m + 1) * d", "m * d"),
    ("parameters += (c + 1) * d", "parameters += c * d"),
):
    bank.slip("biases-forgotten", (there, without))
bank.variant("biases-forgotten", BY_ROWS, ("bias=True", "bias=False"))

bank.hint("one-table", "Each head has its own table: there are `heads` tables.")
bank.slip("one-table", ("heads * table", "table"))
bank.variant("one-table", BY_ROWS, ("(heads * table, 0)", "(table, 0)"))

bank.hint("multiply-add-once", "That is half of the operations: a multiplication and an addition are two.")
bank.slip(
    "multiply-add-once",
    ("2 * n * (3 * c * d + d * d) + 2 * 2 * n * n * d", "n * (3 * c * d + d * d) + 2 * n * n * d"),
)
bank.slip("multiply-add-once", ("2 * (before", "(before"), ("2 * after * c", "after * c"))
bank.variant("multiply-add-once", BY_ROWS, ("2 * places", "places"), ("heads * 2 * n", "heads * n"))

bank.hint(
    "scores-once",
    "There are two products of n² d, for all heads together: queries times keys give the scores, and the scores "
    "multiply the values.",
)
bank.slip("scores-once", ("2 * 2 * n * n * d", "2 * n * n * d"))
bank.variant("scores-once", BY_ROWS, (", (0, heads * 2 * n * n * k)]", "]"))

bank.hint(
    "scores-each-head",
    "d is the width of all heads together: one head has d / heads, and the scores of all heads take 2 n² d.",
)
bank.slip("scores-each-head", ("2 * 2 * n * n * d", "2 * 2 * n * n * d * heads"))
bank.variant("scores-each-head", BY_ROWS, ("k = d // heads", "k = d"))

bank.hint(
    "no-scores",
    "Only the projections are counted. Queries multiply keys, and the scores multiply the values: count both "
    "products too.",
)
bank.slip("no-scores", (" + 2 * 2 * n * n * d", ""))
bank.variant("no-scores", BY_ROWS, ("heads * 2 * n * k * n", "0"), ("heads * 2 * n * n * k", "0"))

bank.hint(
    "half",
    "That is half of the operations: there are two linear layers, and in each, a multiplication and an addition "
    "are two operations.",
)
bank.slip("half", ("2 * n * (d * f + f * d)", "2 * n * d * f"))
bank.slip("half", ("2 * n * (d * f + f * d)", "n * (d * f + f * d)"))
bank.variant("half", BY_ROWS, ("zip(linear(d, f, n), linear(f, d, n))", "zip(linear(d, f, n), (f * d + d, 0))"))

bank.hint(
    "norms-forgotten",
    "Parameters of the batch norms are missing: a scale and a shift for each of their c, m and m channels.",
)
bank.slip("norms-forgotten", ("2 * c + c * m + 2 * m + 9 * m + 2 * m", "c * m + 9 * m"))
bank.slip("norms-forgotten", ("2 * c + c * m + 2 * m + 9 * m + 2 * m", "c + c * m + m + 9 * m + m"))
bank.variant("norms-forgotten", BY_ROWS, ("(2 * c, 0)", "(0, 0)"), ("(2 * m, 0)", "(0, 0)"))

bank.hint("biases-too-many", "A bias is counted that does not exist: the convolutions before a batch norm have none.")
bank.slip("biases-too-many", ("2 * c + c * m", "2 * c + (c + 1) * m"))
bank.slip("biases-too-many", ("+ 9 * m", "+ 10 * m"))
bank.slip("biases-too-many", ("2 * c + c * m", "2 * c + (c + 2) * m"))
bank.variant("biases-too-many", BY_ROWS, ("linear(c, m, height * width, False)", "linear(c, m, height * width)"))

bank.hint(
    "averages-counted",
    "A batch norm has two parameters per channel. Its running mean and variance are buffers: they are not learnt.",
)
bank.slip(
    "averages-counted",
    ("2 * c + c * m + 2 * m + 9 * m + 2 * m", "4 * c + c * m + 4 * m + 9 * m + 4 * m"),
)
bank.variant("averages-counted", BY_ROWS, ("(2 * c, 0)", "(4 * c, 0)"), ("(2 * m, 0)", "(4 * m, 0)"))

bank.hint(
    "wide-of-c",
    "The middle of the block has m = 4 d channels: four times the output channels, not the input channels.",
)
bank.slip("wide-of-c", ("m, squeezed = 4 * d", "m, squeezed = 4 * c"))
bank.variant("wide-of-c", BY_ROWS, ("m, out = 4 * d", "m, out = 4 * c"))

bank.hint("exchanged", "These seem to be the operations: the pair is (parameters, operations).")
bank.slip(
    "exchanged",
    (
        "return parameters, 2 * n * (3 * c * d + d * d) + 2 * 2 * n * n * d",
        "return 2 * n * (3 * c * d + d * d) + 2 * 2 * n * n * d, parameters",
    ),
)
bank.variant(
    "exchanged", BY_ROWS, ("    return tuple(map(sum, zip(*rows)))", "    return tuple(map(sum, zip(*rows)))[::-1]")
)

bank.hint("not-depthwise", "The 3 × 3 convolution treats each channel separately: 9 weights per channel, not 9 m.")
bank.slip("not-depthwise", ("2 * m + 9 * m + 2 * m", "2 * m + 9 * m * m + 2 * m"))
bank.slip("not-depthwise", ("after * 9 * m", "after * 9 * m * m"))
bank.variant("not-depthwise", BY_ROWS, ("(9 * m, 2 * out * 9 * m)", "(9 * m**2, 2 * out * 9 * m**2)"))

bank.hint(
    "squeeze-at-each-place",
    "Squeeze and excite work on the mean of an image: count their products once, not at each place.",
)
bank.slip("squeeze-at-each-place", ("2 * m * squeezed + after", "after * 2 * m * squeezed + after"))
bank.variant(
    "squeeze-at-each-place",
    BY_ROWS,
    ("linear(m, d // 4, 1), linear(d // 4, m, 1)", "linear(m, d // 4, out), linear(d // 4, m, out)"),
)

bank.hint(
    "squeezed-of-others",
    "The squeeze goes to d/4 channels: a quarter of the block's output channels, not of m or c.",
)
bank.slip("squeezed-of-others", ("squeezed = 4 * d, d // 4", "squeezed = 4 * d, d"))
bank.variant(
    "squeezed-of-others",
    BY_ROWS,
    ("linear(m, d // 4, 1), linear(d // 4, m, 1)", "linear(m, m // 4, 1), linear(m // 4, m, 1)"),
)

bank.hint("stride-too-early", "The first 1 × 1 convolution comes before the stride: it works at all input places.")
bank.slip("stride-too-early", ("before * c * m", "after * c * m"))
bank.variant("stride-too-early", BY_ROWS, ("linear(c, m, height * width, False)", "linear(c, m, out, False)"))

bank.hint("stride-ignored", "After the stride there are fewer places: height/stride · width/stride. The "
                               "depthwise convolution, the last 1 × 1 convolution and the shortcut "
                               "work at these.")  # fmt: skip
bank.slip("stride-ignored", ("(height // stride) * (width // stride)", "height * width"))
bank.slip("stride-ignored", ("(height // stride) * (width // stride)", "height * width // stride"))
bank.variant("stride-ignored", BY_ROWS, ("height * width // stride**2", "height * width"))

bank.hint(
    "no-shortcut",
    "Where c ≠ d, the shortcut has its own projection, with a bias, at the places that the stride leaves.",
)
bank.slip("no-shortcut", ("if c != d", "if False"))
bank.variant("no-shortcut", BY_ROWS, ("if c != d", "if c > d > c"))

bank.hint(
    "shortcut-by-stride",
    "The shortcut is projected where the channels change (c ≠ d), and nowhere else. A stride alone only averages.",
)
bank.slip("shortcut-by-stride", ("if c != d", "if stride > 1"))
bank.slip("shortcut-by-stride", ("if c != d", "if c != d or stride > 1"))
bank.slip("shortcut-by-stride", ("if c != d", "if True"))
bank.variant("shortcut-by-stride", BY_ROWS, ("if c != d", "if stride == 2"))

bank.hint(
    "wrong-parameters",
    "There are {by} parameters too {word} here. Go through the layers one by one: weights, then biases.",
)
bank.slip("wrong-parameters", ("3 * (c + 1) * d", "4 * (c + 1) * d"))
bank.slip("wrong-parameters", ("(f + 1) * d, 2", "(f + 2) * d, 2"), variant=True)
bank.hint(
    "wrong-operations",
    "There are {by} operations too {word} here. Each product takes 2 · input channels · output channels · places.",
)
bank.slip("wrong-operations", ("2 * n * (3 * c * d + d * d)", "2 * n * n * (3 * c * d + d * d)"))
bank.slip("wrong-operations", ("2 * 2 * n * n * d", "2 * 2 * n * n"))
bank.slip("wrong-operations", ("2 * n * (d * f + f * d)", "2 * n * n * (d * f + f * d)"), variant=True)

bank.slip("squeezed-of-others", ("squeezed = 4 * d, d // 4", "squeezed = 4 * d, c // 4"))
bank.slip("one-table", (" + heads * table", ""))
for there in ("after * 9 * m", "after * m * d", "2 * after * c * d"):
    bank.slip("stride-ignored", (there, there.replace("after", "before")))

bank.hint(
    "from-d",
    "Queries, keys and values are made from c channels: their weights are c · d each. Only the last projection "
    "goes from d to d.",
)
bank.slip("from-d", ("3 * (c + 1) * d", "3 * (d + 1) * d"))
bank.slip("from-d", ("3 * c * d + d * d", "4 * d * d"))
bank.variant("from-d", BY_ROWS, ("[linear(c, d, n)", "[linear(d, d, n)"))
