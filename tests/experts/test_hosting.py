import asyncio
import contextlib
import functools
import time
import urllib.request

import pytest
import torch

from shoal.core import DeadlineExceeded, LoopThread, Peer, PeerError, PeerUnreachable, UsageError
from shoal.core.identity import Identity
from shoal.dht import connect
from shoal.dht.settings import DHTSettings
from shoal.experts.client.client import ExpertClient
from shoal.experts.config import HostingConfig
from shoal.experts.names import declare_experts, get_experts
from shoal.experts.server.assignment import ExpertMaker
from shoal.experts.server.checkpoints import Checkpoints
from shoal.experts.server.hosting import Hosting, hosted

SMALL = {"hidden_dim": 8, "device": "cpu", "num_loops": 1}


@contextlib.contextmanager
def host(identity=None, **fields):
    with hosted(HostingConfig(**{**SMALL, **fields}), identity) as (hosting, loop):
        hosting.run = loop.run
        yield hosting


@pytest.fixture(autouse=True)
def _impatient(monkeypatch):
    """Hosts do not wait for peers that are gone."""
    monkeypatch.setattr(
        "shoal.experts.server.hosting.DHTSettings", functools.partial(DHTSettings, call_s=0.25)
    )


@pytest.fixture
def swarm():
    with connect(listen="127.0.0.1:0", settings=DHTSettings(call_s=0.25)) as swarm:
        yield swarm


def served_by(swarm, *uids):
    """The ids of the peers at which the swarm finds each."""
    found = swarm.run(get_experts(swarm.dht, uids, latest=True))
    return [None if one is None else sorted({peer.id for peer in one.peers}) for one in found]


def train(hosting, uid):
    """A step, through the network."""
    with ExpertClient() as client:
        expert = client.expert(uid, Peer(hosting.address))
        x = torch.randn(4, 8, requires_grad=True)
        expert(x).sum().backward()
        assert x.grad is not None


def weights(hosting, uid):
    tensors = hosting.run(hosting.server.on_device(hosting.server.experts[uid].state)).tensors
    return {name: tensor for name, tensor in tensors.items() if name.startswith("module.")}


def are_equal(some, others):
    return some.keys() == others.keys() and all(torch.equal(some[name], others[name]) for name in some)


@pytest.fixture
def _unreachable(monkeypatch):
    """Others try in vain to call whoever joins; on loopback nobody tries."""

    async def check(reachability, contacts):
        reachability._protocol.is_client = True  # what it makes of their answers

    monkeypatch.setattr("shoal.dht.join.Reachability.check", check)


def until(hosting, condition):
    """Wait for something that happens on the host's loop."""
    ends_s = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < ends_s
        hosting.run(asyncio.sleep(0.01))


def test_without_a_swarm_it_serves_plain_experts():
    with host(num_experts=2, num_loops=2, metrics_port=0) as hosting:
        assert hosting.uids == ["expert0", "expert1"]
        assert (hosting.dht, hosting.publishing) == (None, None)
        assert not are_equal(weights(hosting, "expert0"), weights(hosting, "expert1"))
        train(hosting, "expert1")
        moment = hosting.moment()
        assert [expert.num_updates for expert in moment.experts] == [0, 1]
        assert (moment.num_samples, moment.num_batches, moment.num_failed) == (8, 2, 0)
        with urllib.request.urlopen(hosting.metrics.url, timeout=5) as answer:
            assert b'shoal_expert_updates_total{expert="expert1"} 1\n' in answer.read()
    assert hosting.moment().num_samples == 8
    with pytest.raises(UsageError, match="not open"):
        _ = hosting.server


