"""States that are taken from several donors: all of it, verified, whoever dies or lies meanwhile."""

from __future__ import annotations

import asyncio
import contextlib

import pytest
import torch

from shoal.core import Address, Deadline, DeadlineExceeded, LoopThread, Peer, PeerLost
from shoal.core.errors import LimitExceeded
from shoal.core.virtual import run_virtual
from shoal.tensors.transfer import LEAF_BYTES, HeldState, StateDonor, StateTaker
from shoal.transport.messages import Reply
from shoal.transport.network.conditions import Conditions
from shoal.transport.network.memory import MemoryNetwork
from shoal.transport.network.profiles import Profile
from shoal.transport.streams.transport import StreamTransport

LINE = """
name = "lines"
[places.home]
up_mbit_s = {up}
down_mbit_s = {down}
[ways.default]
delay_ms = 5
"""


def some_state(num_bytes=5 * LEAF_BYTES + 12_345):
    generator = torch.Generator().manual_seed(7)
    large = torch.randint(0, 255, (num_bytes,), dtype=torch.uint8, generator=generator)
    return {
        "large": large,
        "model": [torch.randn(3, 5, generator=generator), torch.arange(7), torch.zeros(0)],
        "half": torch.randn(9, generator=generator).half(),
        "turned": torch.randn(4, 6, generator=generator).t(),
        "step": 120,
        "rates": (0.1, float("inf")),
        "names": {"a": "b", "none": None},
    }


def assert_equal(one, other):
    assert type(one) is type(other)
    if isinstance(one, torch.Tensor):
        assert one.dtype == other.dtype
        assert torch.equal(one, other)
    elif isinstance(one, dict):
        assert list(one) == list(other)
        for key in one:
            assert_equal(one[key], other[key])
    elif isinstance(one, list | tuple):
        assert len(one) == len(other)
        for pair in zip(one, other, strict=True):
            assert_equal(*pair)
    else:
        assert one == other


class World:
    """A taker and some donors in virtual time, over lines of so many Mbit/s."""

    def __init__(self, opened, network):
        self._opened = opened
        self._network = network

    async def donor(self, name, state, *, lie_after=None, silent_after=None, **options):
        """A peer that gives the state; from some leaf on it lies, or says nothing any more."""
        transport = await self._opened.enter_async_context(StreamTransport(network=self._network.host(name)))
        num_served = 0

        class Odd:
            def handle(self, method, serve, **options):
                async def serve_oddly(head, buffers):
                    nonlocal num_served
                    num_served += method == "state.leaf"
                    if silent_after is not None and num_served > silent_after:
                        await asyncio.sleep(3600)
                    reply = serve(head, buffers)
                    if lie_after is not None and num_served > lie_after:
                        size = sum(len(buffer) for buffer in reply.buffers)
                        return Reply(buffers=[b"\x00" * size])
                    return reply

                transport.handle(method, serve_oddly, **options)

        is_odd = lie_after is not None or silent_after is not None
        donor = StateDonor(Odd() if is_odd else transport, **options)
        if state is not None:
            donor.hold(state)
        peer = Peer(await transport.listen(Address(name, 0)))
        return peer, transport, donor

    async def taker(self, name, **options):
        transport = await self._opened.enter_async_context(
            StreamTransport(network=self._network.host("taker"))
        )
        return StateTaker(transport, name, **options)


def in_world(program, up=200, down=200):
    async def main():
        conditions = Conditions(Profile.parse(LINE.format(up=up, down=down)), seed=3)
        network = MemoryNetwork(conditions, seed=3)
        async with contextlib.AsyncExitStack() as opened:
            return await program(World(opened, network))

    return run_virtual(main(), limit_s=7200)


@pytest.mark.parametrize("num_donors", [1, 3])
def test_a_state_comes_whole_from_one_donor_and_from_several(num_donors):
    state = some_state(20 * LEAF_BYTES)
    held = HeldState(state)

    async def program(world):
        donors = [(await world.donor(f"donor{number}", held))[0] for number in range(num_donors)]
        taker = await world.taker(held.name)
        taken = await taker.take(donors, Deadline.after(600))
        return taken, taker

    taken, taker = in_world(program)
    assert_equal(taken, state)
    assert len(taker.received_bytes) == num_donors
    assert sum(taker.received_bytes.values()) == held.size_bytes
    assert not taker.blamed


