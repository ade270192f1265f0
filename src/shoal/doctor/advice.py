"""What `shoal doctor --join` says of what it saw: findings, each with its likely cause and what to try next.

Nothing here touches the network: `joining` gathers the facts, and they are read here.
"""

from __future__ import annotations

import msgspec

from shoal._version import __version__
from shoal.core import Address
from shoal.core.ids import is_loopback
from shoal.doctor.checks import CheckResult, fail, ok, warn
from shoal.doctor.joining import CLOCK_FAIL_S, CLOCK_WARN_S, JoinFacts, any_host, date, duration
from shoal.transport.frames import VERSION
from shoal.transport.introductions import Attempt, Introduction, IpProtocol
from shoal.transport.network.sockets import is_wildcard

ROWS = (
    "TCP to peer",
    "UDP to peer",
    "secret",
    "version",
    "clock",
    "interface",
    "TCP from peer",
    "UDP from peer",
    "reached",
)
"""In the order in which they are shown; one that could not be tried, or that tells nothing, is left out."""

_SAME_CLOCK_S = 0.1
_SET_CLOCK = "compare `date -u` on both machines, and set the wrong clock: sudo timedatectl set-ntp true"
_SAME_VERSION = "install the same Shoal on both sides; `shoal --version` tells which it is."


def explain(facts: JoinFacts) -> list[CheckResult]:
    """One finding for each row that could be tried."""
    trouble = _after_dialing(facts)
    found = {"TCP to peer": check_out(facts, "tcp", is_peer=bool(trouble)), **trouble}
    if facts.udp.outcome == "ok" or not trouble:  # sealed with another secret, datagrams are not answered
        found["UDP to peer"] = check_out(facts, "udp")
    if facts.about is not None:
        found = {**_after_answering(facts, facts.about), **found}
    return [msgspec.structs.replace(found[name], name=name) for name in ROWS if name in found]


def summarize(facts: JoinFacts, findings: list[CheckResult]) -> str:
    """The sentence under the table."""
    warned, failed = ([each.name for each in findings if each.status == kind] for kind in ("warn", "fail"))
    shown = [*(each.name for each in findings), "UDP to peer"]  # which is always tried
    missing = [name for name in ROWS if name not in shown]
    if failed:
        text = f"This machine cannot be a peer of {facts.target} yet: see {', '.join(failed)}."
        return text + (f" Not tried: {', '.join(missing)}." if missing else "")
    if facts.attempts and not _was_reached(facts):
        way_in = facts.way_in
        if way_in is None or way_in.relay is None:
            return f"This machine can be a peer of {facts.target}, but only outbound: it cannot serve others."
        how = "mostly through its router, else through relays" if way_in.has_one_port else "through relays"
        return f"This machine can be a peer of {facts.target}: others reach it {how}."
    if warned:
        return f"This machine can be a peer of {facts.target}; there is advice on {', '.join(warned)}."
    return f"This machine can be a peer of {facts.target}: both can call each other."


def _after_dialing(facts: JoinFacts) -> dict[str, CheckResult]:
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


def _clock_by_certificate(facts: JoinFacts) -> CheckResult | None:
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


def _after_answering(facts: JoinFacts, about: Introduction) -> dict[str, CheckResult]:
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
        found[f"{attempt.ip_protocol.upper()} from peer"] = check_dial_back(facts, attempt)
    if (reached := check_reached(facts)) is not None:
        found["reached"] = reached
    return found


def _secret(facts: JoinFacts) -> CheckResult:
    if facts.has_secret:
        return ok("Both sides have the same swarm secret: what they say is encrypted.")
    if is_loopback(facts.target.host):
        return ok("Neither side has a swarm secret, which is fine on one machine.")
    return warn(
        f"Neither side has a swarm secret: anybody who reaches {facts.target} can call it and listen in.",
        "make one (shoal keys secret --file swarm.secret), copy it to both machines, and add: --secret-file "
        "swarm.secret",
    )


def _version(about: Introduction) -> CheckResult:
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


def _clock(facts: JoinFacts) -> CheckResult:
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


# --- ways between two machines: out, back, and where others see it ---

# --- to the peer ---


def check_out(facts: JoinFacts, ip_protocol: IpProtocol, *, is_peer: bool = False) -> CheckResult:
    """Whether calls reach the peer over one way; `is_peer`: a Shoal peer is known to be there."""
    out, tried = facts.out(ip_protocol), f"Called {facts.target} over {ip_protocol.upper()}"
    if out.about is not None:
        who = f"peer {out.about.peer_id[:8]}" if out.about.peer_id else "a peer without an id"
        says = f"{tried}: {who} answered, a round trip takes {duration(out.round_trip_s)}."
        return ok(says, round_trip_s=out.round_trip_s, peer_id=out.about.peer_id)
    if is_peer:
        return ok(f"Dialed {facts.target} over {ip_protocol.upper()}: a Shoal peer is there.")
    other = facts.udp if ip_protocol == "tcp" else facts.tcp
    if other.outcome == "ok":
        return _only_this_way(facts, ip_protocol, tried)
    return _no_way(facts, ip_protocol, tried)


