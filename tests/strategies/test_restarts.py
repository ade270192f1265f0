"""Workers that torchrun ends and starts anew: they go on where they were, from what they have left."""

import os
import signal

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import shoal
from group.hosts import open_hosts, together
from shoal.core import PeerLost, UsageError
from shoal.group import SoloGroup
from shoal.group.elastic import RestartedGroup
from shoal.strategies import make_strategy
from shoal.tensors.restart_memory import RestartMemory

NUM_ITEMS = 48
BATCH = 2
OPTIONS = {"all-reduce": {}, "local-sgd": {"local_steps": 2}, "neighbor": {}}
STRATEGIES = sorted(OPTIONS)
pytestmark = pytest.mark.skipif(os.name != "posix", reason="torchrun restarts by signals")


class Worker:
    """A worker of one generation; `seen` are the examples that its optimizer has stepped on."""

    def __init__(self, inner, folder, name="all-reduce"):
        self.group = RestartedGroup(inner, RestartMemory(f"worker-{inner.rank}", [folder]))
        self.group.restart_link.has_restarts_left = True
        self.model = nn.Linear(1, 1)
        nn.init.constant_(self.model.weight, 0.1 * (1 + inner.rank))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01, momentum=0.5)
        data = DataLoader(TensorDataset(torch.arange(float(NUM_ITEMS)).view(-1, 1)), BATCH, shuffle=True)
        self.loader = shoal.shard(data, self.group)
        self.strategy = make_strategy(self.group, name, **OPTIONS[name])
        self.seen = []
        self.sizes = []

    def train(self, num_steps=NUM_ITEMS, before_step=lambda worker: None):
        """Trains for so many steps, or to the end of the epoch."""
        with self.strategy.attach(self.model, self.optimizer) as session:
            session.on_resize(lambda old, new: self.sizes.append((old, new)))
            self.began = self.strategy.steps, self.state()
            end = self.strategy.steps + num_steps
            for (x,) in self.loader:
                self.optimizer.zero_grad()
                before_step(self)
                (self.model(x) - x).square().mean().backward()
                steps = self.strategy.steps
                self.optimizer.step()
                if self.strategy.steps > steps:
                    self.seen += x.flatten().int().tolist()
                if self.strategy.steps == end:
                    break
        return self

    def state(self):
        momenta = [each["momentum_buffer"].tolist() for each in self.optimizer.state.values()]
        return [parameter.tolist() for parameter in self.model.parameters()], momenta

    def lose(self):
        self.group.close(RuntimeError("its machine has no power"))
        raise ConnectionResetError


def stop_after(num_steps):
    """torchrun ends this worker during that step."""

    def before_step(worker):
        if worker.strategy.steps == num_steps - 1:
            worker.group.restart_link.stop()

    return before_step


def generation(size, folder, name, **train):
    """Workers of one generation, in threads: whoever is ended has left its state."""

    def work(inner):
        worker = Worker(inner, folder, name)
        try:
            worker.train(**train)
        except (PeerLost, ConnectionResetError) as error:
            worker.error = error
            if isinstance(error, PeerLost):
                worker.seen += worker.last_items()
        return worker

    with open_hosts(size) as groups:
        return together(groups, work)


def last_items(worker):
    """What the optimizer has stepped on in the step that ended the worker, which did not return."""
    current = worker.loader.course.current
    own = list(
        worker.loader.course.part_of(worker.loader.course.order_of(current), current.legs, worker.loader.part)
    )
    return own[len(worker.seen) : current.num_taken]


Worker.last_items = last_items


@pytest.mark.parametrize("name", STRATEGIES)
def test_two_go_on_as_three(name, tmp_path):
    first = generation(2, tmp_path, name, before_step=stop_after(3))
    assert len(list(tmp_path.iterdir())) == 2
    then = generation(3, tmp_path, name)
    assert {worker.began[0] for worker in then} == {3}
    assert {str(worker.began[1][0]) for worker in then} == {str(then[0].began[1][0])}
    assert [worker.sizes for worker in then] == [[(2, 3)]] * 3
    seen = [item for worker in first + then for item in worker.seen]
    assert sorted(seen) == list(range(NUM_ITEMS))
    assert not list(tmp_path.iterdir())


def test_each_has_exactly_what_it_had_where_models_are_equal(tmp_path):
    first = generation(2, tmp_path, "all-reduce", before_step=stop_after(3))
    then = generation(2, tmp_path, "all-reduce", num_steps=1)
    assert [worker.began[1] for worker in then] == [worker.state() for worker in first]
    assert [worker.sizes for worker in then] == [[], []]


