"""Hosts and workers that come and go while a run goes on, as its launcher sees them; nobody trains here."""

import gc
import os
import signal
import socket
import sys
import threading
from functools import partial

import pytest

from launch.programs import Done, Recorder
from launch.stations import Actors, Children
from shoal.core import Address
from shoal.core.errors import PeerError, UsageError
from shoal.core.processes import own_socket_address
from shoal.core.run_options import RunOptions
from shoal.launch import Elastic, LaunchSettings, launch
from shoal.launch.joining import JoinPort, join_run
from shoal.launch.live import ask_launcher
from shoal.transport import SwarmSecret

pytestmark = pytest.mark.skipif(os.name != "posix", reason="workers are started on POSIX only")
NUMBER = 'import json\nnumber = json.loads(os.environ["SHOAL_RUN"]).get("number", 0)\n'


@pytest.fixture
def start(write):
    """Runs an elastic run in this process, to its end."""

    def start(body, num_workers, engine=None, when=None, *, min_workers=1, max_workers=None, **settings):
        recorder = Recorder(when)
        elastic = Elastic(min_workers=min_workers, max_workers=max_workers, is_live=True)
        command = (sys.executable, str(write(body)))
        launched = LaunchSettings(command, num_workers, elastic=elastic, **settings)
        return Done(launch(launched, recorder, engine), recorder)

    return start


def test_a_lost_host_takes_its_workers_and_gets_others_when_it_is_back(start, tmp_path):
    hosts = Children("ab")
    body = f"{NUMBER}print('here', os.environ['SHOAL_MACHINE'])\nif number == 5: mark('end')\nwait_for('end')"
    when = {"here 1": partial(hosts.signal, "b")}
    done = start(body, 4, hosts, when)
    assert done.outcome.exit_code == 0, done.said
    lost = next(line for line in done.said if "is lost" in line)
    assert lost.startswith("b is lost with workers 2 and 3")
    at = done.said.index("b is back")
    assert done.said[at + 1] == "workers 4, 5 will join on b"
    assert {done.out[number][0] for number in (4, 5)} == {"here 1"}


def test_a_host_that_is_missing_at_the_start_gets_workers_when_it_comes(start):
    class LateHosts(Children):
        def open(self, min_processes, max_processes, *, is_restart):
            agents = super().open(min_processes, max_processes, is_restart=is_restart)
            self.signal("b")
            return agents

    body = f"{NUMBER}if number == 3: mark('end')\nwait_for('end')\n"
    done = start(body, 4, LateHosts("ab"))
    assert done.outcome.exit_code == 0, done.said
    assert any(line.startswith("goes on without b") for line in done.said)
    assert "workers 2, 3 will join on b" in done.said


def test_a_run_is_scaled_to_the_free_slots_of_its_hosts_and_no_further(start, tmp_path):
    body = f"{NUMBER}print('here', os.environ['SHOAL_MACHINE'])\nwait_for('end')"
    answers = []

    def scale():
        answers.extend(ask_launcher(tmp_path.name, size) for size in (5, 4, 2, 3, 4, 2))
        (tmp_path / "end").touch()

    asking = threading.Thread(target=scale)
    options = RunOptions(run_id=tmp_path.name)
    done = start(body, 2, Children("ab"), {"here 0": asking.start}, options=options)
    asking.join()
    assert done.outcome.exit_code == 0, done.said
    assert [(answer.is_done, answer.what) for answer in answers] == [
        (False, "The hosts of this run have 2 free slots, and 3 are needed."),
        (True, "2 workers will join the 2 that are there"),
        (True, "2 of 4 workers will leave"),
        # nobody trains here, so that nobody has left yet
        (True, "1 worker that had to leave will stay"),
        (True, "1 worker that had to leave will stay"),
        (True, "2 of 4 workers will leave"),
    ]
    assert [done.out[number][0] for number in (0, 1)] == ["here 0"] * 2
    assert "here 1" in str(done.out)


def test_another_actor_takes_the_place_of_a_lost_one_wherever_there_is_room(start):
    """On a machine where others go on, and on one that nobody knew."""
    actors = Actors(["a", "a", "b"], ["a", "c"])
    body = f"{NUMBER}print('here', os.environ['SHOAL_MACHINE'])\nif number == 4: mark('end')\nwait_for('end')"
    when = {"here 1": partial(actors.signal, 0), "worker 3 will join": partial(actors.signal, 2)}
    done = start(body, 3, actors, when)
    assert done.outcome.exit_code == 0, done.said
    assert [done.out[number][0] for number in (1, 3, 4)] == ["here 0", "here 0", "here 2"]
    assert sum("is lost with" in line for line in done.said) == 2


