"""Emit: writes the local program as StableHLO text, with replica groups and source locations.

The compiler's output, `Emitted`, is text and plain data only; `execute` parses the text when jax
lowers the program. All ops are in MLIR's generic form, so that none needs a printer of its own.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial
from typing import NamedTuple

from jax.experimental.layout import Format, Layout
from jax.sharding import Mesh as JaxMesh
from jax.sharding import NamedSharding, PartitionSpec

from spmd.ir.description import COMPOSITE, CUSTOM_CALL
from spmd.ir.dialect.callbacks import CALLBACK, CHECK_CALLBACK
from spmd.ir.dialect.host import HOST, hosted
from spmd.ir.program import Body, Callback, Loc, Op, OpKind, Program, Region, Value
from spmd.ir.types import (
    DIM_NUMBERS,
    Attribute,
    ConvDims,
    Dense,
    Opaque,
    Order,
    TensorType,
    needs_x64,
    types_text,
)
from spmd.lowering.expand import LINKED
from spmd.lowering.local.callbacks import FREE
from spmd.lowering.local.composite import traced_composite
from spmd.lowering.partition import Partitioned
from spmd.mesh.mesh import Mesh
from spmd.mesh.sharding import Sharding
from spmd.mesh.spec import has_parts, named_sharding, partition_spec
from spmd.reshard.comm import group_size

Placement = NamedSharding | Format
"""How an array lies on devices: its sharding alone, or with the order of its dims in memory."""


class Constant(NamedTuple):
    """A large constant that is passed to the program as an argument: its elements and sharding."""

    value: Dense
    sharding: Sharding


@dataclass(frozen=True)
class Emitted:
    """A local program as text and plain data, which can be stored, compared and compiled later."""

    name: str
    mesh: Mesh
    # StableHLO text; `main`, which every device runs, takes pieces of arguments, then of constants
    module: str
    # arguments, results: shardings of the global arguments and results
    arguments: tuple[Sharding, ...]
    results: tuple[Sharding, ...]
    # argument_types, result_types: of the global arguments; of one device's pieces of the results
    argument_types: tuple[TensorType, ...]
    result_types: tuple[TensorType, ...]
    # argument_orders, result_orders: the dims in memory, outermost first; None for 0, 1, 2, ...
    argument_orders: tuple[Order | None, ...]
    result_orders: tuple[Order | None, ...]
    donated: tuple[int, ...]  # flat indices of donated arguments
    # argument_hosts, result_hosts: flat indices of those in the host's memory
    argument_hosts: tuple[int, ...]
    result_hosts: tuple[int, ...]
    needs_x64: bool
    callbacks: tuple[Callback, ...] = ()  # the Python functions that it calls, by number
    # peak_bytes, seconds: predicted for one device and one run; None if not predicted
    peak_bytes: int | None = None
    seconds: float | None = None
    constants: tuple[Constant, ...] = ()  # passed to `main` behind the arguments

    @cached_property
    def boundary_mesh(self) -> Mesh:
        """The mesh; one with an axis per atom if part of an axis splits an argument or result."""
        ends = (*self.arguments, *self.constant_shardings, *self.results)
        has = any(has_parts(sharding, self.mesh) for sharding in ends)
        return self.mesh.refined() if has else self.mesh

    @property
    def constant_shardings(self) -> tuple[Sharding, ...]:
        """The sharding of each of `constants`, in their order."""
        return tuple(constant.sharding for constant in self.constants)

    def specs(self, shardings: Sequence[Sharding]) -> tuple[PartitionSpec, ...]:
        """Returns each sharding as a `PartitionSpec` with the axis names of `boundary_mesh`."""
        return tuple(partition_spec(sharding, self.boundary_mesh) for sharding in shardings)

    def named(self, shardings: Sequence[Sharding], where: JaxMesh) -> tuple[NamedSharding, ...]:
        """Returns jax's shardings on `where`; those with parts of axes have an axis per atom."""
        return tuple(named_sharding(sharding, self.mesh, where) for sharding in shardings)

    def named_ends(self, where: JaxMesh) -> tuple[tuple[NamedSharding, ...], ...]:
        """Returns jax's shardings of the arguments and of the results, each in its memory."""
        ends = (self.arguments, self.argument_hosts), (self.results, self.result_hosts)
        return tuple(
            tuple(
                sharding.with_memory_kind(HOST) if i in hosts else sharding
                for i, sharding in enumerate(self.named(shardings, where))
            )
            for shardings, hosts in ends
        )

    def major_to_minor(self) -> "Emitted":
        """Returns a copy whose arguments and results have the default order of dims in memory."""
        arguments, results = (None,) * len(self.arguments), (None,) * len(self.results)
        return replace(self, argument_orders=arguments, result_orders=results)


