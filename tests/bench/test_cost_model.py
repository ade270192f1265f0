"""Iterations by hand, and the model beside what shaped groups reckon on a clock that a test moves."""

import pytest
from msgspec.structs import replace

from group.pretender import ManualSleeper, Pretender, ones
from shoal.bench.forecast.cost_model import (
    Method,
    ModelLink,
    ModelNetwork,
    ModelTurn,
    Terms,
    Work,
    fit,
    iteration_s,
    shaped_network,
    slowest_link,
    traffic_of,
)
from shoal.core import Address, UsageError
from shoal.group import exchange_machines
from shoal.group.wrappers import Shaped
from shoal.topology import Weights
from shoal.transport import Profile

FREE = ModelLink(0.0, 1e18)
SLOW = ModelLink(0.01, 1e6)
WORK = Work(compute_s=3.0, size_bytes=1e6)  # forward 1 s, backward 2 s, a message 1.01 s
REDUCED = Method(kind="all-reduce", leaves="as-layers-finish", speaks="worker")
NEIGHBOR = Method(kind="neighbor", leaves="after-forward")


def cluster(mates, **options):
    return ModelNetwork(inside=FREE, between=SLOW, workers_per_machine=mates, **options)


def test_alone_and_without_sharing_there_is_compute_only():
    assert iteration_s(WORK, REDUCED, cluster(1), 1, Terms(9, 9)) == 3
    assert iteration_s(WORK, Method(kind="none"), cluster(1), 64, Terms(9, 9)) == 3


def test_a_ring_takes_two_rounds_of_shares_after_backward_has_filled_the_bucket():
    # 2·3 steps of 10 ms and a quarter of a megabyte
    assert iteration_s(WORK, REDUCED, cluster(1), 4) == pytest.approx(3 + 6 * (0.01 + 0.25))


def test_buckets_hide_behind_backward_all_but_the_last():
    quarters = replace(REDUCED, bucket_bytes=0.25e6)
    # 0.375 s on the wire for each quarter, one ready every 0.5 s
    assert iteration_s(WORK, quarters, cluster(1), 4) == pytest.approx(3 + 0.375 + 0.06)
    slow = replace(cluster(1), between=ModelLink(0.01, 0.25e6))
    # the first is ready after 1.5 s, then the wire is never free: 4 times 1.5 s
    assert iteration_s(WORK, quarters, slow, 4) == pytest.approx(1.5 + 6 + 0.06)


def test_one_who_speaks_for_a_machine_shortens_the_ring():
    spoken = replace(REDUCED, speaks="machine")
    assert iteration_s(WORK, spoken, cluster(4), 8) == pytest.approx(3 + 2 * (0.01 + 0.5))
    assert iteration_s(WORK, REDUCED, cluster(4), 8) == pytest.approx(3 + 14 * (0.01 + 0.125))
    assert iteration_s(WORK, REDUCED, cluster(8), 8) == pytest.approx(3), "a single machine has no slow link"


def test_an_exchange_hides_behind_what_comes_after_it_leaves():
    for leaves, wanted_s in (
        ("after-forward", 3.0),
        ("after-step", 4.01),
        ("as-layers-finish", 3 + 1.01 * 0.1),  # the last tenth leaves when backward is over
    ):
        method = replace(NEIGHBOR, leaves=leaves, bucket_bytes=0.1e6)
        assert iteration_s(WORK, method, cluster(1), 2) == pytest.approx(wanted_s)
    slow = replace(cluster(1), between=ModelLink(0.0, 0.25e6))
    assert iteration_s(WORK, NEIGHBOR, slow, 2) == pytest.approx(1 + 4), "what is longer than backward shows"


def test_workers_of_a_machine_share_its_line():
    method = replace(NEIGHBOR, leaves="after-step", topology="one-peer-exponential")
    # distances 1, 2 and 4: one, two and all four of a machine's workers send outside
    alone_s = iteration_s(WORK, method, cluster(4, line_of="worker"), 8)
    assert alone_s == pytest.approx(3 + 1.01)
    assert iteration_s(WORK, method, cluster(4), 8) == pytest.approx(3 + 0.01 + (1 + 2 + 4) / 3)
    inner_outer = replace(method, topology="inner-outer-exponential")
    assert iteration_s(WORK, inner_outer, cluster(4), 8) == pytest.approx(3 + 1.01)


def test_machines_average_inside_send_one_message_and_tell_all():
    network = replace(cluster(4), inside=ModelLink(0.0, 10e6))
    method = Method(kind="hierarchical", leaves="after-step")
    wanted_s = 3 + 6 * 0.025 + 1.01 + 0.1
    assert iteration_s(WORK, method, network, 8) == pytest.approx(wanted_s)
    assert iteration_s(WORK, method, network, 64) == pytest.approx(wanted_s), "more machines send no more"
    assert iteration_s(WORK, method, network, 4) == pytest.approx(3 + 6 * 0.025)


