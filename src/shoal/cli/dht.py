"""`shoal dht`: a peer of a swarm's DHT that others can join, until Ctrl-C.

0 ended when it was told to, 1 nobody could be joined.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import msgspec

from shoal.cli.flags import with_flags
from shoal.cli.members import (
    IdentityFile,
    Insecure,
    SecretFile,
    check_ways,
    claimed_identity,
    member_of,
    where_to_listen,
)
from shoal.cli.output import ends_by_signal, live_line, say, say_listening
from shoal.core.clock import SYSTEM_CLOCK
from shoal.core.identity import Identity
from shoal.core.ids import Address
from shoal.core.run_options import flag
from shoal.report.tables import tell_result
from shoal.report.units import counted, scale_for

if TYPE_CHECKING:
    from shoal.dht.blocking import Swarm
    from shoal.dht.node import DHT


class DhtCounters(msgspec.Struct, frozen=True):
    """What a peer knows, holds and did until now."""

    up_s: float
    num_peers: int
    num_records: int
    record_bytes: int
    num_cached: int
    num_requests: int
    """Requests that it sent and answered."""

    def line(self, before: DhtCounters) -> str:
        """Say it in words; the rate is that since `before`."""
        took_s = self.up_s - before.up_s
        rate = (self.num_requests - before.num_requests) / took_s if took_s > 0 else 0.0
        size = scale_for("B", self.record_bytes).format(self.record_bytes)
        records = counted(self.num_records, "record")
        return (
            f"{counted(self.num_peers, 'peer')} known, {records} here ({size}), {self.num_cached:,} cached, "
            f"{rate:.1f} requests/s"
        )


@with_flags
def dht(
    listen: Annotated[
        str | None,
        flag(
            "Where others reach this peer, by TCP and UDP; port 0 takes a free one.",
            metavar="HOST:PORT",
            shown="127.0.0.1:0, with a secret 0.0.0.0:0",
        ),
    ] = None,
    join: Annotated[
        list[str] | None,
        flag(
            "A peer of the swarm; may be given several times, one that answers is enough.",
            metavar="HOST:PORT",
            shown=False,
        ),
    ] = None,
    secret_file: SecretFile = None,
    insecure: Insecure = False,
    identity_file: IdentityFile = None,
    allow_file: Annotated[
        Path | None, flag("Ids of the only peers that may talk, one a line.", metavar="FILE")
    ] = None,
    deny_file: Annotated[
        Path | None, flag("Ids of peers that may not talk, one a line.", metavar="FILE")
    ] = None,
    peers_file: Annotated[
        Path | None, flag("Remember there which peers were met, and join by them next time.", metavar="FILE")
    ] = None,
    relay_mbit_s: Annotated[
        float,
        flag(
            "What peers behind routers may send and receive through this one, in Mbit/s; 0 is nothing.",
            metavar="MBIT",
        ),
    ] = 400.0,
    wait: Annotated[bool, flag("When nobody answers, stay and try again, instead of failing.")] = False,
) -> None:
    """Be a peer of a swarm's DHT, until Ctrl-C.

    It keeps records for others and helps them find each other. Without --join it begins a new swarm. `shoal
    status --join HOST:PORT` shows who is there.
    """
    from shoal.core.loop import own_the_process
    from shoal.dht.blocking import Swarm
    from shoal.dht.node import DHT
    from shoal.dht.settings import DHTSettings
    from shoal.transport.relay import RelayLimits

    own_the_process()
    with claimed_identity(identity_file) as identity, ends_by_signal():
        member = member_of(identity, secret_file, (allow_file, deny_file), is_insecure=insecure)
        is_new = identity_file is None and identity.peer_id != Identity.load_or_create().peer_id
        is_open = insecure or member.membership is not None
        starts = [Address.parse(text) for text in join or ()]
        address = Address.parse(listen) if listen is not None else where_to_listen(starts, is_open=is_open)
        check_ways(address, starts)
        peer = DHT(
            join=starts,
            listen=address,
            membership=member.membership,
            identity=identity,
            is_insecure=insecure,
            settings=DHTSettings(is_strict=not wait),
            peers_file=peers_file,
            relaying=RelayLimits(bytes_per_s=relay_mbit_s * 125_000) if relay_mbit_s else None,
        )
        with Swarm(peer) as swarm:
            began_s = SYSTEM_CLOCK.now_s()
            with contextlib.suppress(KeyboardInterrupt):
                _introduce(peer, is_new=is_new)
                _watch(swarm, began_s)
            last = swarm.run(_moment(peer, began_s))
            listens = None if peer.is_client else str(peer.endpoint.addresses[0])
            result: dict[str, object] = {"peer_id": str(peer.peer_id), "address": listens}
    tell_result({**result, **msgspec.structs.asdict(last)}, sys.stdout)


def _introduce(peer: DHT, *, is_new: bool) -> None:
    from shoal.core.ids import is_loopback
    from shoal.transport.network.sockets import is_wildcard

    address, num_known = peer.endpoint.addresses[0], len(peer.table)
    has_secret = peer.endpoint.membership is not None
    say_listening(address, peer.peer_id, has_secret=has_secret)
    if is_new:
        say("Another peer on this machine has this user's identity: this id is for this run only.")
    say(f"Joined a swarm: {counted(num_known, 'peer')} known." if num_known else "Nobody else is here yet.")
    if peer.is_client:
        say("Others cannot call it there: it takes part as a client, by which nobody can join.")
    else:
        where = f"THIS-MACHINE:{address.port}" if is_wildcard(address.host) else str(address)
        is_local = is_loopback(address.host)
        more = " --secret-file FILE" if has_secret else "" if is_local else " --insecure"
        others = "this machine" if is_local else "another machine"
        say(f"From {others}: shoal dht --join {where}{more}")
    say("Ctrl-C ends it.")


def _watch(swarm: Swarm, began_s: float) -> None:
    """Show how the peer is, until told to end."""
    now = swarm.run(_moment(swarm.dht, began_s))
    with live_line() as (show_line, every_s):
        while True:
            swarm.run(asyncio.sleep(every_s))
            before, now = now, swarm.run(_moment(swarm.dht, began_s))
            show_line(now.line(before))


async def _moment(peer: DHT, began_s: float) -> DhtCounters:
    counts = peer.counts
    return DhtCounters(
        up_s=round(SYSTEM_CLOCK.now_s() - began_s, 3),
        num_peers=len(peer.table),
        num_records=len(peer.storage),
        record_bytes=peer.storage.size_bytes,
        num_cached=len(peer.cache),
        num_requests=counts.num_finds + counts.num_stores + counts.num_pings + peer.num_served,
    )
