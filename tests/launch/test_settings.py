import os

import pytest

from shoal.core import Placement, UsageError
from shoal.core.placement import PLACING_VARIABLES, num_cores
from shoal.core.run_options import RunOptions
from shoal.launch.settings import (
    LaunchSettings,
    Meeting,
    complete,
    free_port,
    variables_of_all,
    variables_of_one,
)


@pytest.fixture
def pipe():
    ends = os.pipe()
    yield ends
    for end in ends:
        os.close(end)


class Surroundings:
    """The environment of each worker of one run on this machine."""

    def __init__(self, settings):
        self._settings = settings
        self._shared = variables_of_all(settings, Meeting("127.0.0.1", free_port()))

    def of(self, rank, status_fd):
        own = variables_of_one(self._settings.env, rank, rank, self._settings.num_processes)
        return complete({**self._shared, **own}, status_fd)


INHERITED = {
    "RANK": "7",
    "WORLD_SIZE": "9",
    "MASTER_ADDR": "elsewhere",
    "TORCHELASTIC_USE_AGENT_STORE": "True",
    "OMPI_COMM_WORLD_RANK": "3",
    "SLURM_NTASKS": "8",
    "NODE_RANK": "1",
}
"""What a launcher around `shoal run` may have said to it."""


@pytest.mark.parametrize("env", ["shoal", "torchrun"])
def test_a_worker_finds_its_place_and_its_options(pipe, monkeypatch, env):
    for name, value in INHERITED.items():
        monkeypatch.setenv(name, value)
    choices = {"encrypt": "never", "all_reduce": "ring"}
    options = RunOptions(strategy="pair", options={"seed": 3}, patience=2.0, **choices)
    surroundings = Surroundings(LaunchSettings(("x",), 4, options, env=env))
    variables = surroundings.of(2, pipe[1])
    placement = Placement.from_environment(variables)
    assert (placement.rank, placement.size, placement.local_rank, placement.local_size) == (2, 4, 2, 4)
    assert (placement.source, placement.machine) == ("shoal run", 0)
    assert placement.rendezvous is not None
    assert "TORCHELASTIC_USE_AGENT_STORE" not in variables
    foreign = {*PLACING_VARIABLES} & {*variables}
    if env == "shoal":
        assert not foreign
    else:
        assert {"ROLE_RANK", "ROLE_WORLD_SIZE", "GROUP_RANK", "TORCHELASTIC_RUN_ID"} <= foreign
        assert (variables["RANK"], variables["WORLD_SIZE"], variables["LOCAL_RANK"]) == ("2", "4", "2")
        assert variables["MASTER_PORT"] == str(placement.rendezvous.port)
        assert variables["TORCHELASTIC_RUN_ID"] == variables["SHOAL_RUN_ID"]
    found = RunOptions.from_environment(variables)
    assert (found.strategy, found.options, found.patience) == ("pair", {"seed": 3}, 2.0)
    assert (found.encrypt, found.all_reduce) == ("never", "ring")
    assert found.status_fd == pipe[1]
    assert found.run_id == variables["SHOAL_RUN_ID"] != ""
    assert RunOptions.from_environment(surroundings.of(0, pipe[1])).run_id == found.run_id


def test_two_runs_share_neither_name_nor_port(pipe):
    first, second = (Surroundings(LaunchSettings(("x",), 1)).of(0, pipe[1]) for _ in range(2))
    assert first["SHOAL_RUN_ID"] != second["SHOAL_RUN_ID"]
    assert first["SHOAL_MASTER_PORT"] != second["SHOAL_MASTER_PORT"]


def test_a_variable_that_was_asked_for_stays(pipe):
    settings = LaunchSettings(("x",), 1, variables={"WORLD_SIZE": "3"})
    assert Surroundings(settings).of(0, pipe[1])["WORLD_SIZE"] == "3"


@pytest.mark.parametrize(
    ("num_threads", "inherited", "expected"),
    [(None, None, None), (None, "7", "7"), (3, "7", "3"), (3, None, "3")],
)
def test_threads_are_as_asked_then_as_set_then_a_share(pipe, monkeypatch, num_threads, inherited, expected):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if inherited is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", inherited)
    settings = LaunchSettings(("x",), 2, num_threads=num_threads)
    share = str(max(1, num_cores() // 2))
    assert Surroundings(settings).of(0, pipe[1])["OMP_NUM_THREADS"] == (expected or share)


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ({"num_workers": 0}, "0 workers"),
        ({"num_workers": 1, "num_threads": 0}, "0 threads"),
        ({"num_workers": 1, "timeout_s": 0.0}, "--timeout 0.0"),
        ({"num_workers": 1, "options": RunOptions(timeout_s=-1.0)}, "--peer-timeout -1.0"),
        ({"num_workers": 1, "options": RunOptions(patience=0.0)}, "--patience 0.0"),
    ],
)
def test_settings_that_cannot_be_are_refused(arguments, complaint):
    with pytest.raises(UsageError, match=complaint) as refused:
        LaunchSettings(("x",), **arguments)
    assert refused.value.next_step


def test_the_c_library_is_tuned_unless_the_user_has_done_so(monkeypatch, pipe):
    settings = LaunchSettings(("x.py",), num_workers=1)
    monkeypatch.delenv("GLIBC_TUNABLES", raising=False)
    assert "non_temporal_threshold" in Surroundings(settings).of(0, pipe[1])["GLIBC_TUNABLES"]
    monkeypatch.setenv("GLIBC_TUNABLES", "mine")
    assert Surroundings(settings).of(0, pipe[1])["GLIBC_TUNABLES"] == "mine"
