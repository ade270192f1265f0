import itertools
import random
from typing import NamedTuple

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dht.made_contacts import TOP, by_distance, made_contact
from shoal.core import PeerId
from shoal.dht.routing_table import CHECK_S, MAX_HEARSAY, QUIET_S, RoutingTable
from shoal.dht.settings import DHTSettings
from shoal.dht.wire import ID_BITS, number_of

OWN = PeerId(bytes(20))
HALF = 1 << (ID_BITS - 1)
EVERYTHING = 1 << ID_BITS


def made_table(bucket_size=4, own=OWN, depth_modulo=1, **more):
    settings = DHTSettings(bucket_size=bucket_size, num_replicas=1, depth_modulo=depth_modulo, **more)
    return RoutingTable(own, settings, random.Random(3))


class View(NamedTuple):
    """One bucket: ids from `low` up to, but not including, `high`."""

    depth: int
    low: int
    high: int
    num_contacts: int
    num_replacements: int


def views_of(table):
    numbers = [contact.number for contact in table.contacts()]
    views = []
    for bucket in table.buckets:
        inside = [number for number in numbers if bucket.low <= number < bucket.high]
        view = View(bucket.depth, bucket.low, bucket.high, len(inside), len(bucket.replacements))
        views.append(view)
    return views


def full_table(bucket_size=4, now_s=0.0):
    """A table with a full bucket from HALF up, and who is in it."""
    table = made_table(bucket_size)
    table.on_seen(made_contact(1), now_s)
    far = [made_contact(HALF + number * TOP) for number in range(bucket_size)]
    for contact in far:
        table.on_seen(contact, now_s)
    assert [view.num_contacts for view in views_of(table)] == [1, bucket_size]
    return table, far


def nearest(table, number, limit=8, *, now_s=0.0, **more):
    return table.nearest(number, limit, now_s=now_s, **more)


def test_only_who_was_seen_is_in_the_table():
    table, one, two = made_table(), made_contact(TOP), made_contact(2 * TOP)
    assert table.on_seen(one, 1.0) is None
    table.on_heard_of(two)
    assert (len(table), one in table, two in table) == (1, True, False)
    assert table.contacts() == [one]
    assert nearest(table, TOP) == [one]


def test_the_own_id_is_never_in_the_table():
    table, own = made_table(), made_contact(0)
    assert table.on_seen(own, 0.0) is None
    table.on_heard_of(own)
    table.on_failed(own, 0.0)
    assert len(table) == 0
    assert nearest(table, 0, has_hearsay=True) == []
    assert not table.is_backed_off(own, 0.0)


def test_an_id_in_the_middle_of_a_split_goes_to_the_upper_half():
    table = made_table(bucket_size=2)
    for number in (HALF - 1, HALF, 1):
        table.on_seen(made_contact(number, host=f"10.0.1.{number % 251}"), 0.0)
    lower, upper = views_of(table)
    assert (lower.low, lower.high, upper.low, upper.high) == (0, HALF, HALF, EVERYTHING)
    assert (lower.num_contacts, upper.num_contacts) == (2, 1)


def test_a_full_bucket_elsewhere_splits_down_to_the_modulo():
    table = made_table(bucket_size=2, depth_modulo=3)
    for number in range(64):
        table.on_seen(made_contact(HALF + number * TOP), 0.0)
    far = [view for view in views_of(table) if view.low >= HALF]
    assert max(view.depth for view in far) == 3
    assert all(view.num_contacts <= 2 for view in far)
    assert [view.num_replacements for view in far if view.depth == 3 and view.num_contacts == 2] != []


def test_a_newcomer_to_a_full_bucket_waits_and_the_quietest_is_to_be_pinged():
    table, far = full_table()
    for contact in (far[0], far[2], far[3]):
        table.on_seen(contact, 30.0)
    newcomer = made_contact(HALF + 99 * TOP)
    assert table.on_seen(newcomer, QUIET_S - 0.1) is None, "everybody was heard lately"
    assert newcomer not in table
    assert table.on_seen(newcomer, QUIET_S) == far[1]
    assert views_of(table)[1].num_replacements == 1
    table.on_failed(far[1], QUIET_S + 3.0)
    assert newcomer in table
    assert far[1] not in table
    assert views_of(table)[1].num_replacements == 0


def test_one_of_a_bucket_is_to_be_pinged_at_a_time():
    table, far = full_table()
    newcomer, other = made_contact(HALF + 99 * TOP), made_contact(HALF + 98 * TOP)
    now_s = QUIET_S + 1.0
    assert table.on_seen(newcomer, now_s) == far[0]
    assert table.on_seen(other, now_s + 1.0) is None
    table.on_seen(far[0], now_s + 2.0)
    assert table.on_seen(other, now_s + CHECK_S) == far[1]


