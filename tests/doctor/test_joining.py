"""Each trouble that `shoal doctor --join` must explain, on real sockets of loopback."""

import asyncio
import contextlib
import logging
import ssl

import pytest

from doctor.networks import LOOPBACK, BadNetwork, saying, serving
from shoal.core import SYSTEM_CLOCK, Address
from shoal.doctor import advice, joining
from shoal.doctor.advice import ROWS, explain, summarize
from shoal.doctor.joining import CloserLook, Member, join, look
from shoal.transport import introductions
from shoal.transport.frames import HEADER, MAGIC, VERSION
from shoal.transport.streams.transport import StreamTransport
from shoal.transport.trust.membership import Access
from shoal.transport.trust.tls import VALID_BEFORE_S, Authority, make_context
from transport.members import Swarm, assert_tells_nothing

PATIENCE_S = 3.0
ANY = Address("0.0.0.0", 0)
SHORT_S = 0.3  # for what is never answered
HALF_S = 0.8  # where one way is answered and the other is not


class Told:
    """What the user reads."""

    def __init__(self, facts):
        self.facts = facts
        self.findings = {finding.name: finding for finding in explain(facts)}
        self.summary = summarize(facts, list(self.findings.values()))

    def __getitem__(self, row):
        return self.findings[row]

    @property
    def statuses(self):
        return {name: finding.status for name, finding in self.findings.items()}

    def rows(self, status):
        return [name for name, each in self.statuses.items() if each == status]


async def told(address, membership=None, listen=None, network=None, patience_s=PATIENCE_S, is_insecure=False):
    member = Member(membership=membership, is_insecure=is_insecure)
    return Told(await join(address, member, listen, network=network, patience_s=patience_s))


def test_all_is_well_between_members(run):
    swarm = Swarm()

    async def main():
        server = swarm.member()
        async with serving(server) as address:
            return server, await told(address, swarm.member())

    server, seen = run(main())
    assert seen.statuses == dict.fromkeys(ROWS, "ok")
    assert seen["TCP to peer"].figures["peer_id"] == str(server.peer_id)
    assert "same swarm secret" in seen["secret"].says
    assert seen["interface"].figures["seen_as"] == "127.0.0.1"
    assert "both can call each other" in seen.summary


def test_all_is_well_without_a_secret_on_one_machine(run):
    async def main():
        async with serving() as address:
            return await told(address)

    seen = run(main())
    assert seen.statuses == dict.fromkeys(ROWS, "ok")
    assert "fine on one machine" in seen["secret"].says


@pytest.fixture
def impatient(monkeypatch):
    """Peers dial back for a short time only, however long they are asked to."""
    monkeypatch.setattr(introductions, "MAX_PATIENCE_S", SHORT_S)


# --- 1. wrong interface ---


def test_listening_on_another_interface_than_others_see(run, impatient):
    async def main():
        async with serving() as address:
            return await told(address, listen=Address("127.0.0.2", 0))

    seen = run(main())
    assert seen.rows("fail") == ["interface"]
    finding = seen["interface"]
    assert "Wrong interface: this peer listens on 127.0.0.2" in finding.says
    assert "sees this machine as 127.0.0.1" in finding.says
    assert "--listen 127.0.0.1:" in finding.next_step
    assert "does not listen there" in seen["TCP from peer"].says
    assert seen["TCP from peer"].next_step == "see interface."


# --- 2. firewalls ---


def test_tcp_refused_and_nothing_on_udp(run):
    async def main():
        async with serving() as address:
            pass  # gone again, so that nothing listens there
        return await told(address, patience_s=SHORT_S)

    seen = run(main())
    assert seen.rows("fail") == ["TCP to peer", "UDP to peer"]
    assert "refused" in seen["TCP to peer"].says
    assert "nothing listens at that port" in seen["TCP to peer"].says
    assert f"shoal doctor --serve {seen.facts.target}" in seen["TCP to peer"].next_step
    assert "Not tried: secret, version, clock" in seen.summary


def test_no_answer_at_all(run):
    async def main():
        async with serving() as address:
            network = BadNetwork(tcp="dropped", udp="dropped")
            return await told(address, network=network, patience_s=SHORT_S)

    seen = run(main())
    assert seen.rows("fail") == ["TCP to peer", "UDP to peer"]
    assert "no answer within 0.3 s" in seen["TCP to peer"].says
    assert "firewall drops" in seen["TCP to peer"].says
    assert "ping 127.0.0.1" in seen["TCP to peer"].next_step


def test_no_route(run):
    async def main():
        network = BadNetwork(tcp="unroutable", udp="dropped")
        return await told(Address("127.0.0.1", 9), network=network, patience_s=SHORT_S)

    seen = run(main())
    assert "No route to host" in seen["TCP to peer"].says
    assert "ip route get 127.0.0.1" in seen["TCP to peer"].next_step


