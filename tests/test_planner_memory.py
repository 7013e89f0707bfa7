"""Bytes a rank against the published figures of ZeRO and of activation recomputation, and against measured runs."""

import functools

import pytest
import torch
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

from dlojz_tp import launch, measure, planner
from dlojz_tp.models import Block, Llama, LlamaBlock, LlamaConfig, TransformerConfig


@pytest.mark.parametrize(
    "stage, gigabytes", [(0, 120), (1, 31.4), (2, 16.6), (3, 1.88)]
)  # Rajbhandari et al. 2020, figure 1: 7.5 billion parameters, 64 ranks, Adam, mixed precision
def test_the_example_of_zero(stage, gigabytes):
    assert planner.state_bytes(7.5e9, 64, stage).total / 1e9 == pytest.approx(gigabytes, abs=0.05)


@pytest.mark.parametrize(
    "ranks, stages",
    [(4, (52.5, 41.3, 30)), (16, (35.6, 21.6, 7.5)), (256, (30.4, 15.4, 0.47)), (1024, (30.1, 15.1, 0.12))],
)  # the same paper, table 1, column of 7.5 billion
def test_the_table_of_zero(ranks, stages):
    found = [planner.state_bytes(7.5e9, ranks, stage).total / 1e9 for stage in (1, 2, 3)]
    assert found == pytest.approx(list(stages), abs=0.1)


def test_parts_and_precisions():
    whole = planner.state_bytes(1000, mixed_precision=False)
    assert (whole.parameters, whole.gradients, whole.optimizer, whole.total) == (4000, 4000, 8000, 16000)
    assert planner.state_bytes(1000, optimizer="sgd").total == 8000
    assert planner.state_bytes(1000, float32_gradients=True).total == 18000
    assert (
        planner.state_bytes(1000, 4, 1, float32_gradients=True).total == 6000 + 12000 / 4
    )  # as Megatron's table has it
    assert planner.state_bytes(1000, 4, 2, mixed_precision=False, optimizer="momentum").total == 4000 + 1000 + 1000
    for stage in (0, 1, 2, 3):
        assert planner.state_bytes(1000, 1, stage).total == 16000  # one rank has nobody to share with


def test_volume_of_a_step():
    assert planner.step_volume(1e9, 1, 3) == 0
    assert planner.step_volume(1e9, 4) == planner.step_volume(1e9, 4, 2) == pytest.approx(1.5 * 1e9 * 2)
    assert planner.step_volume(1e9, 1024, 3) / planner.step_volume(1e9, 1024, 1) == pytest.approx(1.5)


@pytest.mark.parametrize("heads, width, saved", [(96, 12288, 0.70), (128, 20480, 0.65)])
def test_selective_recomputation(heads, width, saved):
    """Korthikanti et al. 2022, §4.2: it saves 70 % of GPT-3's activations and 65 % of MT-NLG's."""
    sizes = (2048, 1, width, heads)
    kept = planner.layer_activation_bytes(*sizes, recomputation="selective") / planner.layer_activation_bytes(*sizes)
    assert 1 - kept == pytest.approx(saved, abs=0.01)


def test_activations_cut_over_ranks():
    sizes = (2048, 4, 6144, 64)
    unit = 2048 * 4 * 6144
    assert planner.layer_activation_bytes(*sizes) == pytest.approx(unit * (34 + 5 * 64 * 2048 / 6144))
    eight = planner.layer_activation_bytes(*sizes, tensor_parallel=8)
    assert eight == pytest.approx(unit * (10 + 24 / 8 + 5 * 64 * 2048 / 6144 / 8))
    both = planner.layer_activation_bytes(*sizes, tensor_parallel=8, sequence_parallel=True)
    assert both == pytest.approx(planner.layer_activation_bytes(*sizes) / 8)
    assert planner.layer_activation_bytes(*sizes, recomputation="full") == 2 * unit


def test_wrong_numbers_are_refused():
    for wrong in ({"stage": 4}, {"world_size": 0}, {"optimizer": "lion"}):
        with pytest.raises(ValueError, match="give 0 or more parameters"):
            planner.state_bytes(1e9, **wrong)
    with pytest.raises(ValueError, match="no volume"):
        planner.step_volume(1e9, 4, 5)
    with pytest.raises(ValueError, match="must divide 6 heads"):
        planner.layer_activation_bytes(8, 1, 12, 6, tensor_parallel=4)
    with pytest.raises(ValueError, match="recomputation is"):
        planner.layer_activation_bytes(8, 1, 12, 6, recomputation="some")


# measured runs

MODEL = LlamaConfig(vocab_size=64, width=32, heads=4, layers=3, max_length=16)  # all rows divide by 2


