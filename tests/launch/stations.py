"""Agents for tests of the head: agents that are children here, and channels that only pretend."""

import os
import signal
import sys

from shoal.core import PeerRefused
from shoal.launch.head import AgentHandle, Engine
from shoal.launch.protocol import AGENT, AgentChannel, PipeChannel


class FakeChannel(AgentChannel):
    """Says what it is given, and keeps what it is told."""

    def __init__(self, host, messages=()):
        self.host, self._messages, self.told, self._is_open = host, list(messages), [], True

    @property
    def is_open(self):
        return self._is_open

    def interests(self):
        return []

    def take(self):
        came, self._messages = self._messages, []
        return came

    def send(self, message):
        self.told.append(message)

    def explain(self):
        return PeerRefused(f"{self.host} has gone.", peer=self.host, next_step="wait")

    def close(self):
        self._is_open = False


class Children(Engine):
    """A local agent for each name; `missing` has those that do not answer in a restart."""

    def __init__(self, names="ab", slots=2, missing=(), has_own_disks=False, cwd=None):
        self._names, self._slots, self._missing = names, slots, missing
        self._has_own_disks = has_own_disks
        self._cwd = cwd
        self.channels = {}

    def open(self, min_processes, max_processes, *, is_restart):
        names = [name for name in self._names if not (is_restart and name in self._missing)]
        self.channels = {name: PipeChannel(name, [sys.executable, *AGENT]) for name in names}
        return [
            AgentHandle(channel, self._slots, name, cwd=self._cwd, has_own_disks=self._has_own_disks)
            for name, channel in self.channels.items()
        ]

    def reopen(self, lost):
        channel = self.channels[lost.machine] = PipeChannel(lost.machine, [sys.executable, *AGENT])
        return AgentHandle(channel, self._slots, lost.machine, has_own_disks=self._has_own_disks)

    def signal(self, name, number=signal.SIGKILL):
        os.kill(self.channels[name].child.pid, number)


class Actors(Engine):
    """Agents of one worker each, on these machines; those that come later are on `more`, in order."""

    can_grow = True

    def __init__(self, machines, more):
        self._machines, self._more = machines, list(more)
        self.agents = []

    def open(self, min_processes, max_processes, *, is_restart):
        return [self._start(machine) for machine in self._machines]

    def reopen(self, lost):
        return self.grow()

    def grow(self):
        return self._start(self._more.pop(0))

    def _start(self, machine):
        channel = PipeChannel(f"{machine}{len(self.agents)}", [sys.executable, *AGENT])
        self.agents.append(AgentHandle(channel, 1, machine, has_own_disks=False))
        return self.agents[-1]

    def signal(self, index):
        os.kill(self.agents[index].channel.child.pid, signal.SIGKILL)