def _only_this_way(facts: JoinFacts, ip_protocol: IpProtocol, tried: str) -> CheckResult:
    """The other way gets through, so the machine and the peer are there."""
    name, other, port = ip_protocol.upper(), "UDP" if ip_protocol == "tcp" else "TCP", facts.target.port
    publish = f"in a container, publish both: -p {port}:{port}/tcp -p {port}:{port}/udp"
    reach = _reach(facts, ip_protocol)
    if reach == "refused":
        return fail(
            f"{tried}: refused, while {other} gets through. A firewall rejects {name}, or what passes "
            f"packets on to the peer does so for {other} only.",
            f"{_allow(facts.target.host, port, ip_protocol)}; {publish}",
        )
    if reach == "silent":
        return fail(
            f"{tried}: no answer within {facts.patience_s:g} s, while {other} gets through. A firewall drops "
            f"{name} at one of the two machines or between them, or what passes packets on to the peer (a "
            f"tunnel, a container's port) does so for {other} only.",
            f"{_allow(facts.target.host, port, ip_protocol)}; {publish}",
        )
    is_clock = abs(facts.tcp.ahead_s) > CLOCK_FAIL_S  # a sealed greeting is refused when it looks old
    return fail(
        f"{tried}: it said no, while {other} gets through. {facts.out(ip_protocol).says}",
        "see clock." if is_clock else "run it again with -v (shoal -v doctor …), and read the peer's log.",
    )


def _no_way(facts: JoinFacts, ip_protocol: IpProtocol, tried: str) -> CheckResult:
    target, reach = facts.target, _reach(facts, ip_protocol)
    if ip_protocol == "udp" and reach != "unknown host":
        return fail(f"{tried}: no answer either.", "see TCP to peer.")
    if reach == "unknown host":
        if ip_protocol == "udp":
            return fail(f"The name {target.host!r} is not known here.", "see TCP to peer.")
        return fail(
            f"The name {target.host!r} is not known here, so nothing could be sent to it.",
            f"check how it is written (getent hosts {target.host}), or give the machine's number, as in "
            f"192.0.2.7:{target.port}",
        )
    if reach == "refused":
        return fail(
            f"{tried}: refused. The machine is there, but nothing listens at that port: the peer has not "
            "started, has ended, or uses another port or another address of its machine.",
            f"see what listens there (ss -ltnup), and start a peer there: shoal doctor --serve "
            f"{_where_to_listen(facts, target.port)}",
        )
    if reach == "silent":
        return fail(
            f"{tried}: no answer within {facts.patience_s:g} s. A firewall drops the packets, the machine is "
            "off, or the address is of a network that cannot be reached from here.",
            f"see whether the machine is up (ping {target.host}); then {_allow(target.host, target.port)}",
        )
    if reach == "unreachable":
        detail = facts.look.detail if facts.look and facts.look.detail else facts.tcp.says
        return fail(
            f"{tried}: this machine finds no way there ({detail}).",
            f"check the address, and this machine's network: ip route get {target.host}",
        )
    if facts.look and not facts.look.is_shoal:
        said = facts.look.says.decode("ascii", "replace").strip()
        heard = f"it says {said!r}" if said else "it does not speak as one does"
        return fail(
            f"Dialed {target} over TCP: something listens there that is no Shoal peer; {heard}.",
            "check the port: a peer prints its address when it starts.",
        )
    return fail(f"{tried}: {facts.tcp.says}", "run it again with -v: shoal -v doctor --join …")


def _where_to_listen(facts: JoinFacts, port: int) -> str:
    """The address that a peer beside the target, or called by it, should have, and what it takes to."""
    host = facts.target.host
    address = Address(host if is_loopback(host) else any_host(host), port)
    if facts.has_secret:
        return f"{address} --secret-file FILE"
    return str(address) if is_loopback(host) else f"{address} --insecure"


def _reach(facts: JoinFacts, ip_protocol: IpProtocol) -> str:
    """How far packets came; for TCP a closer look knows better than the call."""
    return facts.look.reach if ip_protocol == "tcp" and facts.look else facts.out(ip_protocol).outcome


def _allow(host: str, port: int, ip_protocol: IpProtocol | None = None) -> str:
    name, suffix = (ip_protocol.upper(), f"/{ip_protocol}") if ip_protocol else ("TCP and UDP", "")
    return (
        f"allow {name} to port {port} in the firewall of {host} (sudo ufw allow {port}{suffix}, or its "
        "cloud's security group)"
    )


# --- from the peer ---


