"""The element types that travel, by name.

Every unquantised type of torch is here, those that only newer versions of torch have included; a peer with
an older torch refuses the names it does not know. Quantised types are left out: their scales live outside
the bytes.
"""

from __future__ import annotations

import torch

from shoal.core.errors import TensorError, did_you_mean

_NAMES = (
    "bool",
    *(f"int{bits}" for bits in (1, 2, 3, 4, 5, 6, 7, 8, 16, 32, 64)),
    *(f"uint{bits}" for bits in (1, 2, 3, 4, 5, 6, 7, 8, 16, 32, 64)),
    *("bits1x8", "bits2x4", "bits4x2", "bits8", "bits16"),
    *("float16", "bfloat16", "float32", "float64"),
    *("float4_e2m1fn_x2", "float8_e8m0fnu"),
    *("float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz"),
    *("complex32", "complex64", "complex128"),
)

DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in _NAMES if hasattr(torch, name)}
"""Wire name to torch type, for the types that this torch has."""

_NAME_OF = {dtype: name for name, dtype in DTYPES.items()}

# torch has no copy kernel for some types (int4, uint3, …) and warns about complex32, but it can copy any
# type of the same width.
_CARRIERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}


def dtype_name(dtype: torch.dtype) -> str:
    """The wire name; TensorError for a type that does not travel."""
    try:
        return _NAME_OF[dtype]
    except KeyError:
        raise TensorError(
            f"tensors of {dtype} do not travel",
            cause="a quantised tensor keeps its scales outside its bytes",
            next_step="send tensor.dequantize(), or tensor.int_repr() and the scales",
        ) from None


def dtype_named(name: object) -> torch.dtype:
    """The type of a wire name that may come from a hostile peer; TensorError if it is not one."""
    dtype = DTYPES.get(name) if isinstance(name, str) else None
    if dtype is None:
        raise unknown_dtype(name)
    return dtype


def unknown_dtype(name: object) -> TensorError:
    """Say which names are known and which is nearest, in bounded time and length."""
    if not isinstance(name, str):
        return TensorError(f"a dtype is a name, not {type(name).__name__}")
    short = name if len(name) <= 32 else name[:32] + "…"
    return TensorError(
        f"unknown dtype {short!r}.{did_you_mean(short, DTYPES)}",
        cause="it is misspelt, or the sender has a newer torch, or is broken.",
        next_step=f"use one of {', '.join(DTYPES)}",
    )


def carrier(dtype: torch.dtype) -> torch.dtype:
    """A type of the same width that torch can always copy."""
    return _CARRIERS[dtype.itemsize]
