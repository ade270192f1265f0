import contextlib
import json
import os
import sys

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from shoal.core import SYSTEM_CLOCK, ManualClock, UsageError, board
from shoal.core.fork import keep_in_children
from shoal.core.run_options import VARIABLE, RunOptions
from shoal.data import shard
from shoal.group import GroupStats, Metered
from shoal.group.solo import SoloGroup
from shoal.strategies import make_strategy
from shoal.strategies.status import StatusReporter
from strategies.fakes import Mirror


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setattr(board, "_MEMORY", tmp_path)  # other jobs of this user may run on the machine
    return tmp_path / "shoal"


class Pair(SoloGroup):
    """Says that it is one of two, what it has waited, and what it has moved."""

    def __init__(self):
        super().__init__()
        self.run, self.size, self.waits, self.traffic = "job", 2, [0.0, 0.0], (0, 0)
        self.by_rank = (), ()

    @property
    def stats(self):
        return GroupStats(*self.traffic, self.waits, *self.by_rank)


@pytest.fixture
def told(monkeypatch):
    """What the launcher of this process has been told since the last call."""
    reader, writer = os.pipe()
    os.set_blocking(reader, False)
    options = RunOptions(status_fd=writer, status_inode=os.fstat(writer).st_ino)
    monkeypatch.setenv(VARIABLE, options.to_environment()[VARIABLE])

    def told():
        with contextlib.suppress(BlockingIOError):
            return [json.loads(line) for line in os.read(reader, 1 << 16).splitlines()]
        return []

    yield told
    keep_in_children(writer)
    os.close(reader)
    os.close(writer)


def noted(clock):
    (sighting,) = board.look(clock)
    return sighting.note


def test_it_notes_once_a_second_what_has_happened_since(folder):
    clock, group = ManualClock(), Pair()
    reporter = StatusReporter(group, "neighbor", clock)
    reporter.opened(10)
    assert (noted(clock).step, noted(clock).steps_per_s, noted(clock).strategy) == (10, None, "neighbor")
    clock.advance(0.5)
    reporter.stepped(11)
    assert noted(clock).step == 10
    clock.advance(1.5)
    group.waits, group.traffic = [0.5, 1.0], (120, 7)
    reporter.log({"loss": torch.tensor(0.25, requires_grad=True) * 1, "name": "no number"})
    reporter.stepped(14)
    note = noted(clock)
    assert (note.step, note.steps_per_s, note.values) == (14, 2.0, {"loss": 0.25})
    assert (note.waited_s, note.wait_share, note.waits_for) == ({0: 0.5, 1: 1.0}, 0.75, 1)
    assert (note.sent_bytes, note.received_bytes) == (120, 7)
    assert (note.run, note.rank, note.size, note.role) == ("job", 0, 2, "worker")
    reporter.closed()
    assert board.look(clock) == []
    reporter.stepped(15)
    reporter.log({"loss": 1.0})


def test_it_notes_what_the_worker_does_between_steps_at_most_once_a_second(folder):
    clock, group, reporter = opened()
    assert noted(clock).phase == "starts"
    clock.advance(0.5)
    reporter.doing("evaluates")
    assert noted(clock).phase == "starts"
    clock.advance(0.5)
    reporter.doing("evaluates")
    reporter.stepped(1)
    assert (noted(clock).phase, noted(clock).step) == ("evaluates", 0)
    reporter.doing("saves", is_rare=True)
    assert noted(clock).phase == "saves"
    clock.advance(1)
    reporter.stepped(2)
    assert (noted(clock).phase, noted(clock).step) == ("", 2)
    clock.advance(1)
    (hear,) = group.on_wait
    hear(1)
    note = noted(clock)
    assert (note.phase, note.waits_for, note.wait_share, note.steps_per_s) == ("waits", 1, 1.0, 0.0)
    reporter.closed()
    assert group.on_wait == []


