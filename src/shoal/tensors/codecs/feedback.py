"""Error feedback: what a codec could not send is kept, and added to what is sent next.

After Seide et al. (2014) and Karimireddy et al. (2019). The invariant, for each slot and call:
sent + kept = tensor + decay · what was kept before, in float32 (float64 for float64 tensors), to the rounding
of one subtraction. A decay below 1 forgets what was learned long ago (Sarfi et al. 2025).
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from shoal.core.errors import UsageError
from shoal.tensors.codecs.base import (
    LOSSY_DTYPES,
    PLAIN,
    Codec,
    Encoded,
    is_finite,
    plain,
    saturating_cast,
    working_dtype,
)
from shoal.tensors.specs import DEFAULT_LIMITS, describe, size_bytes

_RESIDUAL = "residual/"
_CODEC = "codec/"


class ErrorFeedback(Codec):
    """Wraps any codec; every tensor that is sent again and again has a `slot` of its own.

    A tensor that holds an inf or a nan is sent plain, and alone: the slot keeps what it had.
    """

    def __init__(self, codec: Codec, decay: float = 1.0) -> None:
        if isinstance(codec, ErrorFeedback):
            raise UsageError("error feedback inside error feedback would keep everything twice")
        if not 0 <= decay <= 1:
            raise UsageError(f"error feedback keeps between 0 and 1 of what was not sent, not {decay}")
        self.codec = codec
        self.decay = decay
        self.residuals: dict[str, torch.Tensor] = {}

    def encode(self, tensor: torch.Tensor, slot: str = "") -> Encoded:
        """Encode the tensor and what the slot has kept; UsageError if the slot's shape was another."""
        spec = describe(tensor)
        if spec.dtype not in LOSSY_DTYPES or 0 in spec.shape:
            return self.codec.encode(tensor, slot)
        due = tensor.detach().to(working_dtype(tensor.dtype))
        residual = self.residuals.get(slot)
        if residual is not None:
            if residual.shape != due.shape:
                raise UsageError(
                    f"slot {slot!r} has kept a rest of shape {list(residual.shape)}, "
                    f"but was given a tensor of shape {list(due.shape)}",
                    next_step="give every tensor a slot of its own, or forget() what was kept",
                )
            due = torch.add(due, residual.to(due), alpha=self.decay)
        encoded = self.codec.encode(saturating_cast(due, tensor.dtype), slot)
        arrived = self.codec.decode(encoded, size_bytes(spec)).to(due)
        # A plain tensor arrives in the memory that is about to be sent; any other in memory to reuse.
        rest = due - arrived if encoded.meta.codec == PLAIN else torch.sub(due, arrived, out=arrived)
        if not is_finite(rest):
            return plain(tensor)
        self.residuals[slot] = rest
        return encoded

    def decode(self, encoded: Encoded, max_bytes: int = DEFAULT_LIMITS.max_bytes) -> torch.Tensor:
        """As the codec inside does."""
        return self.codec.decode(encoded, max_bytes)

    def reseed(self, number: int) -> None:
        """Seed the codec inside."""
        self.codec.reseed(number)

    def forget(self) -> None:
        """Drop what all slots have kept, as when parameters were replaced from outside."""
        self.residuals.clear()

    def state_dict(self) -> dict[str, torch.Tensor]:
        """What each slot has kept, and the state of the codec inside."""
        inner = {_CODEC + key: value for key, value in self.codec.state_dict().items()}
        return {_RESIDUAL + slot: rest for slot, rest in self.residuals.items()} | inner

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """Take over what was kept; what other slots have kept is forgotten."""
        strange = [key for key in state if not key.startswith((_RESIDUAL, _CODEC))]
        if strange:
            raise UsageError(f"not the state of error feedback: {sorted(strange)[:3]}")
        self.codec.load_state_dict(
            {key.removeprefix(_CODEC): value for key, value in state.items() if key.startswith(_CODEC)}
        )
        self.residuals = {
            key.removeprefix(_RESIDUAL): value.clone()
            for key, value in state.items()
            if key.startswith(_RESIDUAL)
        }
