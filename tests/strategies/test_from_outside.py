"""A strategy of another package is found, checked, run and measured like one of Shoal's own."""

import json
import os
import shlex
import subprocess
import sys
import textwrap

import pytest

from shoal.bench.compare import compared
from shoal.bench.contenders import is_free_running, needs_servers, options_of
from shoal.cli.run import check_choice
from shoal.core import UsageError
from shoal.group.solo import SoloGroup
from shoal.strategies import BUILT_IN, all_strategies, canonical, find, load_class, make_strategy

RULES = """
    from shoal.strategies import NeighborAverage
    from shoal.strategies.options import NeighborOptions

    class KelpOptions(NeighborOptions, frozen=True, kw_only=True, forbid_unknown_fields=True):
        fronds: int = 3

    class Kelp(NeighborAverage):
        '''Averages parameters among kelp.

        It does nothing else.
        '''

        name = "kelp"
        survives_loss = True
        Options = KelpOptions

    class Sand:
        pass
"""
KELP = "shoal_test_reef.rules:Kelp"


@pytest.fixture
def reef(tmp_path, monkeypatch):
    """A folder on the path that holds a package with a strategy."""
    package = tmp_path / "shoal_test_reef"
    package.mkdir()
    (package / "__init__.py").touch()
    (package / "rules.py").write_text(textwrap.dedent(RULES))
    (package / "broken.py").write_text("import shoal_test_sponge\n")
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    for name in [name for name in sys.modules if name.startswith("shoal_test_reef")]:
        del sys.modules[name]


@pytest.fixture
def installed(reef):
    """What pip would have written for a package with an entry point."""
    metadata = reef / "shoal_test_reef-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: shoal-test-reef\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(f"[shoal.strategies]\nGiant_Kelp = {KELP}\nddp = {KELP}\n")
    return reef


def test_a_class_is_found_by_module_and_name(reef):
    row, implied = find(KELP)
    assert (row.name, row.location, implied) == (KELP, KELP, {})
    assert row.summary == "Averages parameters among kelp."
    assert row.survives_loss
    assert not row.needs_servers
    strategy = make_strategy(SoloGroup(), KELP, fronds="5")
    assert (strategy.name, strategy.options.fronds) == ("kelp", 5)
    with pytest.raises(UsageError, match="kelp has no option 'bucket_mib'"):
        make_strategy(SoloGroup(), KELP, bucket_mib=1)


def test_a_class_is_found_by_its_file(reef, monkeypatch):
    monkeypatch.chdir(reef)
    name = "shoal_test_reef/rules.py:Kelp"
    row = find(name)[0]
    assert (row.name, load_class(row).name) == (name, "kelp")
    assert load_class(find(name)[0]) is load_class(row), "the file is run once"
    assert canonical(f"{reef}/{name}") == f"{reef}/{name}"
    (kelp,) = compared([name], {"local_steps": "2"})
    assert kelp.strategy == name


def test_a_file_that_fails_is_run_again(tmp_path):
    path = tmp_path / "shoal_test_urchin.py"
    path.write_text("raise RuntimeError('spines')")
    for _ in range(2):
        with pytest.raises(RuntimeError, match="spines"):
            find(f"{path}:Urchin")


def test_ours_is_the_same_by_module_and_class():
    assert find("shoal.strategies.diloco:DiLoCo") == (BUILT_IN["diloco"], {})


def test_an_installed_package_adds_names(installed):
    assert find("giant_kelp")[0].location == KELP
    assert canonical("Giant-Kelp") == "giant-kelp"
    assert [row.name for row in all_strategies()] == [*BUILT_IN, "giant-kelp"]
    assert load_class(find("ddp")[0]).name == "ddp", "a name of ours stays ours"
    with pytest.raises(UsageError, match=r"Did you mean 'giant-kelp'\?"):
        find("giant-kelb")


