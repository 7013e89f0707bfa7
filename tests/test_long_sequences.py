"""18: what a trainee's formula says of context parallelism is what the planner counts."""

import pytest

from dlojz_tp import planner
from tests.answers.bank import before


@pytest.mark.parametrize("ranks", [2, 4, 8, 16])
def test_the_ring_sends_what_the_planner_counts(ranks):
    sent_numbers = before("18_long_sequences_and_experts", 6)["sent_numbers"]
    model, cluster = planner.MODELS["llama3-70b"], planner.Cluster(planner.H100)
    layout = planner.Layout(context=ranks, overlap=False)
    ring, _ = sent_numbers(model.heads, model.kv_heads, model.sequence // ranks, model.head, ranks)
    forward = cluster.collective("all_gather", 2 * ring * ranks / (ranks - 1), ranks)
    # backward sends keys and values once more, and their gradients
    assert planner.layer_time(model, layout, cluster).context == pytest.approx(3 * forward)
