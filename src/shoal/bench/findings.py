"""What a look at the machine found: a status, one sentence, and what to do where it is not ok.

A check is a function without arguments that returns a `Finding`; which checks there are is `health`'s.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from typing import Literal

import msgspec

from shoal.core.errors import ShoalError

log = logging.getLogger(__name__)

Status = Literal["ok", "warn", "fail"]


class Finding(msgspec.Struct, frozen=True):
    """What a check found: one sentence, the figures in it, and what to do where it is not ok."""

    status: Status
    says: str
    next_step: str = ""
    figures: dict[str, object] = {}
    name: str = ""
    took_s: float = 0.0


def ok(says: str, **figures: object) -> Finding:
    """Nothing to do."""
    return Finding("ok", says, figures=figures)


def warn(says: str, next_step: str, **figures: object) -> Finding:
    """Works, but slower or less far than it could."""
    return Finding("warn", says, next_step, figures)


def fail(says: str, next_step: str, **figures: object) -> Finding:
    """Shoal cannot work like this."""
    return Finding("fail", says, next_step, figures)


def run_checks(checks: Mapping[str, Callable[[], Finding]]) -> list[Finding]:
    """Run each check in turn; one that raises stands as failed, with its error in one line."""
    findings = []
    for name, check in checks.items():
        began_s = time.perf_counter()
        try:
            finding = check()
        except Exception as error:
            log.debug("The check '%s' raised", name, exc_info=True)
            next_step = error.next_step if isinstance(error, ShoalError) else ""
            what = error.what if isinstance(error, ShoalError) else f"{type(error).__name__}: {error}"
            finding = fail(
                f"The check itself failed: {' '.join(what.split())}",
                next_step or f"run 'shoal --verbose doctor' and report what it says of '{name}'.",
            )
        took_s = time.perf_counter() - began_s
        findings.append(msgspec.structs.replace(finding, name=name, took_s=round(took_s, 3)))
    return findings
