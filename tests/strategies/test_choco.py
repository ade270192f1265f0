"""`choco` against the algorithm, reckoned for all workers at once; what it moves, and who is lost."""

import numpy as np
import pytest
import torch

from shoal.core import UsageError
from shoal.group.wrappers import Metered
from shoal.simulate.exact import run_exact
from shoal.simulate.world import World
from shoal.strategies import make_strategy
from shoal.strategies.choco import ChocoSGD
from shoal.topology import make_topology
from shoal.transport import FaultScript
from strategies.bowls import RATE, Bowl, Bowls, after_a_step, course, everywhere, step

SLOTS = 16
"""Elements of the two parameters, each padded to 64 bytes; x lies in the first, and from the ninth on."""
PLACES = [0, 8, 9]


def largest(rows, k):
    """Of each row, the k largest values, in their places."""
    kept = torch.zeros_like(rows)
    places = rows.abs().topk(k, dim=1).indices
    return kept.scatter_(1, places, rows.gather(1, places))


def reckoned(size, num_steps, gamma, k):
    bowls, w = Bowls(size), torch.from_numpy(make_topology("ring", size).matrix())
    x = torch.zeros(size, SLOTS, dtype=torch.float64)
    public = x.clone()
    rows = []
    for _ in range(num_steps):
        x[:, PLACES] -= RATE * bowls.gradients(x[:, PLACES])
        public = public + largest(x - public, k)
        x = x + gamma * (w @ public - public)
        rows.append(x[:, PLACES].clone())
    return torch.stack(rows)


def test_it_is_the_algorithm():
    got = course("choco", 5, 8, topology="ring", codec="top-k:0.1", gamma=0.3)
    torch.testing.assert_close(got, reckoned(5, 8, 0.3, k=2), rtol=0, atol=1e-12)


def test_the_step_of_consensus_is_by_default_the_share_of_bytes_that_is_sent():
    share = 2 * (4 + 8) / (SLOTS * 8)
    got = course("choco", 3, 4, codec="top-k:0.1")
    torch.testing.assert_close(got, reckoned(3, 4, share, k=2), rtol=0, atol=1e-12)


def test_without_a_codec_it_is_plain_averaging():
    got = course("choco", 4, 6, codec="none", topology="mesh")
    torch.testing.assert_close(got, course("neighbor", 4, 6, topology="mesh"), rtol=0, atol=1e-12)


def test_workers_come_to_agree_though_little_is_sent():
    """From unequal starts, which are the first public copies, to the mean: the exact one."""

    def work(group):
        model = Bowl()
        start = torch.randn(3, generator=torch.Generator().manual_seed(group.rank), dtype=torch.float64)
        with torch.no_grad():
            model.head.copy_(start[:1])
            model.tail.copy_(start[1:])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        strategy = ChocoSGD(group, codec="top-k:0.1", gamma=0.5)
        with strategy.attach(model, optimizer, stays=True, should_start_equal=False):
            before = strategy.consensus_distance()
            for _ in range(40):
                step(model, optimizer, Bowls(4), group.rank)
            assert strategy.consensus_distance() < 1e-3 * before
        return start, model.x.detach()

    starts, ends = map(torch.stack, zip(*everywhere(work, 4), strict=True))
    torch.testing.assert_close(ends.mean(0), starts.mean(0), rtol=0, atol=1e-12)


def test_what_goes_to_neighbours_are_encoded_bytes():
    def work(group):
        model = torch.nn.Linear(100, 10)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        meter = Metered(group)
        strategy = ChocoSGD(meter)
        with strategy.attach(model, optimizer, stays=True):
            meter.reset()
            for _ in range(3):
                optimizer.zero_grad()
                model(torch.ones(2, 100)).square().sum().backward()
                optimizer.step()
            totals = meter.totals()
            assert strategy.message_bytes == 102 * (4 + 4)
            assert [name for name in totals if totals[name].sent_bytes] == ["send"]
            return totals["send"].sent_bytes

    assert everywhere(work, 5) == [3 * 2 * 102 * (4 + 4)] * 5


def test_after_a_global_average_all_are_equal_and_go_on():
    got = course("choco", 4, 6, codec="top-k:0.1", global_average_every=3)
    for row in (2, 5):
        torch.testing.assert_close(got[row], got[row, :1].expand(4, -1), rtol=0, atol=1e-12)
    # the same as what begins there anew
    assert (got[3] - got[2] + RATE * Bowls(4).gradients(got[2])).abs().max() < (got[3] - got[2]).abs().max()


def test_the_others_go_on_when_one_is_lost():
    bowls = Bowls(4)

    def work(worker):
        model = Bowl()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        with ChocoSGD(worker.group, codec="int8", gamma=0.5).attach(model, optimizer):
            for number in range(30):
                if worker.rank == 2 and number == 3:
                    raise UsageError("enough")
                step(model, optimizer, bowls, worker.rank)
        return model.x.detach()

    outcomes = run_exact(World(num_workers=4), work)
    assert [outcome.error is None for outcome in outcomes] == [True, True, False, True]
    mean = torch.stack([outcomes[rank].value for rank in (0, 1, 3)]).mean(0)
    left = [0, 1, 3]
    pulls = (bowls.hessians[left] @ bowls.targets[left, :, None]).sum(0)[:, 0]
    optimum = torch.linalg.solve(bowls.hessians[left].sum(0), pulls)
    assert (mean - optimum).norm() < 0.5 * optimum.norm()