@pytest.mark.parametrize(
    ("name", "should_end"),
    [
        ("all-reduce", True),
        *((name, should_end) for name in ("local-sgd", "neighbor") for should_end in (True, False)),
    ],
)
def test_after_a_loss_every_example_comes_once_or_is_listed(name, should_end, tmp_path):
    def before_step(worker):
        worker.group.restart_link.has_restarts_left = should_end
        if worker.group.rank == 1 and worker.strategy.steps == 3:
            worker.lose()
        if worker.group.rank == 0 and worker.strategy.steps == 6:
            worker.group.restart_link.stop()  # it has gone on alone, and is ended later

    first = generation(2, tmp_path, name, before_step=before_step)
    assert [path.name for path in tmp_path.iterdir()] == ["worker-0"]
    (then,) = generation(1, tmp_path, name)
    earliest = 2 if name == "local-sgd" else 3  # between two averages nobody waits
    assert then.began[0] in (range(earliest, 5) if should_end else (7,))
    seen = [item for worker in [*first, then] for item in worker.seen]
    listed = then.loader.lost_items.get(0, [])
    assert set(seen) | set(listed) == set(range(NUM_ITEMS))
    assert {item for item in seen if seen.count(item) > 1} <= set(listed)
    assert len(listed) <= 6 * BATCH
    assert not listed or name != "all-reduce"


def test_a_state_that_the_others_have_gone_on_without_is_left_out(tmp_path):
    generation(2, tmp_path, "local-sgd", before_step=stop_after(2))
    (tmp_path / "worker-1").rename(tmp_path / "away")
    (alone,) = generation(1, tmp_path, "local-sgd", before_step=stop_after(6))
    (tmp_path / "away").rename(tmp_path / "worker-1")
    then = generation(2, tmp_path, "local-sgd", num_steps=1)
    assert [worker.began[0] for worker in then] == [6, 6]
    assert [worker.began[1][0] for worker in then] == [alone.state()[0]] * 2


@pytest.fixture
def heard():
    """SIGTERM is the program's own business."""
    signals = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: signals.append(number))
    yield signals
    signal.signal(signal.SIGTERM, before)


def test_sigterm_between_two_steps_drops_what_came_for_the_next_one_and_reaches_the_program(tmp_path, heard):
    def interrupt(worker):
        if worker.strategy.steps == 2 and not heard:
            os.kill(os.getpid(), signal.SIGTERM)

    handler = signal.getsignal(signal.SIGTERM)
    first = Worker(SoloGroup(), tmp_path)
    first.train(num_steps=5, before_step=interrupt)
    assert heard == [signal.SIGTERM]
    assert signal.getsignal(signal.SIGTERM) is handler
    then = Worker(SoloGroup(), tmp_path).train()
    assert then.began[0] == 2
    assert sorted(first.seen + then.seen) == list(range(NUM_ITEMS))


def test_after_an_orderly_end_nothing_is_left_and_sigterm_is_what_it_was(tmp_path, heard):
    handler = signal.getsignal(signal.SIGTERM)
    Worker(SoloGroup(), tmp_path).train(num_steps=3)
    assert not list(tmp_path.iterdir())
    assert signal.getsignal(signal.SIGTERM) is handler


def train_and_raise(worker, error):
    with worker.strategy.attach(worker.model, worker.optimizer):
        batches = iter(worker.loader)
        for _ in range(2):
            worker.model(next(batches)[0]).sum().backward()
            worker.optimizer.step()
        next(batches)
        raise error


def test_a_loss_that_the_loop_itself_meets_leaves_the_last_whole_step(tmp_path):
    with pytest.raises(PeerLost):
        train_and_raise(Worker(SoloGroup(), tmp_path), PeerLost("in a barrier of the program's own"))
    then = Worker(SoloGroup(), tmp_path).train()
    assert then.began[0] == 2
    assert len(then.seen) == NUM_ITEMS - 2 * BATCH


def test_a_program_that_fails_otherwise_leaves_nothing(tmp_path):
    with pytest.raises(ZeroDivisionError):
        train_and_raise(Worker(SoloGroup(), tmp_path), ZeroDivisionError())
    assert not list(tmp_path.iterdir())


def test_where_no_restart_is_left_a_loss_leaves_nothing(tmp_path):
    worker = Worker(SoloGroup(), tmp_path)
    worker.group.restart_link.has_restarts_left = False
    with pytest.raises(PeerLost):
        train_and_raise(worker, PeerLost("gone"))
    assert not list(tmp_path.iterdir())


def test_another_model_than_before_is_refused(tmp_path):
    with pytest.raises(PeerLost):
        train_and_raise(Worker(SoloGroup(), tmp_path), PeerLost("gone"))
    other = Worker(SoloGroup(), tmp_path)
    other.model = nn.Linear(1, 2)
    other.optimizer = torch.optim.SGD(other.model.parameters(), lr=0.01)
    with pytest.raises(UsageError, match="does not fit"):
        other.train()


def test_data_that_is_no_loader_is_divided_at_each_start(tmp_path):
    group = RestartedGroup(SoloGroup(), RestartMemory("worker", [tmp_path]))
    assert shoal.shard([1, 2, 3], group) == [1, 2, 3]


def test_random_numbers_go_on_where_they_were(tmp_path):
    with pytest.raises(PeerLost):
        train_and_raise(Worker(SoloGroup(), tmp_path), PeerLost("gone"))
    wanted = torch.rand(3)
    torch.manual_seed(1)
    then = Worker(SoloGroup(), tmp_path)
    with then.strategy.attach(then.model, then.optimizer):
        assert torch.equal(torch.rand(3), wanted)
