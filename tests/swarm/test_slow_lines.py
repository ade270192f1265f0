"""Sixteen peers on slow lines train a GPT of a million parameters: how soon it is good, and what that costs.

All in virtual time, with real gradients. A step is charged `STEP_S`, whatever it takes here; lines,
messages and rounds take the time that the profile says. All-reduce and DiLoCo are trained as defined,
and their rounds charged with what all-reduce of so many bytes takes on the same lines. The tables that
this prints (`pytest -s`) stand in docs/swarm.md.
"""

import contextlib
from dataclasses import dataclass, field

import pytest
import torch
from torch.nn import functional
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from shoal.data.text_set import NUM_CHARACTERS, next_characters
from shoal.models.gpt import Gpt, GptShape
from shoal.simulate.exact import run_exact
from shoal.simulate.swarm import run_swarm
from shoal.simulate.world import Compute
from shoal.simulate.world import World as SimulatedWorld
from shoal.strategies.swarm import SwarmTraining
from shoal.swarm import CommittedSGD
from shoal.transport import Profile

NUM_PEERS = 16
STEP_S = 0.25
NUM_STEPS, NUM_REDUCED = 256, 128
LOCAL_STEPS = 64
NUM_FRAGMENTS = 4
EVAL_EVERY = 16
BATCH, BLOCK = 2, 64
LEARNING_RATE, NUM_WARMUP = 1e-3, 20
REDUCED_RATE = 2e-3
"""All-reduce learns from sixteen times as many sequences at once, and faster at twice the rate."""
OUTER = CommittedSGD(0.7, 0.9)
SHAPE = GptShape(num_layers=4, num_heads=4, width=144, vocabulary_size=NUM_CHARACTERS, max_tokens=BLOCK)
MBYTE = 1e6


class Text:
    """Sequences of the text set, read once."""

    def __init__(self):
        before, following = next_characters(BLOCK, train=True)
        self.train = torch.cat([before, following[:, None].to(torch.uint8)], 1)
        before, following = next_characters(BLOCK, train=False)
        tests = torch.cat([before, following[:, None].to(torch.uint8)], 1)
        self.tests = tests[:: len(tests) // 96][:96].long()


class Learner:
    """One peer's model, optimizer and batches."""

    def __init__(self, text, seed, batch_size=BATCH, learning_rate=LEARNING_RATE):
        torch.manual_seed(1)
        self.model = Gpt(SHAPE)
        self.text, self.batch_size, self.learning_rate = text, batch_size, learning_rate
        self.choice = torch.Generator().manual_seed(seed)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), learning_rate, betas=(0.9, 0.99))
        self.num_steps = 0

    def step(self):
        rows = torch.randint(len(self.text.train), (self.batch_size,), generator=self.choice)
        self.num_steps += 1
        self.optimizer.param_groups[0]["lr"] = self.learning_rate * min(1.0, self.num_steps / NUM_WARMUP)
        loss_of(self.model, self.text.train[rows].long()).backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()

    @property
    def vector(self):
        return parameters_to_vector(self.model.parameters()).detach().clone()

    @vector.setter
    def vector(self, values):
        vector_to_parameters(values.clone(), self.model.parameters())  # it makes them views of what it gets


def loss_of(model, sequences):
    logits = model(sequences[:, :-1])
    return functional.cross_entropy(logits.flatten(0, 1), sequences[:, 1:].flatten())


class Judge:
    """The loss of parameters on what nobody trains on."""

    def __init__(self, text):
        self.learner = Learner(text, 0)

    @torch.no_grad()
    def __call__(self, vector):
        self.learner.vector = vector
        return float(loss_of(self.learner.model, self.learner.text.tests))


@dataclass
class Course:
    """How a training went: seconds, bytes that a peer has sent, and the loss, again and again."""

    points: list = field(default_factory=list)
    computing: float = 1.0

    def at(self, loss):
        """The seconds and bytes until it was as good; None where it never was."""
        return next(((s, sent) for s, sent, found in self.points if found <= loss), None)

    @property
    def best(self):
        return min(loss for _, _, loss in self.points)


# --- the two that wait ---


def all_reduce_s(profile, num_elements, num_times=5):
    """What an all-reduce of all parameters takes."""

    def work(worker):
        for _ in range(num_times):
            worker.group.all_reduce(torch.zeros(num_elements)).wait()
        return worker.clock.now_s()

    world = SimulatedWorld(num_workers=NUM_PEERS, workers_per_machine=1, profile=Profile.load(profile))
    return max(outcome.value for outcome in run_exact(world, work)) / num_times


def all_reduced(text, judge):
    """Losses after so many steps: the mean gradient of all is that of their batches together."""
    learner = Learner(text, 7, NUM_PEERS * BATCH, REDUCED_RATE)
    losses = {}
    for number in range(1, NUM_REDUCED + 1):
        learner.step()
        if number % 4 == 0:
            losses[number] = judge(learner.vector)
    return losses