def test_udp_is_dropped_while_tcp_works(run):
    async def main():
        async with serving() as address:
            return await told(address, network=BadNetwork(udp="dropped"), patience_s=HALF_S)

    seen = run(main())
    assert "UDP to peer" in seen.rows("fail")
    assert seen["TCP to peer"].status == "ok"
    assert "no answer within 0.8 s, while TCP gets through" in seen["UDP to peer"].says
    assert f"ufw allow {seen.facts.target.port}/udp" in seen["UDP to peer"].next_step


@pytest.mark.parametrize(
    ("tcp", "words"), [("dropped", "no answer within"), ("refused", "refused, while UDP")]
)
def test_tcp_is_blocked_while_udp_works(run, tcp, words):
    async def main():
        async with serving() as address:
            return await told(address, network=BadNetwork(tcp=tcp), patience_s=HALF_S)

    seen = run(main())
    assert seen.rows("fail") == ["TCP to peer"]
    assert seen["UDP to peer"].status == "ok"
    assert words in seen["TCP to peer"].says
    assert "UDP gets through" in seen["TCP to peer"].says
    assert "/tcp" in seen["TCP to peer"].next_step
    assert seen["TCP from peer"].status == "ok"  # asked for over UDP


# --- 3. only outbound ---


@pytest.mark.parametrize(("tcp", "words"), [("dropped", "heard nothing"), ("refused", "was refused")])
def test_only_outbound_works_behind_a_firewall(run, impatient, tcp, words):
    async def main():
        async with serving(network=BadNetwork(tcp=tcp, udp="dropped but for the first")) as address:
            return await told(address)

    seen = run(main())
    assert seen.rows("fail") == []
    assert seen.rows("warn") == [
        "TCP from peer",
        "UDP from peer",
        "reached",
    ]  # peers without ids use no relay
    assert words in seen["TCP from peer"].says
    assert "can take part" in seen["TCP from peer"].says
    assert "firewall" in seen["TCP from peer"].says
    assert "firewall of this machine" in seen["TCP from peer"].next_step
    assert "only outbound: it cannot serve others" in seen.summary


def test_only_outbound_works_behind_a_router(run, impatient):
    async def main():
        async with serving(network=BadNetwork(tcp="dropped", udp="dropped but for the first")) as address:
            network = BadNetwork(foreign=["127.0.0.1"])
            return await told(address, None, ANY, network, is_insecure=True)

    seen = run(main())
    assert seen.rows("warn") == ["interface", "TCP from peer", "UDP from peer", "reached"]
    assert "not its own address: a router translates it (NAT)" in seen["interface"].says
    assert "have the router pass port" in seen["interface"].next_step
    assert "the router does not pass the port on" in seen["UDP from peer"].says


def test_only_datagrams_are_kept_from_coming_back(run):
    async def main():
        async with serving(network=BadNetwork(udp="dropped but for the first")) as address:
            return await told(address, patience_s=HALF_S)

    seen = run(main())
    assert seen.rows("warn") == ["UDP from peer"]
    assert "Others cannot call this peer over UDP" in seen["UDP from peer"].says
    assert "advice on UDP from peer" in seen.summary


# --- 4. secrets ---


def test_another_secret(run, caplog):
    ours, theirs = Swarm(), Swarm()

    async def main():
        async with serving(theirs.member()) as address:
            return await told(address, ours.member(), patience_s=SHORT_S)

    seen = run(main())
    assert seen.statuses == {"TCP to peer": "ok", "secret": "fail"}
    assert "another swarm secret" in seen["secret"].says
    assert "sha256sum" in seen["secret"].next_step
    assert_tells_nothing(str(seen.facts) + seen.summary + caplog.text, ours, theirs)


def test_the_peer_has_no_secret(run):
    async def main():
        async with serving() as address:
            return await told(address, Swarm().member(), patience_s=SHORT_S)

    seen = run(main())
    assert seen.statuses == {"TCP to peer": "ok", "secret": "fail"}
    assert "This side has a swarm secret, the peer at" in seen["secret"].says
    assert "start the peer with the same secret" in seen["secret"].next_step


def test_this_side_has_no_secret(run):
    async def main():
        async with serving(Swarm().member()) as address:
            return await told(address, patience_s=SHORT_S)

    seen = run(main())
    assert seen.statuses == {"TCP to peer": "ok", "secret": "fail"}
    assert "this side has none" in seen["secret"].says
    assert "--secret-file FILE" in seen["secret"].next_step


def test_the_peer_does_not_let_this_one_in(run, tmp_path):
    swarm = Swarm()
    (tmp_path / "allowed").write_text("")

    async def main():
        member = swarm.member(access=Access(allow_file=tmp_path / "allowed"))
        async with serving(member) as address:
            return await told(address, swarm.member(), patience_s=SHORT_S)

    seen = run(main())
    assert seen.statuses == {"TCP to peer": "ok", "secret": "fail"}
    assert "turns this one away" in seen["secret"].says
    assert "allow-list" in seen["secret"].next_step