@pytest.mark.parametrize(
    ("name", "what"),
    [
        ("dilocco", "Did you mean 'diloco'"),
        ("shoal_test_reef.rules:", "does not name a class"),
        ("./rules.py:Kelp", r"no file '\./rules\.py'"),
        ("./rules:Kelp", r"does not name a class[\s\S]*file\.py:Class"),
        ("shoal_test_reef.rule:Kelp", "no module 'shoal_test_reef.rule'"),
        ("shoal_test_atoll.rules:Kelp", r"no module 'shoal_test_atoll'[\s\S]*PYTHONPATH"),
        ("shoal_test_reef.rules:Help", r"has no 'Help'[\s\S]*Did you mean 'Kelp'"),
        ("shoal_test_reef.rules:Sand", r"is no strategy[\s\S]*shoal\.Strategy"),
        ("shoal.strategies:Strategy", "has no name"),
    ],
)
def test_what_is_none_is_told_with_what_to_do_next(reef, name, what):
    with pytest.raises(UsageError, match=what):
        find(name)


def test_what_a_module_itself_cannot_import_is_its_own_error(reef):
    with pytest.raises(ModuleNotFoundError, match="shoal_test_sponge"):
        find("shoal_test_reef.broken:Kelp")


def test_benchmarks_and_contests_take_it(reef):
    assert options_of([KELP, "sma"], {"fronds": "4", "alpha": "0.5"})[KELP]["fronds"] == 4
    assert not needs_servers(KELP)
    (kelp,) = compared([KELP], {"local_steps": "2"})
    assert (kelp.strategy, kelp.options["local_steps"]) == (KELP, 2)
    assert not is_free_running("shoal_test_atoll.rules:Kelp", {}), "of a report that comes from elsewhere"


def test_all_means_installed_ones_too(installed):
    assert [each.strategy for each in compared(["all"], {})][-1] == "giant-kelp"


def test_the_launcher_leaves_it_to_the_workers(reef):
    chosen = check_choice(KELP, {"fronds": 2}, 2, None)
    assert chosen == (KELP, {"fronds": 2})
    assert "shoal_test_reef.rules" not in sys.modules


def shoal(folder, words):
    """Run the program as it is installed: without the current folder on its path (-P)."""
    path = os.pathsep.join(entry for entry in sys.path if entry != str(folder))
    return subprocess.run(
        [sys.executable, "-P", "-m", "shoal", *shlex.split(words)],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        timeout=50,
        check=False,
    )


TRAIN = """
    import shoal, torch

    group = shoal.init()
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    strategy = shoal.from_args(group)
    with strategy.attach(model, optimizer):
        model(torch.ones(4, 2)).sum().backward()
        optimizer.step()
    print(strategy.name, type(strategy).__module__)
"""


def test_shoal_run_trains_with_it(reef):
    (reef / "train.py").write_text(textwrap.dedent(TRAIN))
    done = shoal(reef, f"run -np 2 --strategy {KELP} --option fronds=2 train.py")
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == [f"[{rank}] kelp shoal_test_reef.rules" for rank in (0, 1)]


def test_workers_refuse_an_option_that_it_lacks(reef):
    (reef / "train.py").write_text(textwrap.dedent(TRAIN))
    done = shoal(reef, f"run -np 1 --strategy {KELP} --option alpha=2 train.py")
    assert done.returncode == 1
    assert "kelp has no option 'alpha'" in done.stderr


def test_shoal_compare_compares_it(reef):
    words = "compare --task quadratic --workers 2 --seeds 1 --steps 4 --lr 0.1 --profile ideal"
    done = shoal(reef, f"{words} --strategies 'sma,{KELP} fronds=2' --report contest.json")
    assert done.returncode == 0, done.stdout + done.stderr
    contenders = json.loads((reef / "contest.json").read_text())["config"]["contenders"]
    assert [each["strategy"] for each in contenders] == ["sma", KELP]


def test_shoal_bench_measures_it(reef):
    words = "--no-ddp -np 2 --pairs 1 --block-seconds 0.05 --batch-size 2 --num-warmup-batches 1 --device cpu"
    done = shoal(reef, f"bench training {words} --strategies {KELP} --report speed.json")
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads((reef / "speed.json").read_text())["rows"]
    assert KELP in {row["key"].get("strategy") for row in rows}


def test_neither_the_registry_nor_the_help_of_run_imports_torch():
    code = """
import sys
from shoal.strategies.registry import BUILT_IN, find
assert all(find(alias)[0] is row for row in BUILT_IN.values() for alias in (row.name, *row.aliases))
from shoal.cli.program import run
assert run(["run", "--help"]) == 0
assert "torch" not in sys.modules
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=50, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "--strategy" in done.stdout
