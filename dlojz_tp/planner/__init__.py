"""Compute what cannot be run here: collectives, steps on many GPUs, pipelines, and the best layout of a large model."""

from .cards import A100, CARDS, H100, RESNET50_FORWARD_FLOP, RESNET50_FORWARD_SECONDS, V100, Card, read_card
from .collectives import (
    Link,
    all_gather,
    all_reduce,
    broadcast,
    hierarchical_all_gather,
    hierarchical_all_reduce,
    hierarchical_reduce_scatter,
    reduce_scatter,
)
from .layout_search import NoLayout, Plan, search
from .layouts import GPT, Layout, Memory, layer_bytes, rank_memory, stage_parameters
from .memory import StateBytes, layer_activation_bytes, llama_layer_activation_bytes, state_bytes, step_volume
from .pipeline import PipelineEvent, Simulation, simulate
from .pipeline_orders import Action, Deadlock, OrdersDiffer, ScheduleError
from .published import MEGATRON, MEGATRON_OR_ZERO, PublishedRun, predicted_tflops
from .scaling import StepTimes, data_parallel_step, scaling_efficiency
from .schedules import gpipe, interleaved_1f1b, one_f_one_b, zero_bubble_h1
from .steps import Cluster, StepTime, step_time
from .tensor import LayerTimes, layer_flops, tensor_parallel_layer
from .throughput import Throughput, mfu

__all__ = [
    "A100",
    "Action",
    "CARDS",
    "Card",
    "Cluster",
    "Deadlock",
    "GPT",
    "H100",
    "LayerTimes",
    "Layout",
    "Link",
    "MEGATRON",
    "MEGATRON_OR_ZERO",
    "Memory",
    "NoLayout",
    "OrdersDiffer",
    "PipelineEvent",
    "Plan",
    "PublishedRun",
    "RESNET50_FORWARD_FLOP",
    "RESNET50_FORWARD_SECONDS",
    "ScheduleError",
    "Simulation",
    "StateBytes",
    "StepTime",
    "StepTimes",
    "Throughput",
    "V100",
    "all_gather",
    "all_reduce",
    "broadcast",
    "data_parallel_step",
    "gpipe",
    "hierarchical_all_gather",
    "hierarchical_all_reduce",
    "hierarchical_reduce_scatter",
    "interleaved_1f1b",
    "layer_activation_bytes",
    "layer_bytes",
    "layer_flops",
    "llama_layer_activation_bytes",
    "mfu",
    "predicted_tflops",
    "rank_memory",
    "one_f_one_b",
    "read_card",
    "reduce_scatter",
    "scaling_efficiency",
    "search",
    "simulate",
    "stage_parameters",
    "state_bytes",
    "step_time",
    "step_volume",
    "tensor_parallel_layer",
    "zero_bubble_h1",
]
