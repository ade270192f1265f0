"""What a refusal means to whoever looks for a DHT: some peers have none."""

from __future__ import annotations

from shoal.core import Address, PeerRefused


def explained(error: Exception, address: Address) -> Exception:
    """The error of a first ping, or if the peer there has no DHT, one that says so."""
    if not isinstance(error, PeerRefused) or "has no method" not in error.what:
        return error
    return PeerRefused(
        f"At {address} is a Shoal peer without a DHT.",
        peer=error.peer,
        cause="`shoal doctor --serve` runs there, or a program that opens no DHT.",
        next_step="join a peer that `shoal dht` runs, or a program's `shoal.DHT`.",
    )
