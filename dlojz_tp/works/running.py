"""Run text as if it were a file: tracebacks and `inspect` find its lines, and so does Triton."""

import linecache


def run(code: str, file: str, namespace: dict) -> None:
    """Execute code, called `file`, in a namespace. The next text of the same name takes its place."""
    linecache.cache[file] = len(code), None, code.splitlines(keepends=True), file
    exec(compile(code, file, "exec"), namespace)
