"""Every command and every Python block of README.md and docs/*.md runs in a test, or says why it cannot here.

A block is fenced: `python`, or commands (no language, `shoal`, `bash`, `console`). Others, as `text`, are
neither. Each command line and each Python block has a decision below, the first that fits: it is run here
with small sizes, another test runs it, or there is a reason. What nobody has decided fails.
"""

import os
import re
import shlex
import subprocess
import textwrap
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import shoal
from examples.test_coming_from import (
    FEW_BLOCKS,
    FEW_CLIENTS,
    FEW_SWEEPS,
    FEW_UPDATES,
    as_process,
    parsed,
)
from shoal.data import digits
from shoal.group import SoloGroup

ROOT = Path(__file__).parents[2]
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")), ROOT / "examples" / "gpt" / "README.md")
COMMANDS = ("", "shoal", "bash", "console")
LIMIT_S = 280


@dataclass(frozen=True)
class Run:
    """A command that is run here: words are left out of it by a pattern, and others added."""

    more: str = ""
    without: str = ""
    exit_codes: tuple[int, ...] = (0,)


@dataclass(frozen=True)
class Here:
    """Python that is run here, with some texts replaced; `is_inside` what runs in a loop of asyncio."""

    replaced: tuple[tuple[str, str], ...] = ()
    is_inside: bool = False


@dataclass(frozen=True)
class Elsewhere:
    """Another test runs it: `file.py::test`, below tests/."""

    by: str


@dataclass(frozen=True)
class NotHere:
    """It cannot be run on one machine, in minutes, offline; flags of `shoal` are read in any case."""

    reason: str


@dataclass(frozen=True)
class Item:
    """A command line, or a Python block."""

    page: str
    line: int
    text: str
    is_python: bool

    def __str__(self):
        return f"{self.page}:{self.line}"


def items_of(path):
    """What the fenced blocks of a page have."""
    page, text = path.relative_to(ROOT).as_posix(), path.read_text()
    for block in re.finditer(r"^( *)```([\w-]*)\n(.*?)^ *```$", text, re.DOTALL | re.MULTILINE):
        line, language, content = text[: block.start()].count("\n") + 2, block[2], block[3]
        if language == "python":
            yield Item(page, line, content, True)
        elif language in COMMANDS:
            lines = content.replace("\\\n", "  ").splitlines()
            is_session = any(each.startswith("$ ") for each in lines)
            for number, each in enumerate(lines):
                if each.strip() and (each.startswith("$ ") or not is_session):
                    command = re.sub(r"\s{2,}(#|on node).*$", "", each.strip().removeprefix("$ "))
                    yield Item(page, line + number, command, False)


ITEMS = [item for page in PAGES for item in items_of(page)]

OTHER_MACHINES = NotHere("needs other machines; tests/cluster has the like in network namespaces")
INSTALLS = NotHere("downloads packages; tools/packaging_checks.py installs what `pip install` would")
MAKES = NotHere(
    "a target of the Makefile that installs, or runs all tests; tests/test_package.py looks for it"
)
OTHERS = NotHere("the command of another system, to compare with")
LONG = NotHere("hours; docs/convergence.md has what it measured, and the short form runs")
GPUS = NotHere("needs a GPU; `make test-gpu` has the like")
RAY = Elsewhere("cluster/test_ray.py::test_a_killed_worker_is_done_without")
CONTESTS = "--task quadratic --workers 2 --steps 4 --seeds 1 --lr 0.1 --profile ideal"
SHORT_CONTEST = Run(
    CONTESTS, r"--task \S+|--workers \S+|--profile \S+|--target-accuracy \S+|--stragglers \S+"
)
QUICK = Run("--epochs 1")
TINY_GPT = Run(
    "--steps 4 --eval-every 2 --layers 1 --heads 2 --width 16 --block 16 --batch-size 4 --eval-batches 2",
    r"--(?:steps|layers|heads|width|block|batch-size) \d+|--compile|--track \S+",
)
PAGE_OF_DHT = Elsewhere("cli/test_dht.py::test_two_peers_keep_a_record_though_one_is_killed")
PAGE_OF_SERVE = Elsewhere("cli/test_serve.py::test_a_process_serves_until_it_is_told_to_end")
IN_A_SWARM = (("192.168.1.7:31337", "ADDRESS"), (', secret_file="run.secret"', ""), ("4096", "32"))

