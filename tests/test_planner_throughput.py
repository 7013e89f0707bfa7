"""Images and tokens a second, MFU: against figures that were published."""

import pytest

from dlojz_tp import planner


def test_palm_540b_reached_46_percent():
    """Chowdhery et al. 2022, appendix B and table 3: 238.3 thousand tokens a second on 6,144 TPU v4 of 275 TFLOP/s,
    46.2 % with attention's 12·118·(48·256)·2,048 operations a token, 45.7 % without."""
    for attention, share in ((12 * 118 * 48 * 256 * 2048 / 3, 0.462), (0, 0.457)):
        forward = 2 * 540.35e9 + attention
        speed = planner.Throughput(238.3e3, 1.0, forward, 6144 * 275e12)
        assert speed.mfu == pytest.approx(share, abs=1e-3)


def test_images_a_second_and_recomputation():
    speed = planner.Throughput(samples=256, seconds=0.5, forward=4e9, peak=100e12)
    assert speed.per_second == 512
    assert speed.mfu == pytest.approx(3 * 4e9 * 512 / 100e12)
    assert speed.hfu() == pytest.approx(speed.mfu * 4 / 3) and speed.hfu(forwards=1) == speed.mfu
    assert str(speed) == "512 a second, 6.1 % of the peak (MFU)"


@pytest.mark.parametrize("name", ["samples", "seconds", "forward", "peak"])
def test_nothing_is_refused(name):
    with pytest.raises(ValueError, match="above 0"):
        planner.Throughput(**{"samples": 1, "seconds": 1, "forward": 1, "peak": 1} | {name: 0})