def test_the_newest_replacement_is_promoted_and_is_the_first_to_be_doubted():
    table, far = full_table()
    early, late, last = (made_contact(HALF + number * TOP) for number in (90, 91, 92))
    for contact in (late, early, late):
        table.on_seen(contact, 1.0)
    table.on_failed(far[3], 2.0)
    assert late in table
    assert early not in table
    assert table.on_seen(last, 3.0) == late, "it was not heard since it began to wait"
    table.on_seen(late, 4.0)
    assert table.on_seen(last, 3.0 + CHECK_S) is None


def test_replacements_are_bounded_and_the_newest_stay():
    table, far = full_table(bucket_size=4)
    waiting = [made_contact(HALF + number * TOP) for number in range(90, 97)]
    for contact in waiting:
        table.on_seen(contact, 1.0)
    assert views_of(table)[1].num_replacements == 4
    for contact in far:
        table.on_failed(contact, 2.0)
    assert views_of(table)[1].num_contacts == 4
    assert [contact in table for contact in waiting] == 3 * [False] + 4 * [True]


def test_a_replacement_that_fails_waits_no_longer():
    table, far = full_table()
    newcomer = made_contact(HALF + 99 * TOP)
    table.on_seen(newcomer, 1.0)
    table.on_failed(newcomer, 2.0)
    assert views_of(table)[1].num_replacements == 0
    table.on_failed(far[0], 3.0)
    assert newcomer not in table


def test_who_fails_is_backed_off_until_seen_again():
    table, one = made_table(backoff_s=5.0), made_contact(TOP)
    table.on_seen(one, 0.0)
    table.on_failed(one, 1.0)
    assert one not in table
    assert table.is_backed_off(one, 5.9)
    assert table.due_for_retry(5.9) == []
    assert table.due_for_retry(6.0) == [one]
    table.on_seen(one, 6.1)
    assert one in table
    assert not table.is_backed_off(one, 6.1)
    assert table.due_for_retry(100.0) == []


def test_an_id_that_was_seen_elsewhere_has_moved():
    table, here, there = made_table(), made_contact(TOP), made_contact(TOP, host="10.9.9.9")
    table.on_seen(here, 0.0)
    table.on_seen(there, 1.0)
    assert table.contacts() == [there]
    table.on_failed(here, 2.0)
    assert table.contacts() == [there], "nobody failed at the new address"
    tenant = made_contact(2 * TOP, host=here.peer.address.host)
    table.on_seen(tenant, 3.0)
    assert table.contacts() == [there, tenant]


def test_an_address_belongs_to_who_was_seen_there_last():
    table, old = made_table(), made_contact(TOP, host="10.0.0.1")
    new = made_contact(2 * TOP, host="10.0.0.1")
    table.on_seen(old, 0.0)
    table.on_heard_of(new)
    assert table.contacts() == [old]
    assert new not in nearest(table, 0, has_hearsay=True), "hearsay takes nobody's address"
    table.on_seen(new, 1.0)
    assert table.contacts() == [new]
    assert not table.is_backed_off(old, 1.0)


def test_the_place_of_who_lost_its_address_goes_to_a_replacement():
    table, far = full_table()
    waiting = made_contact(HALF + 99 * TOP)
    table.on_seen(waiting, 1.0)
    table.on_seen(made_contact(TOP, host=far[0].peer.address.host), 2.0)
    assert far[0] not in table
    assert waiting in table


def test_a_replacement_whose_address_was_taken_is_not_promoted():
    table, far = full_table()
    first, second = made_contact(HALF + 98 * TOP), made_contact(HALF + 99 * TOP)
    table.on_seen(first, 1.0)
    table.on_seen(second, 1.0)
    table.on_seen(made_contact(TOP, host=second.peer.address.host), 2.0)
    table.on_failed(far[0], 3.0)
    assert first in table
    assert second not in table
    assert views_of(table)[-1].num_replacements == 0


def test_one_host_has_at_most_half_of_a_bucket_and_of_its_replacements():
    table = made_table(bucket_size=6)
    honest = [made_contact(HALF + number * TOP) for number in range(3)]
    flood = [made_contact(HALF + number * TOP, "10.6.6.6", 5000 + number) for number in range(20, 60)]
    table.on_seen(made_contact(1), 0.0)
    for contact in flood + honest + flood:
        table.on_seen(contact, 1.0)
    assert sum(contact in table for contact in flood) == 3
    assert all(contact in table for contact in honest)
    late = [made_contact(HALF + number * TOP) for number in range(3, 6)]
    for contact in late + flood:
        table.on_seen(contact, 2.0)
    assert views_of(table)[1].num_replacements == 6
    for contact in honest:
        table.on_failed(contact, 3.0)
    assert all(contact in table for contact in late)
    assert sum(contact in table for contact in flood) == 3


