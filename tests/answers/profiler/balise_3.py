"""Answers to balise 3 of 04_profiler: find the waits."""

from tests.answers.bank import Bank

bank = Bank("04_profiler", 3, whole=True)

FINDER = """
class WaitFinder(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.found = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if makes_wait(func, args, kwargs):
            self.found.append((str(func.overloadpacket), own_line()))
        return out
"""

bank.text(
    None,
    FINDER
    + """

def own_line():
    import linecache
    import sys
    frame = sys._getframe(2)
    while frame is not None and "/torch/" in frame.f_code.co_filename:
        frame = frame.f_back
    return "" if frame is None else linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip()
""",
)

bank.text(
    None,
    FINDER
    + """

def own_line():
    for frame in reversed(traceback.extract_stack()[:-2]):
        if "site-packages" not in frame.filename and frame.name != "__torch_dispatch__":
            return frame.line
""",
)

bank.text(
    None,
    FINDER
    + """

def own_line():
    import inspect
    for info in inspect.stack()[2:]:
        if os.sep + "torch" + os.sep not in info.filename:
            return info.code_context[info.index].strip()
    return str()
""",
)

bank.text(  # only cells of the notebook
    None,
    FINDER
    + """

def own_line():
    return ([""] + [f.line for f in traceback.extract_stack() if "ipykernel" in f.filename and f.name != "own_line"])[-1]
""",
)

bank.hint("result-lost", "An operator inside returned None: whatever __torch_dispatch__ returns is the operator's "
          "result.")  # fmt: skip
bank.slip("result-lost", ("        return func(*args, **kwargs)\n", "        func(*args, **kwargs)\n"))

bank.slip(
    "result-lost",
    (
        "        if makes_wait",
        "        if not makes_wait(func, args, kwargs):\n            return None\n        if makes_wait",
    ),
    variant=True,
)

bank.hint("arguments-lost", "An operator lost its keyword arguments: {error}. Pass on **kwargs.", edge=True)
bank.slip("arguments-lost", ("return func(*args, **kwargs)", "return func(*args)"), variant=True)

bank.hint("keywords-refused", "An operator lost its keyword arguments: {error}. Pass on **kwargs.")
bank.slip(
    "keywords-refused", ("return func(*args, **kwargs)", "return func(*args, **(list(kwargs) if kwargs else {}))")
)

bank.slip(
    "keywords-refused",
    (
        "return func(*args, **kwargs)",
        "return func(*args, **kwargs) if not kwargs else func(*args, **[*kwargs.items()])",
    ),
    variant=True,
)

bank.hint("result-changed", "The results inside differ from those outside. Call the operator unchanged, once: "
          "func(*args, **kwargs).")  # fmt: skip
bank.slip(
    "result-changed",
    (
        "        return func(*args, **kwargs)\n",
        "        out = func(*args, **kwargs)\n        return out.abs() * 0 if isinstance(out, torch.Tensor) and out.is_floating_point() else out\n",
    ),
)

bank.hint("all-operators", "You listed {n} operators, but only {wanted} of them wait. makes_wait(func, args, kwargs) "
          "tells you which ones.")  # fmt: skip
bank.slip("all-operators", ("if makes_wait(func, args, kwargs):", "if True:"), variant=True)

bank.hint("waits-missed", "There were {wanted} waits and you listed {n}. The same line may wait twice: that makes two.")
bank.slip(
    "waits-missed",
    ("if makes_wait(func, args, kwargs):", 'if "item" in str(func) or "_local_scalar_dense" in str(func):'),
)

bank.slip("waits-missed", ("if makes_wait(func, args, kwargs):", "if func.overloadpacket.__name__ in READS:"))

bank.slip("waits-missed",
    ("            self.found.append((str(func.overloadpacket), line))\n",
     "            self.found = [(str(func.overloadpacket), line)]\n"),
)  # fmt: skip

bank.hint("no-pairs", "The list consists of pairs (operator, line): two strings, in this order.")
bank.slip("no-pairs", ("(str(func.overloadpacket), line)", "line"))

bank.slip("no-pairs", ("str(func.overloadpacket)", "func.overloadpacket"))

bank.hint("not-the-packet", "{got} is one variant of the operator. To get its name without the variant, use "
          "str(func.overloadpacket).", edge=True)  # fmt: skip
bank.slip("not-the-packet", ("str(func.overloadpacket)", "str(func)"), variant=True)

bank.hint("other-spelling", "{got} is the right operator, but it isn't spelt as str(func.overloadpacket).", edge=True)
bank.slip("other-spelling", ("str(func.overloadpacket)", "func.overloadpacket.__name__"))

bank.slip("other-spelling", ("str(func.overloadpacket)", "func.overloadpacket._qualified_op_name"), variant=True)

bank.hint("wrong-operator", "The operators that you listed are not those that waited.")
bank.slip("wrong-operator", ("str(func.overloadpacket)", '"aten.item"'), variant=True)

bank.slip("no-pairs", ("(str(func.overloadpacket), line)", "(line, str(func.overloadpacket))"))

bank.hint("more-than-line", "The second entry of the pair is the text of the line alone, without spaces around it, "
          "file name or number.", edge=True)  # fmt: skip
