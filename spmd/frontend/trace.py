"""Traces JAX functions and lowers them to StableHLO modules; no device is needed."""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, Literal, NamedTuple

import jax
from jax import jit as plain_jit  # users may put spmd.jit in its place
from jax.experimental import io_callback
from jax.experimental.custom_partitioning import custom_partitioning_p
from jax.export import is_symbolic_dim
from jax.extend.core import ClosedJaxpr, Jaxpr, Primitive, jaxpr_as_fun, jaxprs_in_params
from jax.extend.source_info_util import register_exclusion
from jax.interpreters import ad, batching, mlir
from jax.ref import AbstractRef
from jax.sharding import Mesh as JaxMesh
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import sdy
from jaxlib.mlir.dialects import stablehlo as hlo

from spmd.errors import FrontendError, MeshError
from spmd.frontend.refine import DIM, is_dynamic, refine
from spmd.installed import COMPILER
from spmd.ir.dialect.callbacks import CALLBACK, FLAG, INSPECT
from spmd.ir.program import Callback
from spmd.ir.types import numpy_dtype
from spmd.mesh.mesh import Mesh
from spmd.mesh.spec import as_mesh, has_explicit_axes, mesh_around

for _path in COMPILER:
    register_exclusion(_path)  # our own frames are not the user's

_SEEN: ContextVar[list[Mesh] | None] = ContextVar("seen meshes", default=None)
"""Meshes of the marks met by the trace that runs in this thread; None outside of a trace."""


@contextmanager
def seen_meshes(known: Mesh | None = None) -> Iterator[list[Mesh]]:
    """Yields a list to which traces inside add the distinct meshes of marks, behind `known`."""
    found = [] if known is None else [known]
    token = _SEEN.set(found)
    try:
        yield found
    finally:
        _SEEN.reset(token)


def mesh_at_hand() -> Mesh | None:
    """Returns the first mesh that this trace knows, else that of `jax.set_mesh`, else None."""
    found = _SEEN.get()
    if found:
        return found[0]
    around = mesh_around()
    return None if around is None else as_mesh(around)


def note_mesh(mesh: Mesh) -> Mesh:
    """Adds a mark's mesh to the trace's meshes; returns their first, or `mesh` outside a trace."""
    found = _SEEN.get()
    if found is None:
        return mesh
    if mesh not in found:
        found.append(mesh)
    return found[0]


OnCallbacks = Literal["run", "drop"]
"""What happens to `jax.debug.print` and `jax.debug.callback`; all other callbacks always run."""


class ClosedOverTracer(FrontendError):
    """Raised for a function that closes over a tracer of another function that jax is tracing."""


class Trace(NamedTuple):
    """Holds a traced function's StableHLO module, and the meshes and callbacks that it uses."""

    module: Any  # in memory, lowered and not partitioned
    out: Any  # the result's pytree of `ShapeDtypeStruct`s
    manual: list[Any]  # the distinct meshes of its calls of `jax.shard_map`
    meshes: list[Any]  # those meshes and the ones of jax's sharding constraints that have devices
    callbacks: tuple[Callback, ...]  # the Python functions that it calls, by number
    # `jax.Ref`s that the function closes over: they are arguments behind the others. The last
    # results of the module are what refs hold at the end, those among the arguments first.
    refs: tuple[Any, ...] = ()


