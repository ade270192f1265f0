"""Peers that did not answer: backed off from, longer after every failure, then tried again or forgotten."""

import random

import pytest

from dht.made_contacts import TOP, made_contact
from shoal.core import PeerId
from shoal.dht.routing_table import MAX_FAILED, MAX_RETRIES, RoutingTable
from shoal.dht.settings import DHTSettings

ONE = made_contact(1)


def made_table(*seen):
    """A table in which these were seen."""
    settings = DHTSettings(backoff_s=5.0, max_backoff_s=30.0)
    table = RoutingTable(PeerId(bytes(20)), settings, random.Random(3))
    for contact in seen:
        table.on_seen(contact, 0.0)
    return table


def test_every_failure_doubles_the_wait_up_to_the_longest():
    table, now_s = made_table(ONE), 100.0
    for wait_s in (5.0, 10.0, 20.0, 30.0, 30.0):
        table.on_failed(ONE, now_s)
        assert table.is_backed_off(ONE, now_s)
        assert table.is_backed_off(ONE, now_s + wait_s - 0.01)
        assert not table.is_backed_off(ONE, now_s + wait_s)
        now_s += wait_s


def test_many_failures_of_one_outage_count_as_one():
    table = made_table(ONE)
    for at_s in (0.0, 0.0, 0.1, 1.0, 4.9):
        table.on_failed(ONE, at_s)
    assert table.is_backed_off(ONE, 4.99)
    assert not table.is_backed_off(ONE, 5.0)
    assert table.due_for_retry(5.0) == [ONE]
    for at_s in (6.0, 6.0, 7.0):
        table.on_failed(ONE, at_s)
    assert table.is_backed_off(ONE, 14.99)
    assert not table.is_backed_off(ONE, 15.0)


def test_who_is_heard_begins_anew():
    table = made_table(ONE)
    table.on_failed(ONE, 0.0)
    table.on_failed(ONE, 5.0)
    table.on_seen(ONE, 5.0)
    assert not table.is_backed_off(ONE, 5.0)
    table.on_failed(ONE, 6.0)
    assert not table.is_backed_off(ONE, 11.0)


def test_the_same_id_at_another_address_is_not_backed_off_from():
    elsewhere = made_contact(1, host="10.6.6.6")
    table = made_table(ONE)
    table.on_failed(elsewhere, 0.0)
    assert not table.is_backed_off(ONE, 0.0)
    table.on_seen(ONE, 0.0)
    assert table.is_backed_off(elsewhere, 0.0)


def test_who_is_tried_again_is_named_once_for_each_wait():
    table = made_table(ONE)
    table.on_failed(ONE, 0.0)
    assert table.due_for_retry(4.9) == []
    assert table.due_for_retry(5.0) == [ONE]
    assert table.due_for_retry(5.0) == []
    assert table.is_backed_off(ONE, 5.1), "until the ping is answered"
    assert table.due_for_retry(14.9) == []
    assert table.due_for_retry(15.0) == [ONE], "a ping that nobody answered was a failure"


def test_who_was_silent_through_the_longest_wait_is_forgotten():
    table, now_s, num_pings = made_table(ONE), 0.0, 0
    table.on_failed(ONE, now_s)
    while table.failed_near(0, 1):
        now_s += 1.0
        for contact in table.due_for_retry(now_s):
            num_pings += 1
            table.on_failed(contact, now_s)
    assert (num_pings, now_s) == (3, 5.0 + 10.0 + 20.0 + 30.0)


def test_who_was_only_heard_of_is_left_alone_and_then_forgotten():
    table = made_table()
    table.on_failed(ONE, 0.0)
    assert table.is_backed_off(ONE, 4.9)
    assert table.due_for_retry(5.0) == []
    assert table.failed_near(0, 1) == []
    table.on_seen(ONE, 9.0)
    table.on_failed(ONE, 10.0)
    table.on_failed(ONE, 16.0)
    assert table.due_for_retry(26.0) == [ONE], "it was seen before"


def test_a_few_are_tried_at_a_time_and_all_of_them_in_the_end():
    contacts = [made_contact(number * TOP) for number in range(1, 2 * MAX_RETRIES + 4)]
    table = made_table(*contacts)
    for contact in contacts:
        table.on_failed(contact, 0.0)
    first, second, third = (table.due_for_retry(6.0) for _ in range(3))
    assert len(first) == len(second) == MAX_RETRIES
    assert first + second + third == contacts
    assert table.due_for_retry(6.0) == []


@pytest.mark.parametrize("extra", [1, 50])
def test_those_that_failed_longest_ago_are_forgotten_beyond_the_bound(extra):
    table = made_table()
    contacts = [made_contact(number) for number in range(1, MAX_FAILED + 1)]
    for contact in contacts:
        table.on_failed(contact, 0.0)
    table.on_failed(contacts[0], 1.0)
    for number in range(extra):
        table.on_failed(made_contact(TOP + number), 2.0)
    assert len(table.failed_near(0, 2 * MAX_FAILED)) == MAX_FAILED
    assert table.is_backed_off(contacts[0], 2.0)
    assert not table.is_backed_off(contacts[1], 2.0)
    assert not table.is_backed_off(contacts[extra], 2.0)
    assert table.is_backed_off(contacts[extra + 1], 2.0)
