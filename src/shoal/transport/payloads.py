"""What callers and handlers give to be sent or filled: whether it can be, and the errors that say why not."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Sequence
from typing import Any

from shoal.core import PeerError, UsageError
from shoal.transport.frames import encode
from shoal.transport.memory import byte_view
from shoal.transport.messages import Reply

log = logging.getLogger(__name__)

EMPTY_REPLY = Reply()
"""The answer of a handler that returns None."""


def fitting_views(given: Sequence[Any], sizes: Sequence[int]) -> list[memoryview]:
    """Byte views of the memory that was picked for a message; PeerError when it does not fit the message."""
    views = byte_views(given)
    if [len(view) for view in views] != list(sizes):
        raise PeerError(
            f"The message has buffers of {_list(sizes)} bytes, "
            f"the memory given for it {_list([len(view) for view in views])}.",
            cause="the two sides disagree on what is exchanged.",
            next_step="compare the shapes and dtypes that both sides use.",
        )
    if any(view.readonly for view in views):
        raise UsageError(
            "The memory given for a message is read-only.", next_step="give a bytearray or writable array."
        )
    return views


def byte_views(buffers: Sequence[Any]) -> list[memoryview]:
    """The bytes of buffers that are to be sent or filled; UsageError when one of them has none."""
    try:
        return [byte_view(buffer) for buffer in buffers]
    except (TypeError, ValueError, BufferError) as error:
        raise UsageError(
            f"A buffer cannot be used: {error}.",
            cause="buffers are contiguous bytes-like objects.",
            next_step="pack tensors with shoal.tensors.pack first.",
        ) from error


def encode_head(method: str, head: Any, max_bytes: int) -> bytes:
    """A message's head as it travels; UsageError when its payload cannot, or is more than any peer takes."""
    try:
        encoded = encode(head)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise UsageError(
            f"The payload of {method} cannot be sent: {error}",
            cause="payloads carry what MessagePack carries; tensors and arrays travel as buffers.",
        ) from error
    if len(encoded) > max_bytes:
        raise UsageError(
            f"The payload of {method} takes {len(encoded):,} bytes; {max_bytes:,} are allowed.",
            next_step="send large things as buffers.",
        )
    return encoded


def checked_reply(returned: Any) -> Reply:
    """What a handler returned; TypeError when it is no reply."""
    if returned is None:
        return EMPTY_REPLY
    if inspect.iscoroutine(returned):
        returned.close()
        raise TypeError("a plain function answered with a coroutine; make the handler itself 'async def'")
    if not isinstance(returned, Reply):
        raise TypeError(f"a handler answers with a Reply or None, not with a {type(returned).__name__}")
    return returned


def release(reply: Reply) -> None:
    """Tell a reply's owner that its buffers are free again."""
    if reply.on_sent is not None:
        try:
            reply.on_sent()
        except Exception:
            log.exception("on_sent of a reply failed")


def _list(sizes: Sequence[int]) -> str:
    return ", ".join(map(str, sizes[:8])) + (", …" if len(sizes) > 8 else "") if sizes else "no"
