"""The same code on real sockets: processes of one run, one of them killed in the middle."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

PEER = Path(__file__).with_name("socket_peer.py")


class Process:
    """A peer as a child process, and the lines that it has printed."""

    def __init__(self, join, num_steps, *words):
        self.lines = []
        self.child = subprocess.Popen(
            [sys.executable, PEER, join, str(num_steps), *words], stdout=subprocess.PIPE, text=True
        )

    def read(self):
        line = self.child.stdout.readline()
        if line:
            self.lines.append(json.loads(line))
        return bool(line)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_two_that_cannot_be_dialed_train_with_two_that_can_of_which_one_is_killed():
    """On loopback there is no router: those two do not listen, and are called through the others' relays."""
    first = Process("-", 200)
    peers = [first]
    try:
        first.read()
        address = first.lines[0]["address"]
        peers += [Process(address, 200), Process(address, 200, "-"), Process(address, 200, "-")]
        for peer in peers[1:]:
            peer.read()
        while not any(line.get("members") == 4 and line["steps"] > 5 for line in first.lines):
            assert first.read()
        first.child.kill()
        killed_s = time.monotonic()
        known = len(peers[2].lines)
        while len(peers[2].lines) < known + 3:
            assert peers[2].read()
        assert time.monotonic() - killed_s < 20
        for peer in peers[1:]:
            while peer.read():
                pass
            assert peer.child.wait(60) == 0
            assert peer.lines[-1]["steps"] >= 200
            assert peer.lines[-1]["committed"] > 0
        assert {line["way"] for line in peers[1].lines[1:]} == {"dialed"}
        for peer in peers[2:]:
            assert peer.lines[1]["way"] == "relayed"
            # at the end the two of them may be left
            assert not any(line["is_first"] for line in peer.lines[1:] if line["members"] > 2)
        bits = {}
        for peer in peers:
            for line in peer.lines[1:]:
                assert bits.setdefault(line["name"], line["bits"]) == line["bits"]
    finally:
        for peer in peers:
            peer.child.kill()
            peer.child.wait()
            peer.child.stdout.close()


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("kills_first", [True, False])
def test_four_processes_one_killed(kills_first):
    first = Process("-", 200)
    peers = [first]
    try:
        first.read()
        peers += [Process(first.lines[0]["address"], 200) for _ in range(3)]
        for peer in peers[1:]:
            peer.read()
        while not any(line.get("members") == 4 and line["steps"] > 5 for line in first.lines):
            assert first.read()
        is_first = first.lines[-1]["is_first"]
        victim = first if is_first == kills_first else peers[1]
        victim.child.kill()
        killed_s = time.monotonic()
        survivors = [peer for peer in peers if peer is not victim]
        known = len(survivors[0].lines)
        while len(survivors[0].lines) < known + 3:
            assert survivors[0].read()
        assert time.monotonic() - killed_s < 20
        for peer in survivors:
            while peer.read():
                pass
            assert peer.child.wait(60) == 0
            assert peer.lines[-1]["steps"] >= 200
        bits = {}
        for peer in peers:
            for line in peer.lines[1:]:
                assert bits.setdefault(line["name"], line["bits"]) == line["bits"]
                assert line["is_balanced"]
        assert len(bits) > 10
        assert survivors[0].lines[-1]["committed"] > 0
    finally:
        for peer in peers:
            peer.child.kill()
            peer.child.wait()
            peer.child.stdout.close()
