import pytest

from shoal.core import Address, Placement, UsageError
from shoal.core.run_options import RunOptions

TORCHRUN = {
    "RANK": "5",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "4",
    "MASTER_ADDR": "node0",
    "MASTER_PORT": "29500",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
}
PMI = {"PMI_RANK": "2", "PMI_SIZE": "4", "MPI_LOCALRANKID": "0", "MPI_LOCALNRANKS": "2"}
SLURM = {
    "SLURM_PROCID": "9",
    "SLURM_NTASKS": "11",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "2",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_TASKS_PER_NODE": "4(x2),3",
}


def test_alone_without_any_launcher():
    assert Placement.from_environment({}) == Placement(0, 1, 0, 1, "alone", None)


def test_the_environment_is_the_process_own_by_default(monkeypatch):
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert Placement.from_environment().rank == 1


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        (TORCHRUN, Placement(5, 8, 1, 4, "torchrun", Address("node0", 29500))),
        (OPEN_MPI, Placement(3, 4, 1, 2, "Open MPI")),
        (PMI, Placement(2, 4, 0, 2, "MPICH or Intel MPI")),
        (SLURM, Placement(9, 11, 1, 3, "Slurm", machine=2)),
        (TORCHRUN | {"GROUP_RANK": "1"}, Placement(5, 8, 1, 4, "torchrun", Address("node0", 29500), 1)),
    ],
)
def test_each_launcher_is_understood(environ, expected):
    assert Placement.from_environment(environ) == expected


def test_the_innermost_launcher_counts():
    everything = SLURM | PMI | OPEN_MPI | TORCHRUN
    for own in (TORCHRUN, OPEN_MPI, PMI, SLURM):
        assert Placement.from_environment(everything).source == Placement.from_environment(own).source
        everything = {name: text for name, text in everything.items() if name not in own}


OWN = {f"SHOAL_{name}": text for name, text in TORCHRUN.items()} | {"SHOAL_RUN_ID": "a"}


@pytest.mark.parametrize("name", [None, "TORCHELASTIC_RUN_ID"])
def test_what_a_program_sets_itself_does_not_move_a_worker_of_shoal_run(name):
    placed = Placement.from_environment(
        OWN | {"RANK": "0", "WORLD_SIZE": "1"} | ({name: "a"} if name else {})
    )
    assert placed == Placement(5, 8, 1, 4, "shoal run", Address("node0", 29500))


def test_torchrun_inside_of_shoal_run_counts():
    inner = {"RANK": "1", "WORLD_SIZE": "2", "TORCHELASTIC_RUN_ID": "none"}
    assert Placement.from_environment(OWN | inner) == Placement(1, 2, 0, 1, "torchrun")


def test_rank_and_size_alone_mean_one_worker_a_machine():
    assert Placement.from_environment({"RANK": "3", "WORLD_SIZE": "4"}) == Placement(3, 4, 0, 1, "torchrun")


@pytest.mark.parametrize(("node", "count"), [("0", 4), ("1", 4), ("2", 3)])
def test_slurms_list_of_counts_is_read_at_this_machines_place(node, count):
    assert Placement.from_environment(SLURM | {"SLURM_NODEID": node}).local_size == count


def test_slurms_one_count_for_all_machines_needs_no_place():
    environ = {name: text for name, text in SLURM.items() if name != "SLURM_NODEID"}
    assert Placement.from_environment(environ | {"SLURM_STEP_TASKS_PER_NODE": "5(x2)"}).local_size == 5


@pytest.mark.parametrize("node", [None, "3", "x"])
def test_a_machine_without_a_place_in_slurms_list_is_an_error(node):
    environ = {name: text for name, text in SLURM.items() if name != "SLURM_NODEID"}
    if node is not None:
        environ["SLURM_NODEID"] = node
    with pytest.raises(UsageError, match=r"4\(x2\),3 has no number for this machine"):
        Placement.from_environment(environ)


def test_the_steps_count_beats_the_jobs():
    environ = SLURM | {"SLURM_TASKS_PER_NODE": "11", "SLURM_NTASKS_PER_NODE": "7"}
    assert Placement.from_environment(environ).local_size == 3
    del environ["SLURM_STEP_TASKS_PER_NODE"]
    assert Placement.from_environment(environ).local_size == 11


def test_a_slurm_batch_script_is_no_worker():
    environ = {name: text for name, text in SLURM.items() if name != "SLURM_STEP_ID"}
    assert Placement.from_environment(environ).source == "alone"


