"""Profile and script together: every kind of fault on a loop that the test moves by hand."""

import asyncio
import heapq
import itertools
import math
import os
import statistics
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest

from shoal.core import Address, Deadline, ManualClock, Peer, PeerError, UsageError
from shoal.core.virtual import run_virtual
from shoal.transport import Reply, StreamTransport
from shoal.transport.network.conditions import Conditions
from shoal.transport.network.faults import AnyFault, FaultScript
from shoal.transport.network.memory import MemoryNetwork
from shoal.transport.network.profiles import PRESETS, Place, Profile, Way

A, B, C = (Address("10.0.0.1", port) for port in (1, 2, 3))
NAMES = "[peers]\na = '10.0.0.1:1'\nb = '10.0.0.1:2'\nc = '10.0.0.1:3'\n[[fault]]\n"
START_S = 1000.0


class FakeLoop:
    """A loop's clock and timers."""

    def __init__(self):
        self.now_s = START_S
        self.timers = []
        self.order = itertools.count()
        self.is_closed = lambda: False

    def time(self):
        return self.now_s

    def call_at(self, when, callback, *args):
        handle = type("Handle", (), {"is_cancelled": False})()
        handle.cancel = lambda: setattr(handle, "is_cancelled", True)
        heapq.heappush(self.timers, (when, next(self.order), handle, callback, args))
        return handle

    def run_until(self, now_s):
        """To seconds since the start."""
        while self.timers and self.timers[0][0] <= START_S + now_s:
            when, _, handle, callback, args = heapq.heappop(self.timers)
            if not handle.is_cancelled:
                self.now_s = when
                callback(*args)
        self.now_s = START_S + now_s


def conditions(script="", profile="[ways.default]\ndelay_ms = 10", seed=0):
    loop = FakeLoop()
    made = Conditions(
        Profile.parse(profile) if profile else None,
        FaultScript.parse(script) if script else None,
        seed=seed,
    )
    made.start(loop)
    return made, loop


def delay_ms(link, loop, size_bytes=100):
    return 1000 * (link.carry_stream(loop.time(), size_bytes).arrives_at_s - loop.time())


def datagram_delays_ms(link, loop, size_bytes=100):
    return [
        1000 * (passage.arrives_at_s - loop.time())
        for passage in link.carry_datagram(loop.time(), size_bytes)
    ]


# --- profiles ---


def test_links_follow_the_profile():
    made, loop = conditions(
        profile="[places.x]\nup_mbit_s = 8\ndown_mbit_s = 4\n[ways.default]\ndelay_ms = 10\nmbit_s = 80"
    )
    assert delay_ms(made.link(A, B), loop, 1000) == pytest.approx(12)
    assert delay_ms(made.link(A, C), loop, 1000) == pytest.approx(13)  # behind the first on A's line
    made, loop = conditions(
        profile="[places.x]\nup_mbit_s = 8\ndown_mbit_s = 4\n[ways.default]\ndelay_ms = 10\nmbit_s = 80"
    )
    assert delay_ms(made.link(A, B, "leaving"), loop, 1000) == pytest.approx(11)
    assert delay_ms(made.link(B, A, "arriving"), loop, 1000) == pytest.approx(12)
    assert delay_ms(made.link(C, None, "leaving"), loop, 1000) == pytest.approx(1)
    assert delay_ms(made.link(None, C, "arriving"), loop, 1000) == pytest.approx(2)
    assert made.link(A, B) is made.link(A, B)
    assert delay_ms(made.link(A, A), loop, 10**6) == 0
    assert made.concern_line(A)


def test_without_profile_and_script_nothing_happens_to_anybody():
    made, loop = conditions(profile="")
    assert delay_ms(made.link(A, B), loop, 10**9) == 0
    assert not made.is_dead(A)
    assert not made.concern_line(A)
    clock = ManualClock()
    assert made.clock_for(lambda: A, clock) is clock
    made.step(3)
    assert loop.timers == []


def test_directions_draw_their_own_numbers():
    def arrivals(order):
        made, loop = conditions(profile="[ways.default]\ndelay_ms = {kind = 'exponential', mean = 10}")
        links = {"ab": made.link(A, B), "ba": made.link(B, A), "ac": made.link(A, C)}
        seen = {name: [] for name in links}
        for name in order:
            seen[name].append(delay_ms(links[name], loop))
        return seen

    one, other = arrivals(["ab", "ba", "ac"] * 5), arrivals(["ac"] * 5 + ["ba"] * 5 + ["ab"] * 5)
    assert one == other
    assert len({delay for delays in one.values() for delay in delays}) == 15


