"""Hole punching with real sockets: namespaces behind routers of every kind, TCP and UDP, under TLS."""

import contextlib
import json
import subprocess
from pathlib import Path

import pytest

from shoal.core.identity import new_secret, write_private_file
from shoal.transport.network.nat import NATS
from transport import nat_peer
from transport.nat_over_tun import Internet, is_possible

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not is_possible(), reason="it takes root, ip and /dev/net/tun"),
]
RELAYS = ("198.51.100.1", "198.51.100.2")
PORT = 31337
PATIENCE_S = 20


class Program:
    def __init__(self, internet, host, *arguments):
        command = [Path(nat_peer.__file__), *arguments]
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
        self.process = internet.start(host, command, **pipes)

    def said(self):
        return self.process.stdout.readline().strip()

    def reach(self, address, for_s=PATIENCE_S):
        print(address, for_s, file=self.process.stdin, flush=True)
        return json.loads(self.said())

    def close(self):
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.communicate(timeout=10)
        self.process.kill()
        self.process.communicate()


@pytest.fixture(scope="module")
def peers(tmp_path_factory):
    """Two relays that everybody can dial, and two peers behind routers of each kind, with their addresses."""
    secret = tmp_path_factory.mktemp("swarm") / "secret"
    write_private_file(secret, new_secret().encode() + b"\n", replace=False)
    with contextlib.ExitStack() as closing:
        internet = closing.enter_context(Internet())

        def start(host, *arguments):
            program = Program(internet, host, secret, *arguments)
            closing.callback(program.close)
            return program

        relays = []
        for host in RELAYS:
            internet.host(host)
            relays.append(start(host, "relay", f"{host}:{PORT}"))
        addresses = [relay.said() for relay in relays]
        found = {}
        for number, kind in enumerate(NATS):
            for twin in (0, 1):
                router, host = f"203.0.113.{10 * number + twin}", f"10.{number}.{twin}.2"
                internet.router(router, kind)
                internet.host(host, behind=router)
                found[kind, twin] = start(host, "peer", *addresses)
        yield {which: (program, program.said()) for which, program in found.items()}


@pytest.mark.parametrize(
    ("one", "other"), [(one, other) for number, one in enumerate(NATS) for other in list(NATS)[number:]]
)
def test_pairs_of_routers(peers, one, other):
    is_punched = "endpoint-independent" in (one, other) or one == other == "port-restricted"
    caller, (_, address) = peers[one, 0][0], peers[other, 1]
    outcome = caller.reach(address, PATIENCE_S if is_punched else 8)
    expected = "punched" if is_punched else "relayed"
    assert (outcome["tcp"], outcome["udp"]) == (expected, expected)
    assert outcome["name"] == address.rpartition("/")[2]
