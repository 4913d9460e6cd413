"""Python functions that a program calls: the calls in its module become jax's own.

`mlir.emit_python_callback` writes what a backend needs (a custom call on CPUs and GPUs, send and
receive on TPUs) and keeps the function alive with the executable.
"""

from __future__ import annotations

import functools
import threading
import traceback
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import io_callback
from jax.interpreters import mlir
from jaxlib.mlir import ir

from spmd.frontend.importer.attributes import tensor_type
from spmd.ir.description import CUSTOM_CALL
from spmd.ir.dialect.callbacks import CALLBACK, CHECK_CALLBACK, FLAG
from spmd.ir.program import Callback
from spmd.ir.types import numpy_dtype
from spmd.lowering.local.callbacks import FREE, LINKED

_Arrays = Sequence[np.ndarray[Any, Any]]


def effects_of(callbacks: Sequence[Callback]) -> frozenset[Any]:
    """What jax has to know of a program that calls these: `jax.effects_barrier` waits for it.

    One with an ordered callback also begins after the one before it that had one.
    """
    return frozenset(_effect(c.is_ordered) for c in callbacks if c.has_effect)


@functools.cache
def _effect(ordered: bool) -> Any:
    # It has no public name. Of jax's ordered effects this one may be in a program for several
    # devices; that of `jax.debug.callback` may not.
    traced = jax.make_jaxpr(lambda: io_callback(lambda: (), (), ordered=ordered))()
    (effect,) = traced.effects
    return effect


def silent(callbacks: Sequence[Callback]) -> tuple[Callback, ...]:
    """The same callbacks, of which those that only look do nothing."""
    return tuple(
        Callback(lambda *_: (), c.label, c.is_debug, c.has_effect, c.is_ordered)
        if c.is_debug
        else c
        for c in callbacks
    )


def emit_callbacks(ctx: Any, function: Any, callbacks: Sequence[Callback]) -> None:
    """Replaces the calls, by number, in an MLIR function of a module that jax is lowering."""
    calls = []

    def visit(op: Any) -> Any:
        if op.name == CUSTOM_CALL and _target(op) in (CALLBACK, CHECK_CALLBACK):
            calls.append(op)
        return ir.WalkResult.ADVANCE

    function.operation.walk(visit)
    raised = _Raised()
    for op in calls:
        _emit(ctx, op, callbacks[op.attributes["number"].value], raised)


def _target(op: Any) -> str:
    return str(op.attributes["call_target_name"].value)


class _Raised:
    """What a callback raised on the device that called it, for the devices that did not.

    Another process has none of it, and says where to look.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._error: Exception | None = None

    def keep(self, error: Exception) -> None:
        with self._lock:
            self._error = error

    def again(self, label: str) -> Exception:
        """An error for one device, with the traceback as text: XLA hands on nothing else."""
        with self._lock:
            error = self._error
        if error is None:
            return RuntimeError(f"{label} raised in another process, which says what")
        return RuntimeError(f"{label} raised\n{''.join(traceback.format_exception(error))}")


def _emit(ctx: Any, op: Any, callback: Callback, raised: _Raised) -> None:
    operands, results = list(op.operands), list(op.results)
    run: Callable[..., _Arrays]
    if _target(op) == CHECK_CALLBACK:
        run = functools.partial(_raise, callback, raised)
    else:
        is_linked = LINKED in op.attributes
        is_shared = FREE in op.attributes and op.attributes[FREE].value
        types = [_aval(result.type) for result in results[1 : -1 if is_linked else None]]
        run = functools.partial(_call, callback, raised if is_shared else None, types, is_linked)
    with ir.InsertionPoint(op), op.location:
        avals_in, avals_out = ([_aval(v.type) for v in values] for values in (operands, results))
        made, _, _ = mlir.emit_python_callback(
            ctx.replace(primitive=None, avals_in=avals_in, avals_out=avals_out),
            run,
            None,
            operands,
            avals_in,
            avals_out,
            has_side_effect=True,
            returns_token=False,
        )
    for old, new in zip(results, made, strict=True):
        old.replace_all_uses_with(new)
    op.erase()


def _aval(type_: Any) -> Any:
    tensor = tensor_type(type_)
    return jax.core.ShapedArray(tensor.shape, numpy_dtype(tensor.dtype))


def _raise(callback: Callback, raised: _Raised, *_: Any) -> _Arrays:
    raise raised.again(callback.label)


def _call(
    callback: Callback, raised: _Raised | None, types: Sequence[Any], is_linked: bool, *args: Any
) -> _Arrays:
    """The flag, the results, and the number that orders it: the last argument if it `is_linked`.

    An error goes to `raised`, if the program is to hand it to all devices.
    """
    args, link = (args[:-1], args[-1:]) if is_linked else (args, ())
    flag = 0
    try:
        results = _checked(_on_cpu(callback.function, args), types)
    except Exception as error:
        if raised is None:
            raise
        raised.keep(error)
        flag, results = 1, [np.zeros(t.shape, t.dtype) for t in types]
    return (np.asarray(flag, numpy_dtype(FLAG.dtype)), *results, *map(np.asarray, link))


def _on_cpu(function: Callable[..., Any], args: Sequence[Any]) -> Sequence[Any]:
    """Calls a function as jax does: with arrays on a CPU, where it also computes.

    Where JAX_PLATFORMS leaves CPUs out, it gets numpy's.
    """
    try:
        cpu = jax.local_devices(backend="cpu")[0]
    except RuntimeError:
        return [np.asarray(result) for result in function(*args)]
    with jax.default_device(cpu):
        return [np.asarray(result) for result in function(*jax.device_put(list(args), cpu))]


def _checked(results: Sequence[Any], types: Sequence[Any]) -> _Arrays:
    """The results, of the types that were promised; Python's own numbers are converted."""
    found = [jax.dtypes.canonicalize_dtype(result.dtype) for result in results]
    have = [f"{dtype}{list(r.shape)}" for r, dtype in zip(results, found, strict=True)]
    want = [f"{t.dtype}{list(t.shape)}" for t in types]
    if have != want:
        raise TypeError(f"the callback returned ({', '.join(have)}) instead of ({', '.join(want)})")
    return [np.asarray(result, t.dtype) for result, t in zip(results, types, strict=True)]