def test_a_quiet_contact_of_a_crowded_host_is_to_be_pinged_for_another_of_that_host():
    table = made_table(bucket_size=6)
    table.on_seen(made_contact(1), 0.0)
    table.on_seen(made_contact(HALF), 0.0)
    crowd = [made_contact(HALF + number * TOP, "10.6.6.6", 5000 + number) for number in range(20, 24)]
    for now_s, contact in enumerate(crowd[:3]):
        table.on_seen(contact, 1.0 + now_s)
    assert table.on_seen(crowd[3], 100.0) == crowd[0]
    table.on_failed(crowd[0], 101.0)
    assert crowd[3] in table


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.9", "::1"])
def test_this_machine_may_fill_buckets(host):
    table = made_table(bucket_size=6)
    contacts = [made_contact(HALF + number * TOP, host, 5000 + number) for number in range(6)]
    for contact in contacts:
        table.on_seen(contact, 0.0)
    assert table.contacts() == contacts


def test_a_swarm_on_one_host_is_still_known_near_the_own_id():
    table = made_table(bucket_size=8, depth_modulo=5)
    contacts = [made_contact(number, "10.0.0.1", 5000 + number) for number in range(1, 200)]
    for contact in contacts:
        table.on_seen(contact, 0.0)
    assert nearest(table, 0, 4) == contacts[:4]
    assert len(table) > 20


def test_what_is_known_of_the_others_stays_theirs_when_one_comes_or_goes():
    table, far = full_table()
    for index in (3, 0, 2, 1):
        table.on_seen(far[index], 10.0 * index)
    table.on_failed(far[0], 40.0)
    table.on_seen(made_contact(HALF + 99 * TOP), 50.0)
    newcomer = made_contact(HALF + 98 * TOP)
    assert table.on_seen(newcomer, QUIET_S + 9.0) is None
    assert table.on_seen(newcomer, QUIET_S + 10.0) == far[1]


def test_hearsay_seeds_own_look_ups_until_it_fails():
    table, seen, told = made_table(backoff_s=5.0), made_contact(2 * TOP), made_contact(3 * TOP)
    table.on_seen(seen, 0.0)
    table.on_heard_of(told)
    assert nearest(table, 3 * TOP) == [seen]
    assert nearest(table, 3 * TOP, has_hearsay=True) == [told, seen]
    assert nearest(table, 3 * TOP, 1, has_hearsay=True) == [told]
    table.on_failed(told, 1.0)
    assert nearest(table, 3 * TOP, has_hearsay=True) == [seen]
    table.on_heard_of(told)
    assert nearest(table, 3 * TOP, now_s=2.0, has_hearsay=True) == [seen]
    assert nearest(table, 3 * TOP, now_s=7.0, has_hearsay=True) == [told, seen]
    table.on_seen(told, 8.0)
    assert nearest(table, 3 * TOP, now_s=8.0, has_hearsay=True) == [told, seen]


def test_hearsay_does_not_move_who_was_seen_or_said_to_be_elsewhere():
    table, seen, told = made_table(), made_contact(2 * TOP), made_contact(3 * TOP)
    table.on_seen(seen, 0.0)
    table.on_heard_of(told)
    for number in (2 * TOP, 3 * TOP):
        table.on_heard_of(made_contact(number, host="10.6.6.6"))
    assert nearest(table, 0, has_hearsay=True) == [seen, told]


def test_hearsay_of_a_bucket_is_bounded_and_changes():
    table = made_table()
    told = [made_contact(number * TOP) for number in range(1, 200)]
    for contact in told:
        table.on_heard_of(contact)
    kept = nearest(table, 0, 200, has_hearsay=True)
    assert len(kept) == MAX_HEARSAY
    assert told[-1] in kept


def test_buckets_that_nobody_looked_into_are_stale():
    table, _ = full_table()
    (low, high) = table.stale_ranges(1000.0, 600.0)
    assert low < HALF <= high
    table.on_looked_up(HALF + 5, 1000.0)
    (low,) = table.stale_ranges(1599.0, 600.0)
    assert low < HALF
    table.on_looked_up(low, 1599.0)
    assert table.stale_ranges(1599.0, 600.0) == []
    assert len(table.stale_ranges(1600.0, 600.0)) == 1


hosts = st.sampled_from(["10.0.0.1", "10.0.0.2", "10.0.0.3", "127.0.0.1", None])
ids = st.one_of(
    st.builds(lambda high: high * TOP, st.integers(0, 63)),  # all over a quarter of the space
    st.integers(0, 40),  # around the first own id
    st.integers(EVERYTHING - 40, EVERYTHING - 1),
)
contacts = st.builds(made_contact, ids, hosts, st.integers(4000, 4003))
steps = st.lists(
    st.tuples(st.sampled_from(["seen", "seen", "seen", "failed", "told"]), contacts, st.floats(0, 40)),
    max_size=120,
)


