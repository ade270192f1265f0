"""Waits for the agents of a start to answer: which hosts take part, where they meet, or what is wrong."""

from __future__ import annotations

import ipaddress
import select
from collections.abc import Iterable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Self

from shoal._version import __version__
from shoal.core import Clock
from shoal.core.errors import PeerError, PeerRefused, PeerUnreachable, ProtocolError, ShoalError, UsageError
from shoal.core.processes import boot_id
from shoal.launch.channel import Station
from shoal.launch.messages import BEAT_S, Beat, Hello, all_addresses
from shoal.launch.settings import Meeting
from shoal.launch.signals import SignalInbox

_TICK_S = 0.2


@dataclass(frozen=True)
class Present:
    """A station whose agent has answered, and how many workers it gets."""

    station: Station
    hello: Hello
    num_processes: int = 0
    shift_s: float = 0.0
    """What to add to its clock to have this machine's, but for the time that its answer took."""

    @property
    def host(self) -> str:
        """As the user named it."""
        return self.station.channel.host


class Gathering:
    """Of one start; a context manager, which closes all channels."""

    def __init__(self, stations: Sequence[Station]) -> None:
        self._stations = stations
        self._hellos: dict[int, Hello] = {}
        self._shifts_s: dict[int, float] = {}
        self._errors: dict[int, ShoalError] = {}
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        for station in self._stations:
            self._stack.callback(station.channel.close)
        return self

    def __exit__(self, *_: object) -> None:
        for station in self._stations:
            station.channel.hang_up()
        self._stack.close()

    @property
    def present(self) -> list[Present]:
        """In the order of the stations."""
        return [
            Present(self._stations[index], self._hellos[index], shift_s=self._shifts_s[index])
            for index in sorted(self._hellos)
        ]

    @property
    def absent(self) -> list[tuple[Station, ShoalError]]:
        """Who cannot take part, and why."""
        return [(self._stations[index], self._errors[index]) for index in sorted(self._errors)]

    @property
    def num_slots(self) -> int:
        """On those that have answered."""
        return sum(present.station.slots for present in self.present)

    def wait(self, inbox: SignalInbox, limit_s: float, clock: Clock) -> int | None:
        """Until all have answered or cannot, or the time is over; the number of a signal that came first."""
        end_s, beat_s = clock.now_s() + limit_s, 0.0
        while waiting := self._waiting():
            self._poll(waiting, inbox)
            signals = inbox.take()
            if signals:
                return signals[0]
            for index in waiting:
                self._hear(index, clock.now_s())
            now_s = clock.now_s()
            if now_s >= end_s:
                for index in self._waiting():
                    self._errors[index] = _silent(self._stations[index], limit_s)
            if now_s - beat_s >= BEAT_S:
                beat_s = now_s
                for index in self._hellos:
                    self._stations[index].channel.send(Beat())
        return None

    def choose(self, num_processes: int) -> list[Present]:
        """Those that get workers, filled in order; the others are closed."""
        chosen: list[Present] = []
        for present in self.present:
            count = min(present.station.slots, num_processes)
            num_processes -= count
            if count > 0:
                chosen.append(replace(present, num_processes=count))
            else:
                present.station.channel.close()
        assert num_processes == 0
        return chosen

    def complaint(self) -> ShoalError:
        """Of all that are absent, as one error."""
        errors = [error for _, error in self.absent]
        if len(errors) == 1:
            return errors[0]
        told = "\n  ".join(f"{error.what} Try: {error.next_step}" for error in errors)
        return PeerUnreachable(
            f"{len(errors)} of {len(self._stations)} hosts cannot take part.\n  {told}",
            peer=[station.channel.host for station, _ in self.absent],
        )

    def _waiting(self) -> list[int]:
        known = {**self._hellos, **self._errors}
        return [index for index in range(len(self._stations)) if index not in known]

    def _poll(self, waiting: Iterable[int], inbox: SignalInbox) -> None:
        poll = select.poll()
        poll.register(inbox.descriptor, select.POLLIN)
        interests = [one for index in waiting for one in self._stations[index].channel.interests()]
        for descriptor, event, _ in interests:
            poll.register(descriptor, event)
        actions = {descriptor: action for descriptor, _, action in interests}
        for descriptor, _ in poll.poll(_TICK_S * 1000):
            actions.get(descriptor, _nothing)()

    def _hear(self, index: int, now_s: float) -> None:
        channel = self._stations[index].channel
        try:
            for message in channel.take():
                if isinstance(message, Hello):
                    self._welcome(index, message, now_s)
        except ProtocolError as error:
            self._errors[index] = PeerRefused(
                f"What answers on {channel.host} is no agent of Shoal's: {error.what}",
                peer=channel.host,
                cause="the login shell there prints without end, or it has another version of Shoal.",
                next_step=f"ssh {channel.host} true should print nothing.",
            )
        if not channel.is_open and index not in self._hellos and index not in self._errors:
            self._errors[index] = channel.explain()

    def _welcome(self, index: int, hello: Hello, now_s: float) -> None:
        if hello.version == __version__:
            self._hellos[index] = hello
            is_same_clock = bool(hello.boot_id) and hello.boot_id == boot_id()
            self._shifts_s[index] = 0.0 if is_same_clock else now_s - hello.clock_s
            return
        host = self._stations[index].channel.host
        self._errors[index] = PeerRefused(
            f"{host} has Shoal {hello.version}, and this machine {__version__}.",
            peer=host,
            next_step="install the same version on all machines, or name its interpreter by --remote-python.",
        )


def meeting_of(chosen: Sequence[Present], interface: str | None) -> Meeting:
    """The address and port of the machine of rank 0 that all others can reach."""
    machines = dict.fromkeys(present.station.machine for present in chosen)
    first = chosen[0]
    if interface is not None:
        for present in chosen:
            _require_interface(present, interface)
    return Meeting(_address_of(chosen, interface), first.hello.free_port, len(machines))


def _address_of(chosen: Sequence[Present], interface: str | None) -> str:
    first = chosen[0]
    if interface is not None and interface in first.hello.addresses:
        return first.hello.addresses[interface][0]
    if interface is not None:
        return interface
    if all(present.station.machine == first.station.machine for present in chosen):
        return "127.0.0.1"
    own = [address for address in all_addresses(first.hello) if _is_outward(address)]
    # by ssh this is the way to a machine that is known to work
    told = [first.station.address, first.hello.reached_at]
    told += [present.hello.head_address for present in chosen if not first.hello.reached_at]
    for address in told:
        if address and _is_outward(address) and (address in own or not own):
            return address
    return next((address for address in [*own, *told] if address), "127.0.0.1")


def _require_interface(present: Present, interface: str) -> None:
    if interface in present.hello.addresses or interface in all_addresses(present.hello):
        return
    if _is_address(interface):  # of another of the machines
        return
    names = ", ".join(present.hello.addresses)
    raise UsageError(
        f"{present.host} has no network interface {interface} with an address; it has {names}.",
        next_step="give --network-interface the name of one that all hosts have.",
    )


def _is_address(text: str) -> bool:
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return False
    return True


def _is_outward(address: str) -> bool:
    try:
        found = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return True
    return not found.is_loopback and not found.is_link_local


def _silent(station: Station, limit_s: float) -> PeerError:
    host = station.channel.host
    return PeerUnreachable(
        f"{host} has not answered within {limit_s:g} s.",
        peer=host,
        cause="the machine is down or busy, or a firewall drops what is sent to it.",
        next_step=f"ssh {host} true, or give more time by --start-timeout.",
    )


def _nothing() -> None:
    pass