def test_a_run_is_scaled_beyond_its_slots_where_more_can_be_had(start, tmp_path):
    body = f"{NUMBER}print('here', os.environ['SHOAL_MACHINE'])\nif number == 2: mark('end')\nwait_for('end')"
    answers = []
    asking = threading.Thread(target=lambda: answers.append(ask_launcher(tmp_path.name, 3)))
    options = RunOptions(run_id=tmp_path.name)
    done = start(body, 2, Actors(["a", "b"], ["c"]), {"here 0": asking.start}, options=options)
    asking.join()
    assert done.outcome.exit_code == 0, done.said
    assert [answer.what for answer in answers] == ["1 worker will join the 2 that are there"]
    assert done.out[2] == ["here 2"]


def test_a_worker_that_cannot_be_started_takes_no_others_with_it(start, tmp_path):
    """The folder of the program has gone since the others were started there."""
    folder = tmp_path / "program's"
    folder.mkdir()
    body = f"{NUMBER}tell(phase='training')\nprint('here')\nwait_for('end')\nprint('done')"

    def scale():
        folder.rmdir()
        ask_launcher(tmp_path.name, 3)

    def end():
        (tmp_path / "end").touch()

    asking = threading.Thread(target=scale)
    options = RunOptions(run_id=tmp_path.name)
    hosts = Children("a", 3, cwd=str(folder))
    done = start(body, 2, hosts, {"here": asking.start, "cannot start worker 2": end}, options=options)
    asking.join()
    assert any("cannot start worker 2. On a: There is no folder" in line for line in done.said), done.said
    assert [done.out[number] for number in (0, 1)] == [["here", "done"]] * 2


@pytest.mark.parametrize(("size", "most"), [(5, 4), (1, 4)])
def test_a_run_keeps_its_limits(start, tmp_path, size, most):
    answers = []

    def scale():
        answers.append(ask_launcher(tmp_path.name, size))
        (tmp_path / "end").touch()

    asking = threading.Thread(target=scale)
    options = RunOptions(run_id=tmp_path.name)
    when = {"here": asking.start}
    start("print('here')\nwait_for('end')", 2, None, when, max_workers=most, min_workers=2, options=options)
    asking.join()
    assert not answers[0].is_done
    assert "between --min-np 2 and --max-np 4" in answers[0].what


def test_a_run_whose_name_another_one_has_trains_and_cannot_be_scaled(start, tmp_path):
    with socket.socket(socket.AF_UNIX) as taken:
        taken.bind(own_socket_address(f"scale {tmp_path.name}"))
        done = start("print('here')", 1, None, options=RunOptions(run_id=tmp_path.name))
    assert done.outcome.exit_code == 0
    assert done.said == []
    gc.collect()  # a socket that was left open is an error


def test_who_asks_for_a_run_that_is_not_there_is_told_so():
    with pytest.raises(UsageError, match="No launcher of a run nobody"):
        ask_launcher("nobody", 3)


@pytest.mark.parametrize("ending", ["leaves", "killed"])
def test_a_machine_joins_by_itself_and_its_workers_leave_with_it(start, tmp_path, shoal_run, ending):
    name, joiners = tmp_path.name, []
    body = f"{NUMBER}print('here', number, flush=True)\nwait_for('end')"

    def end_joiner():
        joiners[0].send_signal(signal.SIGINT if ending == "leaves" else signal.SIGKILL)

    when = {
        "here 0": lambda: joiners.append(shoal_run("--join", name, "-np", 2)),
        "here 2": end_joiner,
        "leaves the run" if ending == "leaves" else "is lost with": (tmp_path / "end").touch,
    }
    done = start(body, 1, None, when, options=RunOptions(run_id=name))
    out, complaint = joiners[0].communicate(timeout=20)
    host = socket.gethostname()
    assert done.outcome.exit_code == 0, done.said
    assert f"{host} has joined with 2 slots" in done.said, complaint
    assert f"workers 1, 2 will join on {host}" in done.said
    if ending == "leaves":
        assert joiners[0].returncode == 0, complaint
        assert "has left the run, or the run is over" in out + complaint


def test_who_has_another_secret_does_not_join(tmp_path):
    port = JoinPort(SwarmSecret.parse("s" * 40))
    address = port.open()
    try:
        with pytest.raises(PeerError):
            join_run(Address("127.0.0.1", address.port), SwarmSecret.parse("t" * 40), 1)
        assert list(port.take()) == []
    finally:
        port.close()


def test_without_a_secret_only_this_machine_reaches_the_port():
    port = JoinPort()
    try:
        assert port.open().host == "127.0.0.1"
        assert port.secret_text
    finally:
        port.close()
