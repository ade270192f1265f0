"""Workers' clocks: all at once where links are constant, as one message after another would have it."""

import numpy as np
import pytest

from shoal.core import Address
from shoal.simulate.stacked.model import MachineRounds, Rounds, all_edges
from shoal.simulate.stacked.replay import Ring, Tape, times_of
from shoal.simulate.world import Compute, World
from shoal.topology import make_topology
from shoal.transport import Profile
from shoal.transport.network.distributions import Exponential

SIZE = 12
PLACES = Profile.parse(
    """
    [places.here]
    [places.there]
    [ways.default]
    delay_ms = 1
    [[ways.between]]
    from = "here"
    to = "there"
    delay_ms = 20
    """
)
FREE = Profile()


def ranks():
    return [Address("rank", rank) for rank in range(SIZE)]


def taped(*parts):
    """Two steps of all, each with these parts, between marks."""
    tape = Tape(SIZE)
    tape.mark()
    for _ in range(2):
        tape.forward()
        numbers = [tape.issue(part) if isinstance(part, Ring) else tape.exchange(part, 64) for part in parts]
        tape.backward()
        for number in numbers:
            tape.wait(number)
        tape.mark()
    return tape


def turn_of(name):
    return Rounds(make_topology(name, SIZE))[0]


@pytest.mark.parametrize("between", ["workers", "machines"])
@pytest.mark.parametrize("profile", [FREE, PLACES], ids=["free", "places"])
def test_all_at_once_is_one_after_another(profile, between):
    directed = MachineRounds(make_topology("exponential-2", 4), [rank // 3 for rank in range(SIZE)])[0]
    parts = [turn_of("star").edges, Ring(SIZE, 1000), directed.edges, turn_of("exponential-2").edges]
    world = World(
        num_workers=SIZE,
        profile=profile,
        workers_per_machine=3,
        between=between,
        compute=Compute(step_ms=Exponential(10), factors={4: 100.0}),
    )
    addresses = ranks() if between == "workers" else [Address("machine", rank // 3) for rank in range(SIZE)]
    tape = taped(*parts)
    swept = times_of(tape, world, addresses)
    replayed = times_of(tape, world, addresses, can_sweep=False)
    np.testing.assert_allclose(swept.marks_s, replayed.marks_s, rtol=1e-12)
    np.testing.assert_allclose(swept.waited_s, replayed.waited_s, rtol=1e-12, atol=1e-15)
    assert swept.waited_s[:, 4].sum() > 0.5 * swept.waited_s.sum()


@pytest.mark.parametrize("can_sweep", [True, False])
def test_rings_at_once_take_no_longer_than_one(can_sweep):
    profile = Profile.parse("[ways.default]\ndelay_ms = 5")
    world = World(num_workers=SIZE, profile=profile)
    one, three = (
        times_of(taped(*[Ring(SIZE, 1200)] * num), world, ranks(), can_sweep=can_sweep) for num in (1, 3)
    )
    np.testing.assert_allclose(three.marks_s, one.marks_s)


def test_who_sends_much_over_a_narrow_link_is_late():
    profile = Profile.parse("[ways.default]\nmbit_s = 8")
    tape = Tape(SIZE)
    tape.mark()
    tape.wait(tape.exchange(all_edges(SIZE), [1000 * rank for rank in range(SIZE)], is_for_all=True))
    tape.mark()
    times = times_of(tape, World(num_workers=SIZE, profile=profile), ranks())
    last_s = [1e-3 * (SIZE - 1)] * SIZE
    np.testing.assert_allclose(times.marks_s[1], last_s)
    assert tape.marked_bytes[1].tolist() == [1000 * rank * (SIZE - 1) for rank in range(SIZE)]


def test_a_ring_goes_round_nearly_twice():
    profile = Profile.parse("[ways.default]\ndelay_ms = 5")
    times = times_of(taped(Ring(SIZE, 1200)), World(num_workers=SIZE, profile=profile), ranks())
    forward_s, hops_s = 1e-2 / 3, 2 * (SIZE - 1) * 5e-3
    np.testing.assert_allclose(times.marks_s[1], forward_s + hops_s)


def test_bytes_count_from_the_first_mark_on():
    tape = Tape(SIZE)
    tape.wait(tape.exchange(all_edges(SIZE), 10))
    tape.mark()
    tape.wait(tape.issue(Ring(SIZE, 1200)))
    tape.mark()
    assert [bytes_sent.tolist() for bytes_sent in tape.marked_bytes] == [[0] * SIZE, [2200] * SIZE]
