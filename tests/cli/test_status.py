import functools
import json
import subprocess
import sys

import msgspec
import pytest
import typer
from typer.testing import CliRunner

from shoal import __version__
from shoal.cli import status as module
from shoal.cli.status import status
from shoal.core import Address, Peer, PeerId, PeerRefused, PeerUnreachable, UsageError
from shoal.core.identity import Identity, new_secret, write_private_file
from shoal.dht import connect, settings
from shoal.dht.crawl import Crawl, Visited
from shoal.dht.wire import About
from shoal.experts import HostingConfig, hosted

app = typer.Typer()
app.command()(status)


def run(*arguments):
    return CliRunner().invoke(app, list(map(str, arguments)))


def last_line(text):
    last = text.rstrip("\n").splitlines()[-1]
    assert last.startswith("RESULT: ")
    return json.loads(last.removeprefix("RESULT: "))


def test_who_is_there_and_what_they_hold(tmp_path):
    with connect(listen="127.0.0.1:0") as first, connect(first.address, listen="127.0.0.1:0") as second:
        assert first.store("name", b"x" * 100, first.in_s(60)).num_stored == 2
        done = run("--join", first.address, "--json", tmp_path / "status.json")
        assert done.exit_code == 0, done.output
        rows = {line.split()[1]: line.split() for line in done.stdout.splitlines() if "127.0.0.1:" in line}
        for peer in (first, second):
            row = rows[str(peer.address)]
            assert (row[0], row[2], row[-1]) == (peer.peer_id.short, "1", __version__)
        assert "2 peers, 2 records" in done.stdout
        result = last_line(done.stdout)
        assert (result["num_peers"], result["num_silent"], result["num_records"]) == (2, 0, 2)
        assert (result["estimated_size"], result["num_swarms"]) == (2, 1)
        assert result["round_trip_p50_ms"] > 0
        assert "round_trip_p95_ms" not in result  # of two peers
        assert result["versions"] == {__version__: 2}
        document = json.loads((tmp_path / "status.json").read_text())
        assert document["result"] == result
        assert {each["peer_id"] for each in document["peers"]} == {str(first.peer_id), str(second.peer_id)}
        assert all(each["num_contacts"] == 1 for each in document["peers"])
        assert [peer.id for peer in first.peers()] == [second.peer_id]


def test_experts_are_shown_with_their_server_and_what_it_does(tmp_path):
    config = HostingConfig(
        expert_class="nop",
        hidden_dim=8,
        device="cpu",
        num_loops=1,
        uid=("nop.1", "nop.2"),
        listen="127.0.0.1:0",
    )
    with connect(listen="127.0.0.1:0") as first:
        joining = msgspec.structs.replace(config, join=(str(first.address),))
        replica = msgspec.structs.replace(joining, uid=("nop.2",))
        with hosted(joining) as (host, _), hosted(replica) as (other, _):
            done = run("--join", first.address, "--json", tmp_path / "status.json")
    assert done.exit_code == 0, done.output
    assert done.stdout.count("samples/s") == 1
    rows = [line.split() for line in done.stdout.splitlines() if line.startswith("nop.")]
    servers = {host.peer_id.short, other.peer_id.short}
    assert [row[:2] + row[3:4] for row in rows] == [["nop.1", "nop", "1"], *2 * [["nop.2", "nop", "2"]]]
    assert rows[0][2] == host.peer_id.short
    assert {row[2] for row in rows[1:]} == servers
    assert all(row[4:] == ["0%", "0", "0"] for row in rows)
    assert last_line(done.stdout)["num_experts"] == 2
    document = json.loads((tmp_path / "status.json").read_text())
    assert {each["server"] for each in document["experts"]} == servers


def test_two_swarms_are_told_apart_and_json_stands_alone():
    with connect(listen="127.0.0.1:0") as one, connect(listen="127.0.0.1:0") as other:
        joins = f"--join {one.address} --join {other.address}"
        done = run(*joins.split(), "--json", "-")
    assert done.exit_code == 0, done.output
    assert json.loads(done.stdout)["result"]["num_swarms"] == 2
    told = " ".join(done.stderr.split())
    assert "lead to 2 swarms that do not know of each other" in told
    assert f"shoal dht {joins}" in told