def test_stragglers_come_with_each_doubling():
    times_s = [iteration_s(WORK, NEIGHBOR, cluster(1), size, Terms(0.5, 0.25)) for size in (2, 4, 1024)]
    assert times_s == pytest.approx([3.75, 4.0, 6.0])


def test_what_an_average_brings_is_gone_through_and_nothing_hides_that():
    mixing = replace(WORK, mix_s=0.1)

    def extra_s(method, network, num_workers):
        with_it, without = (iteration_s(work, method, network, num_workers) for work in (mixing, WORK))
        return with_it - without

    assert extra_s(Method(kind="neighbor", topology="ring"), cluster(1), 4) == pytest.approx(0.2)
    assert extra_s(Method(kind="all-reduce"), cluster(1), 4) == pytest.approx(0.15)
    assert extra_s(Method(kind="hierarchical"), cluster(2), 4) == pytest.approx(0.2)
    assert extra_s(Method(kind="none"), cluster(1), 4) == 0


def test_traffic_is_counted_from_the_topology():
    assert traffic_of("one-peer-exponential", 4, 2) == (ModelTurn(1, 1, 1, 1), ModelTurn(0, 2, 1, 1))
    assert traffic_of("full", 6, 2) == (ModelTurn(1, 8, 4, 2),)
    with pytest.raises(UsageError, match="do not fill machines of 4"):
        traffic_of("ring", 6, 4)


SHAPE = "[ways.default]\ndelay_ms = 10\nmbit_s = 8"


@pytest.mark.parametrize("between", ["workers", "machines"])
@pytest.mark.parametrize(
    ("method", "issue"),
    [
        (REDUCED, lambda group: group.all_reduce(ones())),
        (
            replace(NEIGHBOR, leaves="after-step", topology="exponential-2"),
            lambda group: group.exchange(ones(), Weights.uniform([2, 3], [1, 2])),
        ),
        (
            Method(kind="hierarchical", speaks="worker"),
            lambda group: exchange_machines(group, ones(), Weights.uniform([1])),
        ),
    ],
)
def test_the_model_agrees_with_shaped_groups(between, method, issue):
    sleeper = ManualSleeper()
    group = Shaped(Pretender(4, per_machine=2), Profile.parse(SHAPE), between=between, sleeper=sleeper)
    issue(group).wait()
    network = shaped_network(Profile.parse(SHAPE), FREE, between, 4, 2)
    predicted_s = iteration_s(Work(0.0, ones().nbytes), method, network, 4)
    assert predicted_s == pytest.approx(sleeper.clock.now_s(), rel=0.01)


def test_parameters_are_found_where_a_maximum_hides_one_at_first():
    def model(parameters):
        pace, overhead = parameters
        return [max(1.0, size * pace) + overhead for size in (1, 2, 4)]

    found = fit(model, model([0.8, 0.1]), [(0.01, 1.0), (0.5, 1.0)])
    assert found == pytest.approx([0.8, 0.1], rel=1e-3)


def test_nothing_is_fitted_below_zero():
    found = fit(lambda parameters: [1 + parameters[0], 1 + parameters[0]], [0.9, 0.8], [(0.1,)])
    assert found == [0.0]


MEMORY = ModelLink(0.0, 1e9)


def test_between_workers_all_links_are_the_profiles():
    profile = Profile.parse("[ways.default]\ndelay_ms = 20\nmbit_s = 80")
    network = shaped_network(profile, MEMORY, "workers", 4, 2)
    assert network.inside == network.between
    assert network.between.latency_s == pytest.approx(0.02)
    assert network.between.bytes_per_s == pytest.approx(1e7)
    assert network.line_of == "worker-pair"


def test_between_machines_the_inside_stays_what_it_is():
    profile = Profile.parse("[ways.default]\ndelay_ms = 20\nmbit_s = 80")
    network = shaped_network(profile, MEMORY, "machines", 4, 2)
    assert (network.inside, network.line_of) == (MEMORY, "machine-pair")
    alone = shaped_network(profile, MEMORY, "machines", 2, 2)
    assert alone.between == ModelLink(0.0, float("inf")), "a single machine has nobody to talk to"


def test_a_line_of_ones_own_is_shared_by_all_that_one_sends():
    lines = "[places.home]\nup_mbit_s = 8\ndown_mbit_s = 80\n[ways.default]\ndelay_ms = 5"
    network = shaped_network(Profile.parse(lines), MEMORY, "workers", 2, 1)
    assert network.between.bytes_per_s == pytest.approx(1e6)
    assert network.line_of == "worker"


def test_the_slowest_of_unlike_links_counts_and_delays_are_means():
    text = (
        '[ways.default]\ndelay_ms = { kind = "exponential", mean = 10 }\nmbit_s = 80\n'
        '[[ways.between]]\nfrom = "rank:0"\nto = "rank:2"\ndelay_ms = 1\nmbit_s = 8'
    )
    peers = [Address("rank", rank) for rank in range(3)]
    link = slowest_link(Profile.parse(text), peers)
    assert link.latency_s == pytest.approx(0.01, rel=0.02)
    assert link.bytes_per_s == pytest.approx(1e6)