@pytest.mark.parametrize(
    ("environ", "missing"),
    [
        ({"RANK": "0"}, "WORLD_SIZE"),
        ({"OMPI_COMM_WORLD_RANK": "0"}, "OMPI_COMM_WORLD_SIZE"),
        ({"PMI_RANK": "0"}, "PMI_SIZE"),
        ({"SLURM_PROCID": "0", "SLURM_STEP_ID": "0"}, "SLURM_NTASKS"),
    ],
)
def test_incomplete_variables_are_named(environ, missing):
    with pytest.raises(UsageError, match=f"is set but {missing} is not") as caught:
        Placement.from_environment(environ)
    assert f"set {missing} too" in str(caught.value)


@pytest.mark.parametrize("name", ["RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"])
@pytest.mark.parametrize("text", ["", "one", "-1", "1.5", "4(x", "4(x0)"])
def test_what_is_no_number_is_named(name, text):
    with pytest.raises(UsageError, match=f"{name}=.* is not a number"):
        Placement.from_environment(TORCHRUN | {name: text})


@pytest.mark.parametrize("name", ["RANK", "WORLD_SIZE", "LOCAL_RANK"])
def test_a_list_of_counts_is_no_rank(name):
    with pytest.raises(UsageError, match="is not a number"):
        Placement.from_environment(TORCHRUN | {name: "1,2"})


@pytest.mark.parametrize(
    "wrong",
    [
        {"RANK": "8"},
        {"WORLD_SIZE": "0"},
        {"LOCAL_RANK": "4"},
        {"LOCAL_WORLD_SIZE": "0"},
        {"LOCAL_WORLD_SIZE": "9"},
    ],
)
def test_variables_that_disagree_are_refused(wrong):
    with pytest.raises(UsageError, match="impossible") as caught:
        Placement.from_environment(TORCHRUN | wrong)
    assert "set by torchrun disagree" in str(caught.value)


def test_a_rendezvous_needs_a_host_and_a_port():
    assert Placement.from_environment(TORCHRUN | {"MASTER_ADDR": ""}).rendezvous is None
    with pytest.raises(UsageError, match="MASTER_PORT='x' is not a number"):
        Placement.from_environment(TORCHRUN | {"MASTER_PORT": "x"})
    with pytest.raises(UsageError, match="is no address"):
        Placement.from_environment(TORCHRUN | {"MASTER_PORT": "99999"})


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("gpu[003-005,9],login", "gpu003"),
        ("gpu[7]-ib", "gpu7-ib"),
        ("node1,node2", "node1"),
        ("rack-a.example.org", "rack-a.example.org"),
    ],
)
def test_slurm_says_where_to_meet(nodes, first):
    step = SLURM | {"SLURM_JOB_ID": "123456", "SLURM_STEP_NODELIST": nodes, "SLURM_JOB_NODELIST": "other"}
    met = Placement.from_environment(step).rendezvous
    assert met.host == first
    assert 15_000 <= met.port < 30_000
    another = Placement.from_environment(step | {"SLURM_STEP_ID": "1"}).rendezvous
    assert another.port != met.port, "two steps of a job may run at once on one machine"
    assert Placement.from_environment(step | {"MASTER_ADDR": "here"}).rendezvous == Address("here", met.port)
    both = step | {"MASTER_ADDR": "here", "MASTER_PORT": "29500"}
    assert Placement.from_environment(both).rendezvous == Address("here", 29500)


def test_slurm_without_a_list_of_machines():
    step = SLURM | {"SLURM_JOB_ID": "7"}
    assert Placement.from_environment(step).rendezvous is None
    launched = step | {"SLURM_LAUNCH_NODE_IPADDR": "10.0.0.4"}
    assert Placement.from_environment(launched).rendezvous.host == "10.0.0.4"


def test_other_launchers_name_the_checkpoint_by_variables():
    torchrun = {"RANK": "0", "WORLD_SIZE": "2", "SHOAL_CHECKPOINT": "/shared", "SHOAL_CHECKPOINT_EVERY": "50"}
    options = RunOptions.from_environment(torchrun)
    assert (options.checkpoint, options.checkpoint_every) == ("/shared", 50)
    own = RunOptions(run_id="r", checkpoint="/flag")
    environ = {**torchrun, **own.to_environment(), "SHOAL_RUN_ID": "r"}
    assert RunOptions.from_environment(environ).checkpoint == "/flag"
    with pytest.raises(UsageError, match="no number of steps"):
        RunOptions.from_environment({**torchrun, "SHOAL_CHECKPOINT_EVERY": "often"})
