"""Compile in a check as if nothing had been compiled before, and leave the notebook's own counters alone."""

import contextlib
import copy
import logging
import warnings
from unittest import mock

import torch
import torch._dynamo
from torch._dynamo import config, guards
from torch._dynamo.utils import counters

USUAL = {  # what a new process starts with; a notebook may have changed it
    "recompile_limit": 8,
    "accumulated_recompile_limit": 256,
    "capture_scalar_outputs": False,
    "capture_dynamic_output_shape_ops": False,
    "suppress_errors": False,
    "automatic_dynamic_shapes": True,
    "assume_static_by_default": True,
    "error_on_recompile": False,
    "fail_on_recompile_limit_hit": False,
    "disable": False,
}


@contextlib.contextmanager
def fresh():
    """Inside, nothing is compiled yet, Dynamo has its usual settings and is silent; nothing of it is left afterwards."""
    kept = copy.deepcopy(counters)
    settings = {name: value for name, value in USUAL.items() if hasattr(config, name)}
    logger = logging.getLogger("torch._dynamo")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    torch._dynamo.reset()
    # for its log alone, Dynamo times the guards of each graph, with a flush of the caches: half of all that is done here
    no_timing = mock.patch.object(guards, "profile_guard_manager", lambda *_: 0.0, create=True)
    try:
        with (
            no_timing,
            config.patch(**settings),
            torch.compiler.set_stance("default"),
            warnings.catch_warnings(action="ignore"),
        ):
            yield
    finally:
        torch._dynamo.reset()
        logger.setLevel(level)
        counters.clear()
        counters.update(kept)


class Graphs:
    """A backend that keeps the graphs it is given and runs them as they are.

    captured: the graph modules, in their order. runs: how often one was run.
    """

    def __init__(self):
        self.captured, self.runs = [], 0

    def __call__(self, graph, example_inputs, **_options):
        self.captured.append(graph)

        def run(*args):
            self.runs += 1
            return graph.forward(*args)

        return run

    def names(self) -> list[set[str]]:
        """For each graph the names of what it calls."""
        return [
            {_name(node.target) for node in graph.graph.nodes if node.op.startswith("call")} for graph in self.captured
        ]


def _name(target):
    return target if isinstance(target, str) else getattr(target, "__name__", str(target))


@contextlib.contextmanager
def no_inductor(backend=lambda graph, example_inputs: graph.forward):
    """Inside, `backend` stands in for Inductor and takes no time. Yields a list of the graphs that Inductor was given."""
    given = []

    def compile_fx(graph, example_inputs, *_args, **_kwargs):
        given.append(graph)
        return backend(graph, example_inputs)

    import torch._inductor.compile_fx  # noqa: F401  (it must be there to be replaced)

    with mock.patch("torch._inductor.compile_fx.compile_fx", compile_fx):
        yield given
