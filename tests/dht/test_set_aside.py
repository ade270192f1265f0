import pytest

from dht.made_contacts import TOP, made_contact
from shoal.dht.set_aside import MAX_COME_BACK, MAX_SET_ASIDE, SetAside
from shoal.dht.settings import DHTSettings

SETTINGS = DHTSettings(set_aside_s=5.0, max_set_aside_s=30.0)
ONE = made_contact(1)


def test_every_failure_doubles_the_wait_up_to_the_longest():
    aside, now_s = SetAside(SETTINGS), 100.0
    for wait_s in (5.0, 10.0, 20.0, 30.0, 30.0):
        aside.add(ONE, now_s)
        assert aside.has(ONE, now_s)
        assert aside.has(ONE, now_s + wait_s - 0.01)
        assert not aside.has(ONE, now_s + wait_s)
        now_s += wait_s


def test_many_failures_of_one_outage_count_as_one():
    aside = SetAside(SETTINGS)
    for at_s in (0.0, 0.0, 0.1, 1.0, 4.9):
        aside.add(ONE, at_s)
    assert aside.has(ONE, 4.99)
    assert not aside.has(ONE, 5.0)
    assert aside.come_back(5.0) == [ONE]
    for at_s in (6.0, 6.0, 7.0):
        aside.add(ONE, at_s)
    assert aside.has(ONE, 15.99)
    assert not aside.has(ONE, 16.0)


def test_who_is_heard_begins_anew():
    aside = SetAside(SETTINGS)
    aside.add(ONE, 0.0)
    aside.add(ONE, 5.0)
    aside.clear(ONE)
    assert not aside.has(ONE, 5.0)
    aside.add(ONE, 6.0)
    assert not aside.has(ONE, 11.0)


def test_the_same_id_at_another_address_is_not_set_aside():
    aside = SetAside(SETTINGS)
    aside.add(made_contact(1, host="10.6.6.6"), 0.0)
    assert not aside.has(ONE, 0.0)
    aside.clear(ONE)
    assert aside.has(made_contact(1, host="10.6.6.6"), 0.0)


def test_who_comes_back_is_named_once_for_each_wait():
    aside = SetAside(SETTINGS)
    aside.add(ONE, 0.0)
    assert aside.come_back(4.9) == []
    assert aside.come_back(5.0) == [ONE]
    assert aside.come_back(5.0) == []
    assert aside.has(ONE, 5.1), "left alone until the ping is answered"
    assert aside.come_back(10.0) == [ONE]


def test_who_was_silent_through_the_longest_wait_is_forgotten():
    aside, now_s, num_pings = SetAside(SETTINGS), 0.0, 0
    aside.add(ONE, now_s)
    while len(aside):
        now_s += 1.0
        for contact in aside.come_back(now_s):
            num_pings += 1
            aside.add(contact, now_s)
    assert (num_pings, now_s) == (3, 5.0 + 10.0 + 20.0 + 30.0)


def test_who_was_only_heard_of_is_left_alone_and_then_forgotten():
    aside = SetAside(SETTINGS)
    aside.add(ONE, 0.0, was_seen=False)
    assert aside.has(ONE, 4.9)
    assert aside.come_back(5.0) == []
    assert len(aside) == 0
    aside.add(ONE, 10.0)
    aside.add(ONE, 16.0, was_seen=False)
    assert aside.come_back(26.0) == [ONE]


def test_a_few_come_back_at_a_time_and_all_of_them_in_the_end():
    aside = SetAside(SETTINGS)
    contacts = [made_contact(number * TOP) for number in range(1, 2 * MAX_COME_BACK + 4)]
    for contact in contacts:
        aside.add(contact, 0.0)
    first, second, third = (aside.come_back(6.0) for _ in range(3))
    assert len(first) == len(second) == MAX_COME_BACK
    assert first + second + third == contacts
    assert aside.come_back(6.0) == []


@pytest.mark.parametrize("extra", [1, 50])
def test_those_that_failed_longest_ago_are_forgotten_beyond_the_bound(extra):
    aside = SetAside(SETTINGS)
    contacts = [made_contact(number) for number in range(1, MAX_SET_ASIDE + 1)]
    for contact in contacts:
        aside.add(contact, 0.0)
    aside.add(contacts[0], 1.0)
    for number in range(extra):
        aside.add(made_contact(TOP + number), 2.0)
    assert len(aside) == MAX_SET_ASIDE
    assert aside.has(contacts[0], 2.0)
    assert not aside.has(contacts[1], 2.0)
    assert not aside.has(contacts[extra], 2.0)
    assert aside.has(contacts[extra + 1], 2.0)
