"""Bytes a rank against the published figures of ZeRO and of activation recomputation."""

import pytest

from dlojz_tp import planner


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