def test_experts_are_saved_at_the_end_and_restored_at_the_start(tmp_path):
    saved = {"checkpoint_dir": str(tmp_path / "saved"), "checkpoint_every_s": 999.0}
    with host(num_experts=2, **saved) as hosting:
        train(hosting, "expert0")
        learned = weights(hosting, "expert0")
    checkpoints = Checkpoints(tmp_path / "saved")
    assert checkpoints.uids() == ["expert0", "expert1"]
    assert checkpoints.load("expert0").about == {"expert_class": "ffn", "hidden_dim": 8}
    with host(seed=5, **saved) as hosting:
        assert hosting.uids == ["expert0", "expert1"]
        assert hosting.server.experts["expert0"].num_updates == 1
        assert are_equal(weights(hosting, "expert0"), learned)
    with (
        pytest.raises(UsageError, match=r"has 2 experts, and --num-experts is 1"),
        host(num_experts=1, **saved),
    ):
        pass
    with pytest.raises(UsageError, match="was saved with hidden_dim 8, not 4"), host(hidden_dim=4, **saved):
        pass


def test_the_swarm_finds_experts_until_their_host_leaves(swarm):
    grid = {"uid_pattern": "ffn.[0:4].[0:4]", "num_experts": 3}
    with host(join=(str(swarm.address),), **grid) as hosting:
        uids = hosting.uids
        assert len(set(uids)) == 3
        assert all(uid.startswith("ffn.") for uid in uids)
        assert served_by(swarm, *uids) == [[hosting.peer_id]] * 3
        with ExpertClient(swarm) as client:
            assert client.expert(uids[0])(torch.ones(2, 8)).shape == (2, 8)
    assert served_by(swarm, *uids) == [None] * 3


def test_a_host_that_cannot_declare_in_time_serves_on(swarm, monkeypatch, caplog):
    async def late(self, deadline):
        raise DeadlineExceeded("not before the deadline.")

    with monkeypatch.context() as patch:
        patch.setattr("shoal.dht.replication.Kept.stored", late)
        with host(join=(str(swarm.address),), declare_s=5.0) as hosting:
            assert "cannot be found yet" in caplog.text
            assert "for tests" in caplog.text
            until(hosting, lambda: served_by(swarm, *hosting.uids) == [[hosting.peer_id]])


def test_a_host_leaves_to_others_what_they_have_begun_to_serve(swarm, monkeypatch, tmp_path):
    async def declare(dht, uids):
        return await declare_experts(dht, uids, dht.in_s(60))

    def make(self, uid):
        swarm.run(declare(swarm.dht, [uid] if uid == "ffn.0" else []))
        return made(self, uid)

    made = ExpertMaker.make
    monkeypatch.setattr(ExpertMaker, "make", make)
    for uid in ("ffn.0", "ffn.1"):
        Checkpoints(tmp_path).save(uid, ExpertMaker(HostingConfig(**SMALL), None).new(uid).state())
    with host(join=(str(swarm.address),), checkpoint_dir=str(tmp_path)) as hosting:
        assert hosting.uids == ["ffn.1"]
        assert served_by(swarm, "ffn.0", "ffn.1") == [[swarm.dht.peer_id], [hosting.peer_id]]


def test_a_host_that_fails_leaves_its_records_to_expire(swarm):
    with pytest.raises(ZeroDivisionError), host(join=(str(swarm.address),)) as hosting:
        raise ZeroDivisionError
    assert served_by(swarm, "expert.0") == [[hosting.peer_id]]


def test_a_replica_begins_as_a_copy(swarm):
    joins = {"join": (str(swarm.address),), "uid": ("ffn.1.2",), "replica_sync_s": 999.0}
    with host(**joins) as first:
        train(first, "ffn.1.2")
        with host(seed=7, **joins) as second:
            assert are_equal(weights(first, "ffn.1.2"), weights(second, "ffn.1.2"))
            assert served_by(swarm, "ffn.1.2") == [sorted([first.peer_id, second.peer_id])]
            assert second.moment().num_copied == 1
        assert served_by(swarm, "ffn.1.2") == [[first.peer_id]]


