from shoal.core import Address, Peer
from shoal.experts.status import ExpertStatus, HostStatus, seen_experts


def expert(uid, num, num_clipped=0):
    return ExpertStatus(uid, num, 10 * num, 2 * num, 20 * num, 2 * num, 0.5 * num, num_clipped)


def moment(up_s, *experts, num_waiting=0, num_failed=0, is_leaving=False):
    return HostStatus(up_s, num_waiting, num_failed, 0, is_leaving, experts)


def test_the_line_tells_what_happened_since_the_one_before():
    before = moment(10.0, expert("a", 1))
    now = moment(12.0, expert("a", 3), expert("b", 1), num_waiting=4, num_failed=2)
    assert (now.num_samples, now.num_batches) == (120, 12)
    assert now.line(before) == "45.0 samples/s, 4 waiting, 2 experts, 9 batches of 10.0, 2 failed"
    assert before.line(before) == "0 samples/s, 0 waiting, 1 expert, 0 batches"
    clipped = moment(10.0, expert("a", 1, 3), expert("b", 1, 4), num_failed=1)
    assert clipped.line(clipped).endswith("0 batches, 7 clipped, 1 failed")
    assert moment(13.0, is_leaving=True).line(moment(12.0)).endswith("0 experts, 0 batches, leaving")


def test_rates_are_those_since_the_look_before():
    first, second = Peer(Address("127.0.0.1", 1)), Peer(Address("127.0.0.1", 2))
    before = {first: moment(10.0, expert("a", 1))}
    now = {
        second: moment(3.0, expert("a", 1)),
        first: moment(12.0, expert("a", 2), expert("b", 1), num_waiting=5),
    }
    seen = [
        (each.uid, each.server, each.num_replicas, each.num_waiting) for each in seen_experts(now, before)
    ]
    assert seen == [
        ("a", str(first.address), 2, 5),
        ("a", str(second.address), 2, 0),
        ("b", str(first.address), 1, 5),
    ]
    rates = [(each.load, each.samples_per_s) for each in seen_experts(now, before)]
    assert rates == [(0.25, 15.0), (None, None), (None, None)]