def test_equal_states_have_one_name_and_a_changed_bit_gives_another():
    state = some_state()
    assert HeldState(state).name == HeldState(some_state()).name
    state["model"][0][2, 3] += 1e-3
    assert HeldState(state).name != HeldState(some_state()).name
    state = some_state()
    state["step"] += 1
    assert HeldState(state).name != HeldState(some_state()).name


def test_a_state_without_tensors_is_taken_too():
    held = HeldState({"step": 3})

    async def program(world):
        donor, *_ = await world.donor("donor", held)
        return await (await world.taker(held.name)).take([donor], Deadline.after(60))

    assert in_world(program) == {"step": 3}


def test_a_donor_that_lies_is_named_and_left_and_the_state_is_right():
    state = some_state(20 * LEAF_BYTES)
    held = HeldState(state)

    async def program(world):
        liar, *_ = await world.donor("liar", held, lie_after=2)
        honest, *_ = await world.donor("honest", held)
        taker = await world.taker(held.name)
        taken = await taker.take([liar, honest], Deadline.after(600))
        return taken, taker, liar

    taken, taker, liar = in_world(program)
    assert_equal(taken, state)
    assert list(taker.blamed) == [liar]
    assert "not those of the state" in taker.blamed[liar]


def test_a_donor_with_the_index_of_another_state_is_left():
    state = some_state()
    held, other = HeldState(state), HeldState({"other": torch.ones(3)})

    async def program(world):
        wrong, _, donor = await world.donor("wrong", other)
        donor._held[held.name] = other  # a lie that no honest donor can be made to tell
        honest, *_ = await world.donor("honest", held)
        taker = await world.taker(held.name)
        return await taker.take([wrong, honest], Deadline.after(600)), taker, wrong

    taken, taker, wrong = in_world(program)
    assert_equal(taken, state)
    assert "another state" in taker.blamed[wrong]


def test_a_donor_that_does_not_hold_the_state_is_left():
    held = HeldState(some_state())

    async def program(world):
        without, *_ = await world.donor("without", None)
        honest, *_ = await world.donor("honest", held)
        taker = await world.taker(held.name)
        await taker.take([without, honest], Deadline.after(600))
        return taker, without

    taker, without = in_world(program)
    assert "does not hold" in taker.left[without]
    assert not taker.blamed  # it has sent nothing wrong


def test_a_donor_that_falls_silent_does_not_hold_the_others_up():
    held = HeldState(some_state(60 * LEAF_BYTES))

    async def program(world):
        silent, *_ = await world.donor("silent", held, silent_after=6)
        honest, *_ = await world.donor("honest", held)
        taker = await world.taker(held.name, leaf_s=1000.0)
        await taker.take([silent, honest], Deadline.after(600))
        return asyncio.get_running_loop().time()

    # the honest one alone needs 60 MiB / 200 Mbit/s = 2.5 s
    assert in_world(program) < 4.0


def test_over_a_line_that_is_too_slow_for_many_leaves_at_once_they_come_one_by_one():
    """All that are asked for at once need 8 times as long as one may take."""
    state = some_state(6 * LEAF_BYTES)
    held = HeldState(state)

    async def program(world):
        donors = [(await world.donor(f"donor{number}", held))[0] for number in range(3)]
        taker = await world.taker(held.name, leaf_s=6.0)
        num_tries = 0
        while taker.num_missing or not num_tries:
            num_tries += 1
            assert num_tries < 8
            with contextlib.suppress(PeerLost):
                taken = await taker.take(donors, Deadline.after(3600))
        return taken, taker

    taken, taker = in_world(program, up=100, down=2)  # 4 s for a leaf
    assert_equal(taken, state)
    assert not taker.blamed