def formats(
    shardings: Sequence[NamedSharding], orders: Sequence[Order | None]
) -> tuple[Placement, ...]:
    """Returns `Format`s of shardings and orders of dims; just the sharding for an order None."""
    return tuple(
        sharding if order is None else Format(Layout(order), sharding)
        for sharding, order in zip(shardings, orders, strict=True)
    )


def emit_local(local: Partitioned, donated: tuple[int, ...] = ()) -> Emitted:
    """Returns an expanded local program as `Emitted`; `donated`: positions of donated arguments."""
    program, mesh, arguments, results = local[:4]
    types, body = program.types, program.body
    count = len(body.args) - len(program.constants)
    moved = hosted(program)
    wholes = []
    for value, sharding in zip(body.args[:count], arguments[:count], strict=True):
        dims = zip(types[value].shape, sharding.dims, strict=True)  # which their axes divide
        wholes.append(types[value].with_shape(tuple([n * mesh.extent(axes) for n, axes in dims])))
    return Emitted(
        name=program.name,
        mesh=mesh,
        module=emit(program, mesh),
        arguments=arguments[:count],
        results=results,
        argument_types=tuple(wholes),
        result_types=tuple(types[value] for value in body.results),
        argument_orders=local.argument_orders[:count] or (None,) * count,
        result_orders=local.result_orders or (None,) * len(results),
        donated=donated,
        argument_hosts=tuple(i for i, value in enumerate(body.args) if value in moved.arguments),
        result_hosts=tuple(i for i, value in enumerate(body.results) if value in moved.results),
        needs_x64=needs_x64(types),
        callbacks=program.callbacks,
        constants=tuple(map(Constant, program.constants, arguments[count:])),
    )


# The text.

_NOT_EMITTED = {"reducer", "axes", "groups", "pairs"}
_OF_CALLBACKS = ("number", "called", "ordered", FREE, LINKED)
_GLOBAL_IDS = {"stablehlo.all_reduce", "stablehlo.all_gather", "stablehlo.reduce_scatter"}


def emit(program: Program, mesh: Mesh) -> str:
    """Returns a program as StableHLO text with one public function, `main`.

    Arguments of zero elements are constants inside `main` instead. The program may be local, or
    global without a `jax.shard_map`.
    """
    return _Emitter(program, mesh).run()


