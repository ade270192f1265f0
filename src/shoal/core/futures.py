"""Answers to those who wait."""

from __future__ import annotations

import asyncio
from typing import TypeVar

T = TypeVar("T")


def settle(future: asyncio.Future[T], outcome: T | Exception) -> None:
    """Give a result to whoever waits, or have an error raised there; nothing once that was done."""
    if future.done():
        return
    if isinstance(outcome, Exception):
        future.set_exception(outcome)
    else:
        future.set_result(outcome)
