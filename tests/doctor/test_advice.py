"""What loopback cannot show: machines with other addresses, and routers."""

import msgspec
import pytest

from shoal.core import Address
from shoal.core.ids import is_loopback
from shoal.doctor.advice import ROWS, check_dial_back, check_interface, check_out, explain, summarize
from shoal.doctor.joining import CallResult, CloserLook, JoinFacts, ShownCertificate, any_host, date, duration
from shoal.transport.introductions import Attempt, Introduction
from shoal.transport.network.sockets import is_wildcard

TARGET = Address("198.51.100.7", 31337)
ABOUT = Introduction("0.1.0", 1, "ab" * 20, 0.0, "203.0.113.9:4000")
OK = CallResult("ok", "", ABOUT, 0.02)
FACTS = JoinFacts(
    TARGET,
    Address("0.0.0.0", 4000),
    has_secret=True,
    tcp=OK,
    udp=OK,
    seen_as=Address("203.0.113.9", 4000),
    port_to_open=31337,
    patience_s=4.0,
)
BOTH_WAYS = (Attempt("tcp", "ok"), Attempt("udp", "ok"))
NO_WAY = (Attempt("tcp", "refused"), Attempt("udp", "silent"))


def facts(**changes):
    return msgspec.structs.replace(FACTS, **changes)


def test_listening_on_loopback_while_others_see_another_address():
    finding = check_interface(facts(listens=Address("127.0.0.1", 4000), attempts=NO_WAY))
    assert finding.status == "fail"
    assert "listens on 127.0.0.1, which only programs on this machine reach" in finding.says
    assert "sees this machine as 203.0.113.9" in finding.says
    assert "--listen 0.0.0.0:31337, with --secret-file FILE" in finding.next_step


def test_what_to_start_where_nothing_listens():
    def advice(host, *, has_secret):
        out, look = CallResult("refused"), CloserLook("refused")
        target = Address(host, 7)
        return check_out(facts(target=target, tcp=out, udp=out, look=look, has_secret=has_secret), "tcp")

    for host, has_secret, ending in (
        ("127.0.0.1", False, "--serve 127.0.0.1:7"),
        ("::1", True, "--serve [::1]:7 --secret-file FILE"),
        ("198.51.100.7", False, "--serve 0.0.0.0:7 --insecure"),
        ("198.51.100.7", True, "--serve 0.0.0.0:7 --secret-file FILE"),
    ):
        assert advice(host, has_secret=has_secret).next_step.endswith(ending)


def test_listening_on_loopback_of_ipv6():
    finding = check_interface(
        facts(listens=Address("::1", 4000), seen_as=Address("2001:db8::9", 4000), attempts=NO_WAY)
    )
    assert finding.status == "fail"
    assert "--listen [::]:31337" in finding.next_step


def test_listening_everywhere_on_an_address_of_its_own():
    finding = check_interface(facts(attempts=BOTH_WAYS))
    assert finding.status == "ok"
    assert "203.0.113.9, its own address." in finding.says


def test_another_address_is_no_trouble_when_the_peer_gets_through():
    finding = check_interface(facts(listens=Address("10.0.0.5", 4000), attempts=BOTH_WAYS))
    assert finding.status == "ok"


def test_a_router_that_passes_the_port_on():
    finding = check_interface(facts(is_own_address=False, attempts=BOTH_WAYS))
    assert finding.status == "ok"
    assert "It passes port 4000 on to this machine" in finding.says


def test_a_router_that_does_not():
    finding = check_interface(facts(is_own_address=False, attempts=NO_WAY))
    assert finding.status == "warn"
    assert "have the router pass port 31337 on to this machine, TCP and UDP" in finding.next_step


def test_dialing_back_to_a_wrong_interface_is_explained_once():
    wrong = facts(listens=Address("10.0.0.5", 4000), attempts=NO_WAY)
    assert check_interface(wrong).status == "fail"
    assert [check_dial_back(wrong, attempt).next_step for attempt in NO_WAY] == ["see interface."] * 2


def test_a_peer_that_does_not_say_what_it_sees():
    assert check_interface(facts(seen_as=None)).status == "warn"


@pytest.mark.parametrize(
    ("attempt", "is_own", "words"),
    [
        (NO_WAY[0], True, "was refused: a firewall, here or on the way, rejects it"),
        (NO_WAY[0], False, "was refused: the router does not pass the port on"),
        (NO_WAY[1], True, "heard nothing: a firewall, here or on the way, drops it"),
        (NO_WAY[1], False, "heard nothing: the router does not pass the port on, or a firewall"),
        (Attempt("udp", "failed", "The peer is X,\n not Y."), True, "failed: The peer is X, not Y."),
    ],
)
def test_why_the_peer_did_not_get_through(attempt, is_own, words):
    finding = check_dial_back(facts(attempts=NO_WAY, is_own_address=is_own), attempt)
    assert finding.status == "warn"
    assert f"dialed back to 203.0.113.9:4000 over {attempt.ip_protocol.upper()}" in finding.says
    assert words in finding.says
    assert (
        "shoal doctor --join 198.51.100.7:31337 --listen 0.0.0.0:31337 --secret-file FILE"
        in finding.next_step
    )
    meaning = (
        "Only outbound works: this peer can take part"
        if attempt.ip_protocol == "tcp"
        else "Others cannot call"
    )
    assert meaning in finding.says


