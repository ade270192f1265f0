"""How the workers of several machines find each other: a torch store, where each leaves its address.

A `WorkerAddress` says which machine this is, and where workers of other machines reach it. The store is
torchrun's where its agent holds one, rank 0's at MASTER_ADDR:MASTER_PORT otherwise, or that of a
torch.distributed which the program has initialised. Nothing but addresses and the run's secret (where the
launcher has given none) goes through it; what workers say to each other goes through the mesh. Whether
tensors are encrypted there follows from everybody's addresses, so that all come to the same answer.
"""

from __future__ import annotations

import datetime
import ipaddress
import os
import platform
import socket
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import torch.distributed

from shoal._version import __version__
from shoal.core import Address, Deadline, DeadlineExceeded, PeerLost, PeerRefused, Placement, UsageError
from shoal.core.identity import new_secret
from shoal.core.placement import torchrun_attempt
from shoal.core.processes import boot_id, network_of, own_address
from shoal.core.run_options import RUN_ID_VARIABLE, SECRET_VARIABLE, TORCHRUN_ID_VARIABLE, EncryptChoice
from shoal.group.base import WaitReport

T = TypeVar("T")
LOOPBACK = "127.0.0.1"
_NETWORK = Path("/proc/self/ns/net")
_PRIVATE = tuple(
    ipaddress.ip_network(each)
    for each in ("10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "169.254.0.0/16", "fc00::/7", "fe80::/10")
)
"""RFC 1918, unique-local (RFC 4193) and link-local addresses; `is_private` of `ipaddress` means many more."""
dist: Any = torch.distributed  # whose stubs leave the stores out
_FIRST_NAP_S, _LONGEST_NAP_S = 0.005, 0.1
_ANSWER_S = 30.0
_opened: dict[str, int] = {}
_stores: dict[Address, Any] = {}
"""Of this process: where a rank 0 has opened one, or reached one, later groups find it again."""


def host_id() -> str:
    """Gives a name that tells machines apart, and containers and namespaces with a network of their own."""
    network = _NETWORK.stat().st_ino if _NETWORK.exists() else ""
    return f"{boot_id()} {network} {platform.node()} {os.getuid() if hasattr(os, 'getuid') else ''}"


class WorkerAddress(msgspec.Struct, frozen=True):
    """Tells on which machine a worker is, and where other machines reach it."""

    rank: int
    machine: str
    """Equal for workers that share memory."""
    pid: int = 0
    address: str = LOOPBACK
    """Where other machines reach it."""
    version: str = __version__
    host: str = ""
    """The machine's name."""
    host_id: str = ""
    """Equal for workers that reach each other by loopback."""
    network: str = ""
    """That of the interface which has the address, as `10.1.2.0/24`; empty where the system does not say."""

    @classmethod
    def here(
        cls, placement: Placement, interface: str | None = None, workers_per_machine: int | None = None
    ) -> WorkerAddress:
        """Makes the address of this worker."""
        where = host_id()
        machine = where if placement.machine is None else str(placement.machine)
        if workers_per_machine:
            machine += f"/{placement.local_rank // workers_per_machine}"
        address = own_address(interface, placement.rendezvous)
        return cls(
            placement.rank,
            machine,
            os.getpid(),
            address,
            host=platform.node(),
            host_id=where,
            network=network_of(address),
        )


def should_encrypt(addresses: Sequence[WorkerAddress], choice: EncryptChoice) -> bool:
    """Tells whether tensors go encrypted between these workers; the same on all, who see the same addresses.

    Under `auto` they do, unless all workers are on one host, where they speak over loopback, or have
    addresses in one private network. Two networks with the same numbers cannot be told apart.
    """
    if choice == "auto":
        return _num_hosts(addresses) > 1 and not _private_network(addresses)
    return choice == "always"


def encryption_line(addresses: Sequence[WorkerAddress], choice: EncryptChoice) -> str:
    """Says to people whether tensors go encrypted between machines, why, and how to change that.

    Empty where all workers are on one host.
    """
    num_hosts, network = _num_hosts(addresses), _private_network(addresses)
    if num_hosts == 1:
        return ""
    is_encrypted = should_encrypt(addresses, choice)
    how = "encrypted (TLS)" if is_encrypted else "without encryption"
    said = f"Shoal sends tensors between {num_hosts} machines"
    encrypt, plain = "--encrypt or shoal.init(encrypt=True)", "--plain or shoal.init(encrypt=False)"
    if choice != "auto":
        return f"{said} {how}, as asked by {encrypt if is_encrypted else plain}."
    if is_encrypted:
        return f"{said} {how}, since they are not in one private network; {plain} changes that."
    return f"{said} of one private network ({network}) {how}; {encrypt} changes that."


def _num_hosts(addresses: Sequence[WorkerAddress]) -> int:
    return len({each.host_id for each in addresses})


def _private_network(addresses: Sequence[WorkerAddress]) -> str:
    """Finds the private network that all addresses are in; empty where there is none, or one is unknown."""
    networks = {each.network for each in addresses}
    if len(networks) != 1:
        return ""
    try:
        network = ipaddress.ip_network(networks.pop())
        hosts = [ipaddress.ip_address(each.address.partition("%")[0]) for each in addresses]
    except ValueError:
        return ""
    # a mask so short that it also covers public addresses makes no private network
    is_private = any(
        network.network_address in each and network.prefixlen >= each.prefixlen for each in _PRIVATE
    )
    return str(network) if is_private and all(host in network for host in hosts) else ""


class Rendezvous:
    """The store of one group that is being opened; `open` finds it."""

    def __init__(self, store: Any, rank: int, size: int, name: str = "") -> None:
        self.store = store
        """A torch.distributed.Store that all workers of the group share, and no other group does."""
        self.rank = rank
        self.size = size
        self.name = name
        """Tells groups apart that are opened side by side; empty for the first of a run."""

    @classmethod
    def open(cls, placement: Placement, deadline: Deadline, name: str = "") -> Rendezvous:
        """Reaches the store, which rank 0 opens where nobody else has; `name` tells groups of a run apart."""
        store = _initialised(placement) or _at_master(placement, deadline)
        names = (RUN_ID_VARIABLE, TORCHRUN_ID_VARIABLE)
        run = "/".join([*(os.environ.get(name, "") for name in names), torchrun_attempt(os.environ)])
        # opened in the same order by all workers, as everything that is collective
        number = _opened[name] = _opened.get(name, 0) + 1
        prefix = dist.PrefixStore(f"shoal/{run}/{name}/{number}", store)
        return cls(prefix, placement.rank, placement.size, name)

    def meet(self, own: WorkerAddress, deadline: Deadline) -> list[WorkerAddress]:
        """Gives everybody's address in rank order, with a line every ten seconds that says who is waited for.

        DeadlineExceeded names who has not come, PeerRefused who has another version of Shoal.
        """
        addresses = self.share("address", own, deadline)
        # whoever reaches the store can change it: a worker with a public address must not be told otherwise
        addresses[own.rank] = own
        for other in addresses:
            if other.version != own.version:
                raise PeerRefused(
                    f"rank {other.rank} on {other.host} runs Shoal {other.version}, rank {own.rank} on "
                    f"{own.host} runs {own.version}.",
                    peer=other.rank,
                    next_step="install the same version on all machines.",
                )
        return _on_machines(addresses)

    def share(self, topic: str, value: T, deadline: Deadline) -> list[T]:
        """Gives everybody's value (of one MessagePack type) in rank order; once for each topic."""
        keys = [f"{topic}/{rank}" for rank in range(self.size)]

        def missing() -> str:
            ranks = [str(rank) for rank, key in enumerate(keys) if not self.store.check([key])]
            return ", ".join(ranks[:8]) + (f" and {len(ranks) - 8} more" if len(ranks) > 8 else "")

        try:
            self.store.set(keys[self.rank], msgspec.msgpack.encode(value).hex())
            if not _wait_until(lambda: self.store.check(keys), lambda: f"rank {missing()} to come", deadline):
                num_here = sum(self.store.check([key]) for key in keys)
                raise DeadlineExceeded(
                    f"{num_here} of {self.size} workers have come; rank {missing()} is missing.",
                    next_step="see why it did not start, or did not call shoal.init().",
                )
            texts = [self.store.get(key).decode() for key in keys]
        except dist.DistError as error:
            raise PeerLost(
                "The store where the workers meet does not answer any more.",
                peer=0,
                cause="the process that held it, rank 0 or torchrun's agent, has ended.",
                next_step="look at its output, and start the run again.",
            ) from error
        return [msgspec.msgpack.decode(bytes.fromhex(text), type=type(value)) for text in texts]

    def secret(self, deadline: Deadline) -> str:
        """Gives the run's secret: that of its launcher, else one that rank 0 makes."""
        return os.environ.get(SECRET_VARIABLE) or self.share("secret", new_secret(), deadline)[0]


class GatheredRendezvous(Rendezvous):
    """Finds the others through the coordinator of their run, and needs no store."""

    def __init__(self, gather: Callable[[str, Any], list[Any]], rank: int, size: int) -> None:
        super().__init__(None, rank, size, "generation")
        self._gather = gather

    def share(self, topic: str, value: T, deadline: Deadline) -> list[T]:
        """Gives everybody's value in rank order."""
        return self._gather(topic, value)


def _initialised(placement: Placement) -> Any:
    """Finds the store of the program's own torch.distributed, where it is of the same workers."""
    if not dist.is_available() or not dist.is_initialized():
        return None
    if (dist.get_rank(), dist.get_world_size()) != (placement.rank, placement.size):
        return None
    get_store = getattr(dist.group.WORLD, "get_group_store", None)
    return None if get_store is None else get_store()


def _at_master(placement: Placement, deadline: Deadline) -> Any:
    where = placement.rendezvous
    if where is None:
        if placement.size == 1:
            return dist.HashStore()
        raise _no_meeting(placement)
    if where in _stores:
        return _stores[where]
    has_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE", "").lower() == "true"
    is_master = placement.rank == 0 and not has_agent
    if not is_master:
        _reach(where, "torchrun's agent" if has_agent else "rank 0", deadline)
    timeout = datetime.timedelta(seconds=_ANSWER_S)
    try:
        # several tenants: a program that initialises torch.distributed later shares what rank 0 has opened
        store = _stores[where] = dist.TCPStore(
            where.host,
            where.port,
            is_master=is_master,
            timeout=timeout,
            wait_for_workers=False,
            multi_tenant=True,
        )
        return store
    except dist.DistError as error:
        raise UsageError(
            f"The store where the workers meet cannot be opened at {where}.",
            cause=str(error).partition("\n")[0],
            next_step="choose another MASTER_PORT, or end what holds this one; MASTER_ADDR must be a name or "
            "address of rank 0's machine.",
        ) from error


def _reach(where: Address, whom: str, deadline: Deadline) -> None:
    """Waits until somebody listens there: torch would fill the screen meanwhile."""
    errors = [OSError()]

    def is_reached() -> bool:
        try:
            timeout_s = max(0.1, min(5.0, deadline.remaining_s))
            socket.create_connection((where.host, where.port), timeout_s).close()
        except OSError as error:
            errors[:] = [error]
            return False
        return True

    if not _wait_until(is_reached, lambda: f"{whom} to come ({errors[0]})", deadline):
        raise DeadlineExceeded(
            f"{whom} cannot be reached at {where}: {errors[0]}.",
            cause="it did not start, a firewall lies between, or MASTER_ADDR is no address of its machine.",
            next_step="see rank 0's output, or set MASTER_ADDR to an address that all machines reach.",
        )


def _wait_until(is_done: Callable[[], bool], what: Callable[[], str], deadline: Deadline) -> bool:
    """Looks again and again, and says now and then what it waits for; False at the deadline."""
    report = WaitReport(lambda waited_s: f"waiting for {what()}, {waited_s:.0f} s")
    nap_s = _FIRST_NAP_S
    while not is_done():
        if deadline.is_past:
            return False
        report.look()
        time.sleep(nap_s)
        nap_s = min(2 * nap_s, _LONGEST_NAP_S)
    return True


def _no_meeting(placement: Placement) -> UsageError:
    """Gives the error of a worker whom nobody has told where to meet."""
    if placement.source in ("Open MPI", "MPICH or Intel MPI"):
        is_open_mpi = placement.source == "Open MPI"
        names = "-x MASTER_ADDR -x MASTER_PORT" if is_open_mpi else "-genvlist MASTER_ADDR,MASTER_PORT"
        next_step = f"MASTER_ADDR=<rank 0's machine> MASTER_PORT=29500 mpirun {names} ... python program.py"
    else:
        next_step = "set MASTER_ADDR to rank 0's machine and MASTER_PORT to a free port there, for all."
    return UsageError(
        f"{placement.source} has placed {placement.local_size} of {placement.size} workers here, and nobody "
        "has said where those of several machines meet.",
        cause="MASTER_ADDR and MASTER_PORT are not set.",
        next_step=next_step,
    )


def _on_machines(addresses: list[WorkerAddress]) -> list[WorkerAddress]:
    """Names machines as the launcher does, unless it puts different ones together: then by what they are."""
    places: dict[str, str] = {}
    for each in addresses:
        if places.setdefault(each.machine, each.host_id) != each.host_id:
            break
    else:
        return addresses
    return [
        msgspec.structs.replace(each, machine=f"{each.host_id}/{each.machine.partition('/')[2]}")
        for each in addresses
    ]
