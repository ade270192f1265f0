from experts.fake_client import peer_at
from shoal.core import PeerLost
from shoal.experts.client.batch import ExpertCall, LastCall, NotEnoughExperts, describe_error


def test_it_counts_and_prints():
    calls = [
        ExpertCall("ffn.1.2", peer_at(7), 20, is_answered=True, seconds=0.0123, backward_seconds=0.2),
        ExpertCall("ffn.31.14", peer_at(8), 4, seconds=1.5, error="PeerLost: the connection ended"),
    ]
    last = LastCall(calls, num_samples=24, search_seconds=0.001, seconds=1.6, backward_seconds=0.25)
    assert (last.num_asked, last.num_answered, last.num_failed) == (2, 1, 1)
    head, columns, first, second = str(last).splitlines()
    assert head == ("1 of 2 experts answered for 24 samples in 1600.0 ms (search 1.0 ms, backward 250.0 ms)")
    assert columns.split() == ["expert", "peer", "samples", "forward", "backward", "error"]
    assert first.split()[0] == "ffn.1.2"
    assert "12.3 ms" in first
    assert "200.0 ms" in first
    assert second.endswith("PeerLost: the connection ended")
    assert first.index(" ms") == second.index(" ms")


def test_before_any_call():
    assert str(LastCall()).startswith("0 of 0 experts answered")


def test_errors_in_one_line():
    error = PeerLost("the connection ended", cause="a long story", next_step="try again")
    assert describe_error(error) == "PeerLost: the connection ended"
    assert NotEnoughExperts("too few", LastCall()).last_call.num_asked == 0