def test_what_has_come_stays_when_all_donors_are_gone():
    held = HeldState(some_state(40 * LEAF_BYTES))

    async def program(world):
        first, transport, _ = await world.donor("first", held)
        taker = await world.taker(held.name)

        async def vanish():
            await asyncio.sleep(1.0)
            await transport.__aexit__(None, None, None)

        vanishing = asyncio.get_running_loop().create_task(vanish())
        with pytest.raises(PeerLost, match="no peer is left"):
            await taker.take([first], Deadline.after(600))
        await vanishing
        num_missing = taker.num_missing
        second, *_ = await world.donor("second", held)
        taken = await taker.take([first, second], Deadline.after(600))
        return taken, num_missing, taker.received_bytes[second]

    taken, num_missing, from_second = in_world(program)
    assert 10 < num_missing < 35
    assert from_second <= num_missing * LEAF_BYTES
    assert_equal(taken["step"], 120)


def test_a_deadline_ends_it():
    held = HeldState(some_state(40 * LEAF_BYTES))

    async def program(world):
        donor, *_ = await world.donor("donor", held)
        taker = await world.taker(held.name)
        with pytest.raises(DeadlineExceeded, match="parts of the state"):
            await taker.take([donor], Deadline.after(0.5))
        return taker.num_missing

    assert 0 < in_world(program) < 41


def test_more_bytes_than_allowed_are_refused_before_memory_is_taken():
    held = HeldState(some_state(4 * LEAF_BYTES))

    async def program(world):
        donor, *_ = await world.donor("donor", held)
        taker = await world.taker(held.name, max_bytes=LEAF_BYTES)
        with pytest.raises(PeerLost):
            await taker.take([donor], Deadline.after(60))
        return taker.blamed[donor]

    assert "bytes" in in_world(program)


def test_four_donors_fill_the_takers_line_and_the_loss_of_one_costs_little():
    """400 MB in leaves that are as many, and lines as much slower, as 1 in 100: the same course."""
    num_bytes, mbit_s = 4_000_000, 2
    held = HeldState({"state": torch.zeros(num_bytes, dtype=torch.uint8)}, leaf_bytes=LEAF_BYTES // 100)
    ideal_s = num_bytes * 8 / (mbit_s * 1e6)

    async def program(world, is_killed):
        donors = [await world.donor(f"donor{number}", held) for number in range(4)]
        taker = await world.taker(held.name)

        async def kill():
            await asyncio.sleep(ideal_s / 2)
            if is_killed:
                await donors[1][1].__aexit__(None, None, None)

        killing = asyncio.get_running_loop().create_task(kill())
        await taker.take([peer for peer, *_ in donors], Deadline.after(600))
        now_s = asyncio.get_running_loop().time()
        await killing
        return now_s

    clean_s = in_world(lambda world: program(world, False), up=mbit_s, down=mbit_s)
    assert ideal_s / clean_s >= 0.9
    killed_s = in_world(lambda world: program(world, True), up=mbit_s, down=mbit_s)
    assert killed_s < 1.1 * clean_s


def test_over_real_sockets():
    state = some_state()
    held = HeldState(state)

    async def program():
        async with StreamTransport() as donating, StreamTransport() as taking:
            StateDonor(donating).hold(held)
            peer = Peer(await donating.listen(Address("127.0.0.1", 0)))
            return await StateTaker(taking, held.name).take([peer], Deadline.after(30))

    with LoopThread() as loop:
        assert_equal(loop.run(program(), Deadline.after(60)), state)


def test_a_leaf_that_there_is_not_is_refused():
    with pytest.raises(LimitExceeded, match="leaves"):
        HeldState(some_state()).leaf(99)


def test_a_donor_gives_as_much_as_it_may():
    held = HeldState(some_state())

    async def program(world):
        asked = []

        def pause_s(num_bytes):
            now_s = asyncio.get_running_loop().time()
            asked.append(num_bytes)
            return max(0.0, 10.0 - now_s)

        peer, *_ = await world.donor("donor", held, pause_s=pause_s)
        taker = await world.taker(held.name)
        taken = await taker.take([peer], Deadline.after(100))
        assert sum(asked) >= held.size_bytes
        return asyncio.get_running_loop().time(), taken

    taken_s, taken = in_world(program)
    assert taken_s >= 10.0
    assert_equal(taken, some_state())
