"""Machines on this one: network namespaces with their own addresses, joined by a bridge, each with an sshd.

    with two_machines(tmp_path) as (a, b):
        done = a.shoal_run("-np", 4, "-H", f"{a.address}:2,{b.address}:2", program)

Needs root, `ip` and sshd: without them the test is skipped. `linked_machines` needs no sshd: a script takes
the place of ssh and starts what it is told in the namespace, so that a cut cable does not cut it. Machines
share the file system and the process table; what tells them apart is their network. Everything is taken down
at the end, whatever has happened.
"""

import contextlib
import itertools
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import pytest

SSHD = next((path for path in ("/usr/sbin/sshd", "/usr/local/sbin/sshd") if Path(path).exists()), None)
SSH_PORT = 22
WAIT_S = 20.0
_COUNTER = itertools.count()


@dataclass
class Machine:
    name: str
    """Of its network namespace."""
    address: str
    folder: Path
    """Keys, known hosts and logs of all machines."""
    link: str
    """The end of its cable at the bridge."""
    variables: dict = field(default_factory=dict)
    """Of all that is started in it by this class."""
    sshd: subprocess.Popen | None = None

    def words(self, *command):
        """A command that runs in it."""
        return ["ip", "netns", "exec", self.name, *map(str, command)]

    def start(self, *command, **settings):
        """A process in it, with pipes."""
        settings = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, **settings}
        return subprocess.Popen(self.words(*command), env={**os.environ, **self.variables}, **settings)

    def run(self, *command, timeout=60, **settings):
        """A command in it, to its end."""
        settings = {"capture_output": True, "text": True, "check": False, **settings}
        environment = {**os.environ, **self.variables}
        return subprocess.run(self.words(*command), env=environment, timeout=timeout, **settings)

    @property
    def ssh_words(self):
        """What makes ssh use the test's key and known hosts."""
        options = {
            "IdentityFile": self.folder / "key",
            "IdentitiesOnly": "yes",
            "UserKnownHostsFile": self.folder / "known_hosts",
            "GlobalKnownHostsFile": "/dev/null",
            "StrictHostKeyChecking": "yes",
        }
        return [word for name, value in options.items() for word in ("--ssh-option", f"{name}={value}")]

    def shoal_words(self, *words, ssh_words=None):
        ssh_words = self.ssh_words if ssh_words is None else ssh_words
        return [sys.executable, "-m", "shoal", "run", *ssh_words, *words]

    def shoal_run(self, *words, timeout=60, **settings):
        """`shoal run` with its head in this machine, to its end."""
        return self.run(*self.shoal_words(*words), timeout=timeout, **settings)

    def pids(self):
        """Processes in it."""
        found = subprocess.run(
            ["ip", "netns", "pids", self.name], capture_output=True, text=True, check=False
        )
        return [int(pid) for pid in found.stdout.split()]

    def kill(self):
        """All its processes at once, sshd too, as if it had crashed; its kernel still answers."""
        for pid in self.pids():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def crash(self):
        """Kill all its processes, and have nobody start others by the stand-in for ssh until `recover`."""
        (self.folder / f"down-{self.address}").touch()
        self.kill()

    def recover(self):
        (self.folder / f"down-{self.address}").unlink()

    def unplug(self):
        """Cut its cable: it runs on, and nobody hears of it."""
        _ip("link", "set", self.link, "down")

    def plug_in(self):
        _ip("link", "set", self.link, "up")

    @property
    def sent_bytes(self):
        """All that has left it by its cable, ssh and the heads of packets included."""
        return int(Path(f"/sys/class/net/{self.link}/statistics/rx_bytes").read_text())

    def start_sshd(self):
        """The server, with the host key of this machine; it stays until the machine is taken down."""
        config = self.folder / f"sshd-{self.name}"
        config.write_text(
            f"Port {SSH_PORT}\nListenAddress {self.address}\nHostKey {self.host_key}\nPidFile none\n"
            f"AuthorizedKeysFile {self.folder}/key.pub\nStrictModes no\nUsePAM no\n"
            "PasswordAuthentication no\nKbdInteractiveAuthentication no\nPermitRootLogin yes\n"
        )
        Path("/run/sshd").mkdir(exist_ok=True)
        words = self.words(SSHD, "-D", "-e", "-f", config)
        with (self.folder / f"sshd-{self.name}.log").open("w") as log:
            self.sshd = subprocess.Popen(words, stderr=log, start_new_session=True)
        self.wait_for_sshd()

    @property
    def host_key(self):
        return self.folder / f"host-{self.name}"

    def wait_for_sshd(self):
        probe = f"import socket; socket.create_connection(({self.address!r}, {SSH_PORT}), 1).close()"
        end_s = time.monotonic() + WAIT_S
        while self.run(sys.executable, "-S", "-c", probe).returncode:
            assert time.monotonic() < end_s, (self.folder / f"sshd-{self.name}.log").read_text()
            time.sleep(0.05)


