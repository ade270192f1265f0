"""What `shoal doctor --join` says of what it saw: findings, each with its likely cause and what to try next.

Nothing here touches the network: `joining` gathers the facts, this file and `reachability` read them.
"""

from __future__ import annotations

import msgspec

from shoal._version import __version__
from shoal.bench.facts import CLOCK_FAIL_S, CLOCK_WARN_S, Facts, date, duration
from shoal.bench.findings import Finding, fail, ok, warn
from shoal.bench.reachability import check_dial_back, check_interface, check_out
from shoal.transport.frames import VERSION
from shoal.transport.introductions import About
from shoal.transport.trust.membership import is_loopback

ROWS = (
    "TCP to peer",
    "UDP to peer",
    "secret",
    "version",
    "clock",
    "interface",
    "TCP from peer",
    "UDP from peer",
)
"""In the order in which they are shown; one that could not be tried, or that tells nothing, is left out."""

_SAME_CLOCK_S = 0.1
_SET_CLOCK = "compare `date -u` on both machines, and set the wrong clock: sudo timedatectl set-ntp true"
_SAME_VERSION = "install the same Shoal on both sides; `shoal --version` tells which it is."


def explain(facts: Facts) -> list[Finding]:
    """One finding for each row that could be tried."""
    trouble = _after_dialing(facts)
    found = {"TCP to peer": check_out(facts, "tcp", is_peer=bool(trouble)), **trouble}
    if facts.udp.outcome == "ok" or not trouble:  # sealed with another secret, datagrams are not answered
        found["UDP to peer"] = check_out(facts, "udp")
    if facts.about is not None:
        found = {**_after_answering(facts, facts.about), **found}
    return [msgspec.structs.replace(found[name], name=name) for name in ROWS if name in found]


def summarize(facts: Facts, findings: list[Finding]) -> str:
    """The sentence under the table."""
    warned, failed = ([each.name for each in findings if each.status == kind] for kind in ("warn", "fail"))
    shown = [*(each.name for each in findings), "UDP to peer"]  # which is always tried
    missing = [name for name in ROWS if name not in shown]
    if failed:
        text = f"This machine cannot be a peer of {facts.target} yet: see {', '.join(failed)}."
        return text + (f" Not tried: {', '.join(missing)}." if missing else "")
    if facts.attempts and all(attempt.outcome != "ok" for attempt in facts.attempts):
        return f"This machine can be a peer of {facts.target}, but only outbound: it cannot serve others."
    if warned:
        return f"This machine can be a peer of {facts.target}; there is advice on {', '.join(warned)}."
    return f"This machine can be a peer of {facts.target}: both can call each other."


def _after_dialing(facts: Facts) -> dict[str, Finding]:
    """Why the call over TCP failed although a Shoal peer was dialed; empty where that is not so."""
    look, tcp = facts.look, facts.tcp
    if tcp.outcome == "ok" or look is None or look.reach != "open":
        return {}
    if look.version not in (None, VERSION) or tcp.outcome == "other version":
        theirs = f"protocol {look.version}" if look.version is not None else "another one"
        says = (
            f"This side speaks protocol {VERSION} (shoal {__version__}), the peer {theirs}: they cannot talk."
        )
        return {"version": fail(says, _SAME_VERSION, protocol=VERSION, peer_protocol=look.version)}
    if look.version is not None:
        if not facts.has_secret:
            return {}
        return {
            "secret": fail(
                f"This side has a swarm secret, the peer at {facts.target} has none.",
                "start the peer with the same secret, by --secret-file or SHOAL_SECRET; if the swarm is "
                "meant to have none, run this without.",
            )
        }
    shown = look.certificate
    if shown is None or not shown.is_of_shoal:
        return {}
    if not facts.has_secret:
        return {
            "secret": fail(
                f"The peer at {facts.target} has a swarm secret, this side has none.",
                "copy the swarm's secret file to this machine, and add: --secret-file FILE",
            )
        }
    if not shown.is_of_this_swarm:
        return {
            "secret": fail(
                f"The peer at {facts.target} has another swarm secret than this side.",
                "give both the same; `sha256sum FILE` on both machines shows whether the files are equal.",
            )
        }
    if (clock := _clock_by_certificate(facts)) is not None:
        return {"secret": ok("Both sides have the same swarm secret."), "clock": clock}
    return {
        "secret": fail(
            f"Both sides have the same swarm secret, and still the peer turns this one away: {tcp.says}",
            "ask whether its allow-list or deny-list names this peer (`shoal keys show` prints the id); and "
            f"{_SET_CLOCK}",
        )
    }


