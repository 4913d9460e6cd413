"""Runs a fuzz case: `spmd.jit` against `jax.jit`; tells errors from ill-conditioned programs."""

import re
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import spmd
from tools.fuzzing.cases import Case, definitions, execute, tolerance

PASSED, FAILED, UNSUPPORTED, INVALID = "passed", "failed", "unsupported", "invalid"


class Outcome(NamedTuple):
    """How a case ended.

    Attributes:
      status: `passed`, `failed`, `unsupported` (an op without a rule), `invalid` (for jax too).
      key: what is the same for failures of one cause, as far as a program can tell.
      message: for people.
    """

    status: str
    key: str = ""
    message: str = ""


def run(case: Case, **options: Any) -> Outcome:
    """Compiles and runs a case both ways and compares every result; with options of ours."""
    scope = execute(definitions(case))
    args = scope["arguments"]()
    plain = scope["make_step"](lambda x, spec: x)
    try:
        reference = jax.jit(plain)
        want = _arrays(reference(*args))
    except Exception as error:
        return Outcome(INVALID, type(error).__name__, str(error))
    try:
        mesh = spmd.Mesh(None, tuple(n for _, n in case.mesh), tuple(a for a, _ in case.mesh))
        step = spmd.jit(
            scope["make_step"](lambda x, spec: spmd.mark_sharding(x, mesh, spec)),
            mesh=mesh,
            in_specs=scope["IN_SPECS"],
            out_specs=scope["OUT_SPECS"],
            options=spmd.Options(check=True, **options),
        )
        got = _arrays(step(*args))
    except spmd.UnsupportedOpError as error:
        return Outcome(UNSUPPORTED, error.what, str(error))
    except Exception as error:
        name, first = type(error).__name__, str(error).strip().partition("\n")[0]
        words = re.sub(r"[%\d\[\]{}(),x]+", "", first)[:80]
        return Outcome(FAILED, f"{name}: {words}", f"{name}: {error}")
    wrong = [name for name in want if differ(got[name], want[name], case)]
    if wrong:
        others = other_references(reference, plain, args, case)
        wrong = [n for n in wrong if not any(differ(o[n], want[n], case) for o in others)]
    if not wrong:
        return Outcome(PASSED)
    lines = [_difference(name, got[name], want[name]) for name in wrong]
    return Outcome(FAILED, "mismatch", "\n".join(lines))


def _arrays(results: dict[str, Any]) -> dict[str, np.ndarray[Any, Any]]:
    return {name: np.asarray(x) for name, x in results.items()}


def differ(a: np.ndarray[Any, Any], b: np.ndarray[Any, Any], case: Case) -> bool:
    """Whether two results are different beyond rounding."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return True
    if not jnp.issubdtype(b.dtype, jnp.inexact):
        return not np.array_equal(a, b)
    x, y = a.astype(np.float64), b.astype(np.float64)
    finite = np.isfinite(y)
    if not np.array_equal(x[~finite], y[~finite], equal_nan=True):
        return True
    scale = np.abs(y[finite]).max(initial=1e-3)
    # NaN where a number should be compares unequal, as it should.
    return not bool(np.all(np.abs(x[finite] - y[finite]) <= tolerance(case) * scale))


def other_references(
    reference: Any, plain: Any, args: Sequence[Any], case: Case
) -> list[dict[str, np.ndarray[Any, Any]]]:
    """Results that are as right as the reference: op by op, and from arguments a touch off."""
    found = [plain(*args)]
    size = tolerance(case) / 64
    for seed in range(3):
        rng = np.random.RandomState(seed)
        touched = [
            (a * (1 + size * rng.uniform(-1, 1, a.shape))).astype(a.dtype)
            if jnp.issubdtype(a.dtype, jnp.inexact)
            else a
            for a in args
        ]
        found.append(reference(*touched))
    return [_arrays(outs) for outs in found]


def _difference(name: str, a: np.ndarray[Any, Any], b: np.ndarray[Any, Any]) -> str:
    if a.shape != b.shape or a.dtype != b.dtype:
        return f"{name} is {a.dtype}{a.shape}, not {b.dtype}{b.shape}"
    x, y = a.astype(np.float64), b.astype(np.float64)
    off = np.nan_to_num(np.abs(x - y), nan=np.inf)
    worst = np.unravel_index(int(off.argmax()), off.shape)
    count = int((off > 1e-3 * np.abs(np.nan_to_num(y)).max(initial=1e-3)).sum())
    return (
        f"{name}: {count} of {x.size} elements differ; "
        f"at {[int(k) for k in worst]} it is {x[worst]:.6g}, not {y[worst]:.6g}"
    )