def trace(
    fn: Callable[..., Any],
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    platform: str,
    static_argnums: Sequence[int] = (),
    static_argnames: Sequence[str] = (),
    on_callbacks: OnCallbacks | None = None,
) -> Trace:
    """Traces `fn` at the given arguments and lowers it for `platform`, whole and unpartitioned.

    `args` and `kwargs` are `jax.ShapeDtypeStruct`s, but static arguments are passed as they are;
    `platform` is `cpu`, `cuda` or `tpu`. `on_callbacks` ("run" or "drop") is for debug callbacks.
    If it is None, jax's callbacks stay, and a module that has any cannot be imported, since it
    points to Python objects. The module numbers devices by their position in the first mesh that
    `seen_meshes` around has, or if it has none that of the first `shard_map` or constraint.

    Raises:
      FrontendError: over Explicit axes, a `shard_map`'s argument is not split as its in_specs say.
      ClosedOverTracer: `fn` uses a tracer that is no argument.
      MeshError: jax's constraints and `shard_map`s are over meshes of different orders of devices.
    """
    jitted = plain_jit(
        fn,
        static_argnums=tuple(static_argnums),
        static_argnames=tuple(static_argnames),
        keep_unused=True,  # argument i of the module stays argument i of the function
    )
    with _told():
        traced = jitted.trace(*args, **kwargs)
    program = traced.jaxpr
    if len(program.in_avals) > len(jax.tree.leaves(traced.in_avals)):  # jax adds such values
        name = traced.fun_name
        raise ClosedOverTracer(
            f"{name} uses a value of another function that jax traces, which has no numbers yet",
            required="arguments, and constants",
            fix=f"pass it to {name} as an argument, or call {name} instead of compiling it: inside "
            "of other programs it is inlined",
        )
    out = jax.tree.unflatten(traced.out_tree, map(_struct, program.out_avals))
    refs = tuple(const for const in program.consts if isinstance(const, jax.Ref))
    calls = _OwnCallbacks(on_callbacks) if on_callbacks else None
    own = calls.rewritten(program) if calls else program
    if own is not program or refs or any(isinstance(a, AbstractRef) for a in program.in_avals):
        structs = map(_struct, (*program.in_avals, *map(jax.typeof, refs)))
        traced = plain_jit(_flat(own, traced.fun_name), keep_unused=True).trace(*structs)
        program = traced.jaxpr
    eqns = list(_eqns_in(program.jaxpr))
    meshes: dict[tuple[bool, Any], None] = {}  # whether each is that of a `shard_map`, the mesh
    for eqn in eqns:
        if eqn.primitive.name == "shard_map":
            meshes[True, eqn.params["mesh"]] = None
        elif eqn.primitive.name == "sharding_constraint":
            meshes[False, getattr(eqn.params["sharding"], "mesh", None)] = None
    jax_meshes = [m for _, m in meshes if isinstance(m, JaxMesh)]
    first = next(iter([*(_SEEN.get() or ()), *map(as_mesh, jax_meshes)]), None)
    positions = first.device_ids if first else ()
    orders = (tuple(d.id for d in m.devices.flat) for m in jax_meshes)
    order = next(orders, positions)
    symbolic = any(is_symbolic_dim(d) for a in program.in_avals for d in getattr(a, "shape", ()))
    # The primitive of jax's composites has no public name.
    named = [eqn.primitive for eqn in eqns if eqn.primitive.name == "composite" and symbolic]
    rules = [(primitive, _lower_composite) for primitive in dict.fromkeys(named)]
    marks = (_uneven_mark, functools.partial(_lower_mark, order=order))
    own_rules = [*(calls.lowering_rules() if calls else ()), *rules]
    every: Any = ((custom_partitioning_p, _inline), marks, *own_rules)
    parameters = mlir.LoweringParameters(override_lowering_rules=every)
    with _told():
        lowered = traced.lower(lowering_platforms=(platform,), _private_parameters=parameters)
    module: Any = lowered.compiler_ir("stablehlo")
    if not symbolic and is_dynamic(module):  # it calls what `jax.export` made, for any shapes
        module = refine(module, [aval.shape for aval in program.in_avals])
    _renumber(module, order, positions)
    manual = [other for is_manual, other in meshes if is_manual]
    return Trace(module, out, manual, jax_meshes, tuple(calls.callbacks) if calls else (), refs)


