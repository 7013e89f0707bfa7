"""Compute what cannot be run here: collectives, steps on many GPUs, pipelines, and the best layout of a large model."""

from .cards import A100, CARDS, H100, RESNET50_FORWARD_FLOP, V100, Card, read_card
from .cluster import Cluster
from .collectives import (
    Link,
    all_gather,
    all_reduce,
    all_to_all,
    broadcast,
    hierarchical_all_reduce,
    hierarchical_reduce_scatter,
    reduce_scatter,
)
from .layout_search import NoLayout, Plan, search
from .layouts import Layout, Memory, layer_bytes, rank_memory, stage_layers, stage_parameters
from .memory import StateBytes, layer_activation_bytes, state_bytes, step_volume
from .models import GPT, MODELS, read_model
from .pipeline import PipelineEvent, Simulation, simulate
from .pipeline_orders import Action, Deadlock, OrdersDiffer, ScheduleError
from .published import MEGATRON, MEGATRON_OR_ZERO, PublishedRun, predicted_tflops
from .scaling import StepTimes, data_parallel_step, scaling_efficiency
from .schedules import gpipe, interleaved_1f1b, one_f_one_b, zero_bubble_h1
from .serving import Serving, serving
from .steps import LayerTime, StepTime, layer_time, step_time
from .throughput import Throughput, mfu

__all__ = [
    "A100", "Action", "CARDS", "Card", "Cluster", "Deadlock", "GPT", "H100", "LayerTime", "Layout", "Link",
    "MEGATRON", "MEGATRON_OR_ZERO", "MODELS", "Memory", "NoLayout", "OrdersDiffer", "PipelineEvent", "Plan",
    "PublishedRun", "RESNET50_FORWARD_FLOP", "ScheduleError", "Serving", "Simulation",
    "StateBytes", "StepTime", "StepTimes", "Throughput", "V100", "all_gather", "all_reduce", "all_to_all",
    "broadcast", "data_parallel_step", "gpipe", "hierarchical_all_reduce", "hierarchical_reduce_scatter",
    "interleaved_1f1b", "layer_activation_bytes", "layer_bytes", "layer_time", "mfu", "one_f_one_b",
    "predicted_tflops", "rank_memory", "read_card", "read_model", "reduce_scatter", "scaling_efficiency",
    "search", "serving", "simulate", "stage_layers", "stage_parameters", "state_bytes", "step_time",
    "step_volume", "zero_bubble_h1",
]  # fmt: skip