def test_an_adopter_serves_what_nobody_serves_any_more(swarm, tmp_path):
    shared = {"join": (str(swarm.address),), "checkpoint_dir": str(tmp_path)}
    with host(adopt=True, adopt_s=0.1, **shared) as adopter:
        assert adopter.uids == []
        with host(uid=("ffn.1.2",), **shared) as first:
            train(first, "ffn.1.2")
            learned = weights(first, "ffn.1.2")
            assert adopter.uids == []
        until(adopter, lambda: adopter.publishing.uids)
        assert adopter.server.experts["ffn.1.2"].num_updates == 1
        assert adopter.moment().num_adopted == 1
        assert are_equal(weights(adopter, "ffn.1.2"), learned)
        until(adopter, lambda: served_by(swarm, "ffn.1.2") == [[adopter.peer_id]])


@pytest.mark.slow
def test_a_host_comes_back_with_what_it_had(swarm, tmp_path):
    identity = Identity.generate()
    shared = {
        "join": (str(swarm.address),),
        "checkpoint_dir": str(tmp_path),
        "uid_pattern": "ffn.[0:99].[0:99]",
    }
    with contextlib.suppress(ZeroDivisionError), host(identity, num_experts=2, **shared) as hosting:
        uids = sorted(hosting.uids)
        until(hosting, lambda: Checkpoints(tmp_path).uids() == uids)
        raise ZeroDivisionError
    # another peer: the one that is declared does not answer
    with host(num_experts=2, **shared) as hosting:
        assert sorted(hosting.uids) == uids
        with host(num_experts=1, **shared) as other:
            assert other.uids[0] not in uids


def test_nobody_to_join_is_an_error():
    with pytest.raises(PeerUnreachable, match="Nobody answers"), host(join=("127.0.0.1:9",)):
        pass


def test_what_was_accepted_is_finished_and_new_work_refused():
    async def ask(expert):
        return expert(torch.ones(1, 8))

    with ExpertClient() as client, LoopThread() as loop, LoopThread() as asking:
        hosting = Hosting(HostingConfig(expert_class="nop_delay", **SMALL))
        hosting.run = loop.run
        loop.run(hosting.__aenter__())
        expert = client.expert("expert0", Peer(hosting.address))
        early = asking.submit(ask(expert))
        until(hosting, lambda: hosting.endpoint.num_calls)
        left = loop.submit(hosting.__aexit__(None, None, None))
        until(hosting, lambda: hosting.moment().is_leaving)
        with pytest.raises(PeerError):
            expert(torch.ones(1, 8))
        assert not early.done()
        assert torch.equal(early.result(10), torch.ones(1, 8))
        left.result(10)


@pytest.mark.usefixtures("_unreachable")
@pytest.mark.parametrize("num_loops", [1, 2])
def test_behind_a_router_experts_are_served_through_relays(swarm, num_loops, caplog):
    with host(join=[str(swarm.address)], uid=["ffn.1"], num_loops=num_loops) as hosting:
        (found,) = swarm.run(get_experts(swarm.dht, ["ffn.1"], latest=True))
        assert [peer.address.relay for peer in found.peers] == [swarm.address]
        assert all(peer.address.is_relayed for peer in found.peers)
        assert "serves through relays" in caplog.text
        before = weights(hosting, "ffn.1")
        with connect(swarm.address) as other, ExpertClient(other) as client:
            x = torch.randn(4, 8, requires_grad=True)
            client.expert("ffn.1")(x).sum().backward()
            assert x.grad is not None
        assert not are_equal(before, weights(hosting, "ffn.1"))
    assert served_by(swarm, "ffn.1") == [None]


@pytest.mark.usefixtures("_unreachable")
def test_behind_a_router_and_without_relays_it_says_what_to_do(monkeypatch):
    monkeypatch.setattr("shoal.experts.server.hosting._RELAY_S", 1.0)
    with (
        connect(listen="127.0.0.1:0", relaying=None) as swarm,
        pytest.raises(UsageError, match="cannot serve experts"),
        host(join=[str(swarm.address)], uid=["ffn.1"]),
    ):
        pass