def _flat(program: ClosedJaxpr, name: str) -> Callable[..., Any]:
    """Returns a program as a flat function called `name`, with arrays in place of `jax.Ref`s.

    before: `r, x -> y`, which writes to `r` and to `q`, a ref that it closes over
    after:  `r's array, x, q's array -> y, r's new array, q's new array`
    """

    def flat(*values: Any) -> Any:
        behind = iter(values[len(program.in_avals) :])
        kept = zip(program.in_avals, values, strict=False)
        args = [jax.new_ref(x) if isinstance(a, AbstractRef) else x for a, x in kept]
        consts = [
            jax.new_ref(next(behind)) if isinstance(c, jax.Ref) else c for c in program.consts
        ]
        results = jaxpr_as_fun(program.replace(consts=consts))(*args)
        refs = [value for value in (*args, *consts) if isinstance(value, jax.Ref)]
        return (*results, *map(jax.freeze, refs))

    flat.__name__ = flat.__qualname__ = name
    return flat


def _struct(aval: Any) -> jax.ShapeDtypeStruct:
    """Returns an abstract value's `ShapeDtypeStruct`, with its weak type and Explicit sharding."""
    typed = getattr(aval, "sharding", None)
    sharding = typed if typed is not None and has_explicit_axes(typed.mesh) else None
    weak = bool(getattr(aval, "weak_type", False))
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=weak, sharding=sharding)


@contextmanager
def _told() -> Iterator[None]:
    """Converts jax's errors on Explicit axes to FrontendErrors, on device orders to MeshErrors."""
    try:
        yield
    except ValueError as error:
        if "does not match the specs of the input" in str(error):
            raise FrontendError(
                "a jax.shard_map over Explicit axes gets an argument whose type is split in "
                "another way than its in_specs say",
                actual=str(error).partition(". ")[0],
                required="as for jax.jit: types that in_specs say, or a mesh whose axes are Auto",
                fix="place the program's arguments with jax.device_put, call jax.sharding.reshard "
                "before the jax.shard_map, or leave in_specs out; or make the mesh with "
                "axis_types=(jax.sharding.AxisType.Auto,) * len(axis_names)",
            ) from error
        if "incompatible devices for jitted" in str(error):
            raise MeshError(
                "two different meshes in one program: jax takes one order of devices",
                actual=str(error),
                required="jax.lax.with_sharding_constraint and jax.shard_map over meshes that have "
                "the devices in one order",
                fix="mark with spmd.mark_sharding, which takes meshes of any order, or order them "
                "alike",
            ) from error
        raise


def _eqns_in(jaxpr: Any) -> Iterator[Any]:
    for eqn in jaxpr.eqns:
        yield eqn
        for inner in jaxprs_in_params(eqn.params):
            yield from _eqns_in(inner)


def _renumber(module: ir.Module, order: tuple[int, ...], program: tuple[int, ...]) -> None:
    """Renumbers the devices of a module's meshes in place, as positions in the program's mesh.

    `order` are the devices' ids in the order of jax's meshes, `program` in the program's order.
    """
    # jax's meshes have one order of devices, by which the module numbers them. For the program's
    # mesh with the devices 0 2 1 3 and jax's with 0 1 2 3:
    #   sdy.mesh @m = <["x"=4]>    becomes    sdy.mesh @m = <["x"=4], device_ids=[0, 2, 1, 3]>
    if order == program or set(order) != set(program):
        return
    place = {device: position for position, device in enumerate(program)}
    with module.context:
        for item in module.body.operations:
            if item.operation.name != "sdy.mesh":
                continue
            mesh = sdy.MeshAttr(item.operation.attributes["mesh"])
            ids = [place[order[i]] for i in list(mesh.device_ids) or range(len(order))]
            item.operation.attributes["mesh"] = sdy.MeshAttr.get(list(mesh.axes), _stated(ids))


def _stated(positions: Sequence[int]) -> list[int]:
    """Returns `positions` as Shardy writes the devices of a mesh: [] if they are 0, 1, 2, ..."""
    return [] if list(positions) == list(range(len(positions))) else list(positions)


