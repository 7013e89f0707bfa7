"""What a program would cost on a card that is not there: pretend_gpu with a clock, and tensors without values.

    from dlojz_tp import modelled_gpu

    run = modelled_gpu.train("bfloat16", step, make_model, make_optimizer, (256, 3, 224, 224), card="H100",
                             loading=modelled_gpu.Loading(seconds=0.4, workers=16))
    print(run)                  # modelled, H100: bfloat16, 60.1 ms a step, 4,261 images/s, 10.9 GiB
    report.streams([run])       # the CPU, the streams and the bus over time
    report.compare([run.record])

`step` is the program's own, step(model, images, labels, optimizer, device). `on_card` runs any other function, and
`on_ranks` runs one on several ranks with a card each; `each_on_ranks` runs several so, and says which have no model.
Sizes are those of a real training: tensors have shapes alone, so that a step of ResNet-50 takes under a second here.

    rates.py        how fast a card is: a few constants a generation, the rest stated
    work.py         what an operation computes, reads and writes
    clock.py        the CPU starts, streams run, somebody waits; fused kernels
    messages.py     messages between ranks, whose clocks differ
    stand_ins.py    autocast, attention, torch.compile and values, in the place of torch's
    runs.py         what programs call, and what they get
    rows.toml       published speeds with their sources; programs.py: what ran there; published.py: both together,
                    for benchmarks/modelled_gpu.py

The time of an operation is the longer of its operations and its bytes, each at the share of the data sheet's peak that
programs reach, and 3 µs at least; the CPU starts one after the other. Casts, broadcasting and transposed tensors get
less of the bandwidth. Products on Tensor Cores want rows of 16 bytes, convolutions there want their channels last, or
tensors are reordered. In a compiled function what stands between two products is one kernel: it reads each memory once
and writes what others read; products of odd sizes are padded. A collective or a message takes the time of the planner's
formulas, in the queue of its group; it begins when all its ranks have come to it, and `wait()` makes the stream wait,
not the CPU.

What it does not know:
- that cards slow down under load (those of 250 W most), and beside a message; that two groups share a link;
- libraries of other years than the rows'; grouped convolutions in TF32 take longer than here;
- what messages of DTensor take (no process group is asked), nor those of objects (they are values, and travel);
- caches: each operation reads from the memory of the card; waves of tiles: a small product is as good as a large one;
- of a compiled function: what compiling takes, the first step, graph breaks;
- the time of the program's Python on the CPU, but for a constant an operation, and of its own data loading (`Loading`);
- branches on values: a floating-point number that is read back is 1, an integer is 0, and a mask keeps all.
"""

from dlojz_tp.modelled_gpu.clock import Clock, Span
from dlojz_tp.modelled_gpu.rates import MISSED, Rates, rates
from dlojz_tp.modelled_gpu.runs import Loading, Modelled, batches, each_on_ranks, on_card, on_ranks, train

__all__ = [
    "MISSED", "Clock", "Loading", "Modelled", "Rates", "Span", "batches", "each_on_ranks", "on_card", "on_ranks",
    "rates", "train",
]  # fmt: skip
