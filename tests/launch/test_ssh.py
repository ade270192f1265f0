import shlex
import sys

import pytest

from shoal.core import PeerError, PeerRefused, PeerUnreachable
from shoal.launch.hosts import SshSettings, explain, ssh_command

SETTINGS = SshSettings(port=2222, user="me", options=("IdentityFile=/k",))


def test_ssh_asks_nothing_and_notices_a_machine_that_has_gone(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", "/my libs")
    words = ssh_command("b", SETTINGS)
    assert words[:3] == ["ssh", "-o", "IdentityFile=/k"]  # the user's own come first: the first one counts
    assert {"BatchMode=yes", "ServerAliveInterval=1", "ServerAliveCountMax=5"} <= set(words)
    assert words[words.index("-p") + 1] == "2222"
    assert words[words.index("-l") + 1] == "me"
    assert words[-3:-1] == ["--", "b"]
    outer = shlex.split(words[-1])
    assert outer[:3] == ["exec", "/bin/sh", "-c"]
    inner = shlex.split(outer[3])
    assert inner == ["exec", "env", "PYTHONPATH=/my libs", sys.executable, "-P", "-m", "shoal.launch.agent"]


@pytest.mark.parametrize(
    ("code", "complaint", "kind", "told", "next_step"),
    [
        (255, "ssh: Could not resolve hostname b: unknown", PeerUnreachable, "no address", "getent"),
        (255, "ssh: connect to host b port 22: Connection refused", PeerUnreachable, "refuses", "--ssh-port"),
        (255, "ssh: connect to host b port 22: Connection timed out", PeerUnreachable, "reached", "ping b"),
        (255, "Timeout, server b not responding.", PeerUnreachable, "cannot be reached", "ping b"),
        (255, "@ REMOTE HOST IDENTIFICATION HAS CHANGED! @\nHost key verification failed.", PeerUnreachable,
         "another host key", "ssh-keygen -R b"),
        (255, "Host key verification failed.", PeerUnreachable, "never been told", "ssh-keyscan b"),
        (255, "me@b: Permission denied (publickey).", PeerUnreachable, "no ssh key", "ssh-copy-id b"),
        (255, "kex_exchange: closed", PeerUnreachable, "by ssh: kex_exchange: closed", "ssh -o"),
        (127, "sh: 1: exec: /p: not found", PeerRefused, "no Python at", "--remote-python"),
        (1, "/p: No module named shoal", PeerRefused, "has no Shoal", "--remote-python"),
        (1, "ModuleNotFoundError: No module named 'msgspec'", PeerRefused, "has no Shoal", "--remote-python"),
        (2, "unknown option -P", PeerRefused, "older than 3.11", "--remote-python"),
        (137, "", PeerRefused, "exit code 137", "dmesg"),
        (None, "", PeerRefused, "", "dmesg"),
    ],
)  # fmt: skip
def test_errors_say_what_to_do(code, complaint, kind, told, next_step):
    error = explain(SETTINGS, "b", code, complaint)
    assert isinstance(error, PeerError)
    assert type(error) is kind
    assert told in error.what
    assert "b" in error.what
    assert next_step in error.next_step
    assert error.peer == "b"