DECISIONS = [
    # page, what the item begins with, decision
    ("README.md", r"python3 -m venv|\. \.venv|pip install", INSTALLS),
    ("README.md", r"make ", MAKES),
    (
        "README.md",
        r"shoal run -np 2 --strategy neighbor examples",
        Elsewhere("examples/test_train_digits.py::test_under_shoal_run"),
    ),
    ("README.md", r"shoal run -np 8 -H", OTHER_MACHINES),
    ("docs/index.md", r"python3 -m venv|\. \.venv|pip install", INSTALLS),
    (
        "docs/index.md",
        r"import torch",
        Elsewhere("test_documentation.py::test_the_five_lines_of_the_first_page_train"),
    ),
    (
        "docs/index.md",
        r"python train|shoal run -np 3",
        Elsewhere("test_documentation.py::test_the_commands_of_the_first_page_run_its_program"),
    ),
    ("docs/training.md", r"make |\. \.venv", MAKES),
    (
        "docs/(training|index).md",
        r"shoal doctor",
        Elsewhere("cli/test_doctor.py::test_the_real_checks_take_a_few_seconds_at_most_and_import_no_torch"),
    ),
    (
        "docs/training.md",
        r"python examples/train_digits",
        Elsewhere("examples/test_train_digits.py::test_alone"),
    ),
    (
        "docs/training.md",
        r"torchrun --nproc-per-node 2",
        Elsewhere("examples/test_train_digits.py::test_under_torchrun"),
    ),
    ("docs/training.md", r"shoal run -np 2 (--strategy \w+ --topology ring )?examples", QUICK),
    (
        "docs/training.md",
        r".*--track tensorboard",
        Elsewhere(
            "integrations/test_trackers.py::test_tensorboard_reads_all_steps_of_four_workers_as_one_run"
        ),
    ),
    (
        "docs/training.md",
        r"tensorboard --logdir",
        NotHere("a page that is served until Ctrl-C, for a browser"),
    ),
    ("docs/training.md", r"shoal run -np 4 --checkpoint", Run("", r"-np 4")),
    ("docs/several-machines.md", r"shoal run -np 4 --workers-per-machine", QUICK),
    ("docs/training.md", r"shoal run -np 2 --num-servers 1", QUICK),
    ("docs/.*", r"shoal run .*(-H|--hostfile) ", OTHER_MACHINES),
    ("docs/slurm.md", r"sbatch ", Elsewhere("launch/test_slurm.py::test_the_script_trains_and_ends_0")),
    (
        "docs/slurm.md",
        r"scontrol requeue",
        Elsewhere("launch/test_slurm.py::test_a_killed_task_is_requeued_and_resumes"),
    ),
    ("docs/.*", r"torchrun --nnodes|srun |MASTER_ADDR=|export TORCH", OTHER_MACHINES),
    ("docs/.*", r"shoal run --engine ray", RAY),
    ("docs/elastic.md", r"shoal run --elastic -np 4 train", Run("", "-np 4")),
    (
        "docs/elastic.md",
        r"shoal scale",
        Elsewhere("launch/test_growing_runs.py::test_a_run_is_scaled_from_two_to_six_to_three"),
    ),
    (
        "docs/elastic.md",
        r"shoal run --join",
        Elsewhere("cluster/test_growing.py::test_a_machine_joins_by_itself_and_leaves"),
    ),
    ("docs/training.md", r"(?s).", Elsewhere("examples/test_docs.py::test_the_code_runs")),
    ("docs/elastic.md", r"with strategy", Elsewhere("examples/test_docs.py::test_the_code_runs")),
    ("docs/strategies.md", r".", Elsewhere("examples/test_docs.py::test_the_code_about_strategies_runs")),
    ("docs/write-a-strategy.md", r"shoal ", Elsewhere("examples/test_my_strategy.py::test_commands_run")),
    ("docs/write-a-strategy.md", r".", Elsewhere("examples/test_my_strategy.py::test_the_code_runs")),
    (
        "docs/integrations.md",
        r"shoal run --env torchrun",
        Elsewhere("strategies/test_fsdp.py::test_a_machine_that_counts_as_two_does_so_too"),
    ),
    ("docs/integrations.md", r"device = ", Here()),
    ("docs/topologies.md", r".", Here()),
    (
        "docs/networks.md",
        r"(?s).*SocketNetwork",
        Here((("        ...", "        return network"),), is_inside=True),
    ),
    ("docs/networks.md", r"(?s).*MemoryNetwork", Here(is_inside=True)),
    ("docs/networks.md", r"(?s).*LoopThread", Elsewhere("test_package.py::test_the_example_of_calls_runs")),
    ("docs/networks.md", r"(?s).*async def join", Here()),
    ("docs/dht.md", r"shoal bench dht --virtual", Run("--num-peers 16 --num-keys 32", r"--num-peers \d+")),
    ("docs/dht.md", r"shoal bench dht --mode keys", Run("--num-peers 16 --num-keys 32", r"--num-\w+ \d+")),
    (
        "docs/dht.md",
        r"shoal bench dht",
        Run("--num-peers 16 --num-experts 16", r"--num-\w+ \d+|--expert-batch-size \d+"),
    ),
    ("docs/dht.md", r"shoal keys", Run()),
    ("docs/dht.md", r"shoal status", Elsewhere("cli/test_status.py::test_who_is_there_and_what_they_hold")),
    ("docs/dht.md", r"shoal doctor", Elsewhere("cli/test_doctor.py::test_serve_and_join_with_a_secret")),
    ("docs/dht.md", r"shoal dht", PAGE_OF_DHT),
    ("docs/dht.md", r".", Elsewhere("dht/test_blocking.py::test_the_guides_examples_run")),
    (
        "docs/experts.md",
        r"shoal bench experts",
        Run(FEW_CLIENTS, r"--device cuda|--precision tf32|--num-clients \d+|--batch-size \d+"),
    ),
    ("docs/experts.md", r"shoal dht", PAGE_OF_DHT),
    ("docs/experts.md", r"shoal serve", PAGE_OF_SERVE),
    ("docs/experts.md", r".", Elsewhere("experts/test_docs.py::test_the_code_runs")),
    ("docs/security.md", r"shoal \.\.\.", NotHere("stands for any command with this flag")),
    ("docs/security.md", r"shoal keys", Run()),
    ("docs/swarm.md", r"shoal keys", Run()),
    (
        "docs/swarm.md",
        r"python examples/train_in_a_swarm",
        Elsewhere("examples/test_train_in_a_swarm.py::test_two_shells"),
    ),
    ("docs/swarm.md", r"shoal run -np 4", Run("", "-np 4")),
    (
        "docs/swarm.md",
        r"shoal run --strategy swarm --option join",
        Elsewhere("examples/test_gpt.py::test_two_shells_are_a_swarm"),
    ),
    ("docs/swarm.md", r"shoal swarm", Elsewhere("cli/test_swarm.py::test_a_run_as_its_member_tells_it")),
    ("docs/swarm.md", r"swarm = ", Here(IN_A_SWARM)),
    (
        "docs/swarm.md",
        r"import sys|python member",
        Elsewhere("examples/test_train_in_a_swarm.py::test_the_program_of_the_page_in_two_shells"),
    ),
    (
        "docs/swarm.md",
        r"strategy = shoal.SwarmTraining",
        Elsewhere("strategies/test_swarm_training.py::test_local_steps_average_what_members_have_learned"),
    ),
    ("docs/coming-from.md", r"dht = hivemind", OTHERS),
    (
        "docs/coming-from.md",
        r"swarm = shoal",
        Here((("HOST:31337", "ADDRESS"), *IN_A_SWARM[1:], ("    ...", "    pass"))),
    ),
    (
        "docs/coming-from.md",
        r"shoal |python examples/gate",
        Elsewhere("examples/test_coming_from.py::test_it_runs"),
    ),
    ("docs/coming-from.md", r".", OTHERS),
    (
        "docs/compare.md",
        r"shoal compare --workers 4 --faults",
        Elsewhere("cli/test_compare.py::test_every_command_of_the_page_is_understood"),
    ),
    (
        "docs/compare.md",
        r"shoal report",
        Elsewhere("cli/test_report.py::test_figures_are_printed_and_the_page_is_written_beside_the_report"),
    ),
    (
        "docs/compare.md",
        r"import torch|shoal compare --task waves",
        Elsewhere(
            "bench/test_compare_from_python.py::test_the_task_of_the_page_is_compared_with_a_model_of_ones_own"
        ),
    ),
    ("docs/compare.md", r"shoal compare", SHORT_CONTEST),
    (
        "docs/convergence.md",
        r"shoal bench convergence (--short|.*--steps 8192)",
        Run(FEW_UPDATES, r"--(?:num-\w+|layer-dim|steps) \d+"),
    ),
    ("docs/convergence.md", r"shoal bench convergence", LONG),
    (
        "docs/convergence.md",
        r"shoal report",
        Elsewhere("cli/test_report.py::test_several_reports_go_on_one_page"),
    ),
    ("docs/benchmarks.md", r".*--device cuda", GPUS),
    ("docs/benchmarks.md", r"shoal bench .*-H ", OTHER_MACHINES),
    (
        "docs/benchmarks.md",
        r"shoal bench training .*--against",
        Elsewhere("bench/test_against.py::test_a_revision_is_checked_out_and_removed_again"),
    ),
    ("docs/benchmarks.md", r"shoal bench training", Run(FEW_BLOCKS, r"--model \S+|--slow-worker \S+")),
    (
        "docs/benchmarks.md",
        r"shoal bench accuracy",
        Run("--np 2 --task digits --seeds 1 --steps 4 --eval-every 2", r"--np \d+"),
    ),
    ("docs/benchmarks.md", r"shoal bench ddp", Run(FEW_SWEEPS, r"--model \S+|--starts \d+")),
    (
        "docs/benchmarks.md",
        r"shoal bench collectives",
        Run("--sizes 64KB --repeats 2 --short", r"--repeats \d+"),
    ),
    (
        "docs/benchmarks.md",
        r"shoal bench swarm",
        Run("--peers 3 --size 1MB --kills 1 --stops 0", r"--\w+ \S+"),
    ),
    ("docs/benchmarks.md", r"shoal diff", Elsewhere("examples/test_coming_from.py::test_it_runs")),
    (
        "docs/benchmarks.md",
        r"shoal report",
        Elsewhere("cli/test_report.py::test_figures_are_printed_and_the_page_is_written_beside_the_report"),
    ),
    (
        "docs/benchmarks.md",
        r"shoal top",
        Elsewhere("cli/test_top_web.py::test_it_is_served_until_it_is_ended"),
    ),
    ("examples/gpt/README.md", r"shoal run -np 4|shoal run .*neighbor", TINY_GPT),
    (
        "examples/gpt/README.md",
        r"shoal run -np 1",
        Elsewhere("examples/test_gpt.py::test_two_shells_are_a_swarm"),
    ),
    (
        "examples/gpt/README.md",
        r"shoal run .*diloco",
        Elsewhere("examples/test_gpt.py::test_two_workers_learn_under_any_strategy"),
    ),
    (
        "examples/gpt/README.md",
        r"shoal run .*swarm",
        Elsewhere("examples/test_gpt.py::test_two_workers_learn_under_any_strategy"),
    ),
    (
        "examples/gpt/README.md",
        r"python .*--resume",
        Elsewhere(
            "examples/test_gpt.py::test_a_run_that_was_resumed_ends_as_one_that_was_not_and_samples_are_written"
        ),
    ),
    (
        "examples/gpt/README.md",
        r"python .*sample.py",
        Elsewhere(
            "examples/test_gpt.py::test_a_run_that_was_resumed_ends_as_one_that_was_not_and_samples_are_written"
        ),
    ),
    (
        "examples/gpt/README.md",
        r"python .*virtual.py",
        Elsewhere(
            "examples/test_gpt.py::test_in_virtual_time_strategies_are_compared_on_a_network_that_is_not_here"
        ),
    ),
    ("examples/gpt/README.md", r".", TINY_GPT),
]


