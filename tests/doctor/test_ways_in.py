"""In which of three ways a machine takes part, as `shoal doctor --join` says of hosts in memory."""

import contextlib

import pytest

from shoal.core import Address
from shoal.core.identity import Identity
from shoal.core.virtual import run_virtual
from shoal.dht import DHT
from shoal.doctor.advice import explain, summarize
from shoal.doctor.joining import Member, join
from shoal.transport import Endpoint, MemoryNetwork


def seen_from(kind, num_peers=3, **options):
    """What doctor says on a laptop behind a router of that kind, or behind none."""

    async def main():
        network = MemoryNetwork(seed=1)
        async with contextlib.AsyncExitStack() as stack:
            for number in range(num_peers):
                name, identity = f"peer{number}", Identity.from_seed(bytes([number]) * 32)
                endpoint = Endpoint(network=network.host(name), peer_id=identity.peer_id, **options)
                await stack.enter_async_context(endpoint)
                await endpoint.listen(Address(name, 1024))
                joined = [Address("peer0", 1024)] if number else []
                await stack.enter_async_context(DHT(endpoint=endpoint, identity=identity, join=joined))
            if kind:
                network.router("home", kind)
            host = network.host("laptop", behind="home" if kind else "")
            member = Member(Identity.from_seed(bytes(31) + b"x").peer_id)
            target, listen = Address("peer0", 1024), Address("laptop", 5000)
            facts = await join(target, member, listen, network=host)
            findings = explain(facts)
            return facts, {each.name: each for each in findings}, summarize(facts, findings)

    return run_virtual(main())


def test_one_that_others_dial():
    facts, found, summary = seen_from("")
    assert found["reached"].status == "ok"
    assert found["reached"].figures["way"] == "dialed"
    assert "laptop:5000" in found["reached"].says
    assert facts.way_in is None
    assert "relays" not in summary


@pytest.mark.parametrize("kind", ["endpoint-independent", "port-restricted"])
def test_behind_a_router_that_shows_all_the_same_port(kind):
    facts, found, summary = seen_from(kind)
    assert len(facts.way_in.seen) == 3
    assert found["reached"].figures["way"] == "punched"
    assert "hole punching" in found["reached"].says
    assert "3 peers see it at the same port, home:" in found["reached"].says
    assert "mostly through its router" in summary


@pytest.mark.parametrize("kind", ["address-dependent", "symmetric"])
def test_behind_a_router_that_shows_each_another_port(kind):
    facts, found, summary = seen_from(kind)
    assert len(dict.fromkeys(facts.way_in.seen)) == 3
    assert found["reached"].figures["way"] == "relayed"
    assert "another port to each peer" in found["reached"].says
    assert summary.endswith("others reach it through relays.")


def test_one_peer_alone_cannot_tell_what_the_router_does():
    facts, found, _ = seen_from("port-restricted", num_peers=1)
    assert len(facts.way_in.seen) == 1
    assert found["reached"].figures["way"] == "relayed"
    assert "takes a second peer" in found["reached"].says


def test_a_client_that_no_relay_takes():
    facts, found, summary = seen_from("symmetric", relaying=None)
    assert facts.way_in.relay is None
    assert found["reached"].status == "warn"
    assert found["reached"].figures["way"] == "client"
    assert "shoal dht" in found["reached"].next_step
    assert "only outbound" in summary