def test_bytes_are_noted_by_peer_those_of_the_most_alone(folder):
    clock, group, reporter = opened()
    group.by_rank = (0, 20, *range(100, 200)), (7, 0)
    clock.advance(1)
    reporter.stepped(1)
    note = noted(clock)
    assert note.received_from == {0: 7}
    assert len(note.sent_to) == 64
    assert min(note.sent_to.values()) == 136


def test_a_model_that_runs_outside_of_training_is_seen(folder, monkeypatch):
    monkeypatch.setattr(board, "NOTE_S", 0.0)
    group = Mirror()
    group.run = "job"
    model = torch.nn.Linear(2, 1)
    with make_strategy(group, "neighbor").attach(model, torch.optim.SGD(model.parameters(), lr=0.1)):
        model(torch.ones(1, 2))
        before = noted(SYSTEM_CLOCK).phase
        model.eval()(torch.ones(1, 2))
        after = noted(SYSTEM_CLOCK).phase
    assert (before, after) == ("starts", "evaluates")


def test_only_groups_of_a_run_note_anything_and_only_if_wanted(folder, monkeypatch):
    StatusReporter(SoloGroup(), "pair").opened(0)
    monkeypatch.setenv("SHOAL_TOP", "0")
    off = StatusReporter(Pair(), "pair")
    off.opened(0)
    assert not folder.exists()


def test_two_strategies_of_a_process_are_told_apart(folder):
    clock, group = ManualClock(), Pair()
    first, second = StatusReporter(group, "pair", clock), StatusReporter(Metered(group), "sma", clock)
    first.opened(0)
    second.opened(0)
    first.closed()
    first.opened(0)
    assert [(one.note.number, one.note.strategy) for one in board.look(clock)] == [(0, "pair"), (1, "sma")]
    assert Metered(group).run == "job"


def test_nothing_that_fails_here_reaches_the_training(folder, monkeypatch):
    clock, group = ManualClock(), Pair()
    reporter = StatusReporter(group, "pair", clock)
    reporter.opened(0)
    group.waits = None
    clock.advance(2)
    reporter.stepped(1)
    monkeypatch.setattr(board, "pin", lambda name: 1 / 0)
    StatusReporter(group, "pair", clock).opened(0)
    with pytest.raises(UsageError, match=r"loss has 3 elements"):
        reporter.log({"loss": torch.zeros(3)})


def test_an_attached_strategy_notes_its_steps_and_examples(folder, monkeypatch):
    monkeypatch.setattr(board, "NOTE_S", 0.0)
    group = SoloGroup()
    group.run = "job"
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    strategy = make_strategy(group, "all-reduce")
    loader = shard(DataLoader(TensorDataset(torch.ones(10, 2)), batch_size=4), group)
    with strategy.attach(model, optimizer):
        for (x,) in loader:
            loss = model(x).mean()
            strategy.log(loss=loss)
            loss.backward()
            optimizer.step()
        (sighting,) = board.look()
    assert (sighting.note.step, sighting.note.num_examples, sighting.note.strategy) == (3, 10, "all-reduce")
    assert sighting.note.values == {"loss": pytest.approx(loss.item())}
    assert sighting.state == "running"
    assert board.look() == []


@pytest.mark.parametrize(
    ("batch", "count"),
    [
        (torch.zeros(3, 2), 3),
        ([torch.zeros(5), torch.zeros(1)], 5),
        ({"x": (torch.zeros(2, 2), 1)}, 2),
        (torch.tensor(1.0), 1),
        ([], 1),
        ("text", 1),
    ],
)
def test_examples_are_counted_by_the_first_tensor(batch, count):
    from shoal.data.loader import _num_examples

    assert _num_examples(batch) == count


def opened(group=None):
    clock, group = ManualClock(), group or Pair()
    reporter = StatusReporter(group, "pair", clock)
    reporter.opened(0)
    return clock, group, reporter


