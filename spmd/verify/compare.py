"""How far two results are apart, and whether that is more than rounding."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from spmd.ir.program import Program
from spmd.ir.types import TensorType, numpy_dtype

_TOLERANCE_BITS = {64: 1e-9, 32: 1e-4, 16: 3e-2, 8: 3e-1, 4: 5e-1}
"""Relative tolerance by the bits of the narrowest float type that a program computes in."""


class Comparison(NamedTuple):
    """How one result of two programs compares.

    Attributes:
      max_abs, max_rel: largest difference; the same over the expected result's largest magnitude.
      at: index of the element that exceeds its tolerance most.
      got, wanted: that element in both.
      ok: every element agrees within the tolerance; integers and predicates exactly.
    """

    name: str
    type: TensorType
    max_abs: float
    max_rel: float
    at: tuple[int, ...]
    got: Any
    wanted: Any
    ok: bool

    def __str__(self) -> str:
        sign = "ok" if self.ok else "DIFFERS"
        text = f"{sign:<8}{self.name}: {self.type}, largest difference {self.max_abs:.3g}"
        if self.max_abs:
            text += f" (relative {self.max_rel:.3g})"
        if not self.ok:
            text += f", at {list(self.at)} it is {self.got} instead of {self.wanted}"
        return text


class Tolerance(NamedTuple):
    """Two floats agree when they are not further apart than `atol + rtol * |wanted|`.

    If left out, `atol` is `rtol` times the largest magnitude of the result. The error of a sum in
    another order depends on its terms, which may be large where the sum itself is nearly 0.
    """

    rtol: float
    atol: float | None = None


def default_rtol(types: Iterable[TensorType]) -> float:
    """The tolerance for programs that compute in these types."""
    bits = [_float_bits(type_.dtype) for type_ in types]
    return _TOLERANCE_BITS[min((b for b in bits if b), default=32)]


def _float_bits(dtype: str) -> int:
    kind = numpy_dtype(dtype)
    return int(jnp.finfo(kind).bits) if jnp.issubdtype(kind, jnp.inexact) else 0


def compare(
    name: str, type_: TensorType, got: Any, wanted: Any, tolerance: Tolerance
) -> Comparison:
    """Compares two arrays of one type; NaN equals NaN, and infinities only themselves."""
    if np.shape(got) != np.shape(wanted):
        text = f"shape {np.shape(got)}", f"shape {np.shape(wanted)}"
        return Comparison(name, type_, np.inf, np.inf, (), *text, False)
    x, y = _wide(got), _wide(wanted)
    with np.errstate(invalid="ignore", over="ignore"):
        same = (x == y) | ((x != x) & (y != y))
        off = np.where(same, 0.0, np.abs(x - y).astype(np.float64))
    off = np.where(np.isnan(off), np.inf, off)
    if not off.size:
        return Comparison(name, type_, 0.0, 0.0, (), None, None, True)
    # `at` is where the tolerance is exceeded most, not where the difference is largest: with `rtol`
    # large elements may be off by more.
    size = np.where(np.isfinite(y), np.abs(y), 0.0)
    allowed = np.zeros(())
    if _float_bits(type_.dtype):
        atol = tolerance.rtol * size.max() if tolerance.atol is None else tolerance.atol
        allowed = atol + tolerance.rtol * size
    excess = np.where(off > 0, off - allowed, -np.inf)
    at = np.unravel_index(int(excess.argmax()), off.shape)
    worst = float(off.max())
    return Comparison(
        name,
        type_,
        worst,
        worst / float(size.max()) if size.max() else worst,
        tuple(int(i) for i in at),
        np.asarray(got)[at],
        np.asarray(wanted)[at],
        not bool((off > allowed).any()),
    )


def compare_results(
    program: Program, got: Iterable[Any], wanted: Iterable[Any], tolerance: Tolerance
) -> tuple[Comparison, ...]:
    """Compares the results of two runs of a program, one by one."""
    values = program.body.results
    return tuple(
        compare(name, program.types[v], a, b, tolerance)
        for name, v, a, b in zip(program.result_names, values, got, wanted, strict=True)
    )


def _wide(array: Any) -> Any:
    """Elements in a type in which differences are exact enough."""
    elements = np.asarray(array)
    if elements.dtype.kind == "c":
        return elements.astype(np.complex128)
    if elements.dtype.kind in "iu" and elements.dtype.itemsize == 8:
        return elements.astype(np.longdouble)
    return elements.astype(np.float64)