# --- 5. versions ---


def test_another_version_of_the_protocol(run):
    async def main():
        async with saying(HEADER.pack(MAGIC, VERSION + 1, 1, 0, 0, 0)) as address:
            return await told(address, patience_s=SHORT_S)

    seen = run(main())
    assert seen.statuses == {"TCP to peer": "ok", "version": "fail"}
    assert f"This side speaks protocol {VERSION}" in seen["version"].says
    assert f"the peer protocol {VERSION + 1}: they cannot talk" in seen["version"].says
    assert "install the same Shoal" in seen["version"].next_step


def test_another_version_of_the_protocol_under_tls(run):
    swarm = Swarm()

    async def main():
        context = swarm.member().server_tls()
        async with saying(HEADER.pack(MAGIC, VERSION + 1, 1, 0, 0, 0), context) as address:
            return await told(address, swarm.member(), patience_s=SHORT_S)

    seen = run(main())
    assert seen.statuses == {"TCP to peer": "ok", "version": "fail"}
    assert "they cannot talk" in seen["version"].says


def test_other_software_that_speaks_the_same_protocol(run, monkeypatch):
    monkeypatch.setattr(advice, "__version__", "0.0.1")

    async def main():
        async with serving() as address:
            return await told(address)

    seen = run(main())
    assert seen.rows("warn") == ["version"]
    assert "This side runs shoal 0.0.1, the peer" in seen["version"].says
    assert "can talk" in seen["version"].says


# --- 6. clocks ---


@pytest.mark.parametrize(
    ("ahead_s", "status", "words"),
    [
        (0.0, "ok", "agree"),
        (5.0, "warn", "5.0 s ahead of"),
        (-5.0, "warn", "5.0 s behind"),
        (40.0, "fail", "40.0 s ahead of"),
    ],
)
def test_a_clock_that_is_off(run, ahead_s, status, words):
    swarm = Swarm()

    async def main():
        async with serving(swarm.member(), BadNetwork(ahead_s=ahead_s)) as address:
            return await told(address, swarm.member())

    seen = run(main())
    assert seen["clock"].status == status
    assert words in seen["clock"].says
    assert seen["clock"].figures["ahead_s"] == pytest.approx(ahead_s, abs=0.5)
    assert set(seen.statuses.values()) == {"ok", status}
    if status != "ok":
        assert "date -u" in seen["clock"].next_step


def test_a_clock_so_far_off_that_datagrams_are_refused(run):
    swarm = Swarm()

    async def main():
        async with serving(swarm.member(), BadNetwork(ahead_s=1000.0)) as address:
            return await told(address, swarm.member())

    seen = run(main())
    assert seen.rows("fail") == ["UDP to peer", "clock"]
    assert "17 min ahead of" in seen["clock"].says
    assert seen["UDP to peer"].next_step == "see clock."


@pytest.mark.parametrize(
    ("made_days_ago", "words"),
    [(-3, "refused as not yet valid: it begins"), (60, "refused as expired: it ended")],
)
def test_a_certificate_that_is_refused_because_of_a_clock(run, made_days_ago, words):
    swarm = Swarm()
    identity = swarm.member().identity
    made_s = SYSTEM_CLOCK.wall_s() - made_days_ago * 86400

    async def main():
        context = make_context(identity, Authority.of(swarm.secret), made_s, is_server=True)
        async with saying(b"", context) as address:
            return await told(address, swarm.member(), patience_s=SHORT_S)

    seen = run(main())
    assert seen.statuses == {"TCP to peer": "ok", "secret": "ok", "clock": "fail"}
    assert words in seen["clock"].says
    assert "One of the two clocks is wrong" in seen["clock"].says
    assert "timedatectl" in seen["clock"].next_step


# --- and ---


def test_a_name_that_nobody_knows(run):
    seen = run(told(Address("no-such-host.invalid", 31337), patience_s=SHORT_S))
    assert seen.rows("fail") == ["TCP to peer", "UDP to peer"]
    assert "'no-such-host.invalid' is not known here" in seen["TCP to peer"].says
    assert "getent hosts" in seen["TCP to peer"].next_step


def test_something_else_listens_there(run):
    async def main():
        async with saying(b"SSH-2.0-OpenSSH_9.6\r\n") as address:
            return await told(address, patience_s=SHORT_S)

    seen = run(main())
    assert "no Shoal peer; it says 'SSH-2.0-OpenSSH_9.6'" in seen["TCP to peer"].says
    assert "check the port" in seen["TCP to peer"].next_step