def decision_of(item):
    """The first that fits; None where nobody has decided."""
    for page, begins, decision in DECISIONS:
        if re.fullmatch(page, item.page) and re.match(begins, item.text):
            return decision
    return None


DECIDED = [(item, decision_of(item)) for item in ITEMS]


def of_kind(kind):
    """Those with such a decision; slow where processes or peers take part."""
    return [
        pytest.param(item, decision, id=str(item), marks=[pytest.mark.slow] * ("ADDRESS" in str(decision)))
        for item, decision in DECIDED
        if isinstance(decision, kind)
    ]


def test_every_block_has_a_decision(capsys):
    counts = Counter(
        ("Python blocks" if item.is_python else "commands", type(decision).__name__)
        for item, decision in DECIDED
    )
    with capsys.disabled():
        print()
        for (what, kind), count in sorted(counts.items()):
            print(f"{count:4} {what}: {WORDS.get(kind, kind)}")
    undecided = [f"{item}: {item.text.splitlines()[0]}" for item, decision in DECIDED if decision is None]
    assert undecided == []
    assert all(
        isinstance(decision, (Run, Elsewhere, NotHere)) for item, decision in DECIDED if not item.is_python
    )
    assert not any(isinstance(decision, Run) for item, decision in DECIDED if item.is_python)


