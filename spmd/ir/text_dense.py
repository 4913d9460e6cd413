"""The elements of a constant as text: exact to the bit, or where they are many, a digest."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from typing import Any

import numpy as np

from spmd.ir.types import Dense, numpy_dtype

READABLE_ELEMENTS = 16
"""Constants of more elements are written as the hexadecimal digits of their bytes."""

LARGEST = 1 << 16
"""Constants of more bytes are written as a digest of them, which tells them apart and no more."""


def dense_text(dense: Dense) -> str:
    """The elements of a constant; whatever would not read back bit by bit is hexadecimal."""
    if len(dense.data) > LARGEST:
        return f"sha256 {hashlib.sha256(dense.data).hexdigest()}"
    try:
        dtype = numpy_dtype(dense.type.dtype)
    except KeyError:
        return f"splat {dense.data.hex()}" if dense.splat else f"hex {dense.data.hex()}"
    size = dtype.itemsize
    whole = len(dense.data) == (1 if dense.splat else dense.type.size) * size
    if whole and dense.splat:
        return _element(dense.data, dtype)
    if whole and dense.type.size <= READABLE_ELEMENTS:
        texts = [_element(dense.data[i : i + size], dtype) for i in range(0, len(dense.data), size)]
        return _nested(texts, dense.type.shape or (1,))
    return f"splat {dense.data.hex()}" if dense.splat else f"hex {dense.data.hex()}"


def _nested(texts: Sequence[str], shape: Sequence[int]) -> str:
    if not shape:
        return texts[0]
    if not texts:
        return "[]"
    piece = len(texts) // shape[0]
    rows = [_nested(texts[i * piece :][:piece], shape[1:]) for i in range(shape[0])]
    return "[" + ", ".join(rows) + "]"


def _element(raw: bytes, dtype: np.dtype[Any]) -> str:
    scalar = np.frombuffer(raw, dtype)[0]
    text = str(scalar).lower() if dtype == np.bool_ else str(scalar)
    try:
        same = element_bytes(text, dtype) == raw
    except (ValueError, OverflowError):
        same = False
    return text if same else "0x" + raw[::-1].hex()


def element_bytes(text: str, dtype: np.dtype[Any]) -> bytes:
    """The bytes of one element from its text.

    Raises:
      ValueError, OverflowError: the text is not an element of the dtype.
    """
    if text.startswith("0x"):
        return int(text, 16).to_bytes(dtype.itemsize, "little")
    number: Any
    if dtype == np.bool_:
        number = {"true": True, "false": False}.get(text)
        if number is None:
            raise ValueError(f"{text!r} is neither true nor false")
    elif dtype.kind == "c":
        number = complex(text)
    else:
        number = int(text) if re.fullmatch(r"-?\d+", text) else float(text)
    with np.errstate(all="ignore"):
        return np.asarray([number]).astype(dtype).tobytes()