# `jax.custom_partitioning`. Where a program names devices, jax lowers it to a custom call that only
# points to its Python callbacks. We need none: what it computes is inlined, and partitioned.


def _inline(ctx: Any, *values: Any, call: Any, **_: Any) -> Any:
    return mlir.lower_fun(jaxpr_as_fun(call), multiple_results=True)(ctx, *values)


# Composites in programs with symbolic dims. jax lowers a function there to one that takes the
# symbols' values in front of its arguments, and forgets to pass them to a composite's function.


def _lower_composite(
    ctx: Any, *values: Any, name: str, attributes: Any, version: int, **params: Any
) -> Any:
    """Lowers a composite to one whose operands begin with the symbols' values, as a call's do."""
    (closed,) = params.values()  # `jaxpr`, or in newer versions `call_jaxpr`
    results = mlir.lower_fun(plain_jit(jaxpr_as_fun(closed)), multiple_results=True)(ctx, *values)
    call = results[0].owner
    own = {key: tree.unflatten(leaves) for key, leaves, tree in attributes}
    stated = {
        key: mlir.ir_attribute(f"{DIM}{value}" if is_symbolic_dim(value) else value)
        for key, value in own.items()
        if value is not None
    }
    builder: Any = hlo  # its stub does not know what may be left out
    made = builder.CompositeOp(
        [value.type for value in call.results],
        list(call.operands),
        name=ir.StringAttr.get(name),
        decomposition=call.attributes["callee"],
        composite_attributes=ir.DictAttr.get(stated),
        version=mlir.i32_attr(version),
    )
    call.erase()
    return list(made.results)


# A mark that jax's own sharding constraint refuses: a dim that its axes don't divide, or a mesh
# with the devices in another order. It is linear like the constraint, lowers to the same op, and so
# runs under plain `jax.jit` too.

_uneven_mark = Primitive("spmd_mark")


def mark_uneven(x: Any, mesh: Mesh, entries: tuple[tuple[str, ...] | None, ...]) -> Any:
    """Returns `x` marked with axes for each dim (None: open), which need not divide its size."""
    axes = tuple(zip(mesh.axis_names, mesh.sizes, strict=True))
    return _uneven_mark.bind(x, mesh=axes, ids=mesh.device_ids, entries=entries)


def _batch_mark(args: Any, dims: Any, *, entries: Any, **params: Any) -> tuple[Any, int]:
    (x,), (dim,) = args, dims
    spread = (*entries[:dim], None, *entries[dim:])
    return _uneven_mark.bind(x, entries=spread, **params), dim


def _lower_mark(
    ctx: Any, x: Any, *, mesh: Any, ids: Any, entries: Any, order: tuple[int, ...] = ()
) -> Any:
    place = {device: position for position, device in enumerate(order)}
    stated = _stated([place[i] for i in ids]) if place.keys() == set(ids) else []
    devices = f", device_ids={stated}" if stated else ""
    axes = ", ".join(f'"{name}"={size}' for name, size in mesh)
    dims = ", ".join(
        "{?}" if names is None else "{" + ", ".join(f'"{n}"' for n in names) + "}"
        for names in entries
    )
    sharding = ir.Attribute.parse(f"#sdy.sharding<mesh<[{axes}]{devices}>, [{dims}]>")
    return [sdy.ShardingConstraintOp(x, sharding).result]


_uneven_mark.def_impl(lambda x, **_: x)
_uneven_mark.def_abstract_eval(lambda x, **_: x)
ad.deflinear2(_uneven_mark, lambda cotangent, _, **params: [_uneven_mark.bind(cotangent, **params)])
batching.primitive_batchers[_uneven_mark] = _batch_mark
mlir.register_lowering(_uneven_mark, _lower_mark)


# Callbacks of jax become calls of our own, which name the Python function by its number.
#
# jax lowers a callback to a custom call that points to a Python object of the lowering, on one
# platform, and threads ordered ones by tokens through a program for a single device. We replace
# each in the traced program by a primitive that every platform can have. Programs keep the order of
# such ops; tokens come back when one device's program is written
# (`spmd.lowering.local.callbacks`).
#
# before: `debug_print[fmt="{}" ordered=True] x`
# after:  `spmd_callback[number=0 ...] x`, with callback 0 in the table beside the program

