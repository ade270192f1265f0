"""When machines encrypt the tensors that they send each other, and what people are told of it."""

import ipaddress
import itertools

import msgspec
import pytest

from shoal.core import Placement
from shoal.group.cluster.rendezvous import WorkerAddress, encryption_line, should_encrypt

ONE_NETWORK = ("10.1.2.3/24", "10.1.2.4/24")
FAR_APART = ("10.1.2.3/24", "10.1.3.4/24")


def on_hosts(*places):
    """One worker on each host, at `10.1.2.3/24`; without a prefix, where the system does not say it."""
    return [worker(rank, place, f"host {rank}") for rank, place in enumerate(places)]


def worker(rank, place, host):
    address, _, prefix = place.partition("/")
    plain = address.partition("%")[0]
    network = str(ipaddress.ip_network(f"{plain}/{prefix}", strict=False)) if prefix else ""
    return WorkerAddress(rank, host, address=address, host_id=host, network=network)


@pytest.mark.parametrize(
    "places",
    [
        ONE_NETWORK,
        ("10.0.0.1/8", "10.255.0.1/8", "10.3.0.7/8"),
        ("172.16.0.1/12", "172.31.255.254/12"),
        ("172.20.1.1/16", "172.20.2.1/16"),
        ("192.168.0.1/16", "192.168.9.1/16"),
        ("192.168.1.4/30", "192.168.1.5/30", "192.168.1.6/30"),
        ("169.254.1.1/16", "169.254.200.1/16"),
        ("fd00::1/64", "fd00::2/64"),
        ("fdab:1:2::1/48", "fdab:1:2:3::1/48"),
        ("fe80::1%eth0/64", "fe80::2%eth1/64"),
    ],
)
def test_one_private_network_is_plain(places):
    assert not should_encrypt(on_hosts(*places), "auto")


@pytest.mark.parametrize(
    "places",
    [
        FAR_APART,
        ("10.1.2.3/24", "10.1.2.4/16"),
        ("10.1.2.3/24", "10.1.2.4"),
        ("10.1.2.3", "10.1.2.4"),
        ("10.1.2.3/32", "10.1.2.4/32"),
        ("10.1.2.3/24", "192.168.1.1/24"),
        ("10.1.2.3/24", "fd00::1/64"),
        ("10.1.2.3/24", "10.1.2.4/24", "8.8.8.8/24"),
        ("8.8.8.1/24", "8.8.8.2/24"),
        ("2001:4860::1/64", "2001:4860::2/64"),
        # private by other rules, and not by ours: shared by a provider's customers, for tests, for documents
        ("100.64.0.1/10", "100.64.0.2/10"),
        ("198.18.0.1/15", "198.18.0.2/15"),
        ("192.0.2.1/24", "192.0.2.2/24"),
        ("2001:db8::1/64", "2001:db8::2/64"),
        # a mask that covers public addresses, too
        ("172.16.0.1/8", "172.16.0.2/8"),
        ("192.168.0.1/0", "192.168.0.2/0"),
        ("fd00::1/6", "fd00::2/6"),
        ("172.32.0.1/16", "172.32.0.2/16"),
        # loopback of several hosts is no network
        ("127.0.0.1/8", "127.0.0.1/8"),
        ("::1/128", "::1/128"),
        ("node1", "node2"),
    ],
)
def test_everything_else_is_encrypted(places):
    assert should_encrypt(on_hosts(*places), "auto")


@pytest.mark.parametrize(
    ("address", "network"),
    [("8.8.8.8", "10.1.2.0/24"), ("10.1.2.3", "nonsense"), ("10.1.2.3", "10.1.2.0/99"), ("", "10.1.2.0/24")],
)
def test_an_address_that_does_not_fit_its_network_is_not_believed(address, network):
    good, other = on_hosts(*ONE_NETWORK)
    odd = [msgspec.structs.replace(each, network=network) for each in (good, other)]
    assert should_encrypt([odd[0], msgspec.structs.replace(odd[1], address=address)], "auto")


@pytest.mark.parametrize("place", ["8.8.8.8/24", "10.1.2.3/24", "127.0.0.1/8", "10.1.2.3"])
def test_workers_of_one_host_speak_over_loopback(place):
    split = [worker(rank, place, "host") for rank in range(3)]
    assert not should_encrypt(split, "auto")
    assert should_encrypt(split, "always")


@pytest.mark.parametrize("places", [ONE_NETWORK, FAR_APART, ("8.8.8.8/24", "9.9.9.9")])
def test_a_choice_counts_whatever_the_network(places):
    assert should_encrypt(on_hosts(*places), "always")
    assert not should_encrypt(on_hosts(*places), "never")


@pytest.mark.parametrize("places", [ONE_NETWORK, FAR_APART])
def test_the_order_of_workers_does_not_matter(places):
    mixed = on_hosts(*places, places[0])
    assert len({should_encrypt(order, "auto") for order in itertools.permutations(mixed)}) == 1


def test_a_worker_tells_the_network_of_its_address():
    here = WorkerAddress.here(Placement(0, 2, 0, 1, "torchrun"), "127.0.0.1")
    assert here.network in ("127.0.0.0/8", "")
    assert WorkerAddress.here(Placement(0, 2, 0, 1, "torchrun"), "198.51.100.7").network == ""


@pytest.mark.parametrize(
    ("places", "choice", "rest"),
    [
        (
            ONE_NETWORK,
            "auto",
            (
                "of one private network (10.1.2.0/24) without encryption; --encrypt or "
                "shoal.init(encrypt=True) changes that."
            ),
        ),
        (
            FAR_APART,
            "auto",
            (
                "encrypted (TLS), since they are not in one private network; --plain or "
                "shoal.init(encrypt=False) changes that."
            ),
        ),
        (ONE_NETWORK, "always", "encrypted (TLS), as asked by --encrypt or shoal.init(encrypt=True)."),
        (ONE_NETWORK, "never", "without encryption, as asked by --plain or shoal.init(encrypt=False)."),
        (FAR_APART, "never", "without encryption, as asked by --plain or shoal.init(encrypt=False)."),
    ],
)
def test_people_are_told_what_is_done_and_how_to_change_it(places, choice, rest):
    addresses = on_hosts(*places)
    again = [msgspec.structs.replace(each, rank=each.rank + 2) for each in addresses]
    assert encryption_line([*addresses, *again], choice) == f"Shoal sends tensors between 2 machines {rest}"


@pytest.mark.parametrize("choice", ["auto", "always", "never"])
def test_one_host_that_is_split_needs_no_line(choice):
    split = [
        msgspec.structs.replace(worker(rank, "10.1.2.3/24", "host"), machine=str(rank)) for rank in range(2)
    ]
    assert encryption_line(split, choice) == ""