def test_an_answer_over_udp_that_is_a_refusal():
    refused = CallResult("failed", "It does not talk to this peer.")
    finding = check_out(facts(udp=refused), "udp")
    assert "said no, while TCP gets through. It does not talk to this peer." in finding.says
    assert "firewall" not in finding.next_step


def test_no_way_for_a_reason_that_nobody_foresaw():
    lost = CallResult("failed", "The disk is on fire.")
    finding = check_out(facts(tcp=lost, udp=lost, look=None), "tcp")
    assert "The disk is on fire." in finding.says
    assert finding.next_step


def test_a_shoal_peer_that_takes_no_calls_now():
    busy = CallResult("failed", "It takes no connection now.")
    finding = check_out(facts(tcp=busy, udp=busy, look=CloserLook("open", version=1)), "tcp")
    assert "It takes no connection now." in finding.says
    assert "no Shoal peer" not in finding.says


def test_something_listens_that_says_nothing():
    late = CallResult("silent", "late")
    finding = check_out(facts(tcp=late, udp=late, look=CloserLook("open")), "tcp")
    assert "no Shoal peer; it does not speak as one does" in finding.says


DAY_S = 86400.0
NOW_S = 1_700_000_000.0


def named(**changes):
    facts = msgspec.structs.replace(FACTS, wall_s=NOW_S, **changes)
    return {finding.name: finding for finding in explain(facts)}


def test_rows_keep_their_order_and_what_is_not_ok_says_what_to_do():
    found = named(attempts=NO_WAY, has_secret=False)
    assert list(found) == [row for row in ROWS if row != "reached"]  # nobody was asked: test_ways_in
    assert all(bool(each.next_step) == (each.status != "ok") for each in found.values())


def test_no_secret_between_machines_is_worth_a_warning():
    finding = named(has_secret=False)["secret"]
    assert finding.status == "warn"
    assert "listen in" in finding.says
    assert "shoal keys secret --file" in finding.next_step


@pytest.mark.parametrize(
    ("begins_s", "words"),
    [
        (NOW_S + 3 * DAY_S, "not yet valid: it begins 2023-11-17 22:13 UTC, here it is 2023-11-14 22:13 UTC"),
        (NOW_S - 90 * DAY_S, "expired: it ended 2023-09-16"),
        (NOW_S - 0.5 * DAY_S, "The peer's clock is at least 12 h ahead of this one"),
    ],
)
def test_what_a_certificate_says_of_clocks(begins_s, words):
    shown = ShownCertificate(True, True, begins_s, begins_s + 31 * DAY_S)
    refused = CallResult("failed", "it does not take this certificate.")
    found = named(tcp=refused, udp=refused, look=CloserLook("open", certificate=shown))
    assert found["clock"].status == "fail"
    assert words in found["clock"].says
    assert found["secret"].status == "ok"


def test_a_certificate_that_tells_nothing_of_clocks():
    shown = ShownCertificate(True, True, NOW_S - 2 * DAY_S, NOW_S + 29 * DAY_S)
    refused = CallResult("failed", "it turned away.")
    found = named(tcp=refused, udp=refused, look=CloserLook("open", certificate=shown))
    assert list(found) == ["TCP to peer", "secret"]
    assert "still the peer turns this one away: it turned away." in found["secret"].says
    facts = msgspec.structs.replace(
        FACTS, tcp=refused, udp=refused, look=CloserLook("open", certificate=shown), wall_s=NOW_S
    )
    assert summarize(facts, explain(facts)).endswith(
        "Not tried: version, clock, interface, TCP from peer, UDP from peer, reached."
    )


def test_tls_that_is_not_shoals_is_no_matter_of_secrets():
    shown = ShownCertificate(False, False, 0.0, 1.0)
    lost = CallResult("failed", "lost")
    found = named(tcp=lost, udp=lost, look=CloserLook("open", certificate=shown))
    assert list(found) == ["TCP to peer", "UDP to peer"]
    assert "no Shoal peer" in found["TCP to peer"].says


def test_a_dial_back_that_was_refused():
    found = named(dial_back_error="it has no such method.")
    assert found["TCP from peer"].status == "warn"
    assert "did not: it has no such method." in found["TCP from peer"].says


def test_the_summary():
    facts = msgspec.structs.replace(FACTS, wall_s=NOW_S, has_secret=False)
    assert summarize(facts, explain(facts)).endswith("there is advice on secret.")


def test_words_for_numbers():
    assert [duration(each) for each in (0.0123, 5.0, 600.0, 90_000.0)] == [
        "12.3 ms",
        "5.0 s",
        "10 min",
        "25 h",
    ]
    assert date(NOW_S) == "2023-11-14 22:13 UTC"
    assert [is_loopback(each) for each in ("127.0.0.9", "::1", "localhost", "10.0.0.1", "a.example")] == [
        True,
        True,
        True,
        False,
        False,
    ]
    assert [is_wildcard(each) for each in ("0.0.0.0", "::", "127.0.0.1", "a.example")] == [
        True,
        True,
        False,
        False,
    ]
    assert [any_host(each) for each in ("10.0.0.1", "::1")] == ["0.0.0.0", "::"]
