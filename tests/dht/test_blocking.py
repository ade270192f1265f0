"""The blocking face over real sockets on loopback."""

import asyncio
import re
import subprocess
import sys
import threading
from pathlib import Path

import pytest

import shoal
from shoal.core import Deadline, LoopThread, PeerUnreachable, UsageError
from shoal.core.identity import Identity, new_secret, write_private_file
from shoal.dht import DHT, DHTSettings, Entry, Schema, Swarm, Verdict, connect
from shoal.transport import SwarmSecret

GUIDE = Path(__file__).parents[2] / "docs" / "dht.md"
QUICK = DHTSettings(call_s=0.3)


@pytest.fixture
def first():
    """A swarm of one."""
    with connect(listen="127.0.0.1:0") as swarm:
        yield swarm


def test_a_client_stores_and_reads(first):
    with shoal.connect(str(first.address)) as client:
        expires_at_s = client.in_s(60)
        assert client.store("name", {"at": (1, 2)}, expires_at_s)
        assert client.get("name") == first.get("name") == ({"at": (1, 2)}, expires_at_s, None)
        assert client.get("no such name") is None
        assert client.store("all", 1, expires_at_s, subkey="one")
        assert client.store("all", 2, expires_at_s, subkey=2)
        found = client.get("all", latest=True)
        assert {subkey: slot.value for subkey, slot in found.value.items()} == {"one": 1, 2: 2}
        stored = client.store_many([Entry("a", 1, expires_at_s), Entry("b", 2, client.in_s(-1))])
        assert [each.verdict for each in stored] == [Verdict.STORED, Verdict.EXPIRED]
        assert [value and value.value for value in client.get_many(["b", "a"])] == [None, 1]


def test_who_is_where(first):
    with connect(first.address) as client:
        assert client.address is None
        assert [peer.id for peer in client.peers()] == [first.peer_id]
        assert first.peers() == []
        answered = client.ping(first.address)
        assert answered.peer.id == first.peer_id
        assert 0 < answered.round_trip_s < 5
        assert client.find_peer(first.peer_id).address == first.address
        assert client.run(client.dht.about(answered.peer)).num_records == 0


def test_an_owned_record_is_replaced_by_its_owner_alone(first):
    identity = Identity.generate()
    with connect(first.address, identity=identity) as owner, connect(first.address) as other:
        assert owner.peer_id == identity.peer_id
        assert owner.store("mine", 1, owner.in_s(60), is_owned=True)
        assert other.store("mine", 2, other.in_s(90)).verdict is Verdict.NOT_OWNER
        assert other.get("mine").owner == identity.peer_id
        assert owner.store("mine", 3, owner.in_s(90), is_owned=True)


def test_any_thread_may_call(first):
    with connect(first.address) as client:
        stored = []
        threads = [
            threading.Thread(target=lambda n=n: stored.append(client.store(f"n{n}", n, client.in_s(60))))
            for n in range(8)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert all(stored)
        assert [value.value for value in client.get_many([f"n{n}" for n in range(8)])] == list(range(8))


def test_the_secret_is_the_swarms(tmp_path, monkeypatch):
    path = tmp_path / "swarm.secret"
    text = new_secret()
    write_private_file(path, text.encode())
    with connect(listen="127.0.0.1:0", secret=path) as first:
        with connect(first.address, secret=SwarmSecret.load(path)) as client:
            assert client.store("name", 1, client.in_s(60))
        with pytest.raises(PeerUnreachable, match=f"Nobody answers at {first.address}"):
            connect(first.address, settings=QUICK).open()
        monkeypatch.setenv("SHOAL_SECRET", text)
        with connect(first.address) as client:
            assert client.get("name").value == 1


def test_opening_and_closing_by_hand(first):
    client = connect(first.address)
    with pytest.raises(UsageError, match="not open"):
        client.get("name")
    assert client.open() is client
    with pytest.raises(UsageError, match="open already"):
        client.open()
    client.close()
    client.close()
    with pytest.raises(UsageError, match="not open"):
        client.get("name")


def test_a_swarm_that_is_opened_again_is_a_whole_peer(first):
    """With its upkeep and its keeper."""
    swarm = connect(first.address, listen="127.0.0.1:0")
    for number in range(2):
        with swarm:
            kept = swarm.run(_keep(swarm.dht, f"kept {number}"))
            assert [stored.num_stored for stored in kept] == [2]
            assert first.get(f"kept {number}").value == number
            assert swarm.run(_looks(swarm.dht.upkeep))


async def _keep(dht, name):
    kept = dht.keeper.keep(lambda at_s: [Entry(name, int(name[-1]), at_s)], 60)
    return await kept.stored(Deadline.after(10))


async def _looks(upkeep):
    """Whether it does what is due."""
    looked = asyncio.Event()
    upkeep._duties[0].find = looked.set
    upkeep._wake.set()
    async with asyncio.timeout(10):
        return await looked.wait()


def test_several_threads_may_close_it(first):
    client = connect(first.address).open()
    errors = []

    def close():
        try:
            client.close()
            client.get("name")
        except UsageError as error:
            errors.append(str(error))

    threads = [threading.Thread(target=close) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(errors) == 4
    assert all("not open" in error for error in errors)


def test_a_schema_holds_from_when_it_is_added(first):
    assert first.store("loss.run", "low", first.in_s(60))
    first.add_schema(Schema("loss", float))
    assert first.store("loss.run", "low", first.in_s(90)).verdict is Verdict.BAD_VALUE
    assert first.store("loss.run", 0.5, first.in_s(90))


def test_a_loop_thread_that_is_given_stays_open(first):
    with LoopThread() as loop:
        with connect(first.address, loop=loop) as one, Swarm(DHT(join=[first.address]), loop) as other:
            assert one.store("name", 1, one.in_s(60))
            assert other.get("name").value == 1
        assert loop.run(_three()) == 3


async def _three():
    return 3


def test_a_swarm_that_cannot_be_joined_leaves_nothing_open():
    before = threading.active_count()
    with pytest.raises(PeerUnreachable, match=r"Nobody answers at 127\.0\.0\.1:9"):
        connect("127.0.0.1:9", settings=QUICK).open()
    assert threading.active_count() == before


def test_the_guides_examples_run(first, tmp_path):
    """All of them in order, as one program, with the address of a swarm that is there."""
    blocks = re.findall(r"^```python\n(.*?)^```", GUIDE.read_text(), re.DOTALL | re.MULTILINE)
    assert len(blocks) >= 6
    script = tmp_path / "examples.py"
    script.write_text("\n".join(blocks).replace("127.0.0.1:31337", str(first.address)))
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, check=False, timeout=60)
    assert done.stderr == ""
    said = done.stdout.splitlines()
    assert said[0] == "hello"
    assert "'gpus': 2" in said[1]
    assert "Value(value='hello'" in said[2]


def test_bad_usage_says_what_is_wrong():
    with pytest.raises(UsageError, match="nobody to connect to"):
        connect()
    text = new_secret()
    with pytest.raises(UsageError, match="not as text") as error:
        connect("127.0.0.1:9", secret=text)
    assert text not in str(error.value)
    with pytest.raises(UsageError, match="is no address"):
        connect("nowhere")
    with pytest.raises(shoal.ShoalError, match="cannot be read"):
        connect("127.0.0.1:9", secret=Path("no-such-file"))