def _measured_step(stage, optimizer):
    """On a rank: (bytes of parameters, gradients, states after a step; {collective: bytes handed in} of the next)."""
    model = Llama(MODEL)
    if stage == 3:
        for part in [*model.blocks, model]:
            fully_shard(part, reshard_after_forward=True)
        trained = model
    else:
        trained = DistributedDataParallel(model, broadcast_buffers=False)
    if optimizer == "adam":
        updater = torch.optim.AdamW(model.parameters())
    else:
        updater = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9 if optimizer == "momentum" else 0)
    tokens = torch.randint(64, (2, 16))
    trained(tokens).square().mean().backward()
    updater.step()
    found = measure.shard_bytes(*model.parameters())
    gradients = measure.shard_bytes(*[p.grad for p in model.parameters()])
    states = [value for state in updater.state.values() for value in state.values() if torch.is_tensor(value)]
    kept = measure.shard_bytes(
        [value for value in states if value.dim()]
    )  # Adam's counters are no states of the formula
    updater.zero_grad()
    trained(tokens).square().mean().backward()  # DDP orders its buckets anew in its second step, with a message
    with measure.Communications() as log:
        trained(tokens).square().mean().backward()
    return (found, gradients, kept), [(entry["name"], entry["bytes"]) for entry in log.entries()]


@functools.cache
def _on_two_ranks(stage, optimizer):
    return launch.ranks(_measured_step, stage, optimizer, n=2)


@pytest.mark.parametrize("stage, optimizer", [(0, "adam"), (3, "adam"), (3, "momentum"), (3, "sgd")])
def test_states_of_a_measured_run(stage, optimizer):
    """What DDP (stage 0) and fully_shard (stage 3) hold on two ranks after a step is what the formula says."""
    wanted = planner.state_bytes(MODEL.n_parameters, 2, stage, mixed_precision=False, optimizer=optimizer)
    for parts, _ in _on_two_ranks(stage, optimizer):
        # the gradients that DDP keeps are views of its buckets
        assert parts[0] == wanted.parameters
        assert parts[1] == pytest.approx(wanted.gradients, rel=0.01)
        assert parts[2] == wanted.optimizer


@pytest.mark.parametrize("stage", [0, 3])
def test_volume_of_a_measured_step(stage):
    """What a rank of two sends in a step of DDP and of fully_shard, from what its collectives were handed."""
    n = 2
    sent = {
        "all_reduce": lambda handed: 2 * (n - 1) / n * handed,  # the whole tensor
        "all_gather": lambda handed: (n - 1) * handed,  # a shard, which goes round
        "reduce_scatter": lambda handed: (n - 1) / n * handed,  # the whole tensor
    }
    for _, calls in _on_two_ranks(stage, "adam"):
        volume = sum(sent[name](handed) for name, handed in calls)
        assert volume == pytest.approx(planner.step_volume(MODEL.n_parameters, n, stage, bytes_per_element=4))


def _kept_for_backward(block, x, run=None):
    """Bytes that a block keeps for its backward beside its weights, each storage once."""
    own = {t.untyped_storage().data_ptr() for t in [*block.parameters(), *block.buffers()]}
    kept = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        y = (run or block)(x)
    assert y.requires_grad
    return sum(storage.nbytes() for storage in kept.values())


@pytest.mark.parametrize("b, s, d, h", [(2, 64, 128, 4), (1, 128, 256, 2)])
def test_activations_of_a_measured_layer(b, s, d, h):
    """A layer with fused attention keeps what the formula says without scores, less the masks of two dropouts."""
    block = Block(TransformerConfig(vocab_size=8, width=d, heads=h, max_length=s)).bfloat16()
    x = torch.randn(b, s, d, dtype=torch.bfloat16, requires_grad=True)
    wanted = planner.layer_activation_bytes(s, b, d, h, recomputation="selective") - 2 * s * b * d
    assert _kept_for_backward(block, x) == pytest.approx(wanted, rel=0.02)


@pytest.mark.parametrize("kv_heads", [4, 2, 1])
def test_activations_of_a_measured_llama_layer(kv_heads):
    """Without fused kernels: both norms keep their input divided by the deviation as well, SwiGLU its activation, and
    the attention's output is kept in the order of its kernel and in the next layer's."""
    config = LlamaConfig(vocab_size=8, width=128, heads=4, kv_heads=kv_heads, max_length=64)
    x = torch.randn(2, 64, 128, requires_grad=True)
    model = planner.GPT(128, 1, 4, 64, 8, kv_heads=kv_heads, ffn=config.hidden, gated=True)
    unfused = 4 * (3 * x.numel() + 2 * 64 * config.hidden)
    wanted = 2 * planner.layer_bytes(model, planner.Layout(micro_batch=2)) + unfused
    assert _kept_for_backward(LlamaBlock(config), x) == pytest.approx(wanted, rel=0.02)


def test_activations_of_a_measured_recomputed_layer():
    config = LlamaConfig(vocab_size=8, width=128, heads=4, max_length=64)
    block, x = LlamaBlock(config), torch.randn(2, 64, 128, requires_grad=True)
    held = measure.ShardBytes().track(block, x)
    with held:
        y = checkpoint(block, x, use_reentrant=False)
    kept = held.live - y.numel() * 4 - measure.shard_bytes(block)
    model = planner.GPT(128, 1, 4, 64, 8, ffn=config.hidden, gated=True)
    wanted = 2 * planner.layer_bytes(model, planner.Layout(micro_batch=2, recomputation="full"))
    assert kept == pytest.approx(wanted, rel=0.02)