class _Emitter:
    def __init__(self, program: Program, mesh: Mesh) -> None:
        self.program, self.mesh = program, mesh
        self.lines: list[str] = []
        self.names: dict[Value, str] = {}
        self.locs: dict[Loc, str] = {}
        self.channels = 0
        self.groups = cache(lambda axes: _matrix(mesh.groups(axes)))
        self.functions: dict[str, tuple[str, ...]] = {}

    def run(self) -> str:
        body, types = self.program.body, self.program.types
        empty = [v for v in body.args if types[v].is_empty]
        args = ", ".join(f"{self.define((v,))}: {types[v]}" for v in body.args if v not in empty)
        results = types_text([types[v] for v in body.results])
        name = "".join(c if c.isalnum() else "_" for c in self.program.name) or "program"
        self.lines.append(f"module @{name} {{")
        self.lines.append(f"func.func public @main({args}) -> {results} {{")
        for v in empty:
            # XLA for CPUs crashes at calls with arguments of no elements, in jax 0.11.
            self.lines.append(f"{self.define((v,))} = stablehlo.constant dense<> : {types[v]}")
        for op in body.ops:
            self.op(op)
        values = ", ".join(self.names[v] for v in body.results)
        self.lines.append(f'"func.return"({values}) : {results} -> ()')
        self.lines.append("}")
        self.lines += [text for texts in self.functions.values() for text in texts]
        self.lines.append("}")
        for loc, alias in self.locs.items():
            # As jax writes it: XLA keeps a stack only where its frames have functions.
            text = json.dumps(loc.scope or "spmd")
            places = [f"{json.dumps(frame.file)}:{frame.line}:0" for frame in loc.frames]
            calls = [
                f"{json.dumps(frame.function)}({place})" if frame.function else place
                for frame, place in zip(loc.frames, places, strict=True)
            ]
            if calls:
                text += f"(callsite({calls[0]} at {calls[1]}))" if calls[1:] else f"({calls[0]})"
            self.lines.append(f"{alias} = loc({text})")
        return "\n".join(self.lines) + "\n"

    def define(self, values: Sequence[Value]) -> str:
        name = f"%{values[0]}"
        if len(values) == 1:
            self.names[values[0]] = name
            return name
        self.names.update((v, f"{name}#{i}") for i, v in enumerate(values))
        return f"{name}:{len(values)}"

    def op(self, op: Op) -> None:
        kind = op.kind
        if op.name in (CALLBACK, CHECK_CALLBACK):  # for `execute`, which has the functions
            own = {**kind.attrs, FREE: bool(kind.attrs.get(FREE))}
            attrs = [f"{n} = {_attribute(a)}" for n, a in own.items() if n in _OF_CALLBACKS]
            attrs += [f"call_target_name = {_attribute(op.name)}", "has_side_effect = true"]
            kind = OpKind(CUSTOM_CALL, kind.operands, kind.results, {})
            self.write(op._replace(kind=kind), attrs, [])
            return
        if op.name == COMPOSITE:  # a call of what computes it, whose functions join the module once
            traced = traced_composite(kind)
            assert traced is not None, op.label
            self.functions[traced.entry] = traced.functions
            call = OpKind("func.call", kind.operands, kind.results, {})
            self.write(op._replace(kind=call), [f"callee = @{traced.entry}"], [])
            return
        attrs = [
            f"{name} = {_attribute(attr)}"
            for name, attr in kind.attrs.items()
            if not (isinstance(attr, Body) or name in _NOT_EMITTED or "spmd." in name)
        ]
        if op.collective:
            attrs += self.collective_attrs(op)
        bodies = [a for a in kind.attrs.values() if isinstance(a, Body)]
        if op.name == "stablehlo.select_and_scatter":
            bodies = [kind.attrs["select"], kind.attrs["scatter"]]
        blocks = [partial(self.body, body) for body in bodies]
        blocks += [partial(self.block, region, self.program.types) for region in op.regions]
        self.write(op, attrs, blocks)

    def write(self, op: Op, attrs: Sequence[str], blocks: Sequence[Callable[[], None]]) -> None:
        operands = ", ".join([self.names[v] for v in op.operands])
        target = f"{self.define(op.results)} = " if op.results else ""
        dictionary = f" {{{', '.join(attrs)}}}" if attrs else ""
        signature = f"{types_text(op.kind.operands)} -> {types_text(op.kind.results)}"
        tail = f"{dictionary} : {signature} loc({self.loc(op.loc)})"
        self.lines.append(f'{target}"{op.name}"({operands})' + (" ({" if blocks else tail))
        for i, block in enumerate(blocks):
            if i:
                self.lines.append("}, {")
            block()
        if blocks:
            self.lines.append("})" + tail)

    def block(self, region: Region, types: Sequence[TensorType]) -> None:
        if region.args:
            args = ", ".join(f"{self.define((v,))}: {types[v]}" for v in region.args)
            self.lines.append(f"^bb0({args}):")
        for op in region.ops:
            self.op(op)
        values = ", ".join(self.names[v] for v in region.results)
        made = types_text([types[v] for v in region.results])
        self.lines.append(f'"stablehlo.return"({values}) : {made} -> ()')

    def body(self, body: Body) -> None:
        """Writes an op's scalar body, such as a reducer, with values named `%b0`, `%b1`, ..."""
        outer, self.names = self.names, {}
        start = len(self.lines)
        self.block(body.region, body.types)
        self.lines[start:] = [line.replace("%", "%b") for line in self.lines[start:]]
        self.names = outer

    def collective_attrs(self, op: Op) -> list[str]:
        # A channel makes it an exchange among the devices of one program; without one it would be
        # among replicas of the program. Ids in its groups are then positions in the mesh.
        self.channels += 1
        attrs = [f"channel_handle = #stablehlo.channel_handle<handle = {self.channels}, type = 1>"]
        own = op.kind.attrs
        if op.collective == "collective_permute":
            return [*attrs, f"source_target_pairs = {_matrix(own['pairs'])}"]
        groups = _matrix(own["groups"]) if "groups" in own else self.groups(own["axes"])
        attrs.append(f"replica_groups = {groups}")
        if op.name == "stablehlo.all_to_all":
            attrs.append(f"split_count = {group_size(own, self.mesh)} : i64")
        if op.name in _GLOBAL_IDS:
            attrs.append("use_global_device_ids")
        return attrs

    def loc(self, loc: Loc) -> str:
        if not loc.scope and not loc.frames:
            return "unknown"
        return self.locs.setdefault(Loc(loc.scope, loc.user_frames[:2]), f"#loc{len(self.locs)}")


