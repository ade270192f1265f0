"""One member that can be dialed and five behind routers of every kind train in one run; no port is opened.

Four of the five are called through the first as their relay, which has no more places: the last is a client.

Each is a process in a network namespace of its own, with real sockets and TLS; it needs root.
"""

import contextlib
import json
import subprocess
import time
from collections import Counter
from pathlib import Path

import pytest

from shoal.core.identity import new_secret, write_private_file
from swarm import routed_member
from transport.nat_over_tun import Internet, is_possible

HUB = "198.51.100.1"
ROUTERS = ["endpoint-independent", "address-dependent", "symmetric", "endpoint-independent", "symmetric"]
NUM_STEPS = 25


class Member:
    def __init__(self, internet, host, *arguments):
        command = [Path(routed_member.__file__), *arguments, 1 + len(ROUTERS), NUM_STEPS]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self.process = internet.start(host, command, **pipes)
        self.id = self.read()["id"]

    def read(self):
        return json.loads(self.process.stdout.readline())

    def end(self):
        self.process.stdin.close()
        self.process.stdin = None

    def close(self):
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.communicate(timeout=20)
        self.process.kill()
        self.process.communicate()


@pytest.mark.slow
@pytest.mark.skipif(not is_possible(), reason="it takes root, ip and /dev/net/tun")
@pytest.mark.timeout(300)
def test_five_behind_routers_train_with_one_that_can_be_dialed(tmp_path):
    secret = tmp_path / "secret"
    write_private_file(secret, new_secret().encode() + b"\n", replace=False)
    with contextlib.ExitStack() as closing:
        internet = closing.enter_context(Internet())

        def start(host, join, listen):
            member = Member(internet, host, join, listen, secret)
            closing.callback(member.close)
            return member

        internet.host(HUB)
        members = [start(HUB, "-", f"{HUB}:31337")]
        for number, kind in enumerate(ROUTERS):
            router, host = f"203.0.113.{number}", f"10.0.{number}.2"
            internet.router(router, kind)
            internet.host(host, behind=router)
            members.append(start(host, f"{HUB}:31337", "-"))
        began_s = time.monotonic()
        bits, last = {}, []
        for member in members:
            line = member.read()
            while line["step"] < NUM_STEPS or not line["committed"]:
                line = member.read()
                bits.setdefault(line["name"], {}).setdefault(line["bits"], None)
            last.append(line)
        took_s = time.monotonic() - began_s
        for member in members:
            member.end()
        assert len(bits) >= NUM_STEPS
        assert all(len(prints) == 1 for prints in bits.values())
        ways = Counter(way for way in last[0]["ways"])
        links = Counter()
        for line in last[1:]:
            links.update({way: num for way, num in line["links"].items() if way != "direct"})
        print(
            f"{NUM_STEPS} steps in {took_s:.0f} s; members: {dict(ways)}, links behind routers: {dict(links)}"
        )
        assert ways == {"dialed": 1, "relayed": 4, "client": 1}
        assert links["punched"] > links["relayed"] > 0  # 14 and 6 where all have met, one for each side