bank.slip(
    "more-than-line", ("frames[-1].line.strip()", 'f"{frames[-1].filename}:{frames[-1].lineno} {frames[-1].line}"')
)

bank.slip("more-than-line", ("frames[-1].line.strip()", 'frames[-1].line + "\\n"'), variant=True)

bank.hint("whole-stack", "The second entry of the pair is the text of the line alone, without spaces around it, file "
          "name or number.")  # fmt: skip
bank.slip("whole-stack", ("frames[-1].line.strip()", '"\\n".join(f.line for f in frames)'))

bank.slip("whole-stack", ("frames[-1].line.strip()", '"".join(traceback.format_stack())'), variant=True)

bank.hint("torch-by-name", "You take one of your own files for PyTorch's: it is in a folder called torch_course. "
          "PyTorch's files are those in torch.__path__[0].", edge=True)  # fmt: skip
bank.slip("torch-by-name", ("f.filename.startswith(torchs)", '"torch" in f.filename'), variant=True)

bank.slip(
    "result-changed", ("        return func(", "        func(*args, **kwargs)\n        return func("), variant=True
)

bank.hint("outer-line", "You listed a line that called the line to blame. The innermost frame is the last one of "
          "extract_stack().")  # fmt: skip
bank.slip("outer-line", ("frames[-1]", "frames[0]"))

bank.slip(
    "waits-missed",
    (
        "            self.found.append((str(func.overloadpacket), line))\n",
        "            if (str(func.overloadpacket), line) not in self.found:\n"
        "                self.found.append((str(func.overloadpacket), line))\n",
    ),
    variant=True,
)

bank.hint("line-number", "The second entry of the pair is the text of the line. In a notebook, a line number says "
          "little.")  # fmt: skip
bank.slip("line-number", ("frames[-1].line.strip()", "frames[-1].lineno"), variant=True)

bank.hint("no-line-at-all", "In one of PyTorch's own threads, such as the one of a GPU's backward pass, no line of "
          "the stack is yours: {error}. List an empty string as the line.", edge=True)  # fmt: skip
bank.slip("no-line-at-all", (' if frames else ""', ""))

bank.slip(
    "no-line-at-all", ("            self.found.append", "            if frames:\n                self.found.append")
)

bank.hint("listed-again", "You listed {n} waits, but there were {wanted}. List each of them once.")
bank.slip(
    "listed-again",
    ("            self.found.append", "            for _ in 1, 2:\n                self.found.append"),
    variant=True,
)

bank.slip("no-pairs", ("self.found.append((", "self.found.extend(("), variant=True)

bank.slip("no-line-at-all", ('frames else ""', 'frames else "backward"'))

bank.slip(
    "no-line-at-all", ('frames else ""', "frames else traceback.extract_stack()[0].line or func.name()"), variant=True
)

bank.hint("own-line", "This is not the line that waits. It is the line in which your finder looks at the stack, an "
          "empty one, or something of a frame other than its `line`. Leave out the finder's own frames.")  # fmt: skip
bank.slip("own-line", ("extract_stack()[:-1]", "extract_stack()"))

bank.slip("own-line", ("frames[-1].line.strip()", "traceback.extract_stack()[-1].line"))

bank.slip("own-line", ("frames[-1].line.strip()", 'getattr(frames[-1], "source", "")'), variant=True)

bank.hint("torch-line", "The wait happened inside a function of PyTorch, and you listed PyTorch's line. Go outwards "
          "to the line that called it.")  # fmt: skip
bank.slip("torch-line", (" if not f.filename.startswith(torchs)", ""), variant=True)

bank.slip("outer-line", ("frames[-1]", "frames[-2]"))

bank.slip(
    "outer-line", ("frames[-1]", "next((f for f in frames if 'ipykernel' in f.filename), frames[-1])"), variant=True
)

bank.hint("wrong-line-of-source", "This is not the line that waited.")
bank.slip(
    "wrong-line-of-source", ("frames[-1].line.strip()", 'frames[-1].line.strip() and "y = (x * 2).sum()"'), variant=True
)

bank.hint("finds-shared", "A second finder starts with what the first one found. Create the list in __init__, on "
          "self.", edge=True)  # fmt: skip
bank.slip(
    "finds-shared",
    ("        self.found = []\n", "        pass\n"),
    ("    def __init__", "    found = []\n\n    def __init__"),
)

bank.slip(
    "finds-shared",
    (
        "    def __init__(self):\n        super().__init__()\n",
        "    def __init__(self, found=[]):\n        super().__init__()\n",
    ),
    ("self.found = []", "self.found = found"),
    variant=True,
)

bank.hint("no-mode", "Inside `with WaitFinder() as finder:`, the finder must be a TorchDispatchMode with a list "
          "`found`: {error}")  # fmt: skip
bank.slip("no-mode", ("        self.found = []\n", "        self.waits = []\n"))

bank.slip("no-mode", ("(TorchDispatchMode)", "(dict)"))

bank.slip(
    "no-mode", ("self.found = []", "self.found = {}"), ("self.found.append((", "self.found.update(("), variant=True
)
