import dataclasses

import torch
from torch.utils.flop_counter import FlopCounterMode
from torchvision.models import resnet50

from dlojz_tp import planner


def test_resnet50_operations_are_those_that_are_counted():
    with torch.device("meta"), FlopCounterMode(display=False) as counter:
        resnet50()(torch.empty(1, 3, 224, 224))
    assert abs(counter.get_total_flops() / planner.RESNET50_FORWARD_FLOP - 1) < 0.005


def test_published_throughputs_are_within_what_the_card_can_do():
    for card in (planner.V100, planner.A100, planner.H100):
        step = 3 * planner.RESNET50_FORWARD_FLOP
        for images, peak in ((card.resnet50_float32, card.tf32 or card.float32), (card.resnet50_mixed, card.float16)):
            if images is not None:
                assert 0.1 < images * step / peak < 0.7  # ResNet-50 is bound by memory far below the peak
    assert planner.V100.bfloat16 is None and planner.V100.tf32 is None


def test_cards_cannot_be_changed():
    try:
        planner.A100.float32 = 0
    except dataclasses.FrozenInstanceError:
        return
    raise AssertionError("a card was changed")


def test_rows_of_cards_agree_with_each_other():
    for card in planner.CARDS.values():
        assert card.source and card.memory < card.bandwidth < card.float16 and card.network < card.link < card.bandwidth
        assert card.tf32 is None or 0.45 < card.tf32 / card.bfloat16 <= 0.5
    assert planner.CARDS["H200"].bfloat16 == planner.H100.bfloat16  # the same chip, more memory
