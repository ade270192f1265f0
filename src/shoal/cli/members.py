"""Who this process is in a swarm, as command lines say it: identity, secret, lists of peers, address."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from shoal.core.errors import IdentityError, UsageError
from shoal.core.identity import Identity, default_identity_path
from shoal.core.ids import Address
from shoal.core.run_options import flag

if TYPE_CHECKING:
    from shoal.doctor.joining import Member

SecretFile = Annotated[
    Path | None, flag("The swarm's secret; SHOAL_SECRET where it is not given.", metavar="FILE")
]
AsPage = Annotated[bool, flag("Serve it as a web page, with /metrics for Prometheus and /status.json.")]
PageAddress = Annotated[
    str | None,
    flag(
        "With --web: where; whoever reaches it can read it. Port 0 takes a free one.",
        metavar="HOST:PORT",
        shown="127.0.0.1:8470",
    ),
]
Insecure = Annotated[bool, flag("Listen beyond this machine without a secret.")]
IdentityFile = Annotated[
    Path | None,
    flag(
        "Be this peer, a file of `shoal keys new`; by default this user's own identity, or a fresh one "
        "while another peer on this machine has it.",
        metavar="FILE",
        shown=False,
    ),
]
Lists = tuple[Path | None, Path | None]
"""The files of peers that are allowed and denied."""


def member_of(
    identity: Identity, secret_file: Path | None, lists: Lists = (None, None), *, is_insecure: bool = False
) -> Member:
    """Who has this identity and the secret that was given, by file or by environment, if any."""
    from shoal.doctor.joining import Member
    from shoal.transport.trust.membership import Access, Membership
    from shoal.transport.trust.secret import SwarmSecret

    secret = SwarmSecret.load(secret_file) if secret_file is not None else SwarmSecret.from_environment()
    if secret is None and any(lists):
        raise UsageError(
            "Lists of peers need a swarm secret.",
            cause="without one every peer can claim to be any other.",
            next_step="add --secret-file; shoal keys secret --file FILE makes one.",
        )
    access = Access(allow_file=lists[0], deny_file=lists[1])
    membership = None if secret is None else Membership(identity, secret, access)
    return Member(identity.peer_id, membership, is_insecure)


def where_to_listen(starts: list[Address], *, is_open: bool) -> Address:
    """Listen on all addresses, or on this machine's own alone, of the kind that the swarm is joined by."""
    is_v6 = bool(starts) and ":" in starts[0].host
    if is_open:
        return Address("::" if is_v6 else "0.0.0.0", 0)
    return Address("::1" if is_v6 else "127.0.0.1", 0)


def check_ways(listens: Address, starts: list[Address]) -> None:
    """UsageError for a peer that joins others where they could never call it."""
    from shoal.core.ids import is_loopback

    elsewhere = [start for start in starts if _is_elsewhere(start.host)]
    if elsewhere and is_loopback(listens.host):
        raise UsageError(
            f"This peer would listen on {listens}, where {elsewhere[0]} cannot call it.",
            cause="without a secret a peer listens on this machine only, unless --insecure says otherwise.",
            next_step="give the swarm's secret (--secret-file), or --listen HOST:PORT of an address that "
            "others reach; `shoal status` asks without being a peer.",
        )


def _is_elsewhere(host: str) -> bool:
    """Whether it is certain to be an address by which other machines are reached; names may be any."""
    try:
        return not ipaddress.ip_address(host.partition("%")[0]).is_loopback
    except ValueError:
        return False


@contextlib.contextmanager
def claimed_identity(path: Path | None) -> Iterator[Identity]:
    """An identity that no other peer on this machine has at the same time, for as long as the block lasts.

    Two peers of one id would be taken for each other, and each would take the other for itself.
    """
    with contextlib.ExitStack() as stack:
        if path is None:
            yield _own_or_new(stack)
            return
        identity = Identity.load(path)
        if not _is_locked(path, stack):
            raise UsageError(
                f"The identity in {path} is in use by another peer on this machine.",
                next_step="end that one, or make an identity for this one: shoal keys new --file FILE",
            )
        yield identity


def passing_identity(path: Path | None) -> Identity:
    """For a visit that leaves nothing behind: what was named, else this user's own unless a peer has it.

    Who has none, and may not even be able to keep one, has one for the visit.
    """
    if path is not None:
        return Identity.load(path)
    try:
        is_there = os.path.lexists(default_identity_path())
    except IdentityError:  # there is no folder for it
        is_there = False
    if not is_there:
        return Identity.generate()
    with contextlib.ExitStack() as stack:
        return _own_or_new(stack)


def _own_or_new(stack: contextlib.ExitStack) -> Identity:
    own = Identity.load_or_create()
    return own if _is_locked(default_identity_path(), stack) else Identity.generate()


def _is_locked(path: Path, stack: contextlib.ExitStack) -> bool:
    """Take the lock of a file until the stack closes; False when another process has it."""
    if sys.platform == "win32":
        return True
    import fcntl

    try:
        file = stack.enter_context(path.open("rb"))
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        pass  # a file system without locks: nobody can tell
    return True
