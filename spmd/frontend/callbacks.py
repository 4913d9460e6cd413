"""Callbacks of jax -> calls of our own, which name the Python function by its number.

jax lowers a callback to a custom call that points to a Python object of the lowering, on one
platform, and threads ordered ones by tokens through a program for a single device. We replace each
in the traced program by a primitive that every platform can have. Programs keep the order of such
ops; tokens come back when one device's program is written (`spmd.lowering.local.callbacks`).

before: `debug_print[fmt="{}" ordered=True] x`
after:  `spmd_callback[number=0 ...] x`, with callback 0 in the table beside the program
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import jax
from jax.experimental import io_callback
from jax.extend.core import ClosedJaxpr, Jaxpr, Primitive, jaxpr_as_fun, jaxprs_in_params
from jax.interpreters import mlir
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import stablehlo as hlo

from spmd.errors import FrontendError
from spmd.ir.dialect.callbacks import CALLBACK, FLAG
from spmd.ir.program import Callback
from spmd.ir.types import numpy_dtype

OnCallbacks = Literal["run", "drop"]
"""What becomes of `jax.debug.print` and `jax.debug.callback`; others run in any case."""

_KERNELS = ("pallas_call",)
"""Primitives whose bodies run where no Python can be called; they print by means of their own."""

_callback = Primitive("spmd_callback")
_callback.multiple_results = True


class OwnCallbacks:
    """Replaces the callbacks of one program, each jaxpr once: what is called twice stays one.

    `on_callbacks` says what becomes of those that only look; `callbacks` are those seen so far.
    """

    def __init__(self, on_callbacks: OnCallbacks) -> None:
        self.on_callbacks = on_callbacks
        self.callbacks: list[Callback] = []
        self._calls: dict[int, bool] = {}
        self._done: dict[int, Jaxpr] = {}

    def without_jax(self, program: ClosedJaxpr, name: str) -> Callable[..., Any] | None:
        """A function of flat arguments, with calls of ours for jax's; None where there are none."""
        if not self._calls_python(program.jaxpr):
            return None
        fun = jaxpr_as_fun(self._rewritten(program))

        def flat(*args: Any) -> Any:
            return fun(*args)

        flat.__name__ = flat.__qualname__ = name
        return flat

    def lowering_rules(self) -> tuple[tuple[Primitive, Any], ...]:
        """Rules that lower jax's callbacks to ours: of those that no jaxpr shows.

        Some libraries have primitives that trace what they are when they are lowered.
        """

        def rule(primitive: Primitive) -> Any:
            def lower(ctx: Any, *args: Any, **params: Any) -> Any:
                if _is_ordered(params):
                    raise FrontendError(
                        f"an ordered {_jax_callbacks()[primitive]} inside a primitive of a library",
                        fix="call it with ordered=False, or from outside that library",
                    )
                own = self._called(primitive, params)
                return [] if own is None else _lower(ctx, *args, **own)

            return lower

        return tuple((primitive, rule(primitive)) for primitive in _jax_callbacks())

    def _calls_python(self, jaxpr: Jaxpr) -> bool:
        """Whether a jaxpr calls Python, one inside it, or another branch beside it."""
        found = self._calls.get(id(jaxpr))
        if found is None:
            found = any(isinstance(effect, _callback_effects()) for effect in jaxpr.effects)
            found = self._calls[id(jaxpr)] = found or any(
                eqn.primitive in _jax_callbacks()
                or (
                    eqn.primitive.name not in _KERNELS
                    and any(self._calls_python(inner) for inner in jaxprs_in_params(eqn.params))
                )
                for eqn in jaxpr.eqns
            )
        return found

    def _rewritten(self, value: Any) -> Any:
        """A parameter of a primitive, with what it calls replaced."""
        if isinstance(value, ClosedJaxpr):
            inner = self._rewritten(value.jaxpr)
            return value if inner is value.jaxpr else value.replace(jaxpr=inner)
        if type(value) in (tuple, list):
            return type(value)(map(self._rewritten, value))
        if not isinstance(value, Jaxpr) or not self._calls_python(value):
            return value
        if id(value) not in self._done:
            eqns = [made for eqn in value.eqns for made in self._eqn(eqn)]
            made = value.replace(eqns=eqns, effects=_own_effects(value.effects))
            self._done[id(value)] = made
        return self._done[id(value)]

    def _eqn(self, eqn: Any) -> Sequence[Any]:
        """An equation as it is to be; none for a callback that is left out."""
        effects = _own_effects(eqn.effects)
        if eqn.primitive in _jax_callbacks():
            own = self._called(eqn.primitive, eqn.params)
            if own is None:
                return ()
            own["results"] = tuple(v.aval for v in eqn.outvars)
            return (eqn.replace(primitive=_callback, params=own, effects=effects),)
        if eqn.primitive.name in _KERNELS:
            return (eqn,)
        params = {name: self._rewritten(value) for name, value in eqn.params.items()}
        return (eqn.replace(params=params, effects=effects),)

    def _called(self, primitive: Primitive, params: Mapping[str, Any]) -> dict[str, Any] | None:
        """The parameters of our call in the place of one of jax's; None if it is left out."""
        label = _jax_callbacks()[primitive]
        is_debug = label.startswith("jax.debug.")
        if is_debug and self.on_callbacks == "drop":
            return None
        function = params.get("callback") or functools.partial(primitive.impl, **params)
        name = getattr(getattr(function, "callback_func", None), "__name__", "")
        has_effect = label != "jax.pure_callback"
        is_ordered = _is_ordered(params)
        callback = Callback(
            function, f"{label} of {name}" if name else label, is_debug, has_effect, is_ordered
        )
        self.callbacks.append(callback)
        return {
            "number": len(self.callbacks) - 1,
            "called": callback.label,
            "ordered": is_ordered,
            "partitioned": bool(params.get("partitioned", False)),
            "is_pure": not has_effect,
            "results": (),
        }


