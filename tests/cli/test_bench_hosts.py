import pytest
import typer
from typer.testing import CliRunner

from shoal.cli.bench_hosts import is_on_hosts, launched_size, mates_of, where_of, with_hosts, workers_of
from shoal.core import UsageError


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def launched(monkeypatch):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "3")


def test_alone_the_flag_counts_then_the_slots_of_the_hosts_then_the_default():
    assert launched_size() is None
    assert workers_of(5, {"hosts": "10.9.9.9:4"}, 2) == 5
    assert workers_of(None, {"hosts": "10.9.9.9:4,10.9.9.8:3"}, 2) == 7
    assert workers_of(None, {}, 2) == 2


@pytest.mark.usefixtures("launched")
def test_a_launcher_has_decided_how_many_there_are():
    assert launched_size() == 3
    assert workers_of(None, {}, 2) == 3
    assert workers_of(3, {}, 2) == 3
    with pytest.raises(UsageError, match="--np 4 is not the 3 processes"):
        workers_of(4, {}, 2)


def test_this_machine_alone_needs_no_ssh():
    assert where_of({}, 2) is None
    assert where_of({"hosts": "localhost:2"}, 2) is None


def test_hosts_with_too_few_slots_are_refused_before_anything_starts():
    with pytest.raises(UsageError, match="4 workers need more than the 2 slots"):
        where_of({"hosts": "10.9.9.9:2"}, 4)


@pytest.mark.usefixtures("launched")
def test_ranks_do_not_start_other_ranks():
    with pytest.raises(UsageError, match="leave -H out"):
        where_of({"hosts": "10.9.9.9:4"}, 3)


def test_a_machine_has_as_many_workers_as_its_slots_or_its_launcher_say(monkeypatch):
    assert mates_of({}) is None
    assert mates_of({"hosts": "localhost:4"}) is None
    assert mates_of({"hosts": "10.9.9.9:4,10.9.9.8:4"}) == 4
    for name, value in {"RANK": 1, "WORLD_SIZE": 4, "LOCAL_RANK": 1, "LOCAL_WORLD_SIZE": 2}.items():
        monkeypatch.setenv(name, str(value))
    assert mates_of({}) == 2


def test_flags_for_hosts_are_in_the_context_and_no_arguments():
    app = typer.Typer()
    seen = {}

    @app.command()
    @with_hosts(before="seed")
    def measure(context: typer.Context, size: int = 2, seed: int = 0) -> None:
        """Measure."""
        seen.update(context.params, arguments=(size, seed), is_elsewhere=is_on_hosts(context.params))

    runner = CliRunner()
    assert runner.invoke(app, ["-H", "far:2", "--size", "3", "--ssh-option", "A=b"]).exit_code == 0
    assert (seen["arguments"], seen["hosts"], seen["ssh_option"]) == ((3, 0), "far:2", ["A=b"])
    assert seen["is_elsewhere"]
    assert [name for name in seen if name in ("size", "hosts", "seed")] == ["hosts", "size", "seed"]
    assert runner.invoke(app, []).exit_code == 0
    assert not seen["is_elsewhere"]