WORDS = {
    "Run": "run by this file",
    "Here": "run by this file",
    "Elsewhere": "run by another test",
    "NotHere": "cannot be run here",
}


def test_every_decision_is_about_a_block():
    idle = [
        (page, begins)
        for page, begins, decision in DECISIONS
        if not any(
            re.fullmatch(page, item.page) and re.match(begins, item.text) and found is decision
            for item, found in DECIDED
        )
    ]
    assert idle == []


def test_tests_that_are_named_are_there():
    for decision in {decision for _, decision in DECIDED if isinstance(decision, Elsewhere)}:
        path, _, name = decision.by.partition("::")
        assert f"\ndef {name}(" in (ROOT / "tests" / path).read_text(), decision.by


@pytest.mark.parametrize(
    "item",
    [
        pytest.param(item, id=str(item))
        for item in ITEMS
        if item.text.startswith("shoal ") and "..." not in item.text
    ],
)
def test_its_flags_are_those_of_the_program(item):
    assert parsed(shlex.split(item.text, comments=True)[1:]).params


PROGRAM = """
import torch, shoal
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = torch.utils.data.TensorDataset(torch.randn(32, 4))
group = shoal.init()
strategy = shoal.from_args(group)
loader = shoal.shard(torch.utils.data.DataLoader(data, batch_size=4), group)
with strategy.attach(model, optimizer):
    for epoch in range(loader.epoch, 2):
        for (x,) in loader:
            optimizer.zero_grad()
            model(x).square().mean().backward()
            optimizer.step()
"""
"""What pages call train.py: a program of the reader's."""