def test_a_peer_that_will_not_dial_back(run, monkeypatch):
    async def main():
        async with serving() as address:
            for _ in range(7):
                seen = await told(address)
                if seen.facts.dial_back_error:
                    return seen
            raise AssertionError("it dials back however often it is asked")

    seen = run(main())
    assert seen.rows("warn") == ["TCP from peer"]
    assert "too often" in seen["TCP from peer"].says


def test_it_takes_no_longer_than_its_steps_allow(run):
    """Half a patience for the name, one to call, a share for each look, one for dialing back, and margins."""
    p = joining.PATIENCE_S
    assert p / 2 + (p + 1) + 2.5 * joining._LOOK_SHARE * p + (p + 1) <= 16


def test_serving_tells_of_each_caller(run):
    async def main():
        lines = []
        ready = asyncio.get_running_loop().create_future()
        server = asyncio.ensure_future(
            joining.serve(LOOPBACK, Member(), on_ready=ready.set_result, on_caller=lines.append)
        )
        try:
            seen = await told(await ready)
        finally:
            server.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await server
        return seen, lines

    seen, lines = run(main())
    assert seen.statuses == dict.fromkeys(ROWS, "ok")
    assert any("asks who is here over TCP" in line for line in lines)
    assert any("asks who is here over UDP" in line for line in lines)
    assert lines[-1].endswith("TCP ok, UDP ok")
    assert logging.getLogger("shoal.transport.introductions").handlers == []


def look_at(address, secret=None, network=None, patience_s=2.0):
    return look(network or BadNetwork(), address, secret, patience_s=patience_s)


def test_a_peer_without_a_secret_says_its_version(run):
    async def main():
        async with StreamTransport() as peer:
            return await look_at(await peer.listen(LOOPBACK))

    assert run(main()) == CloserLook("open", version=VERSION)


def test_a_peer_of_another_version(run):
    async def main():
        async with saying(HEADER.pack(MAGIC, 77, 1, 0, 0, 0)) as address:
            return await look_at(address)

    assert run(main()).version == 77


@pytest.mark.parametrize("run", ["uvloop", "asyncio"], indirect=True)
def test_the_certificate_of_this_swarm_and_of_another(run):
    ours, theirs = Swarm(), Swarm()

    async def main():
        membership = ours.member()
        async with StreamTransport(membership=membership) as peer:
            address = await peer.listen(LOOPBACK)
            secrets = (ours.secret, theirs.secret, None)
            return [await look_at(address, secret, patience_s=0.5) for secret in secrets]

    looks = run(main())
    shown = [each.certificate for each in looks]
    assert [each.reach for each in looks] == ["open"] * 3
    assert all(each.is_of_shoal for each in shown)
    assert [each.is_of_this_swarm for each in shown] == [True, False, False]
    assert shown[0].made_s == pytest.approx(SYSTEM_CLOCK.wall_s(), abs=60)
    assert shown[0].begins_s == shown[0].made_s - VALID_BEFORE_S


def test_something_else_that_listens(run):
    async def main():
        async with saying(b"SSH-2.0-OpenSSH_9.6\r\n") as talking, saying(b"") as silent:
            return await look_at(talking), await look_at(silent, patience_s=SHORT_S)

    talking, silent = run(main())
    assert talking == CloserLook("open", says=b"SSH-2.0-OpenSSH_9.6\r\n"[: HEADER.size])
    assert silent == CloserLook("open")


@pytest.mark.parametrize(
    ("tcp", "expected"),
    [
        ("dropped", CloserLook("silent")),
        ("refused", CloserLook("refused")),
        ("unroutable", CloserLook("unreachable", "No route to host")),
    ],
)
def test_nobody_is_reached(run, tcp, expected):
    async def main():
        return await look_at(Address("127.0.0.1", 9), None, BadNetwork(tcp=tcp), SHORT_S)

    assert run(main()) == expected


def test_a_closer_look_at_a_name_that_nobody_knows(run):
    found = run(look_at(Address("no-such-host.invalid", 9)))
    assert found.reach == "unknown host"


def test_tls_of_another_program(run, tmp_path):
    """A certificate that no swarm has signed is not taken for one."""
    import datetime

    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "www.example.org")])
    now = datetime.datetime.now(datetime.UTC)
    certificate = (
        x509.CertificateBuilder(name, name, key.public_key(), 7, now, now + datetime.timedelta(days=1))
    ).sign(key, hashes.SHA256())
    chain = tmp_path / "chain.pem"
    chain.write_bytes(
        certificate.public_bytes(serialization.Encoding.PEM)
        + key.private_bytes(
            serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
        )
    )
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(chain)

    async def main():
        async with saying(b"", context) as address:
            return await look_at(address, Swarm().secret, patience_s=0.5)

    found = run(main())
    assert found.certificate is not None
    assert not found.certificate.is_of_shoal
    assert not found.certificate.is_of_this_swarm
