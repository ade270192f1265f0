"""Training in worlds whose workers come and go, and what must hold of it."""

import hashlib
from collections import defaultdict
from dataclasses import dataclass, field

import torch
from torch.utils.data import DataLoader, TensorDataset

import shoal
from shoal.core import PeerLost
from shoal.data.kept import kept_loaders
from shoal.group.elastic import elastic_of
from shoal.simulate.exact import run_exact
from shoal.simulate.world import World
from shoal.strategies import make_strategy
from shoal.transport import FaultScript, Profile

LINES = Profile.parse("[ways.default]\ndelay_ms = 1\nmbit_s = 0.5")
"""So slow that a state takes as long as a step or two."""
NUM_EXAMPLES, BATCH_SIZE, NUM_EPOCHS = 96, 4, 4
INPUTS = torch.randn(NUM_EXAMPLES, 8, generator=torch.Generator().manual_seed(1))


@dataclass
class Life:
    """What one worker has done."""

    number: int
    began_s: float
    attached_s: float | None = None
    ended_s: float | None = None
    trail: list[tuple[int, int, str, float]] = field(default_factory=list)
    """After each step that counts: generation, step, digest of the model, time."""
    sizes: list[tuple[int, int]] = field(default_factory=list)
    trained: dict[int, list[int]] = field(default_factory=dict)
    """By epoch: the examples of steps that count."""
    doubtful: dict[int, list[int]] = field(default_factory=dict)
    """By epoch: those of the last step, of which it is not known whether it counted."""
    lost: dict[int, list[int]] = field(default_factory=dict)
    """By epoch: what the loader lists."""
    num_dropped: int = 0
    """Steps whose examples come again."""
    means_at_first: list[torch.Tensor] = field(default_factory=list)
    """Running means of the model, when this worker was attached."""
    final: str = ""
    steps: int = 0
    rate: float = 0.0
    is_finite: bool = False


def digest(model, optimizer):
    """Of parameters and momentum."""
    found = hashlib.sha256()
    for parameter in model.parameters():
        found.update(parameter.detach().numpy().tobytes())
        momentum = optimizer.state.get(parameter, {}).get("momentum_buffer")
        found.update(b"" if momentum is None else momentum.numpy().tobytes())
    return found.hexdigest()[:16]


def make_model(has_running_means=False):
    norms = [torch.nn.BatchNorm1d(4)] if has_running_means else []
    return torch.nn.Sequential(torch.nn.Linear(8, 4), *norms, torch.nn.Tanh(), torch.nn.Linear(4, 2))


def train(worker, life, strategy, options, scales_rate=False, has_running_means=False, new_ones_hold=None):
    torch.manual_seed(0)
    model = make_model(has_running_means)
    if new_ones_hold is not None and worker.rank >= worker.group.size:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.fill_(new_ones_hold)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.5)
    sharing = make_strategy(worker.group, strategy, **options)
    data = TensorDataset(torch.arange(NUM_EXAMPLES), INPUTS)
    loader = shoal.shard(DataLoader(data, batch_size=BATCH_SIZE, shuffle=True), worker.group)
    _count_dropped(worker.group, life)
    with worker.charged(model), sharing.attach(model, optimizer) as session:
        session.on_resize(lambda old, new: life.sizes.append((old, new)))
        if scales_rate:
            session.on_resize(
                lambda old, new: [
                    group.update(lr=group["lr"] * new / old) for group in optimizer.param_groups
                ]
            )
        life.means_at_first = [mean.clone() for name, mean in model.named_buffers() if name.endswith("_mean")]
        life.attached_s = worker.clock.now_s()
        while loader.epoch < NUM_EPOCHS:
            for numbers, inputs in loader:
                epoch, num_dropped = loader.course.current.epoch, life.num_dropped
                life.doubtful = {epoch: numbers.tolist()}
                optimizer.zero_grad()
                model(inputs).square().mean().backward()
                optimizer.step()
                life.doubtful = {}
                if life.num_dropped == num_dropped:
                    life.trained.setdefault(epoch, []).extend(numbers.tolist())
                generation = elastic_of(session.group).form.generation
                life.trail.append((generation, sharing.steps, digest(model, optimizer), worker.clock.now_s()))
                life.lost = {epoch: list(items) for epoch, items in loader.lost_items.items()}
    life.final, life.steps = digest(model, optimizer), sharing.steps
    life.rate = optimizer.param_groups[0]["lr"]
    life.is_finite = all(bool(parameter.isfinite().all()) for parameter in model.parameters())