@pytest.mark.parametrize("way", ["", "one_way = true"])
def test_after_a_partition_copies_are_what_they_are_copies_of(way):
    """Meanwhile both sides go on alone; what was missed comes whole, and they agree again."""
    script = FaultScript.parse(
        f"[[fault]]\nkind = 'partition'\nat_s = 0.1\nfor_s = 0.15\nbetween = [['rank:0', 'rank:1'], "
        f"['rank:2', 'rank:3']]\n{way}"
    )
    bowls = Bowls(4)

    def work(worker):
        model = Bowl()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        strategy = ChocoSGD(worker.group, codec="top-k:0.1", gamma=0.5)
        with worker.charged(model), strategy.attach(model, optimizer, stays=True):
            for number in range(60):
                if number == 40:
                    optimizer.param_groups[0]["lr"] = 0.0
                worker.compute(0.01)
                step(model, optimizer, bowls, worker.rank)
            worker.group.barrier().wait()
            copies = {rank: [flat.clone() for flat in kept.flats] for rank, kept in strategy._public.items()}
            return copies, model.x.detach().clone()

    outcomes = run_exact(World(num_workers=4, faults=script), work)
    assert [outcome.error for outcome in outcomes] == [None] * 4
    for outcome in outcomes:
        copies, x = outcome.value
        torch.testing.assert_close(x, outcomes[0].value[1], rtol=0, atol=1e-3)
        for rank, flats in copies.items():
            assert all(map(torch.equal, flats, outcomes[rank].value[0][rank]))


def test_what_is_not_finite_reaches_nobody():
    def work(group):
        model = Bowl()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        with ChocoSGD(group, codec="int8").attach(model, optimizer, stays=True):
            if group.rank == 0:
                model.head.data.fill_(torch.nan)
            for _ in range(3):
                step(model, optimizer, Bowls(3), group.rank)
        return model.x.isfinite().all().item()

    assert everywhere(work, 3) == [False, True, True]


@pytest.mark.parametrize("codec", ["top-k:0.1", "low-rank:1"])
def test_it_goes_on_from_its_state(codec):
    bowls, wanted = Bowls(3), course("choco", 3, 6, codec=codec)

    def work(group):
        model = Bowl()
        optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
        strategy = ChocoSGD(group, codec=codec)
        with strategy.attach(model, optimizer, stays=True):
            for _ in range(3):
                step(model, optimizer, bowls, group.rank)
        state = strategy.state_dict()
        resumed = ChocoSGD(group, codec=codec)
        resumed.load_state_dict(state)
        assert resumed.state_dict()["public"].keys() == {"0", "1", "2"}
        with resumed.attach(model, optimizer, stays=True, should_start_equal=False):
            for _ in range(3):
                step(model, optimizer, bowls, group.rank)
        other = ChocoSGD(group, codec=codec)
        other.load_common_state(state)
        assert not other.state_dict()["public"]
        return model.x.detach()

    assert torch.equal(torch.stack(everywhere(work, 3)), wanted[-1])


def test_states_that_do_not_fit_all_begin_anew():
    """Of another rank or another topology; while attached, that is an error."""

    def work(group):
        model, optimizer, state = after_a_step(ChocoSGD(group))
        one = {**state, "rank": 3 - group.rank} if group.rank == 0 else state
        for topology, loaded in (("full", state), ("ring", one)):
            resumed = ChocoSGD(group, topology=topology)
            resumed.load_state_dict(loaded)
            with resumed.attach(model, optimizer, stays=True, should_start_equal=False):
                public = resumed.state_dict()["public"]
                assert torch.equal(public[str(group.rank)]["tail"], model.tail)
                with pytest.raises(UsageError, match="another rank"):
                    resumed.load_state_dict({**state, "rank": group.rank + 1})
        return True

    assert all(everywhere(work, 4))


def test_public_copies_are_those_of_their_owners_to_the_bit():
    def work(group):
        torch.manual_seed(group.rank)
        model = torch.nn.Linear(9, 3)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        strategy = ChocoSGD(group, topology="full", global_average_every=2)
        with strategy.attach(model, optimizer, stays=True):
            for _ in range(2):
                optimizer.zero_grad()
                model(torch.randn(2, 9)).square().sum().backward()
                optimizer.step()
        return strategy.state_dict()["public"]

    states = everywhere(work, 5)
    for copies in states:
        for rank, copy in copies.items():
            assert torch.equal(copy["weight"], states[int(rank)][rank]["weight"])


@pytest.mark.parametrize("name", ["choco", "relay"])
def test_equal_workers_stay_what_they_are_in_half_precision(name):
    def work(group):
        torch.manual_seed(0)
        model = torch.nn.Linear(40, 1, dtype=torch.bfloat16)
        begin = model.weight.detach().clone()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
        with make_strategy(group, name).attach(model, optimizer, stays=True):
            for _ in range(20):
                optimizer.zero_grad()
                model(torch.ones(1, 40, dtype=torch.bfloat16)).sum().backward()
                optimizer.step()
        return torch.equal(model.weight, begin)

    assert all(everywhere(work, 5))


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ({"topology": "one-peer-exponential"}, "every round"),
        ({"topology": "ring:left"}, "symmetric"),
        ({"topology": np.eye(4)}, "no|way"),
        ({"codec": "zip"}, "zip"),
        ({"gamma": 0}, "gamma"),
    ],
)
def test_what_does_not_fit_is_refused(options, what):
    def work(group):
        ChocoSGD(group, **options)

    with pytest.raises(UsageError, match=what):
        everywhere(work, 4)
