import msgspec
import pytest

from bench.test_reachability import FACTS, NO_WAY
from shoal.bench.advice import ROWS, explain, summarize
from shoal.bench.facts import Out, any_host, date, duration
from shoal.bench.looking import Look, ShownCertificate
from shoal.transport.network.sockets import is_wildcard
from shoal.transport.trust.membership import is_loopback

DAY_S = 86400.0
NOW_S = 1_700_000_000.0


def named(**changes):
    facts = msgspec.structs.replace(FACTS, wall_s=NOW_S, **changes)
    return {finding.name: finding for finding in explain(facts)}


def test_rows_keep_their_order_and_what_is_not_ok_says_what_to_do():
    found = named(attempts=NO_WAY, has_secret=False)
    assert list(found) == list(ROWS)
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
    refused = Out("failed", "it does not take this certificate.")
    found = named(tcp=refused, udp=refused, look=Look("open", certificate=shown))
    assert found["clock"].status == "fail"
    assert words in found["clock"].says
    assert found["secret"].status == "ok"


def test_a_certificate_that_tells_nothing_of_clocks():
    shown = ShownCertificate(True, True, NOW_S - 2 * DAY_S, NOW_S + 29 * DAY_S)
    refused = Out("failed", "it turned away.")
    found = named(tcp=refused, udp=refused, look=Look("open", certificate=shown))
    assert list(found) == ["TCP to peer", "secret"]
    assert "still the peer turns this one away: it turned away." in found["secret"].says
    facts = msgspec.structs.replace(
        FACTS, tcp=refused, udp=refused, look=Look("open", certificate=shown), wall_s=NOW_S
    )
    assert summarize(facts, explain(facts)).endswith(
        "Not tried: version, clock, interface, TCP from peer, UDP from peer."
    )


def test_tls_that_is_not_shoals_is_no_matter_of_secrets():
    shown = ShownCertificate(False, False, 0.0, 1.0)
    lost = Out("failed", "lost")
    found = named(tcp=lost, udp=lost, look=Look("open", certificate=shown))
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
