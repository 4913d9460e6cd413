"""Imports blocks of MLIR ops as ops of a `Program`, one by one.

Most ops become one op of the same name. Handlers import ops that become others (`handlers.py`), and
ops that StableHLO's own passes rewrite (`LEGALIZED`). Some ops are errors (`REFUSED`).
"""

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

from jaxlib.mlir import ir
from jaxlib.mlir.dialects import chlo, func
from jaxlib.mlir.dialects import stablehlo as hlo
from jaxlib.mlir.passmanager import PassManager

from spmd.errors import FrontendError, MeshError, SpecError, UnsupportedOpError
from spmd.frontend.importer.contents import (
    MARKS,
    Contents,
    Scope,
    attribute,
    cloned,
    defining_op,
    entries_of,
    location_of,
    tensor_type,
)
from spmd.ir.description import ALONE
from spmd.ir.dialect.builder import Builder
from spmd.ir.dialect.callbacks import CALLBACK, FLAG
from spmd.ir.dialect.collectives import DEVICE_IDS, RESIZED
from spmd.ir.dialect.reducers import NEUTRAL, body_reducer, is_identity, is_neutral
from spmd.ir.program import Body, Loc, Op, OpKind, Region, Value, has_effect
from spmd.ir.types import Attribute, Dense, ShardingAttr, TensorType
from spmd.mesh.sharding import axes_text

DEEPEST_REGIONS = 64  # how many loops and branches may be inside each other
_CONTROL_FLOW = {"stablehlo.while", "stablehlo.case", "stablehlo.if"}
_NEUTRAL_OPERAND = {"stablehlo.reduce", "stablehlo.reduce_window", "stablehlo.pad"}
_RETURNS = {"func.return", "stablehlo.return", "sdy.return"}

Env = dict[Any, Value]  # maps a value of the module to its number in the program
Attrs = Mapping[str, Attribute]
Handler = Callable[["Importer", Any, Env], None]
"""A function that imports an op of the module: appends ops, and enters results into the `Env`."""