def _clock_by_certificate(facts: Facts) -> Finding | None:
    """What the dates of a peer's certificate say of the two clocks."""
    shown = facts.look.certificate if facts.look else None
    if shown is None:
        return None
    here = f"here it is {date(facts.wall_s)}"
    if facts.wall_s < shown.begins_s:
        says = (
            f"The peer's certificate is refused as not yet valid: it begins {date(shown.begins_s)}, {here}."
        )
    elif facts.wall_s > shown.ends_s:
        says = f"The peer's certificate is refused as expired: it ended {date(shown.ends_s)}, {here}."
    elif shown.made_s - facts.wall_s > CLOCK_FAIL_S:
        ahead = duration(shown.made_s - facts.wall_s)
        says = (
            f"The peer's clock is at least {ahead} ahead of this one, and it refuses this side's certificate."
        )
    else:
        return None
    return fail(f"{says} One of the two clocks is wrong.", _SET_CLOCK)


def _after_answering(facts: Facts, about: About) -> dict[str, Finding]:
    found = {
        "secret": _secret(facts),
        "version": _version(about),
        "clock": _clock(facts),
        "interface": check_interface(facts),
    }
    if facts.dial_back_error:
        says = f"The peer was asked to dial back, and did not: {facts.dial_back_error}"
        found["TCP from peer"] = warn(says, "try again in ten seconds.")
    for attempt in facts.attempts:
        found[f"{attempt.way.upper()} from peer"] = check_dial_back(facts, attempt)
    return found


def _secret(facts: Facts) -> Finding:
    if facts.has_secret:
        return ok("Both sides have the same swarm secret: what they say is encrypted.")
    if is_loopback(facts.target.host):
        return ok("Neither side has a swarm secret, which is fine on one machine.")
    return warn(
        f"Neither side has a swarm secret: anybody who reaches {facts.target} can call it and listen in.",
        "make one (shoal keys secret --file swarm.secret), copy it to both machines, and add: --secret-file "
        "swarm.secret",
    )


def _version(about: About) -> Finding:
    figures: dict[str, object] = {
        "software": __version__,
        "peer_software": about.software,
        "protocol": VERSION,
        "peer_protocol": about.protocol,
    }
    if about.software != __version__:
        return warn(
            f"This side runs shoal {__version__}, the peer {about.software}. Both speak protocol "
            f"{about.protocol}, so they can talk.",
            _SAME_VERSION,
            **figures,
        )
    return ok(f"shoal {__version__}, protocol {about.protocol} on both sides.", **figures)


def _clock(facts: Facts) -> Finding:
    out = facts.tcp if facts.tcp.about else facts.udp
    ahead_s = out.ahead_s
    if abs(ahead_s) < _SAME_CLOCK_S:
        precision = duration(max(abs(ahead_s), out.round_trip_s / 2, 1e-3))
        return ok(f"The clocks of both sides agree to {precision}.", ahead_s=ahead_s)
    direction = "ahead of" if ahead_s > 0 else "behind"
    says = f"The peer's clock is {duration(abs(ahead_s))} {direction} this one."
    if abs(ahead_s) > CLOCK_FAIL_S:
        return fail(f"{says} Records and certificates end by it.", _SET_CLOCK, ahead_s=ahead_s)
    if abs(ahead_s) > CLOCK_WARN_S:
        return warn(f"{says} Records end by it.", _SET_CLOCK, ahead_s=ahead_s)
    return ok(says, ahead_s=ahead_s)