def check_interface(facts: JoinFacts) -> CheckResult:
    """Whether this peer listens where others look for it."""
    seen, listens, port = facts.seen_as, facts.listens, facts.port_to_open
    if seen is None:
        return warn("The peer did not say where it sees this machine.", "see version.")
    figures: dict[str, object] = {"seen_as": seen.host, "listens": str(listens)}
    everywhere = Address(any_host(seen.host), port)
    is_wrong = _wrong_interface(facts)
    if is_wrong and is_loopback(listens.host) and not is_loopback(seen.host):
        return fail(
            f"Wrong interface: this peer listens on {listens.host}, which only programs on this machine "
            f"reach, while the peer sees this machine as {seen.host}.",
            f"listen on all addresses, --listen {everywhere}, with --secret-file FILE (or --insecure in a "
            "network that you trust).",
            **figures,
        )
    if is_wrong:
        return fail(
            f"Wrong interface: this peer listens on {listens.host} only, while packets to "
            f"{facts.target.host} leave through another one, and the peer sees this machine as {seen.host}.",
            f"listen on that address, --listen {Address(seen.host, port)}, or on all, --listen {everywhere}",
            **figures,
        )
    if facts.is_own_address:
        note = " Both peers are on one machine." if is_loopback(seen.host) else ""
        return ok(f"The peer sees this machine as {seen.host}, its own address.{note}", **figures)
    says = f"The peer sees this machine as {seen.host}, not its own address: a router translates it (NAT)."
    if _was_reached(facts):
        return ok(f"{says} It passes port {listens.port} on to this machine.", **figures)
    return warn(
        says,
        f"to be reached, have the router pass port {port} on to this machine, TCP and UDP.",
        **figures,
    )


def _wrong_interface(facts: JoinFacts) -> bool:
    """Whether this peer listens on one address of this machine, and is looked for at another."""
    seen, host = facts.seen_as, facts.listens.host
    if seen is None or is_wildcard(host) or host == seen.host or _was_reached(facts):
        return False
    return facts.is_own_address or (is_loopback(host) and not is_loopback(seen.host))


def _was_reached(facts: JoinFacts) -> bool:
    return any(attempt.outcome == "ok" for attempt in facts.attempts)


def check_dial_back(facts: JoinFacts, attempt: Attempt) -> CheckResult:
    """Whether the peer got through to this one, and what it means if it did not."""
    name, where = attempt.ip_protocol.upper(), facts.seen_as
    tried = f"The peer dialed back to {where} over {name}"
    if attempt.outcome == "ok":
        return ok(f"{tried} and got through.")
    if _wrong_interface(facts):
        return warn(f"{tried} and did not get through: this peer does not listen there.", "see interface.")
    is_only_outbound = all(each.outcome != "ok" for each in facts.attempts)
    meaning = (
        "Only outbound works: this peer can take part, but others cannot dial it, so it cannot serve."
        if is_only_outbound and attempt is facts.attempts[0]
        else f"Others cannot call this peer over {name}."
    )
    return warn(f"{tried} {_why_not_back(facts, attempt)} {meaning}", _open_up(facts, attempt.ip_protocol))


def check_reached(facts: JoinFacts) -> CheckResult | None:
    """In which of three ways this peer takes part: dialed, through its router or relays, or as a client."""
    over_tcp = [attempt.outcome for attempt in facts.attempts if attempt.ip_protocol == "tcp"]
    if "ok" in over_tcp:
        return ok(f"Others dial this peer at {facts.seen_as}: it does all that a peer can.", way="dialed")
    way_in = facts.way_in
    if way_in is None or _wrong_interface(facts):
        return None
    figures: dict[str, object] = {"seen": list(way_in.seen)}
    open_up = f"open port {facts.port_to_open} (TCP and UDP) to be dialed"
    if way_in.relay is None:
        return warn(
            "Client only: others cannot dial this peer, and no peer that was asked relays for it. It asks, "
            f"trains and sends; it cannot serve experts. {way_in.relay_error}",
            f"run `shoal dht` on a machine that can be dialed, or {open_up}.",
            way="client",
            **figures,
        )
    relayed = f"Others call this peer through relays, such as {way_in.relay}"
    rest = f"Nothing has to be done; {open_up}, and to average for others."
    if way_in.has_one_port:
        return ok(
            f"{relayed}, and most find a direct way then (hole punching): {len(way_in.seen)} peers see it at "
            f"the same port, {way_in.seen[0]}. {rest}",
            way="punched",
            **figures,
        )
    why = (
        f"the router shows another port to each peer ({', '.join(way_in.seen)}), so few find a direct way"
        if len(way_in.seen) > 1
        else "whether the router lets direct ways be found (hole punching) takes a second peer to ask"
    )
    return ok(f"{relayed}; {why}. {rest}", way="relayed", **figures)


def _why_not_back(facts: JoinFacts, attempt: Attempt) -> str:
    if attempt.outcome == "refused":
        return "and was refused: " + (
            "a firewall, here or on the way, rejects it."
            if facts.is_own_address
            else "the router does not pass the port on."
        )
    if attempt.outcome == "silent":
        return "and heard nothing: " + (
            "a firewall, here or on the way, drops it."
            if facts.is_own_address
            else "the router does not pass the port on, or a firewall drops it."
        )
    return f"and failed: {' '.join(attempt.says.split())}"


def _open_up(facts: JoinFacts, ip_protocol: IpProtocol) -> str:
    port = facts.port_to_open
    first = (
        _allow("this machine", port, ip_protocol)
        if facts.is_own_address
        else f"have the router pass {ip_protocol.upper()} port {port} on to this machine"
    )
    listen = _where_to_listen(facts, port)
    return f"{first}, then try it: shoal doctor --join {facts.target} --listen {listen}"