@contextlib.contextmanager
def two_machines(folder, count=2, *, has_sshd=True):
    """So many machines, two by default, that reach each other; the first may be the head."""
    _skip_unless_possible(has_sshd=has_sshd)
    mark = f"{os.getpid():x}{next(_COUNTER)}"
    with contextlib.ExitStack() as stack:
        bridge = f"shl{mark}"
        _ip("link", "add", bridge, "type", "bridge")
        stack.callback(_ip, "link", "del", bridge, check=False)
        _ip("link", "set", bridge, "up")
        machines = [_make_machine(stack, folder, bridge, mark, index) for index in range(count)]
        if not has_sshd:
            yield machines
            return
        _make_key(folder / "key")
        for machine in machines:
            _make_key(machine.host_key)
        known = [f"{one.address} {one.host_key.with_suffix('.pub').read_text()}" for one in machines]
        (folder / "known_hosts").write_text("".join(known))
        for machine in machines:
            machine.start_sshd()
        yield machines


@contextlib.contextmanager
def linked_machines(folder, count=2):
    """So many machines with a script in the place of ssh."""
    with two_machines(folder, count, has_sshd=False) as machines:
        script = folder / "ssh"
        names = "".join(f"{one.address}) name={one.name};;\n" for one in machines)
        script.write_text(
            '#!/bin/sh\nwhile [ "$1" != -- ]; do shift; done\n'
            f'[ ! -e "{folder}/down-$2" ] || {{ echo "ssh: No route to host" >&2; exit 255; }}\n'
            f'case "$2" in\n{names}esac\nexport SSH_CONNECTION="{machines[0].address} 1 $2 22"\n'
            'exec ip netns exec "$name" sh -c "$3"\n'
        )
        script.chmod(0o755)
        for machine in machines:
            machine.variables["PATH"] = f"{folder}:{os.environ['PATH']}"
        yield machines


def _make_machine(stack, folder, bridge, mark, index):
    # a bridge leads nowhere else: others may have the same addresses
    name, link, address = f"shoal-{mark}-{index}", f"sh{mark}-{index}", f"10.83.0.{index + 1}"
    machine = Machine(name, address, folder, link)
    _ip("netns", "add", name)
    stack.callback(_take_down, machine)
    _ip("link", "add", link, "type", "veth", "peer", "name", "eth0", "netns", name)
    stack.callback(_ip, "link", "del", link, check=False)
    _ip("link", "set", link, "master", bridge, "up")
    _ip("-n", name, "address", "add", f"{address}/24", "dev", "eth0")
    _ip("-n", name, "link", "set", "eth0", "up")
    _ip("-n", name, "link", "set", "lo", "up")
    return machine


def _take_down(machine):
    end_s = time.monotonic() + WAIT_S
    while machine.pids() and time.monotonic() < end_s:
        machine.kill()
        time.sleep(0.02)
    if machine.sshd is not None:
        machine.sshd.wait(WAIT_S)
    _ip("netns", "del", machine.name, check=False)


def _make_key(path):
    subprocess.run(
        ["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "", "-f", str(path)], check=True, timeout=30
    )


def _skip_unless_possible(*, has_sshd):
    if sys.platform != "linux" or os.geteuid() != 0:
        pytest.skip("machines are network namespaces, which only root can make on Linux")
    for tool in ("ip", "ssh", "ssh-keygen") if has_sshd else ("ip",):
        if shutil.which(tool) is None:
            pytest.skip(f"there is no {tool}, which machines of a test need")
    if has_sshd and SSHD is None:
        pytest.skip("there is no sshd, which machines of a test need")
    probe = f"shoal-probe-{os.getpid():x}"
    done = subprocess.run(["ip", "netns", "add", probe], capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"network namespaces cannot be made here: {done.stderr.strip()}")
    _ip("netns", "del", probe, check=False)


def _ip(*words, check=True):
    done = subprocess.run(["ip", *words], capture_output=True, text=True, check=False, timeout=30)
    assert not check or done.returncode == 0, f"ip {' '.join(words)}: {done.stderr}"
