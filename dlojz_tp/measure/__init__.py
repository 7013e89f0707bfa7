"""Measure time and memory, and keep what was found in run records."""

from .budget import MemoryBudget
from .chronometer import PHASES, Chronometer
from .communications import Communications
from .live import LiveBytes
from .machine import hardware, synchronize, versions
from .memory import MemoryEstimate, PeakMemory, estimate_memory, peak_memory, training_step
from .racing import Race, race, rounds
from .records import Record, RecordError, counted_steps, load, new_record, save
from .shards import ShardBytes, shard_bytes
from .units import human_bytes, human_seconds

__all__ = [
    "PHASES",
    "Chronometer",
    "Communications",
    "LiveBytes",
    "MemoryBudget",
    "MemoryEstimate",
    "PeakMemory",
    "Race",
    "Record",
    "RecordError",
    "ShardBytes",
    "counted_steps",
    "estimate_memory",
    "hardware",
    "human_bytes",
    "human_seconds",
    "load",
    "new_record",
    "peak_memory",
    "race",
    "rounds",
    "save",
    "shard_bytes",
    "synchronize",
    "training_step",
    "versions",
]
