"""What loopback cannot show: machines with other addresses, and routers."""

import msgspec
import pytest

from shoal.bench.facts import Facts, Out
from shoal.bench.looking import Look
from shoal.bench.reachability import check_dial_back, check_interface, check_out
from shoal.core import Address
from shoal.transport.introductions import About, Attempt

TARGET = Address("198.51.100.7", 31337)
ABOUT = About("0.1.0", 1, "ab" * 20, 0.0, "203.0.113.9:4000")
OK = Out("ok", "", ABOUT, 0.02)
FACTS = Facts(
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
        out, look = Out("refused"), Look("refused")
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
    assert f"dialed back to 203.0.113.9:4000 over {attempt.way.upper()}" in finding.says
    assert words in finding.says
    assert (
        "shoal doctor --join 198.51.100.7:31337 --listen 0.0.0.0:31337 --secret-file FILE"
        in finding.next_step
    )
    meaning = "Only outbound works: this peer can take part" if attempt.way == "tcp" else "Others cannot call"
    assert meaning in finding.says


def test_an_answer_over_udp_that_is_a_refusal():
    refused = Out("failed", "It does not talk to this peer.")
    finding = check_out(facts(udp=refused), "udp")
    assert "said no, while TCP gets through. It does not talk to this peer." in finding.says
    assert "firewall" not in finding.next_step


def test_no_way_for_a_reason_that_nobody_foresaw():
    lost = Out("failed", "The disk is on fire.")
    finding = check_out(facts(tcp=lost, udp=lost, look=None), "tcp")
    assert "The disk is on fire." in finding.says
    assert finding.next_step


def test_a_shoal_peer_that_takes_no_calls_now():
    busy = Out("failed", "It takes no connection now.")
    finding = check_out(facts(tcp=busy, udp=busy, look=Look("open", version=1)), "tcp")
    assert "It takes no connection now." in finding.says
    assert "no Shoal peer" not in finding.says


def test_something_listens_that_says_nothing():
    late = Out("silent", "late")
    finding = check_out(facts(tcp=late, udp=late, look=Look("open")), "tcp")
    assert "no Shoal peer; it does not speak as one does" in finding.says
