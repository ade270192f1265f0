"""A profile describes a network: places with their peers' lines, and the ways between peers.

It is written in TOML, by people or by `shoal doctor --record`; `docs/networks.md` says what each key means.
What a network does with it is `conditions`'s business.
"""

from __future__ import annotations

import hashlib
from importlib import resources
from pathlib import Path
from typing import Annotated, Self

import msgspec

from shoal.core import Address, UsageError
from shoal.transport.network import documents
from shoal.transport.network.distributions import Delay, NotNegative, Positive

PRESETS = ("lan", "wan", "home", "three-continents")

Probability = Annotated[float, msgspec.Meta(ge=0, le=1)]
Loss = Annotated[float, msgspec.Meta(ge=0, lt=1)]

DEFAULT_QUEUE_MS = 200.0


class Place(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """A class of peers. Each has a line of its own, which all its links share; no number, no limit."""

    up_mbit_s: Positive | None = None
    down_mbit_s: Positive | None = None
    queue_ms: Positive = DEFAULT_QUEUE_MS


class Way(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """What lies between two peers, in one direction; what it leaves out stands in `ways.default`."""

    delay_ms: Delay | None = None
    jitter_ms: NotNegative | None = None
    loss: Loss | None = None
    mbit_s: Positive | None = None
    queue_ms: Positive | None = None

    def over(self, below: Way) -> Way:
        """The same, with what it leaves out taken from another."""
        names = [name for name in Way.__struct_fields__ if getattr(self, name) is not None]
        return msgspec.structs.replace(below, **{name: getattr(self, name) for name in names})


class Between(Way, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """The way between some peers: each end is a place, one address, or all of a host as `HOST:*`."""

    from_: str = msgspec.field(name="from")
    to: str
    one_way: bool = False


class Ways(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """The way between any two peers, and exceptions; the last exception that fits counts."""

    default: Way = Way()
    between: list[Between] = []


class Profile(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """A network. `peers` says which place an address, or a host as `HOST:*`, belongs to."""

    name: str = ""
    description: str = ""
    places: dict[str, Place] = {}
    ways: Ways = Ways()
    peers: dict[str, str] = {}

    @classmethod
    def load(cls, name_or_path: str | Path) -> Self:
        """A preset by its name, or a TOML file."""
        if str(name_or_path) in PRESETS:
            folder = resources.files("shoal.transport.network") / "presets"
            return cls.parse((folder / f"{name_or_path}.toml").read_text("utf-8"), f"preset {name_or_path}")
        path = Path(name_or_path)
        if path.suffix != ".toml" and not path.exists():
            raise _unknown_preset(str(name_or_path))
        return documents.read_file(path, cls, "The profile")._checked(f"The profile {str(path)!r}")

    @classmethod
    def parse(cls, text: str, what: str = "The profile") -> Self:
        """Read TOML; UsageError says which key is wrong."""
        return documents.read(text, cls, what)._checked(what)

    def to_toml(self) -> str:
        """TOML that `parse` makes the same profile of."""
        return documents.write(self)

    def _checked(self, what: str) -> Self:
        for index, rule in enumerate(self.ways.between):
            for key, end in (("from", rule.from_), ("to", rule.to)):
                if end not in self.places:
                    _check_end(end, f"ways.between[{index}].{key}", self.places, what)
        for peer, place in self.peers.items():
            if not is_pattern(peer):
                documents.refuse(what, "peers", f"{peer!r} is no address, write HOST:PORT or HOST:*")
            if place not in self.places:
                near = documents.suggest(place, self.places)
                documents.refuse(what, f'peers."{peer}"', f"{place!r} is no place, {near}")
        return self

    # --- who is where ---

    def place_of(self, peer: Address) -> str | None:
        """Where a peer is: as `peers` says, else by a hash that all find alike; None without places."""
        if not self.places:
            return None
        for pattern in patterns_of(peer):
            if pattern in self.peers:
                return self.peers[pattern]
        digest = hashlib.blake2b(str(peer).encode(), digest_size=8, person=b"shoal place").digest()
        names = sorted(self.places)
        return names[int.from_bytes(digest, "big") % len(names)]

    def line_of(self, peer: Address) -> Place:
        """What a peer's own line is like."""
        place = self.place_of(peer)
        return Place() if place is None else self.places[place]

    def way_between(self, source: Address, target: Address) -> Way:
        """What lies between two peers in this direction; only a bandwidth without limit is left out."""
        sources, targets = ({self.place_of(peer), *patterns_of(peer)} for peer in (source, target))
        found = self.ways.default
        for rule in self.ways.between:
            is_there = rule.from_ in sources and rule.to in targets
            is_back = not rule.one_way and rule.from_ in targets and rule.to in sources
            if is_there or is_back:
                found = rule.over(self.ways.default)
        return found.over(_NOTHING)


_NOTHING = Way(delay_ms=0.0, jitter_ms=0.0, loss=0.0, queue_ms=DEFAULT_QUEUE_MS)


def patterns_of(peer: Address) -> tuple[str, str]:
    """How documents may name a peer: itself, or all of its host."""
    host = f"[{peer.host}]" if ":" in peer.host else peer.host
    return f"{host}:{peer.port}", f"{host}:*"


def is_pattern(text: str) -> bool:
    """Whether a text names an address, or all of a host."""
    try:
        peer = Address.parse(text[:-1] + "0" if text.endswith(":*") else text)
    except UsageError:
        return False
    return text in patterns_of(peer)


def _check_end(end: str, path: str, places: dict[str, Place], what: str) -> None:
    if not is_pattern(end):
        near = documents.suggest(end, places)
        documents.refuse(what, path, f"{end!r} is neither a place nor HOST:PORT nor HOST:*, {near}")


def _unknown_preset(name: str) -> UsageError:
    return UsageError(
        f"There is no profile {name!r}.",
        cause=documents.suggest(name, PRESETS),
        next_step=f"use one of {', '.join(PRESETS)}, or the path of a TOML file.",
    )