@settings(max_examples=60, deadline=None)
@given(st.sampled_from([0, 17, 5 * TOP, EVERYTHING - 7]), st.integers(1, 6), st.integers(1, 6), steps, ids)
def test_whatever_happens_the_table_is_in_order(own, bucket_size, depth_modulo, steps, target):
    table = made_table(bucket_size, PeerId(own.to_bytes(20)), depth_modulo)
    now_s, alive = 0.0, {}
    for kind, contact, pause_s in steps:
        now_s += pause_s
        if kind == "seen":
            to_ping = table.on_seen(contact, now_s)
            assert to_ping is None or to_ping in table
            alive[contact] = True
        elif kind == "failed":
            table.on_failed(contact, now_s)
            alive[contact] = False
            assert contact not in table
            assert contact.number == own or table.is_backed_off(contact, now_s)
        else:
            num_before = len(table)
            table.on_heard_of(contact)
            assert len(table) == num_before
        check_order(table, own, bucket_size, now_s)
        assert all(alive[contact] for contact in table.contacts()), (
            "only who was seen, and did not fail since"
        )
    known = table.contacts()
    for limit in (1, 3, 8, 200):
        assert nearest(table, target, limit) == by_distance(known, target)[:limit]
    with_hearsay = nearest(table, target, 200, now_s=now_s, has_hearsay=True)
    assert with_hearsay == by_distance(with_hearsay, target)
    assert [contact for contact in with_hearsay if contact in table] == by_distance(known, target)
    assert not any(table.is_backed_off(contact, now_s) for contact in with_hearsay)


def check_order(table, own, bucket_size, now_s):
    known, views = table.contacts(), views_of(table)
    assert len(table) == len(known) == sum(view.num_contacts for view in views)
    assert len({contact.number for contact in known} - {own}) == len(known)
    assert len({contact.peer.address for contact in known}) == len(known)
    assert not any(table.is_backed_off(contact, now_s) for contact in known)
    assert views[0].low == 0
    assert views[-1].high == EVERYTHING
    for before, after in itertools.pairwise(views):
        assert before.high == after.low
    for view in views:
        inside = [contact for contact in known if view.low <= contact.number < view.high]
        assert len(inside) == view.num_contacts <= bucket_size
        assert view.num_replacements <= bucket_size
        assert view.high - view.low == EVERYTHING >> view.depth
        in_a_host = [contact.peer.address.host for contact in inside]
        for host in in_a_host:
            assert host == "127.0.0.1" or in_a_host.count(host) <= max(1, bucket_size // 2)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.integers(1, 200)), max_size=150), st.integers(2, 5))
def test_while_buckets_may_split_everybody_has_a_place(steps, bucket_size):
    table, alive = made_table(bucket_size, depth_modulo=200), {}
    for has_failed, number in steps:
        contact = made_contact(number * TOP)
        if has_failed:
            table.on_failed(contact, 0.0)
            alive.pop(number, None)
        else:
            assert table.on_seen(contact, 0.0) is None
            alive[number] = contact
    assert table.contacts() == [alive[number] for number in sorted(alive)]


def test_a_swarm_that_changes_for_long_leaves_a_table_of_the_same_size():
    rng = random.Random(8)
    own = PeerId(rng.randbytes(20))
    table = RoutingTable(own, DHTSettings(), rng)
    swarm, sizes = [], []
    for round_number in range(30):
        newcomers = [made_contact(rng.getrandbits(ID_BITS)) for _ in range(250)]
        gone, swarm = swarm[:250], swarm[250:] + newcomers
        for contact in gone:
            table.on_failed(contact, 600.0 * round_number)
        for contact in rng.sample(swarm, len(swarm)):
            table.on_seen(contact, 600.0 * round_number + 1.0)
        sizes.append((len(table), len(views_of(table))))
    for index in (0, 1):
        assert max(size[index] for size in sizes[15:]) <= 1.2 * max(size[index] for size in sizes[2:15])
    near = by_distance(swarm, number_of(own.digest))[:8]
    assert nearest(table, number_of(own.digest)) == near, "the nearest of all are known"


def test_the_same_happenings_leave_the_same_table():
    def lived():
        rng = random.Random(4)
        table = RoutingTable(OWN, DHTSettings(bucket_size=5), rng)
        for _ in range(300):
            contact = made_contact(rng.getrandbits(ID_BITS))
            rng.choice([lambda c: table.on_seen(c, 1.0), table.on_heard_of])(contact)
        return table.contacts(), table.stale_ranges(700.0, 600.0), nearest(table, 5, 50, has_hearsay=True)

    assert lived() == lived()