def test_an_odd_value_is_left_out_and_the_rest_is_noted(folder):
    clock, _, reporter = opened()
    reporter.log({"loss": 1.0, "huge": 10**400, "unreal": torch.empty((), device="meta"), "\udcff": 2.0})
    clock.advance(1)
    reporter.stepped(5)
    assert noted(clock).values == {"loss": 1.0, "?": 2.0}
    assert noted(clock).steps_per_s == 5.0


def test_after_a_note_that_failed_rates_count_from_the_one_before(folder):
    clock, group, reporter = opened()
    group.waits = None
    clock.advance(1)
    reporter.stepped(10)
    assert noted(clock).step == 0
    group.waits = [0.0, 1.0]
    clock.advance(0.5)
    reporter.stepped(15)
    assert noted(clock).step == 0
    clock.advance(0.5)
    reporter.stepped(20)
    assert (noted(clock).steps_per_s, noted(clock).wait_share) == (10.0, 0.5)
    clock.advance(1)
    reporter.stepped(22)
    assert (noted(clock).steps_per_s, noted(clock).wait_share) == (2.0, 0.0)


def test_a_tensor_is_noted_as_it_was_logged_and_keeps_no_other_alive(folder):
    clock, _, reporter = opened()
    losses = torch.full((1000,), 5.0)
    reporter.log({"loss": losses[0]})
    losses.zero_()
    assert reporter._values["loss"].untyped_storage().nbytes() == 4
    clock.advance(1)
    reporter.stepped(1)
    assert noted(clock).values == {"loss": 5.0}


def test_only_so_many_values_are_noted(folder):
    clock, _, reporter = opened()
    reporter.log({f"{'long' * 100}{number}": 0.0 for number in range(5)})
    reporter.log({f"v{number}": float(number) for number in range(3000)})
    reporter.log({"v0": 7.0})
    clock.advance(1)
    reporter.stepped(1)
    assert len(noted(clock).values) == 32
    assert noted(clock).values["v0"] == 7.0


def test_several_elements_are_refused_whether_or_not_anything_is_noted():
    with pytest.raises(UsageError, match=r"losses has 2 elements"):
        StatusReporter(SoloGroup(), "pair").log({"losses": torch.zeros(2)})


def test_a_look_that_fails_keeps_the_first_worker_from_nothing(folder, monkeypatch):
    with monkeypatch.context() as patched:
        patched.setattr(board, "look", lambda clock: 1 / 0)
        opened()
    assert len(board.look()) == 1


def test_the_launcher_is_told_the_step_often_at_first_and_then_once_a_second(told, folder):
    clock = ManualClock()
    reporter = StatusReporter(Pair(), "neighbor", clock)
    reporter.opened(0)
    assert told() == [{"phase": "training", "step": 0}]
    for step in range(1, 33):
        clock.advance(0.125)
        reporter.stepped(step)
    assert [one["step"] for one in told()] == [1, 2, 4, 8, 16, 24, 32]
    reporter.closed()
    clock.advance(9)
    reporter.stepped(33)
    assert told() == []


@pytest.mark.parametrize("end", ["leaves", "stays", "exits"])
def test_the_launcher_is_told_how_training_ends(told, folder, end):
    group = SoloGroup()
    group.run = "job"
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def train():
        with make_strategy(group, "neighbor").attach(model, optimizer, stays=end == "stays"):
            optimizer.step()
            optimizer.step()
            if end == "exits":
                sys.exit(0)

    with pytest.raises(SystemExit) if end == "exits" else contextlib.nullcontext():
        train()
    said = [one for one in told() if "step" not in one]
    ends = {"leaves": ["joined", "left"], "stays": ["joined"], "exits": []}
    assert said[0] == {"survives_loss": True}
    assert said[1:] == [*({"phase": phase} for phase in ends[end]), *[{"early_step": 2}] * (end == "exits")]


def test_training_in_another_group_than_that_of_the_run_is_nobodys_business(told):
    model = torch.nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with make_strategy(SoloGroup(), "neighbor").attach(model, optimizer):
        optimizer.step()
    assert told() == [{"survives_loss": True}]