# ---------------------------------------------------------------------------------------------
# jax's primitives and their effects have no public names: they are read off small traces.


def _traced(call: Callable[[], Any]) -> Any:
    return jax.make_jaxpr(call)().eqns[0]


def _nothing() -> None:
    return None


@functools.cache
def _jax_callbacks() -> dict[Primitive, str]:
    """Every primitive that calls Python -> what users know it as."""
    return {
        _traced(lambda: jax.debug.print("")).primitive: "jax.debug.print",
        _traced(lambda: jax.debug.callback(_nothing)).primitive: "jax.debug.callback",
        _traced(lambda: jax.pure_callback(_nothing, None)).primitive: "jax.pure_callback",
        _traced(lambda: io_callback(_nothing, None)).primitive: "io_callback",
    }


@functools.cache
def _ordered_effects() -> tuple[type, ...]:
    calls = (
        lambda: jax.debug.callback(_nothing, ordered=True),
        lambda: io_callback(_nothing, None, ordered=True),
    )
    return tuple(type(effect) for call in calls for effect in _traced(call).effects)


def _is_ordered(params: Mapping[str, Any]) -> bool:
    effect = params.get("effect")
    return bool(params.get("ordered", isinstance(effect, _ordered_effects())))


@functools.cache
def _own_effect() -> Any:
    """The effect of our calls: that of `jax.debug.callback`, which jax allows everywhere."""
    (effect,) = _traced(lambda: jax.debug.callback(_nothing)).effects
    return effect


@functools.cache
def _callback_effects() -> tuple[type, ...]:
    (io,) = _traced(lambda: io_callback(_nothing, None)).effects
    return (*_ordered_effects(), type(io), type(_own_effect()))


def _own_effects(effects: Any) -> Any:
    """Effects with those of callbacks replaced by that of ours."""
    own = _callback_effects()
    return frozenset(_own_effect() if isinstance(e, own) else e for e in effects)


# ---------------------------------------------------------------------------------------------
# Our own primitive.


@_callback.def_effectful_abstract_eval  # type: ignore[untyped-decorator]
def _type(*_: Any, results: Any, is_pure: bool, **__: Any) -> Any:
    return list(results), frozenset() if is_pure else frozenset({_own_effect()})


def _lower(ctx: Any, *args: Any, number: int, called: str, **params: Any) -> Any:
    def type_of(shape: Sequence[int], dtype: Any) -> Any:
        return ir.RankedTensorType.get(shape, dtype)

    types = [type_of(a.shape, mlir.dtype_to_ir_type(a.dtype)) for a in ctx.avals_out]
    flag = type_of((), mlir.dtype_to_ir_type(numpy_dtype(FLAG.dtype)))
    call = hlo.CustomCallOp(
        [flag, *types],
        list(args),
        call_target_name=ir.StringAttr.get(CALLBACK),
        has_side_effect=ir.BoolAttr.get(True),
    )
    call.attributes["number"] = ir.IntegerAttr.get(ir.IntegerType.get_signless(64), number)
    call.attributes["called"] = ir.StringAttr.get(called)
    for name in ("ordered", "partitioned"):
        call.attributes[name] = ir.BoolAttr.get(params[name])
    return list(call.results)[1:]


mlir.register_lowering(_callback, _lower)
