from shoal.bench.environment import Watch, describe_code, describe_machine


def test_the_machine_is_described_without_torch():
    machine = describe_machine()
    assert machine["cores"] >= 1
    assert machine["device"]
    assert machine["versions"]["torch"] == "2.13.0+cpu" or machine["versions"]["torch"]
    assert isinstance(machine["topology"], str)


def test_load_and_steal_are_seen_between_two_looks():
    watch = Watch()
    sum(range(2_000_000))  # some CPU time must pass between the looks
    state = watch.look()
    assert state["load_average"] >= 0
    assert 0 <= state.get("cpu_steal_percent", 0) <= 100


def test_code_is_named_by_version_and_commit(request):
    code = describe_code()
    assert code.version
    other = describe_code(request.config.rootpath / "src")
    assert other.version == code.version
    assert other.revision == code.revision
