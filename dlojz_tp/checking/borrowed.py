"""Notice an answer that borrows a ready-made implementation of what it was to write."""

import contextlib


class Borrowed(Exception):  # noqa: N818  (raised on a rank, it names what was borrowed)
    """The answer called a ready-made implementation of what it was to write."""


@contextlib.contextmanager
def refusing(*borrowed: tuple[object, str, str]):
    """Inside, calling what is named raises Borrowed. borrowed: (owner, name of its attribute, what it is called)."""

    def refusal(what):
        def refuse(*_, **__):
            raise Borrowed(what)

        return refuse

    with contextlib.ExitStack() as stack:
        for owner, name, what in borrowed:
            stack.enter_context(replaced(owner, name, refusal(what)))
        yield


@contextlib.contextmanager
def replaced(owner, name: str, value):
    """Inside, the attribute `name` of `owner` is `value`. (unittest.mock costs every rank 20 ms to import.)"""
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)