INSPECTS = "jax.debug.inspect_array_sharding"

_callback = Primitive("spmd_callback")
_callback.multiple_results = True


class _OwnCallbacks:
    """Replaces jax's callbacks in a program by `spmd_callback`s, numbered as in `callbacks`."""

    def __init__(self, on_callbacks: OnCallbacks) -> None:
        self.on_callbacks = on_callbacks
        self.callbacks: list[Callback] = []  # those seen so far
        self._done: dict[int, Jaxpr] = {}

    def lowering_rules(self) -> tuple[tuple[Primitive, Any], ...]:
        """Returns (primitive, rule) pairs that lower jax's callbacks to ours.

        They are for callbacks in no jaxpr: some libraries trace code when a primitive is lowered.
        """

        def lower(ctx: Any, *args: Any, primitive: Primitive, **params: Any) -> Any:
            if _is_ordered(params):
                raise FrontendError(
                    f"an ordered {_of_jax().labels[primitive]} inside a primitive of a library",
                    fix="call it with ordered=False, or from outside that library",
                )
            own = self._called(primitive, params)
            return [] if own is None else _lower_callback(ctx, *args, **own)

        return tuple((p, functools.partial(lower, primitive=p)) for p in _of_jax().labels)

    def rewritten(self, value: Any) -> Any:
        """Returns a program, or a primitive's parameter, with the callbacks in its jaxprs replaced.

        A jaxpr in which neither equations nor effects change is returned as the same object.
        """
        if isinstance(value, ClosedJaxpr) and value.jaxpr is not value:  # jax 0.11 has one class
            inner = self.rewritten(value.jaxpr)
            return value if inner is value.jaxpr else value.replace(jaxpr=inner)
        if type(value) in (tuple, list):
            return type(value)(map(self.rewritten, value))
        if not isinstance(value, Jaxpr):
            return value
        if id(value) not in self._done:
            eqns = [made for eqn in value.eqns for made in self._eqn(eqn)]
            effects = _own_effects(value.effects)
            is_same = effects == value.effects and [*map(id, eqns)] == [*map(id, value.eqns)]
            self._done[id(value)] = value if is_same else value.replace(eqns=eqns, effects=effects)
        return self._done[id(value)]

    def _eqn(self, eqn: Any) -> Sequence[Any]:
        """Returns (the equation with callbacks replaced,), or () if it is a dropped callback."""
        effects = _own_effects(eqn.effects)
        if eqn.primitive.name == "call_exported" and eqn.params["exported"].nr_devices > 1:
            # jax lowers for one device here; which mesh it is for, the module says.
            exported = dataclasses.replace(eqn.params["exported"], nr_devices=1)
            return (eqn.replace(params={**eqn.params, "exported": exported}),)
        if eqn.primitive in _of_jax().labels:
            own = self._called(eqn.primitive, eqn.params)
            if own is None:
                return ()
            own["results"] = tuple(v.aval for v in eqn.outvars)
            return (eqn.replace(primitive=_callback, params=own, effects=effects),)
        is_kernel = eqn.primitive.name == "pallas_call"  # whose body cannot call Python
        inside = [] if is_kernel else list(jaxprs_in_params(eqn.params))
        if effects == eqn.effects and all(self.rewritten(i) is i for i in inside):
            return (eqn,)
        params = {name: self.rewritten(value) for name, value in eqn.params.items()}
        return (eqn.replace(params=params, effects=effects),)

    def _called(self, primitive: Primitive, params: Mapping[str, Any]) -> dict[str, Any] | None:
        """Numbers a callback; returns its `spmd_callback`'s parameters, None if it is dropped."""
        label = _of_jax().labels[primitive]
        is_debug = label.startswith("jax.debug.")
        if is_debug and self.on_callbacks == "drop":
            return None
        function = params.get("callback") or functools.partial(primitive.impl, **params)
        name = getattr(getattr(function, "callback_func", None), "__name__", "")
        inspects = label == INSPECTS
        has_effect = not inspects and label != "jax.pure_callback"
        is_ordered = _is_ordered(params)
        label = f"{label} of {name}" if name else label
        callback = Callback(function, label, is_debug, has_effect, is_ordered, inspects)
        self.callbacks.append(callback)
        partitioned = bool(params.get("partitioned", False))
        number = len(self.callbacks) - 1
        return {"number": number, "callback": callback, "partitioned": partitioned, "results": ()}