def _matrix(rows: Sequence[Sequence[int]]) -> str:
    return f"dense<{list(map(list, rows))}> : tensor<{len(rows)}x{len(rows[0])}xi64>"


def _attribute(attr: Attribute) -> str:
    if isinstance(attr, bool | str):
        return json.dumps(attr)
    if isinstance(attr, int):
        return f"{attr} : i64"
    if isinstance(attr, Opaque):
        return attr.text
    if isinstance(attr, Dense):
        if attr.type.size == 0:
            return f"dense<> : {attr.type}"
        if attr.type.dtype.lstrip("u") not in ("i1", "i2", "i4"):
            return f'dense<"0x{attr.data.hex().upper()}"> : {attr.type}'
        array = attr.array().reshape(-1)[0] if attr.splat else attr.array()
        plain = array.astype(bool if attr.type.dtype == "i1" else int).tolist()
        return f"dense<{json.dumps(plain)}> : {attr.type}"
    if isinstance(attr, ConvDims):
        return _conv(attr)
    if type(attr) in DIM_NUMBERS:
        word, names = DIM_NUMBERS[type(attr)]
        fields = zip(names, attr, strict=True)
        stated = [f"{n} = {list(v) if isinstance(v, tuple) else v}" for n, v in fields if v != ()]
        return f"#stablehlo.{word}<{', '.join(stated)}>"
    if isinstance(attr, tuple):
        if attr and isinstance(attr[0], tuple):
            return _matrix(attr)
        dtype = "i1" if attr and isinstance(attr[0], bool) else "i64"
        return f"array<{dtype}: {json.dumps(attr)[1:-1]}>" if attr else "array<i64>"
    raise TypeError(f"attribute {attr!r} cannot be emitted")


def _conv(dims: ConvDims) -> str:
    def term(letters: str, places: tuple[int, int], spatial: tuple[int, ...]) -> str:
        names = dict(zip(places, letters, strict=True))
        names |= {dim: str(i) for i, dim in enumerate(spatial)}
        return "[" + ", ".join(names[d] for d in range(len(names))) + "]"

    source = term("bf", (dims.input_batch, dims.input_feature), dims.input_spatial)
    features = dims.kernel_input_feature, dims.kernel_output_feature
    kernel = term("io", features, dims.kernel_spatial)
    result = term("bf", (dims.output_batch, dims.output_feature), dims.output_spatial)
    return f"#stablehlo.conv<{source}x{kernel}->{result}>"
