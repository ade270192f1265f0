import errno

from shoal.bench.findings import Finding, fail, ok, run_checks, warn
from shoal.core import IdentityError


def test_a_check_that_raises_is_a_failed_finding():
    def broken():
        raise OSError(errno.EIO, "the disk\nis on fire")

    def ours():
        raise IdentityError("There is no home.", next_step="set SHOAL_STATE.")

    first, second, third = run_checks({"disk": broken, "home": ours, "after": lambda: ok("Fine.")})
    assert first.status == second.status == "fail"
    assert first.says == "The check itself failed: OSError: [Errno 5] the disk is on fire"
    assert "shoal --verbose doctor" in first.next_step
    assert (second.says, second.next_step) == (
        "The check itself failed: There is no home.",
        "set SHOAL_STATE.",
    )
    assert third.status == "ok"


def test_the_three_kinds_of_finding():
    assert ok("Fine.", size=1) == Finding("ok", "Fine.", figures={"size": 1})
    assert warn("Slow.", "wait.") == Finding("warn", "Slow.", "wait.")
    assert fail("Broken.", "mend it.").status == "fail"
