import signal

import pytest

from shoal.launch.worker import Death, describe, first_cause, is_echo, name_ranks, name_signal, summarise

LOST = "shoal.core.errors.PeerLost: rank 2 is lost: its process 7 ended"


@pytest.mark.parametrize(
    ("death", "text", "exit_code"),
    [
        (Death(2, 1), "rank 2 failed with exit code 1", 1),
        (Death(2, 125), "rank 2 failed with exit code 125", 125),
        (Death(2, 126), "rank 2 failed with exit code 126", 1),
        (Death(2, 255), "rank 2 failed with exit code 255", 1),
        (Death(2, -9), "rank 2 was killed by signal 9 (SIGKILL)", 137),
        (Death(2, -15), "rank 2 was killed by signal 15 (SIGTERM)", 143),
        (
            Death(2, 0, manner="early", step=12),
            "rank 2 ended early with exit code 0, at step 12, inside of attach",
            1,
        ),
        (
            Death(2, 0, manner="abrupt", step=9),
            "rank 2 ended with exit code 0 without leaving its group (os._exit?), at step 9 or later",
            1,
        ),
        (Death(0, -signal.SIGSTOP, stopped_s=6.2), "rank 0 was stopped by signal 19 (SIGSTOP), 6 s ago", 147),
    ],
)
def test_an_end_in_words_and_as_an_exit_code(death, text, exit_code):
    assert str(death) == text
    assert death.exit_code == exit_code


def test_hints_say_what_often_lies_behind_a_signal():
    assert "out-of-memory" in describe(Death(0, -9))
    assert "/dev/shm" in describe(Death(0, -signal.SIGBUS))
    assert describe(Death(0, 3)) == "rank 0 failed with exit code 3"


@pytest.mark.parametrize(
    ("error", "is_consequence"),
    [
        (LOST, True),
        ("RuntimeError: [/gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]", True),
        ("ValueError: boom", False),
        ("", False),
    ],
)
def test_losing_a_peer_is_a_consequence(error, is_consequence):
    assert Death(0, 1, error=error).is_consequence is is_consequence


@pytest.mark.parametrize(
    ("error", "is_so"),
    [
        ("ConnectionResetError: [Errno 104] Connection reset by peer", True),
        ("EOFError", True),
        ("RuntimeError: [pair.cc:534] Connection reset by peer", False),
        (LOST, False),
        ("", False),
    ],
)
def test_what_children_say_of_a_worker_that_has_gone(error, is_so):
    assert is_echo(error) is is_so


def test_the_cause_is_the_first_that_is_no_consequence():
    late, early = Death(2, 1, at_s=5, error="ValueError: boom"), Death(0, 1, at_s=1, error=LOST)
    assert first_cause([early, late]) is late
    assert first_cause([early, Death(1, 1, at_s=2, error=LOST)]) is early
    assert first_cause([Death(3, -9, at_s=7), late]) is late


def test_others_are_a_line_each_and_those_alike_share_one():
    cause = Death(2, -9)
    deaths = [cause, Death(3, 1, error=LOST), Death(0, -15, error=LOST), Death(1, -6), Death(4, 3)]
    assert summarise(deaths, cause) == [
        "ranks 0 and 3 failed after that: PeerLost: rank 2 is lost: its process 7 ended",
        "rank 1 was killed by signal 6 (SIGABRT) after that",
        "rank 4 failed with exit code 3 after that",
    ]


def test_those_that_failed_alike_are_named_together():
    """Ranks, processes and addresses in an error are each worker's own."""
    cause = Death(1, 1, error="ValueError: rank 1 fails (process 71) in <object at 0x7f>")
    alike = [Death(rank, 1, error=cause.error.replace("1", str(rank + 4))) for rank in (0, 2)]
    other = Death(3, 1, error="ValueError: 5 parts")
    assert summarise([cause, *alike, other], cause) == [
        "ranks 0-2 failed with the same error: ValueError: rank 1 fails (process 71) in <object at 0x7f>",
        "rank 3 failed after that: ValueError: 5 parts",
    ]


@pytest.mark.parametrize(
    ("death", "is_loss"),
    [
        (Death(0, -signal.SIGKILL), True),
        (Death(0, -signal.SIGSTOP, stopped_s=6.2), True),
        (Death(0, 1, error=LOST), True),
        (Death(0, 1, host="elsewhere"), True),
        (Death(0, 1, error="ValueError: boom"), False),
        (Death(0, 7), False),
        (Death(0, 0, manner="abrupt"), False),
    ],
)
def test_a_signal_is_a_loss_and_an_exception_an_error(death, is_loss):
    assert death.is_loss is is_loss


def test_names():
    assert name_ranks([3]) == "rank 3"
    assert name_ranks([0, 1, 3]) == "ranks 0, 1 and 3"
    assert name_ranks([0, 1, 2, 3]) == "ranks 0-3"
    assert name_ranks([0, 1, 2, 4, 6, 7, 8]) == "ranks 0-2, 4 and 6-8"
    assert name_signal(250) == "signal 250"