class _OfJax(NamedTuple):
    """Holds jax's primitives of callbacks, with the names that users know, and their effects."""

    labels: Mapping[Primitive, str]  # as `jax.debug.print`
    ordered: tuple[type, ...]  # effects of ordered ones
    effects: tuple[type, ...]  # of all
    own: Any  # the effect of our calls: that of `jax.debug.callback`, which jax allows everywhere


@functools.cache
def _of_jax() -> _OfJax:
    # They have no public names, and are read off small traces.
    def traced(call: Callable[..., Any], *args: Any, **options: Any) -> Any:
        return jax.make_jaxpr(lambda: call(*args, **options))().eqns[0]

    def nothing() -> None:
        return None

    debug, io = traced(jax.debug.callback, nothing), traced(io_callback, nothing, None)
    labels = {
        traced(jax.debug.print, "").primitive: "jax.debug.print",
        debug.primitive: "jax.debug.callback",
        traced(jax.pure_callback, nothing, None).primitive: "jax.pure_callback",
        io.primitive: "io_callback",
        traced(jax.debug.inspect_array_sharding, 0.0, callback=nothing).primitive: INSPECTS,
    }
    ordered = (
        *traced(jax.debug.callback, nothing, ordered=True).effects,
        *traced(io_callback, nothing, None, ordered=True).effects,
    )
    own, *_ = debug.effects
    effects = tuple(map(type, (*ordered, *io.effects, own)))
    return _OfJax(labels, tuple(map(type, ordered)), effects, own)


def _is_ordered(params: Mapping[str, Any]) -> bool:
    return bool(params.get("ordered", isinstance(params.get("effect"), _of_jax().ordered)))


def _own_effects(effects: Any) -> Any:
    """Returns effects with that of `spmd_callback` in place of those of jax's callbacks."""
    return frozenset(_of_jax().own if isinstance(e, _of_jax().effects) else e for e in effects)


@_callback.def_effectful_abstract_eval  # type: ignore[untyped-decorator]
def _callback_type(*_: Any, results: Any, callback: Callback, **__: Any) -> Any:
    is_kept = callback.has_effect or callback.inspects
    return list(results), frozenset({_of_jax().own} if is_kept else ())


def _lower_callback(
    ctx: Any, *args: Any, number: int, callback: Callback, partitioned: bool, results: Any
) -> Any:
    outs = [((), numpy_dtype(FLAG.dtype)), *((a.shape, a.dtype) for a in ctx.avals_out)]
    call = hlo.CustomCallOp(
        [ir.RankedTensorType.get(shape, mlir.dtype_to_ir_type(dtype)) for shape, dtype in outs],
        list(args),
        call_target_name=ir.StringAttr.get(INSPECT if callback.inspects else CALLBACK),
        has_side_effect=ir.BoolAttr.get(True),
    )
    call.attributes["number"] = ir.IntegerAttr.get(ir.IntegerType.get_signless(64), number)
    call.attributes["called"] = ir.StringAttr.get(callback.label)
    call.attributes["ordered"] = ir.BoolAttr.get(callback.is_ordered)
    call.attributes["partitioned"] = ir.BoolAttr.get(partitioned)
    return list(call.results)[1:]


mlir.register_lowering(_callback, _lower_callback)
