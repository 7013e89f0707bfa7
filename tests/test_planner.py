"""Collectives and steps against figures worked out by hand, published factors, and limits that must hold."""

import pytest

from dlojz_tp import planner
from dlojz_tp.planner import Link

LINK = Link(latency=10e-6, bandwidth=10e9)


def test_ring_all_reduce_by_hand():
    # 4 ranks, 400 MB: 6 messages of 100 MB, each 10 µs + 10 ms
    assert planner.all_reduce(400e6, 4, LINK) == pytest.approx(6 * (10e-6 + 0.01))


def test_tree_all_reduce_by_hand():
    # 8 ranks: up and down 3 levels, all the bytes twice
    assert planner.all_reduce(1e9, 8, LINK, "tree") == pytest.approx(2 * (3 * 10e-6 + 0.1))


@pytest.mark.parametrize("n", [2, 3, 8, 64])
def test_bus_bandwidth_factors_of_nccl_tests(n):
    """nccl-tests (PERFORMANCE.md): bytes/time times 2(n−1)/n or (n−1)/n is the link's bandwidth."""
    no_latency, size = Link(0.0, 25e9), 1e9
    assert size / planner.all_reduce(size, n, no_latency) * 2 * (n - 1) / n == pytest.approx(25e9)
    assert size / planner.all_gather(size, n, no_latency) * (n - 1) / n == pytest.approx(25e9)


def test_one_rank_sends_nothing():
    for name in ("ring", "tree", "best"):
        assert planner.all_reduce(1e9, 1, LINK, name) == 0
    assert planner.broadcast(1e9, 1, LINK) == 0
    assert planner.hierarchical_all_reduce(1e9, 1, 1, LINK, LINK) == 0


def test_trees_win_on_many_ranks_and_few_bytes_only():
    assert planner.all_reduce(1e3, 1024, LINK, "tree") < planner.all_reduce(1e3, 1024, LINK, "ring")
    assert planner.all_reduce(1e9, 4, LINK, "ring") < planner.all_reduce(1e9, 4, LINK, "tree")
    assert planner.all_reduce(1e3, 1024, LINK, "best") == planner.all_reduce(1e3, 1024, LINK, "tree")


def test_hierarchy_spares_the_slow_link():
    fast, slow = Link(2e-6, 200e9), Link(10e-6, 10e9)
    assert planner.hierarchical_all_reduce(1e9, 8, 4, fast, slow) < planner.all_reduce(1e9, 32, slow)
    assert planner.hierarchical_all_reduce(1e9, 1, 4, fast, slow) == pytest.approx(planner.all_reduce(1e9, 4, fast))


def test_fsdp_between_nodes_by_hand():
    # 8 nodes of 8, 64 GB: 7 messages of 8 GB at 200 GB/s in the node, then 7 of 1 GB at 10 GB/s between nodes
    fast, slow = Link(2e-6, 200e9), Link(10e-6, 10e9)
    wanted = 7 * (2e-6 + 8 / 200) + 7 * (10e-6 + 1 / 10)
    assert planner.hierarchical_reduce_scatter(64e9, 8, 8, fast, slow) == pytest.approx(wanted)
    both = 2 * wanted  # with rings between the nodes, an all-reduce is the two together
    assert planner.hierarchical_all_reduce(64e9, 8, 8, fast, slow, "ring") == pytest.approx(both)


def test_overlap_hides_all_but_the_last_bucket():
    # four buckets, one each second of backward, each 0.5 s: only the last one sticks out
    step = planner.data_parallel_step(2.0, 4.0, 400.0, lambda size: size / 200, bucket_bytes=100, update=1.0)
    assert (step.total, step.compute, step.communication) == pytest.approx((7.5, 7.0, 2.0))
    assert step.exposed == pytest.approx(0.5)
    bare = planner.data_parallel_step(2.0, 4.0, 400.0, lambda size: size / 200, bucket_bytes=100, overlap=False)
    assert bare.exposed == pytest.approx(2.0)


def test_slow_links_queue_up():
    # buckets are ready at 1, 2, 3, 4 s and take 3 s each: the first starts at 1, the last ends at 13
    step = planner.data_parallel_step(0.0, 4.0, 400.0, lambda size: 3.0, bucket_bytes=100)
    assert step.total == pytest.approx(13.0)


def test_last_bucket_may_be_smaller():
    sizes = []
    planner.data_parallel_step(0.0, 1.0, 250.0, lambda size: sizes.append(size) or 0.0, bucket_bytes=100)
    assert sizes == [100, 100, 50]


def test_efficiency_is_one_alone_and_falls():
    def at(n):
        return planner.scaling_efficiency(
            planner.data_parallel_step(0.1, 0.2, 100e6, lambda size: planner.all_reduce(size, n, LINK, "ring"))
        )

    found = [at(n) for n in (1, 4, 64, 1024)]
    assert found[0] == 1.0 and found == sorted(found, reverse=True) and found[-1] > 0


@pytest.mark.parametrize("wrong", [lambda: Link(-1, 1), lambda: Link(0, 0), lambda: planner.all_reduce(1, 0, LINK)])
def test_nonsense_is_refused(wrong):
    with pytest.raises(ValueError):
        wrong()
    with pytest.raises(ValueError, match="ring, tree or best"):
        planner.all_reduce(1, 2, LINK, "magic")
    with pytest.raises(ValueError, match="capacity"):
        planner.data_parallel_step(1, 1, 1, lambda size: 0, bucket_bytes=0)
