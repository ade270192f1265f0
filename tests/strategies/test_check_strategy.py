"""`shoal.testing.check_strategy` passes strategies that keep their promises, and says what others break."""

from typing import Annotated

import pytest
import torch
from msgspec import Meta

from shoal.core import UsageError
from shoal.group import SoloGroup
from shoal.strategies import BUILT_IN, Strategy, StrategyOptions, load_class
from shoal.testing import StrategyCheckFailed, check_strategy
from shoal.topology import Weights

CHECKED = [row for row in BUILT_IN.values() if not row.needs_servers and not row.has_own_channel]


@pytest.mark.parametrize("row", CHECKED, ids=lambda row: row.name)
def test_ours_pass(row):
    kept = check_strategy(load_class(row))
    assert len(kept) == 10
    assert all(promise.endswith(".") for promise in kept)


def test_options_are_those_of_the_strategy():
    kind = load_class(BUILT_IN["neighbor"])
    check_strategy(kind, topology="ring", order="adapt-while-combine", local_steps=3)
    with pytest.raises(UsageError, match="neighbor has no option 'color'"):
        check_strategy(kind, color="red")


def test_those_with_servers_are_refused():
    with pytest.raises(UsageError, match="needs servers"):
        check_strategy(load_class(BUILT_IN["parameter-server"]))


class Average(Strategy):
    """Averages all parameters in each round: what the broken ones below break."""

    name = "average"
    survives_loss = True

    def after_step(self, session):
        if session.is_round:
            session.parameters.copy_(session.average(session.parameters))


class WithOptions(Average):
    """Has an option that text cannot give, and one without a description."""

    class Options(StrategyOptions, frozen=True):
        rates: Annotated[tuple[float, ...], Meta(description="one for each layer")] = (0.1, 0.2)


class WithoutDescription(Average):
    class Options(StrategyOptions, frozen=True):
        rate: float = 0.1


class OnOneRank(Average):
    """Averages on rank 0 alone."""

    def after_step(self, session):
        if session.group.rank == 0:
            super().after_step(session)


class LeavesOutSkipped(Average):
    """Does not take part in the round of a step that was skipped."""

    def skip_step(self, session):
        pass


class Forgetful(Average):
    """Has momentum that no checkpoint holds."""

    def start(self, session):
        self._momentum = session.parameters.zeros_like()
        self._before = session.parameters.clone()

    def after_step(self, session):
        change = session.average(session.parameters) - self._before
        self._momentum *= 0.5
        self._momentum += change
        self._before += self._momentum
        session.parameters.copy_(self._before)


class Uphill(Average):
    """Goes back twice as far as the optimizer has come."""

    def start(self, session):
        self.before = session.parameters.clone()

    def after_step(self, session):
        change = session.average(session.parameters - self.before)
        self.before.sub_(change)
        session.parameters.copy_(self.before)


class Misspelt(Strategy):
    """Has a method that nobody calls."""

    name = "misspelt"

    def after_steps(self, session):
        session.average_parameters()


class StartsApart(Average):
    """Changes parameters before the first step."""

    def start(self, session):
        session.parameters.mul_(1 + session.group.rank)


class EndsApart(Average):
    """Says that models end equal, and averages with one partner only."""

    has_last_round = True
    is_equal_after_round = True

    def after_step(self, session):
        if session.is_round:
            partner = session.random_partner()
            peers = [] if partner is None else [partner]
            session.parameters.copy_(session.average(session.parameters, peers))


class NeverWritten(Average):
    """Averages, says that models are equal then, and does not write the mean."""

    has_last_round = True
    is_equal_after_round = True

    def after_step(self, session):
        if session.is_round:
            session.average(session.parameters)


class ApartAfterALeave(Average):
    """Says that a round leaves models equal, and gives the weight of one that leaves to itself."""

    is_equal_after_round = True

    def start(self, session):
        self.slow = session.parameters.clone()

    def after_step(self, session):
        if session.is_round:
            self.slow += session.average(session.parameters - self.slow, session.others)
            session.parameters.copy_(self.slow)