def _count_dropped(group, life):
    """Which steps were dropped is nothing that a loop can see, so that the loaders are listened to."""
    loaders = kept_loaders(group)
    roll_back = loaders.roll_back

    def count():
        life.num_dropped += 1
        roll_back()

    loaders.roll_back = count


def run(strategy, script, num_workers=4, options=None, training=None, **world):
    """The outcomes, and what each worker has done, by number; `training` is what `train` gets beside."""
    lives = {}

    def work(worker):
        life = lives[worker.rank] = Life(worker.rank, worker.clock.now_s())
        try:
            train(worker, life, strategy, options or {}, **(training or {}))
        finally:
            life.ended_s = worker.clock.now_s()

    def serve(server):
        torch.manual_seed(0)
        model = make_model()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.5)
        make_strategy(server.group, strategy, **(options or {})).serve(model, optimizer)

    world = {"profile": LINES, "seed": 3, "elastic": True, **world}
    faults = FaultScript.parse(script) if script else None
    outcomes = run_exact(World(num_workers=num_workers, faults=faults, **world), work, serve)
    return outcomes, lives


def check_ends(outcomes, killed=(), left=()):
    """Everybody has come to the end, but for those that the script took."""
    for outcome in outcomes:
        if outcome.error is not None:
            assert outcome.rank in killed, (outcome.rank, outcome.error)
            assert isinstance(outcome.error, PeerLost)
        if outcome.has_left:
            assert outcome.rank in left, outcome.rank
    return [outcome.rank for outcome in outcomes if outcome.error is None and not outcome.has_left]


def check_equal(lives):
    """Who is at the same step in the same generation has the same model and momentum."""
    found = defaultdict(dict)
    for life in lives.values():
        for generation, step, state, _ in life.trail:
            found[generation, step].setdefault(state, []).append(life.number)
    for where, states in found.items():
        assert len(states) == 1, (where, states)


def check_examples(lives, num_most):
    """No example counts twice in an epoch; who is missing was lost, is listed, or did not go round."""
    for epoch in range(NUM_EPOCHS):
        counted = [number for life in lives.values() for number in life.trained.get(epoch, ())]
        twice = sorted({number for number in counted if counted.count(number) > 1})
        assert not twice, (epoch, "twice", twice)
        known = {*counted}
        for life in lives.values():
            known.update(life.doubtful.get(epoch, ()), life.lost.get(epoch, ()))
        missing = [number for number in range(NUM_EXAMPLES) if number not in known]
        assert len(missing) < num_most, (epoch, "missing", missing)


def check_listed(lives, number, local_steps):
    """What a lost worker had learned since it last shared is listed, as is what others may do again."""
    listed = {epoch: {*items} for life in lives.values() for epoch, items in life.lost.items()}
    own = [(epoch, item) for epoch, items in lives[number].trained.items() for item in items]
    num_steps = lives[number].trail[-1][1] % local_steps if lives[number].trail else 0
    if num_steps == local_steps - 1 and lives[number].doubtful:
        num_steps = 0  # it was lost in a round: the others may have what it had learned
    for epoch, item in own[len(own) - num_steps * BATCH_SIZE :]:
        assert item in listed.get(epoch, ()), (epoch, item, listed)
    for epoch in range(NUM_EPOCHS):
        counted = [item for life in lives.values() for item in life.trained.get(epoch, ())]
        known = {
            *listed.get(epoch, ()),
            *(item for life in lives.values() for item in life.doubtful.get(epoch, ())),
        }
        twice = {item for item in counted if counted.count(item) > 1}
        assert twice <= known, (epoch, "twice", twice - known)
        missing = {*range(NUM_EXAMPLES)} - {*counted} - known
        assert len(missing) < 5, (epoch, "missing", missing)