def diloco(text, judge):
    """Losses after so many steps, at the ends of rounds."""
    learners = [Learner(text, seed) for seed in range(NUM_PEERS)]
    committed = learners[0].vector
    kept, losses = OUTER.start(committed.numel()), {}
    for number in range(LOCAL_STEPS, NUM_STEPS + 1, LOCAL_STEPS):
        mean = torch.zeros_like(committed)
        for learner in learners:
            learner.vector = committed
            for _ in range(LOCAL_STEPS):
                learner.step()
            mean += (committed - learner.vector) / NUM_PEERS
        OUTER.step(committed, mean, kept)
        losses[number] = judge(committed)
    return losses


def waiting(losses, profile, num_elements, steps_per_round):
    """Charges what was learned with the time and the bytes of one all-reduce a round."""
    round_s = all_reduce_s(profile, num_elements)
    sent = 2 * (NUM_PEERS - 1) / NUM_PEERS * 4 * num_elements
    course = Course(computing=steps_per_round * STEP_S / (steps_per_round * STEP_S + round_s))
    for number, loss in losses.items():
        num_rounds = number / steps_per_round
        course.points.append((number * STEP_S + num_rounds * round_s, num_rounds * sent, loss))
    return course


# --- the swarm ---


def swarm(profile, text, judge, overlap, codec):
    """Trains by the strategy itself; its losses are those of the committed parameters."""
    course, peers = Course(), []

    def work(worker):
        peers.append(worker.peer)
        learner = Learner(text, worker.rank)
        strategy = SwarmTraining(
            worker.peer.swarm,
            run="text",
            local_steps=LOCAL_STEPS,
            overlap=overlap,
            fragments=NUM_FRAGMENTS,
            codec=codec,
        )
        with worker.charged(learner.model), strategy.attach(learner.model, learner.optimizer, stays=True):
            worker.peer.begin()
            began_s, sent = worker.clock.now_s(), sum(peer.num_sent_bytes() for peer in peers)
            while learner.num_steps < NUM_STEPS:
                learner.step()
                if worker.rank == 0 and learner.num_steps % EVAL_EVERY == 0:
                    # the run's own, which a strategy keeps to itself between rounds
                    loss = judge(strategy._opened.parameters())
                    each_sent = (sum(peer.num_sent_bytes() for peer in peers) - sent) / NUM_PEERS
                    course.points.append((worker.clock.now_s() - began_s, each_sent, loss))
                    tell_point(f"{profile}, {overlap}, {codec}", learner.num_steps, course)
            return NUM_STEPS * STEP_S * slowness(worker.rank) / (worker.clock.now_s() - began_s)

    world = SimulatedWorld(
        num_workers=NUM_PEERS,
        workers_per_machine=1,
        profile=Profile.load(profile),
        compute=Compute(step_ms=1000 * STEP_S, factors={rank: slowness(rank) for rank in range(NUM_PEERS)}),
    )
    outcomes = run_swarm(world, work)
    assert not any(outcome.error for outcome in outcomes), [outcome.error for outcome in outcomes]
    course.computing = sum(outcome.value for outcome in outcomes) / NUM_PEERS
    return course


def slowness(rank):
    """No two peers are equally fast: the last takes 15 % longer than the first."""
    return 1 + 0.01 * rank


@contextlib.contextmanager
def one_thread():
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(num_threads)


def tell_point(name, number, course):
    seconds, sent, loss = course.points[-1]
    print(f"{name}: {number} steps, {seconds:.1f} s, {sent / MBYTE:.2f} MB, loss {loss:.3f}", flush=True)


def tell(profile, courses, target):
    print(f"\n{profile}, loss {target:.2f}, {NUM_PEERS} peers, a step {STEP_S} s")
    print("| how | loss at the end | seconds to the loss | MB sent by a peer | of its time computing |")
    print("|---|--:|--:|--:|--:|")
    for name, course in courses.items():
        seconds, sent = course.at(target) or (float("nan"), float("nan"))
        last = course.points[-1][2]
        print(f"| {name} | {last:.2f} | {seconds:.0f} | {sent / MBYTE:.2f} | {course.computing:.0%} |")


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_streaming_takes_a_hundredth_of_the_bytes_and_computes_nine_tenths_of_its_time():
    with one_thread():
        text = Text()
        judge = Judge(text)
        num_elements = judge.learner.vector.numel()
        assert 0.95e6 < num_elements < 1.1e6
        reduced, local = all_reduced(text, judge), diloco(text, judge)
        for profile, kinds in (
            ("home", [("delayed", "int8"), ("streaming", "int4")]),
            ("three-continents", [("streaming", "int4")]),
        ):
            courses = {
                "all-reduce": waiting(reduced, profile, num_elements, 1),
                f"DiLoCo, {LOCAL_STEPS} steps": waiting(local, profile, num_elements, LOCAL_STEPS),
            }
            for overlap, codec in kinds:
                courses[f"swarm, {overlap}, {codec}"] = swarm(profile, text, judge, overlap, codec)
            streaming = courses["swarm, streaming, int4"]
            target = streaming.best
            tell(profile, courses, target)
            seconds, sent = streaming.at(target)
            plain_s, plain_sent = courses["all-reduce"].at(target)
            assert sent <= plain_sent / 100
            assert seconds < plain_s
            assert streaming.computing >= 0.9