class NotCommon(Average):
    """Says that a vector is equal on all workers which is not."""

    common_state = ("before",)

    def start(self, session):
        self.before = session.parameters.clone()

    def after_step(self, session):
        self.before.copy_(session.parameters)
        super().after_step(session)


class NotKept(Average):
    """Has a plain tensor in common, which no checkpoint holds."""

    common_state = ("scale",)

    def start(self, session):
        self.scale = torch.ones(1)


class Greedy(Average):
    """Takes memory of the group, and keeps it."""

    def start(self, session):
        self._memory = session.group.empty(100, torch.float32)


class DoesNotLook(Average):
    """Needs everybody, and does not look whether somebody is lost."""

    survives_loss = False

    def before_step(self, session):
        pass

    def after_step(self, session):
        others = session.others
        for flat in session.parameters.flats:
            session.group.exchange(flat, Weights.uniform(others, others)).wait()


class Breaks(Average):
    """Ends when somebody is lost, and says that it goes on."""

    def before_step(self, session):
        for loss in session.group.lost.values():
            raise loss.error()


@pytest.mark.parametrize(
    ("kind", "expected", "hint"),
    [
        (WithOptions, "text is read as a value of the option `rates`", "int, float, bool, str"),
        (WithoutDescription, "a description of the option `rate`", "Meta"),
        (OnOneRank, "all workers issue the same operations", "same order"),
        (LeavesOutSkipped, "skipped on one worker stops nobody", "same order"),
        (Forgetful, "resumed run ends as the uninterrupted one does", "public attributes"),
        (Uphill, "training lowers the loss", "the sign"),
        (Misspelt, "workers share something", "after_step, before_step"),
        (StartsApart, "all workers have the parameters of rank 0", "`start` may not change parameters"),
        (EndsApart, "all models are equal after the end", "is_equal_after_round = False"),
        (NeverWritten, "all models are equal after the end", "did the round write its result into session"),
        (ApartAfterALeave, "equal again a round after one has left", "without peers"),
        (NotCommon, "what common_state names is equal on all workers", "equal values"),
        (NotKept, "checkpoints hold what common_state names", "Plain tensors"),
        (Greedy, "memory of the group is given back", "session.empty"),
        (DoesNotLook, "the others end with PeerLost, which names rank 2", "check_lost_peers"),
        (Breaks, "the others train on when a worker is lost", "survives_loss = False"),
    ],
)
def test_a_broken_promise_is_named_with_a_hint(kind, expected, hint):
    with pytest.raises(StrategyCheckFailed) as failure:
        check_strategy(kind)
    assert expected in failure.value.expected
    assert hint in failure.value.hint
    assert str(failure.value).startswith(f"{kind.name} does not keep a promise.\n  Expected: ")


def test_what_is_no_strategy_is_refused():
    class Nameless(Strategy):
        pass

    with pytest.raises(StrategyCheckFailed, match="Expected: a class attribute `name`"):
        check_strategy(Nameless)
    with pytest.raises(StrategyCheckFailed, match=r"inherits from shoal\.Strategy"):
        check_strategy(torch.nn.Module)


def test_an_error_of_ones_own_comes_through():
    class Wrong(Average):
        def after_step(self, session):
            session.parameters.copy_(self.slow)

    with pytest.raises(AttributeError, match="slow"):
        check_strategy(Wrong)


def test_random_numbers_stay_what_they_were():
    torch.manual_seed(3)
    wanted = torch.rand(2)
    torch.manual_seed(3)
    check_strategy(Average)
    assert torch.equal(torch.rand(2), wanted)


def in_this_group(group, arguments):
    return check_strategy(Average, group=group, local_steps=2)


def test_it_runs_in_a_group_that_is_there(workers):
    assert [len(kept) for kept in workers.run(in_this_group, 2)] == [6, 6]
    assert len(check_strategy(Average, group=SoloGroup())) == 2