class Importer:
    """Builds a program from a module's blocks, with the state that importing an op depends on."""

    # MLIR shares equal types and attributes; each distinct one is converted once. Equal types are
    # therefore one object, and `_kind_cache` may use `id(type)` instead of hashing shapes.

    def __init__(
        self,
        contents: Contents,
        handlers: Mapping[str, Handler],
        function: tuple[str, str] | None,
        composites: Mapping[str, Attrs],
        callbacks: int,
    ) -> None:
        self.contents, self.function = contents, function
        self.composites = composites  # that stay one op -> attributes besides their own
        self.callbacks = callbacks  # how many Python functions are there to be called
        self.tuples: dict[Any, tuple[Value, ...]] = {}  # of the module -> what they are made of
        self.b = Builder()  # appends ops; has the type of each value so far
        self.type = functools.cache(tensor_type)  # equal ones become the same object
        self.attribute = functools.cache(attribute)
        self.call_loc = Loc()
        self.scopes: list[Scope] = []  # manual regions around the op, outermost first
        self.in_bodies = 0  # how many scalar bodies are around the op
        self._handlers = handlers
        self._depth = 0
        self._producers: dict[Value, Op] = {}
        self._loc_cache: dict[Any, Loc] = {}
        self._kind_cache: dict[Any, OpKind] = {}

    def bind(self, env: Env, value: Any) -> Value:
        """Returns a new value of the program for a module's value, and enters it into `env`."""
        env[value] = self.b.value(self.type(value.type))
        return env[value]

    def loc(self, location: Any) -> Loc:
        """Returns an MLIR location as a `Loc`, inside a call with the caller's scope and frames."""
        # A call at `train.py:9` in scope `jit(step)` of a function whose op has scope `mlp/dot` and
        # frame `model.py:3` gives the scope `jit(step)/mlp/dot` and both frames, innermost first.
        # Locations compare equal by identity in MLIR but hash by their Python wrapper; the
        # attribute behind one hashes properly.
        key = (location.attr, id(self.call_loc))
        found = self._loc_cache.get(key)
        if found is None:
            scope, frames = location_of(location)
            outer = self.call_loc
            if scope.partition("/")[0] != outer.scope.partition("/")[0]:
                scope = "/".join(filter(None, (outer.scope, scope)))
            frames += [frame for frame in outer.frames if frame not in frames]
            # Who called the compiler is not the program's own: else a function that is compiled at
            # two places would be two programs. Constants that jax made at no line of the function
            # have the callers' frames alone. The scope of others goes on: `jit(f)/sin`. Very deep
            # stacks do not reach the function.
            if self.function is not None:
                places = [(frame.file, frame.function) for frame in frames]
                own = [i for i, place in enumerate(places) if place == self.function]
                frames = frames[: own[-1] + 1] if own else frames if "/" in scope else []
            found = self._loc_cache[key] = Loc(scope, tuple(frames))
        return found

    def region(self, block: Any, env: Env) -> Region:
        """Imports a block, and its arguments, as a region."""
        args = [self.bind(env, arg) for arg in block.arguments]
        self.b.begin()
        return self.b.end(args, self.block(block, env))

    def block(self, block: Any, env: Env) -> tuple[Value, ...]:
        """Appends the ops of a block; returns the values that the block's terminator returns."""
        for item in block.operations:
            op = item.operation
            if op.name in _RETURNS:
                return tuple([env[v] for v in op.operands])
            try:
                handler: Handler = self._handlers.get(op.name, Importer.op)
                handler(self, op, env)
                stated = op.attributes
                if len(stated) and (MARKS[0] in stated or MARKS[1] in stated):
                    results = [r for r in op.results if r in env]  # no tuple has a value
                    ranks = [self.b.types[env[r]].rank for r in results]
                    marks = self.contents.marks_of(op, ranks) if results else ()
                    for r, sharding in zip(results, marks, strict=True):
                        env[r] = self.mark(env[r], sharding, self.loc(op.location))
            except MeshError as error:
                error.at(self.loc(op.location).source)
                raise
        raise FrontendError("a block of the module has no terminator")

    def op(self, op: Any, env: Env, name: str = "", attrs: Attrs | None = None) -> None:
        """Appends one op for an op of the module; none for control flow without results or effects.

        `name` and `attrs`, if given, replace the op's own; they must follow from the op alone, for
        equal ops share a kind. FrontendError: it reads a value that is not visible, or nests too
        deep. UnsupportedOpError: it is in `REFUSED`, and no device id inside a manual region.
        """
        name = name or op.name
        loc = self.loc(op.location)
        if not (name in DEVICE_IDS and self.scopes):
            is_call = name == "stablehlo.custom_call"
            called = op.attributes["call_target_name"].value if is_call else ""
            refuse(f"custom_call:{called}" if is_call else name, loc)
        try:
            inputs = tuple([env[v] for v in op.operands])
        except KeyError as error:
            raise FrontendError(f"{name} reads a value that is not visible") from error
        kind = self._kind(op, name, inputs, attrs, loc)
        regions: tuple[Region, ...] = ()
        if name in _CONTROL_FLOW:  # its regions see the values around it
            if self._depth >= DEEPEST_REGIONS:
                raise FrontendError(f"loops and branches nest more than {DEEPEST_REGIONS} deep")
            self._depth += 1
            regions = tuple([self.region(region.blocks[0], dict(env)) for region in op.regions])
            self._depth -= 1
        if regions and not kind.results:
            if not any(has_effect(inner) for region in regions for inner in region.ops):
                return
            # Control flow that is there for its effects alone gets a result, for ops go by theirs.
            pairs = zip(regions, [self.flag(loc) for _ in regions], strict=True)
            regions = tuple([r._replace(ops=(*r.ops, f), results=f.results) for r, f in pairs])
            kind = OpKind(name, kind.operands, (FLAG,), kind.attrs)
        self.b.loc = loc
        outs = self.b.repeat(kind, inputs, regions)
        env.update(zip(op.results, outs, strict=False))  # that flag is no value of the module
        self._producers.update(dict.fromkeys(outs, self.b.last))

    def flag(self, loc: Loc) -> Op:
        """Returns a constant op, not appended, as the result of a region that only has effects."""
        kind = OpKind("stablehlo.constant", (), (FLAG,), {"value": Dense.of(0, FLAG.dtype)})
        return Op(kind, (), (self.b.value(FLAG),), (), loc)

    def add(self, name: str, operand: Value, type_: TensorType, attrs: Attrs, loc: Loc) -> Value:
        """Appends an op with one operand and a result of type `type_`, which is returned."""
        self.b.loc = loc
        return self.b.op(name, (operand,), (type_,), attrs)[0]

    def mark(self, value: Value, sharding: ShardingAttr | None, loc: Loc) -> Value:
        """Appends a mark op, returns its result; `value` if the sharding is None or all open.

        In scalar bodies it returns `value`, too. SpecError: it splits over a manual axis.
        """
        if self.in_bodies or sharding is None or (not any(sharding.dims) and all(sharding.open)):
            return value
        if self.scopes:
            mesh, manual = self.scopes[-1].mesh, self.scopes[-1].held
            used = {a for refs in sharding.dims for a in self.contents.atoms(mesh, refs)}
            if held := used & set(manual):
                raise SpecError(
                    "a mark inside a jax.shard_map splits over an axis that is manual there",
                    source=loc.source,
                    actual=f"{axes_text(tuple(sorted(held)), mesh)} of the mesh ({mesh})",
                    fix="mark the other axes alone, or mark outside of shard_map",
                )
        return self.add("spmd.mark", value, self.b.types[value], {"sharding": sharding}, loc)

    def _kind(
        self, op: Any, name: str, inputs: tuple[Value, ...], given: Attrs | None, loc: Loc
    ) -> OpKind:
        entries = entries_of(op) if len(op.attributes) else ()
        operands = tuple([self.b.types[v] for v in inputs])
        is_whole = bool(self.scopes) and self.scopes[-1].is_whole  # all axes are manual here
        is_alone = name == "stablehlo.custom_call" and is_whole
        key = (
            name,
            tuple([id(t) for t in operands]),  # types are made once (see `type`)
            tuple([r.type for r in op.results]),
            entries,
            is_alone,
        )
        has_body = name not in _CONTROL_FLOW and len(op.regions) > 0
        kind = None if has_body else self._kind_cache.get(key)
        if kind is None:
            attrs = {n: self.attribute(n, a) for n, a in entries} if given is None else given
            if has_body:
                attrs = {**attrs, **self.bodies(op)}
            if is_alone:
                attrs = {**attrs, ALONE: True}
            kept = {n: a for n, a in attrs.items() if a is not None}
            try:
                kind = OpKind(name, operands, tuple([self.type(r.type) for r in op.results]), kept)
            except FrontendError as error:
                raise FrontendError(error.what, op=name, source=loc.source) from error
            if not has_body:
                self._kind_cache[key] = kind
        if name not in _NEUTRAL_OPERAND:
            return kind
        # A reduction that starts from its identity (a sum from 0) is linear, so a partial value may
        # flow through it; from 1 every device's term would bring a 1 of its own.
        if name == "stablehlo.pad":
            neutral = is_identity(inputs[-1], self._producers, "add")
        else:
            neutral = is_neutral(inputs[len(inputs) // 2 :], self._producers, kind.attrs["body"])
        return OpKind(name, kind.operands, kind.results, {**kind.attrs, NEUTRAL: neutral})

    def bodies(self, op: Any) -> dict[str, Attribute]:
        """Returns attributes: an op's scalar regions by name, and what the last one reduces by.

        The names are `body`, or `select` and `scatter`; `reducer` is `add`, `max`, ..., or "".
        """
        is_scatter = op.name == "stablehlo.select_and_scatter"
        bodies = [self.body(region, op.name) for region in op.regions]
        named = zip(("select", "scatter") if is_scatter else ("body",), bodies, strict=False)
        return {**dict(named), "reducer": body_reducer(bodies[-1])}

    def body(self, region: Any, name: str) -> Body:
        """Returns a scalar region as a `Body`; FrontendError if it reads non-constants outside."""
        outer = self.b, self._producers  # values are numbered anew
        self.b, self._producers = Builder(), {}
        self.in_bodies += 1
        try:
            block = region.blocks[0]
            env: Env = {}
            args = [self.bind(env, arg) for arg in block.arguments]
            self.b.begin()
            # MLIR's folding moves constants out of bodies. They are repeated inside: a `Body` reads
            # nothing from around it, so that equal bodies are equal wherever they stand.
            for value in [v for item in block.operations for v in item.operation.operands]:
                owner: Any = None if value in env else defining_op(value)
                is_outside = owner is not None and owner.block != block
                if is_outside and owner.name == "stablehlo.constant":
                    self.op(owner, env)
            region = self.b.end(args, self.block(block, env))
            plain = tuple([op._replace(loc=Loc()) for op in region.ops])
            return Body(tuple(self.b.types), region._replace(ops=plain))
        except KeyError as error:
            raise FrontendError(f"the body of {name} reads a value from outside it") from error
        finally:
            self.b, self._producers = outer
            self.in_bodies -= 1


# Ops that StableHLO's own passes write with others, one at a time.
#
# before: `%2 = stablehlo.dynamic_pad %x, %zero, %low, %high, %inner` with constant amounts
# after:  `%2 = stablehlo.pad %x, %zero {edge_padding_low = ..., ...}`

hlo.register_stablehlo_passes()

# `refine-shapes` folds the sizes and amounts, which the pass for dynamic ops reads from constants;
# `canonicalize` the checks that CHLO's select makes of its operands' shapes.
_PASSES = (
    "builtin.module(stablehlo-refine-shapes,func.func(chlo-legalize-to-stablehlo,"
    "stablehlo-legalize-deprecated-ops,canonicalize,shape-legalize-to-stablehlo,"
    "stablehlo-canonicalize-dynamism,cse))"
)


def dialect_ops() -> list[str]:
    """Returns the names of all ops of StableHLO and CHLO in the installed jaxlib, sorted."""
    items = [*vars(hlo).values(), *vars(chlo).values()]
    names = {str(getattr(item, "OPERATION_NAME", "")) for item in items}
    return sorted(name for name in names if name.startswith(("stablehlo.", "chlo.")))


_DATA = {
    **{name: 3 for name in dialect_ops() if name.startswith("chlo.broadcast_")},
    "chlo.constant": 0,
    "chlo.constant_like": 1,
    "chlo.mulhi": 2,
    "stablehlo.broadcast": 1,
    "stablehlo.dot": 2,
    "stablehlo.dynamic_conv": 2,
    "stablehlo.dynamic_gather": 2,
    "stablehlo.dynamic_pad": 2,
    "stablehlo.get_dimension_size": 1,
    "stablehlo.real_dynamic_slice": 1,
    "stablehlo.set_dimension_size": 1,
}
"""Op -> how many of its operands, the first ones, are data; the rest are sizes and amounts."""

_FOLDED = {
    f"stablehlo.{name}"
    for name in ("add", "concatenate", "constant", "convert", "get_dimension_size", "reshape")
}
"""Ops that compute sizes and amounts from constants, and that the passes fold."""


def _legalize(importer: Importer, op: Any, env: Env) -> None:
    for result in op.results:
        importer.type(result.type)  # a dynamic shape is refused before the passes see it
    amounts = op.operands[_DATA[op.name] :]
    chain = [*dict.fromkeys(_makers(amounts)), op]
    made = {value for item in chain for value in item.results}
    given = [*dict.fromkeys(v for item in chain for v in item.operands if v not in made)]
    # The op is alone in a function, so that the passes take nothing else apart: CHLO's would also
    # write out `erf` and `top_k`, which stay one op. With it are the constants that it reads.
    builder: Any = func  # its stub lacks the extensions of the class
    with ir.Location.unknown():
        module = ir.Module.create()
        with ir.InsertionPoint(module.body):

            @builder.FuncOp.from_py_func(*[value.type for value in given])  # type: ignore[untyped-decorator]
            def main(*arguments: Any) -> Any:
                values = dict(zip(given, arguments, strict=True))
                copies = [cloned(item, values) for item in chain]
                return list(copies[-1].results)

        with contextlib.suppress(ir.MLIRError):
            PassManager.parse(_PASSES).run(module.operation)
    block = module.body.operations[0].regions[0].blocks[0]
    if any(item.name in LEGALIZED for item in block.operations):
        types = ", ".join(str(value.type) for value in op.operands)
        raise refusal(
            op.name,
            "its sizes, amounts or strides are computed at run time, or it broadcasts unlike numpy",
            "make these operands constants (refine the shapes, or fold constants first)",
            importer.loc(op.location),
            op=f"{op.name}({types}) -> {op.results[0].type}",
        )
    inner = dict(zip(block.arguments, [env[v] for v in given], strict=True))
    env.update(zip(op.results, importer.block(block, inner), strict=True))


def _makers(values: Iterable[Any]) -> Iterator[Any]:
    """Yields ops in `_FOLDED` that compute `values`, each behind the producers that it reads."""
    for maker in map(defining_op, values):
        if maker is not None and maker.name in _FOLDED:
            yield from _makers(maker.operands)
            yield maker


LEGALIZED: Mapping[str, Handler] = MappingProxyType(dict.fromkeys(_DATA, _legalize))
"""Name of each op that StableHLO's passes rewrite as other ops -> the handler that does so."""


# Ops that no program to be partitioned may contain, each with the reason and the way out.


class Refusal(NamedTuple):
    """Says why the importer refuses an op, and what the user can do instead."""

    reason: str
    fix: str


_REFUSALS: Mapping[Refusal, tuple[str, ...]] = {
    Refusal(
        "it is written for one device among several, and is outside any jax.shard_map",
        "leave it out, and let the marks place the collectives; or put it into jax.shard_map",
    ): (*(f"stablehlo.{kind}" for kind in RESIZED), *DEVICE_IDS),
    Refusal(
        "it says what becomes of one device's piece",
        "compile the program as one device would run it, and let the marks place the collectives",
    ): ("stablehlo.collective_reduce", "stablehlo.cross-replica-sum"),
    Refusal(
        "it is an end of a jax.shard_map that jax lowered for GSPMD",
        "lower the program with jax_use_shardy_partitioner=True",
    ): ("custom_call:SPMDFullToShardShape", "custom_call:SPMDShardToFullShape"),
    Refusal(
        "it talks to the host or to another program while it runs",
        "pass the data as arguments and results",
    ): ("stablehlo.infeed", "stablehlo.outfeed", "stablehlo.recv", "stablehlo.send"),
    Refusal(
        "tokens order side effects, which every device would repeat",
        "compile the jax function itself with spmd.jit, which keeps its callbacks in order; or "
        "export it without ordered=True in jax.debug.print, io_callback, ...",
    ): ("stablehlo.after_all", "stablehlo.create_token"),
    Refusal(
        "asynchronous ops hold their operands across others",
        "compile the program before its collectives were split into start and done",
    ): ("stablehlo.async_done", "stablehlo.async_start"),
    Refusal(
        "its numbers come from a generator of each device's own, so the devices would disagree",
        "use jax.random, or stablehlo.rng_bit_generator with an explicit state",
    ): ("stablehlo.rng",),
    Refusal(
        "it calls back into Python, and the module only points to the function in the process "
        "that made it",
        "compile the jax function itself with spmd.jit, which runs its callbacks; or export it "
        "without (jax.debug.print, jax.pure_callback, jax.experimental.io_callback)",
    ): (
        f"custom_call:{CALLBACK}",
        *(
            f"custom_call:xla_{way}python_{platform}_callback"
            for way in ("ffi_partitioned_", "ffi_", "")
            for platform in ("cpu", "gpu")
        ),
    ),
    Refusal(
        "the module only points to what it computes, which is Python in the process that made it",
        "compile the jax function itself with spmd.jit, which inlines jax.custom_partitioning",
    ): ("custom_call:CustomSPMDPartitioning",),
    Refusal(
        "quantized element types are unknown to jaxlib's MLIR",
        "write the scale and the zero point out as arithmetic on integers",
    ): ("stablehlo.uniform_dequantize", "stablehlo.uniform_quantize"),
}  # fmt: skip

REFUSED = {name: why for why, names in _REFUSALS.items() for name in names}
"""Name of an op (or `custom_call:` and its target) -> why the importer refuses it."""


def refuse(name: str, loc: Loc) -> None:
    """Raises UnsupportedOpError if the op `name` (or `custom_call:` and target) is in `REFUSED`."""
    if name in REFUSED:
        raise refusal(name, *REFUSED[name], loc)


def refusal(name: str, why: str, fix: str, loc: Loc, op: str = "") -> UnsupportedOpError:
    """Returns the error that says why op `name` at `loc` cannot be partitioned; `fix` is advice."""
    what = f"{name} cannot be partitioned: {why}"
    return UnsupportedOpError(what, op=op or name, source=loc.source, fix=fix)