@pytest.mark.slow
@pytest.mark.timeout(LIMIT_S + 20)
@pytest.mark.parametrize(("item", "decision"), of_kind(Run))
def test_the_command_runs(item, decision, tmp_path):
    (tmp_path / "train.py").write_text(PROGRAM)
    words = shlex.split(re.sub(decision.without, "", item.text) if decision.without else item.text)
    words += shlex.split(decision.more)
    if words[:2] == ["shoal", "run"] and "-np" not in words:
        words[2:2] = ["-np", "2"]
    words = [str(ROOT / word) if word.startswith("examples/") else word for word in as_process(words)]
    environ = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "XDG_CONFIG_HOME": str(tmp_path),
        "XDG_STATE_HOME": str(tmp_path),
    }
    done = subprocess.run(
        words, cwd=tmp_path, env=environ, capture_output=True, text=True, check=False, timeout=LIMIT_S
    )
    assert done.returncode in decision.exit_codes, done.stdout + done.stderr


@pytest.mark.parametrize(("item", "decision"), of_kind(Here))
def test_the_python_block_runs(item, decision, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "faults.toml").write_text('[[fault]]\nkind = "kill"\npeers = ["rank:3"]\nat_s = 2.0\n')
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 10))
    names = {
        "torch": torch,
        "shoal": shoal,
        "group": SoloGroup(),
        "model": model,
        "optimizer": torch.optim.SGD(model.parameters(), lr=0.1),
        "loss_fn": nn.CrossEntropyLoss(),
        "loader": DataLoader(TensorDataset(*digits(train=False)), batch_size=36),
    }
    code = item.text
    for before, after in decision.replaced:
        assert before in code
        code = code.replace(before, after)
    if decision.is_inside:
        code = f"import asyncio\nasync def block():\n{textwrap.indent(code, '    ')}\nasyncio.run(block())"
    if "ADDRESS" not in code:
        exec(compile(code, str(item), "exec"), names)
        return
    with shoal.connect(listen="127.0.0.1:0") as first:
        exec(compile(code.replace("ADDRESS", str(first.address)), str(item), "exec"), names)