PROGRAM = """
import hashlib
from shoal.core import Address
from shoal.core.virtual import VirtualLoop
from shoal.transport.network.conditions import Conditions
from shoal.transport.network.faults import AnyFault, FaultScript
from shoal.transport.network.profiles import PRESETS, Place, Profile, Way
script = FaultScript.parse('''
[[fault]]
kind = "drop"
at_s = 1
probability = 0.3
peers = ["p1:*", "p2:*", "p3:*", "p4:*"]
count = 2
[[fault]]
kind = "duplicate"
probability = 0.3
chance = 0.5
[[fault]]
kind = "reorder"
probability = 0.3
''')
seen = hashlib.sha256()
for preset in ("lan", "home", "three-continents"):
    conditions = Conditions(Profile.load(preset), script, seed=7)
    loop = VirtualLoop()
    conditions.start(loop)
    peers = [Address(f"p{number}", 1) for number in range(6)]
    for number in range(300):
        link = conditions.link(peers[number % 6], peers[(number * 7 + 1) % 5])
        seen.update(repr(link.carry_stream(number / 100, 500)).encode())
        seen.update(repr(link.carry_datagram(number / 100, 500)).encode())
    loop.close()
print(seen.hexdigest())
"""


def test_two_processes_see_the_same_to_the_bit():
    digests = {
        subprocess.run(
            [sys.executable, "-c", PROGRAM],
            env={**os.environ, "PYTHONHASHSEED": seed},
            capture_output=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(digests) == 1


# --- faults ---


def test_names_are_checked_against_places():
    script = FaultScript.parse("[[fault]]\nkind = 'kill'\npeer = 'asie'")
    with pytest.raises(UsageError, match=r"no peer is called 'asie', did you mean 'asia'\?"):
        Conditions(Profile.load("three-continents"), script)


def test_partition_holds_streams_and_drops_datagrams():
    made, loop = conditions(NAMES + "kind = 'partition'\nat_s = 1\nfor_s = 2\npeer = 'a'")
    link, back, others = made.link(A, B), made.link(B, A), made.link(B, C)
    told = []
    stop = link.when_changed(lambda: told.append(loop.now_s))
    assert delay_ms(link, loop) == pytest.approx(10)
    loop.run_until(1)
    assert link.carry_stream(loop.time(), 1).arrives_at_s == math.inf
    assert back.carry_stream(loop.time(), 1).arrives_at_s == math.inf
    assert link.carry_datagram(loop.time(), 1) == ()
    assert delay_ms(others, loop) == pytest.approx(10)
    loop.run_until(3)
    assert told == [START_S + 1, START_S + 3]
    assert delay_ms(link, loop) == pytest.approx(30)  # sent again: a round trip more, once
    assert delay_ms(link, loop) == pytest.approx(10)
    assert datagram_delays_ms(link, loop) == [pytest.approx(10)]
    stop()
    assert loop.timers == []


def test_a_change_is_felt_even_before_the_timer_rings():
    made, loop = conditions(NAMES + "kind = 'partition'\nat_s = 1\nfor_s = 2\npeer = 'a'")
    link = made.link(A, B)
    told = []
    link.when_changed(lambda: told.append(loop.now_s))
    assert link.carry_stream(START_S + 1, 1).arrives_at_s == math.inf
    assert told == []  # not inside: whoever sends is in the middle of something
    loop.run_until(1)
    assert told == [START_S + 1]


def test_pause():
    made, loop = conditions(NAMES + "kind = 'pause'\nat_s = 1\nfor_s = 2\npeer = 'a'")
    there, back = made.link(B, A), made.link(A, B)
    loop.run_until(0.995)
    assert delay_ms(there, loop) == pytest.approx(2005)  # on its way when the pause begins: heard at its end
    assert delay_ms(back, loop) == pytest.approx(10)
    assert datagram_delays_ms(there, loop) == [pytest.approx(2005)]
    loop.run_until(1.5)
    assert there.carry_stream(loop.time(), 1).arrives_at_s == math.inf
    assert back.carry_stream(loop.time(), 1).arrives_at_s == math.inf
    assert datagram_delays_ms(there, loop) == [pytest.approx(1510)]
    assert datagram_delays_ms(back, loop) == [pytest.approx(1510)]
    assert made.link(None, A, "arriving").carry_stream(loop.time(), 1).arrives_at_s == math.inf
    assert delay_ms(made.link(None, B, "arriving"), loop) == 0
    loop.run_until(3)
    assert delay_ms(there, loop) == pytest.approx(10)


def test_a_datagram_to_a_paused_peer_holds_up_no_other():
    profile = "[places.x]\nup_mbit_s = 8\n[ways.default]\ndelay_ms = 10"
    made, loop = conditions(NAMES + "kind = 'pause'\nfor_s = 60\npeer = 'c'", profile)
    assert datagram_delays_ms(made.link(A, C), loop, 1000) == pytest.approx([60_011])
    assert datagram_delays_ms(made.link(A, B), loop, 1000) == pytest.approx([12])
    assert delay_ms(made.link(A, B), loop, 1000) == pytest.approx(13)


def test_conditions_serve_one_run():
    made = Conditions(Profile.load("lan"))

    async def world():
        MemoryNetwork(made).host("a")

    run_virtual(world())
    with pytest.raises(UsageError, match="Conditions serve one run"):
        run_virtual(world())
    made, loop = conditions()
    made.start(FakeLoop())  # another thread's
    loop.is_closed = lambda: True
    with pytest.raises(UsageError, match="Conditions serve one run"):
        made.start(FakeLoop())


def test_what_is_stopped_stays_stopped():
    made, loop = conditions(NAMES + "kind = 'partition'\nat_s = 1\nlink = ['a', 'b']")
    made.stop()
    made.step(1)
    loop.run_until(5)
    assert delay_ms(made.link(A, B), loop) == pytest.approx(10)
    assert made.next_change_s == math.inf
    early = Conditions(None, FaultScript.parse(NAMES + "kind = 'kill'\npeer = 'a'"))
    early.stop()
    early.start(loop)
    assert not early.is_dead(A)


def test_a_pause_of_which_nobody_knows_the_end():
    made, loop = conditions(NAMES + "kind = 'pause'\nat_step = 1\nfor_steps = 1\npeer = 'a'")
    link = made.link(B, A)
    made.step(1)
    assert link.carry_stream(loop.time(), 1).arrives_at_s == math.inf
    assert link.carry_datagram(loop.time(), 1) == ()
    made.step(2)
    assert delay_ms(link, loop) == pytest.approx(10)


def test_kill():
    made, loop = conditions(NAMES + "kind = 'kill'\nat_s = 1\npeer = 'a'")
    link = made.link(B, A)
    killed = []
    made.on_kill(A, lambda: killed.append("a"))
    made.on_kill(B, lambda: killed.append("b"))
    forget = made.on_kill(A, lambda: killed.append("never"))
    forget()
    assert link.carry_datagram(loop.time(), 1)
    loop.run_until(2)
    assert killed == ["a"]
    assert made.is_dead(A)
    assert not made.is_dead(B)
    assert link.carry_datagram(loop.time(), 1) == ()
    assert made.link(A, B).carry_datagram(loop.time(), 1) == ()
    assert delay_ms(link, loop) == pytest.approx(10)  # what the operating system says of the end
    made.on_kill(A, lambda: killed.append("late"))
    assert killed == ["a", "late"]


def test_slow():
    profile = "[places.x]\nup_mbit_s = 8\n[ways.default]\ndelay_ms = 10\nmbit_s = 80\njitter_ms = 0"
    made, loop = conditions(NAMES + "kind = 'slow'\nat_s = 1\nfor_s = 1\nfactor = 3\npeer = 'a'", profile)
    link, others = made.link(A, B), made.link(B, C)
    assert delay_ms(link, loop, 1000) == pytest.approx(11)
    loop.run_until(1)
    assert delay_ms(link, loop, 1000) == pytest.approx(33)
    assert delay_ms(made.link(B, A), loop, 1000) == pytest.approx(31)  # B's line is as quick as ever
    loop.run_until(1.5)
    assert delay_ms(others, loop, 1000) == pytest.approx(11)
    loop.run_until(2)
    assert delay_ms(link, loop, 1000) == pytest.approx(11)


def test_a_slow_link_leaves_lines_alone():
    profile = "[places.x]\nup_mbit_s = 8\n[ways.default]\ndelay_ms = 10\nmbit_s = 800"
    made, loop = conditions(NAMES + "kind = 'slow'\nfactor = 3\nlink = ['a', 'b']", profile)
    assert delay_ms(made.link(A, B), loop, 1000) == pytest.approx(31)


def test_drop():
    made, loop = conditions(
        NAMES + "kind = 'drop'\nprobability = 0.5\nlink = ['a', 'b']\none_way = true",
        "[ways.default]\ndelay_ms = 10\nloss = 0.2",
    )
    link, back = made.link(A, B), made.link(B, A)
    passed = [len(link.carry_datagram(loop.time(), 1)) for _ in range(4000)]
    assert sum(passed) == pytest.approx(4000 * 0.8 * 0.5, rel=0.1)
    assert sum(len(back.carry_datagram(loop.time(), 1)) for _ in range(4000)) == pytest.approx(3200, rel=0.1)
    late = [delay_ms(link, loop) > 11 for _ in range(4000)]
    assert sum(late) == pytest.approx(4000 * 0.6, rel=0.1)


def test_dropping_everything_holds_streams():
    made, loop = conditions(NAMES + "kind = 'drop'\nprobability = 1\nfor_s = 1")
    link = made.link(A, B)
    assert link.carry_stream(loop.time(), 1).arrives_at_s == math.inf
    assert link.carry_datagram(loop.time(), 1) == ()
    loop.run_until(1)
    assert delay_ms(link, loop) < math.inf


def test_corrupt():
    made, loop = conditions(NAMES + "kind = 'corrupt'\nprobability = 0.1\nfor_s = 1")
    link = made.link(A, B)
    assert sum(link.carry_stream(loop.time(), 1).is_corrupt for _ in range(4000)) == pytest.approx(
        400, rel=0.2
    )
    assert sum(link.carry_datagram(loop.time(), 1)[0].is_corrupt for _ in range(4000)) == pytest.approx(
        400, rel=0.2
    )
    assert sum(link.carry_stream(loop.time(), 14_000).is_corrupt for _ in range(1000)) == pytest.approx(
        1000 * (1 - 0.9**10), rel=0.1
    )
    loop.run_until(1)
    assert not any(link.carry_stream(loop.time(), 1).is_corrupt for _ in range(100))


def test_duplicate():
    made, loop = conditions(NAMES + "kind = 'duplicate'\nprobability = 0.2")
    link = made.link(A, B)
    sizes = [len(link.carry_datagram(loop.time(), 1)) for _ in range(4000)]
    assert sizes.count(2) == pytest.approx(800, rel=0.15)
    assert sizes.count(1) == 4000 - sizes.count(2)
    assert delay_ms(link, loop) == pytest.approx(10)


def test_reorder():
    made, loop = conditions(NAMES + "kind = 'reorder'\nprobability = 0.2\nby_ms = 30")
    link = made.link(A, B)
    arrivals = [link.carry_datagram(loop.time() + number * 1e-3, 1)[0].arrives_at_s for number in range(4000)]
    late = [arrival - START_S - number * 1e-3 - 0.01 > 1e-9 for number, arrival in enumerate(arrivals)]
    assert sum(late) == pytest.approx(800, rel=0.15)
    overtaken = sum(later < earlier for earlier, later in itertools.pairwise(arrivals))
    assert overtaken > 500
    assert max(arrival - START_S - number * 1e-3 for number, arrival in enumerate(arrivals)) <= 0.04
    assert delay_ms(link, loop) == pytest.approx(10)  # streams keep their order and do not feel it


def test_skew():
    made, loop = conditions(
        NAMES + "kind = 'skew'\nat_s = 1\nfor_s = 10\npeer = 'a'\noffset_s = 60\ndrift = 0.1"
    )
    clock = ManualClock()
    skewed, right = made.clock_for(lambda: A, clock), made.clock_for(lambda: B, clock)
    nobody = made.clock_for(lambda: None, clock)
    assert skewed.wall_s() == clock.wall_s()
    loop.run_until(1)
    assert skewed.wall_s() - clock.wall_s() == pytest.approx(60)
    assert right.wall_s() == nobody.wall_s() == clock.wall_s()
    loop.run_until(6)
    assert skewed.wall_s() - clock.wall_s() == pytest.approx(60.5)
    assert skewed.now_s() == clock.now_s()
    loop.run_until(12)
    assert skewed.wall_s() == clock.wall_s()


def test_steps_wake_those_who_wait():
    made, loop = conditions(NAMES + "kind = 'partition'\nat_step = 2\nfor_steps = 2\npeer = 'a'")
    link = made.link(A, B)
    told = []
    link.when_changed(lambda: told.append(made.version))
    for step in range(6):
        made.step(step)
        is_held = link.carry_stream(loop.time(), 1).arrives_at_s == math.inf
        assert is_held == (step in (2, 3))
    assert len(told) == 2
    made.step(2)  # steps do not go back
    assert delay_ms(link, loop) < math.inf


def test_nothing_changes_after_the_end():
    made, loop = conditions(NAMES + "kind = 'partition'\nat_s = 1\npeer = 'a'")
    made.stop()
    loop.run_until(2)
    assert delay_ms(made.link(A, B), loop) == pytest.approx(10)


# --- in virtual time ---


async def serve(network, name):
    transport = StreamTransport(network=network.host(name))
    await transport.__aenter__()
    transport.handle("echo", lambda head, buffers: Reply(head.payload, buffers))
    return transport, await transport.listen(Address(name, 0))


def test_calls_in_memory_take_a_round_trip_and_wait_for_the_end_of_a_partition():
    script = FaultScript.parse("[[fault]]\nkind = 'partition'\nat_s = 10\nfor_s = 5\npeer = 'a:*'")

    async def world():
        made = Conditions(Profile.parse("[ways.default]\ndelay_ms = 30"), script)
        network = MemoryNetwork(made)
        made.start()

        loop = asyncio.get_running_loop()
        server, address = await serve(network, "a")
        client, _ = await serve(network, "b")
        peer, taken_s = Peer(address), []
        try:
            for _ in range(100):
                began_s = loop.time()
                await client.call(peer, "echo", 1, deadline=Deadline.after(60))
                taken_s.append(loop.time() - began_s)
                await asyncio.sleep(0.2)
        finally:
            await client.__aexit__(None, None, None)
            await server.__aexit__(None, None, None)
        return taken_s

    taken_s = run_virtual(world())
    assert statistics.median(taken_s) == pytest.approx(0.06, rel=0.01)
    assert sum(taken > 0.1 for taken in taken_s[1:]) == 1
    assert 4.5 < max(taken_s) < 5.3


def test_a_killed_host_is_lost_to_others():
    script = FaultScript.parse("[[fault]]\nkind = 'kill'\nat_s = 1\npeer = 'a:*'")

    async def world():

        made = Conditions(Profile.load("wan"), script)
        network = MemoryNetwork(made)
        made.start()
        server, address = await serve(network, "a")
        client, _ = await serve(network, "b")
        try:
            await client.call(address, "echo", 1, deadline=Deadline.after(60))
            await asyncio.sleep(2)
            with pytest.raises(PeerError):
                await client.call(address, "echo", 1, deadline=Deadline.after(60))
            return asyncio.get_running_loop().time()
        finally:
            await client.__aexit__(None, None, None)
            await server.__aexit__(None, None, None)

    assert run_virtual(world()) < 5


def test_the_examples_of_the_docs_work():
    text = (Path(__file__).parents[3] / "docs" / "networks.md").read_text()
    profile, script = (block.split("```")[0] for block in text.split("```toml\n")[1:])
    made = Conditions(Profile.parse(profile), FaultScript.parse(script))
    cellar, office = Address("10.0.0.7", 31337), Address("10.0.0.1", 31337)
    assert made.profile.line_of(cellar).up_mbit_s == 10
    assert made.profile.way_between(cellar, office).loss in (0.001, 0.05)
    for name in PRESETS:
        assert f"| `{name}` |" in text
    for kind in AnyFault.__args__:
        assert f"| `{kind.__struct_config__.tag}` |" in text
    documented = "".join(line for line in text.splitlines() if line.startswith("|"))
    for struct in (Place, Way, *AnyFault.__args__):
        assert all(f"`{field.encode_name}`" in documented for field in msgspec.structs.fields(struct))