def test_a_wrong_secret_is_an_error_with_a_next_step(tmp_path, monkeypatch):
    monkeypatch.setattr(settings.DHTSettings, "__init__", _quickly(settings.DHTSettings.__init__))
    for name in ("right", "wrong"):
        write_private_file(tmp_path / name, new_secret().encode())
    with connect(listen="127.0.0.1:0", secret=tmp_path / "right") as swarm:
        assert run("--join", swarm.address, "--secret-file", tmp_path / "right").exit_code == 0
        done = run("--join", swarm.address, "--secret-file", tmp_path / "wrong")
        assert isinstance(done.exception, PeerUnreachable)
        assert "another secret" in done.exception.cause
        assert f"shoal doctor --join {swarm.address} --secret-file FILE" in done.exception.next_step


def test_a_visit_needs_an_identity_of_its_own(tmp_path):
    own = Identity.generate()
    own.save(tmp_path / "own.pem")
    with connect(listen="127.0.0.1:0", identity=own) as swarm:
        done = run("--join", swarm.address, "--identity-file", tmp_path / "own.pem")
        assert isinstance(done.exception, PeerRefused)
        assert "has the identity that is to visit it" in str(done.exception)
        assert run("--join", swarm.address).exit_code == 0
    assert not (tmp_path / "state").exists()


def test_neither_the_peer_nor_the_visitor_imports_torch():
    """In one process, so that both have been at work when it is looked at."""
    code = (
        "import sys; from shoal.cli import dht; from shoal.cli.program import run\n"
        "dht._watch = lambda swarm, _: codes.append(run(['status', '--join', str(swarm.address)]))\n"
        "codes = []; codes.append(run(['dht'])); assert codes == [0, 0]; assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "1 peer, 0 records" in done.stdout


def _quickly(init):
    return functools.partialmethod(init, call_s=0.3)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [(["--join", "nowhere"], "is no address"), (["--join", "127.0.0.1"], "is no address")],
)
def test_bad_usage_says_what_is_wrong(arguments, words):
    done = run(*arguments)
    assert isinstance(done.exception, UsageError)
    assert words in str(done.exception)


def visited(number, **told):
    peer = Peer(Address("10.0.0.7", 1000 + number), PeerId(bytes([number]) * 20))
    about = {
        "software": __version__,
        "uptime_s": 90.0,
        "num_records": 3,
        "record_bytes": 400,
        "num_cached": 0,
        "num_contacts": 2,
        "is_client": False,
        "wall_s": 0.0,
    }
    gap_s = told.pop("clock_gap_s", 0.0)
    return Visited(peer, About(**{**about, **told}), 0.01 * number, gap_s)


def notes(*peers, silent=(), num_unasked=0, size=None):
    seen = Crawl(list(peers), list(silent), num_unasked, size or len(peers), 1)
    return list(module.peers_notes(seen, [Address("10.0.0.7", 1001)]))


def test_what_is_unusual_is_told():
    assert notes(visited(1)) == ["1 peer, 3 records (400 B), each counted at every peer that holds it."]
    gone = [Visited(Peer(Address("10.0.0.8", port)), error="no answer") for port in range(1, 8)]
    told = notes(
        visited(1),
        visited(2, software="0.0.9\n" + "x" * 99),
        visited(3, clock_gap_s=-7.0),
        silent=gone,
        num_unasked=5,
        size=1234,
    )
    assert "there are about 1,234 peers" in told[1]
    assert told[2].startswith("7 peers did not answer: 10.0.0.8:1, ")
    assert told[2].endswith(" and 2 more.")
    assert told[3].startswith("Versions differ: 0.0.9")
    assert len(told[3]) < 80
    assert "03030303 (10.0.0.7:1003) -7.0 s" in told[4]


def test_the_nearest_of_many_are_shown():
    seen = Crawl([visited(number) for number in range(150, 0, -1)], [], 0, 150, 1)
    table = module.peers_table(seen)
    assert len(table.rows) == 100
    assert table.rows[0][0] == "01010101"
    assert "The nearest 100 are shown; --json FILE has all." in notes(*seen.peers)
