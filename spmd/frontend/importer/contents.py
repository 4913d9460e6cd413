"""Reads parts of a module as plain data: types, constants, locations, meshes, shardings, names.

Shardings, as Shardy's attributes or GSPMD's text, are translated to the mesh to compile for.
"""

import math
import re
from collections.abc import Container, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import sdy
from jaxlib.mlir.dialects import stablehlo as hlo

from spmd.errors import FrontendError
from spmd.ir.program import Frame
from spmd.ir.text import element_bytes
from spmd.ir.types import (
    DIM_NUMBERS,
    Attribute,
    ConvDims,
    Dense,
    DotDims,
    GatherDims,
    Opaque,
    ScatterDims,
    ShardingAttr,
    TensorType,
    numpy_dtype,
)
from spmd.mesh.mesh import Mesh
from spmd.mesh.sharding import Axes, axis_refs, part_atoms
from spmd.mesh.spec import check_reduced

DEEPEST_CALLS = 100  # how many functions may call each other in turn
MOST_OPS = 250_000  # how many ops a program may have with its calls inlined

MARKS = ("sdy.sharding", "mhlo.sharding")
"""Names of the attributes with the sharding of an op's results, an argument or a result."""


def tensor_type(type_: Any) -> TensorType:
    """Converts an MLIR type, or its text; FrontendError unless it is a static tensor or a token."""
    text = str(type_)
    if text == "!stablehlo.token":
        return TensorType((), "token")
    match = re.fullmatch(r"tensor<((?:(?:\d+|\?)x)*)([!\w][\w.]*(?:<.*?>)?)(, .*)?>", text)
    encoding = match[3] if match else None
    if match is None or (encoding and "#stablehlo.bounds" not in encoding):
        raise FrontendError(
            f"a value of type {text} cannot be partitioned", required="ranked tensors and tokens"
        )
    if "?" in match[1] or encoding:
        raise FrontendError(
            f"the module has a dynamic shape: {text}",
            required="static shapes",
            fix="give the sizes of symbolic dims, as in spmd.compile_stablehlo(module, mesh, "
            "symbols={'n': 8}), or export it with static shapes",
        )
    return TensorType(tuple(int(n) for n in match[1].split("x")[:-1]), match[2])


def _dense(attr: Any) -> Dense:
    try:
        type_ = tensor_type(attr.type)
        if type_.size == 0:
            return Dense(type_, b"", False)
        if attr.is_splat and type_.size > 1:
            return Dense(type_, np.asarray(attr).reshape(-1)[:1].tobytes(), True)
        return Dense.of(np.asarray(attr), type_.dtype)
    except (TypeError, AttributeError, ValueError):
        return _dense_from_text(str(attr))


def _dense_from_text(text: str) -> Dense:
    """Parses a constant of a dtype that the bindings don't convert (bf16, fp8, int4, complex)."""
    match = re.fullmatch(r"(?s)dense<(.*)> : (tensor<.*>)", text)
    if match is None:
        raise FrontendError(f"cannot read the constant {text[:60]}")
    type_ = tensor_type(match[2])
    if match[1].startswith('"0x'):
        raw = bytes.fromhex(match[1][3:-1])
    else:
        part = numpy_dtype(re.sub(r"complex<(.*)>", r"\1", type_.dtype))
        words = re.findall(r"[^\s,()\[\]]+", match[1])
        raw = b"".join([element_bytes(word, part) for word in words])
    elements = np.frombuffer(raw, numpy_dtype(type_.dtype))
    shape = () if elements.size == 1 else type_.shape
    return Dense.of(np.broadcast_to(elements.reshape(shape), type_.shape), type_.dtype)


def location_of(location: Any) -> tuple[str, list[Frame]]:
    """Returns an MLIR location's scope name (`jit(f)/sin`), and its frames, innermost first."""
    # jax writes "jit(f)/sin"(callsite("f"("a.py":3) at "<module>"("a.py":9))): a name around call
    # sites is a scope, a name around a file is the function of a frame. A module from elsewhere may
    # fuse several locations; the last one that has a scope gives it.
    frames: list[Frame] = []

    def walk(location: Any, scope: str) -> str:
        if isinstance(location, ir.CallSiteLoc):
            scope = walk(location.callee, scope)
            walk(location.caller, scope)
        elif isinstance(location, ir.NameLoc):
            child = location.child_loc
            if isinstance(child, ir.FileLineColLoc):
                frames.append(Frame(child.filename, child.start_line, location.name_str))
                return scope
            inner = walk(child, scope)
            return location.name_str or inner
        elif isinstance(location, ir.FileLineColLoc):
            frames.append(Frame(location.filename, location.start_line, ""))
        elif isinstance(location, ir.FusedLoc):
            for part in location.locations:
                scope = walk(part, scope) or scope
        return scope

    return walk(location, ""), frames


def entries_of(op: Any) -> tuple[tuple[str, Any], ...]:
    """Returns (name, attribute) pairs, complex constants as text; FrontendError if unreadable."""
    try:
        return tuple([(name, op.attributes[name]) for name in op.attributes])
    except TypeError:
        text = op.get_asm(print_generic_op_form=True)
        match = re.search(r"(?s)<\{value = (dense<.*> : tensor<.*>)\}> : \(", text)
        if match is None:
            raise FrontendError(f"cannot read the attributes of {op.name}", op=text[:80]) from None
        return (("value", match[1]),)


_NUMBERS: Mapping[type, tuple[Any, Sequence[str]]] = {
    ConvDims: (
        hlo.ConvDimensionNumbers,
        [f"{n}_dimension{'s' * n.endswith('spatial')}" for n in ConvDims._fields],
    ),
    DotDims: (hlo.DotDimensionNumbers, DIM_NUMBERS[DotDims][1]),
    GatherDims: (hlo.GatherDimensionNumbers, GatherDims._fields),
    ScatterDims: (
        hlo.ScatterDimensionNumbers,
        [n.replace("scatter_dims", "scattered_dims") for n in ScatterDims._fields],
    ),
}
"""Class of dimension numbers -> its class in MLIR's bindings, and that class's fields in order."""


def attribute(name: str, attr: Any) -> Attribute:
    """Returns the MLIR attribute called `name` as plain data; None if programs don't keep it."""
    if isinstance(attr, str):  # a constant, from `entries_of`
        return _dense_from_text(attr)
    if isinstance(attr, ir.DenseElementsAttr) and name == "value":
        return _dense(attr)
    is_i64 = isinstance(attr, ir.IntegerAttr) and str(attr.type) == "i64"
    if is_i64 or isinstance(attr, ir.BoolAttr | ir.StringAttr):
        return attr.value
    if isinstance(attr, ir.DenseBoolArrayAttr):
        return tuple(attr) or None  # an empty tuple would be emitted as one of integers
    if isinstance(attr, ir.DenseI64ArrayAttr):
        return tuple(attr)
    for kind, (numbers, fields) in _NUMBERS.items():
        if numbers.isinstance(attr):
            values = [getattr(numbers(attr), field) for field in fields]
            return kind(*(value if isinstance(value, int) else tuple(value) for value in values))
    if name == "padding" and isinstance(attr, ir.DenseIntElementsAttr):
        return tuple((int(low), int(high)) for low, high in np.asarray(attr)) or None
    if name in (*MARKS, "sdy.sharding_rule"):  # marks become ops, and rules are ours
        return None
    text = str(attr)
    return _dense(attr) if name == "value" and text.startswith("dense") else Opaque(text)


def composite_attribute(attr: Any) -> Attribute:
    """Returns a composite's attribute as a Python value; as `Opaque` text if no type fits."""
    if isinstance(attr, ir.DenseElementsAttr):
        return _dense(attr)
    if isinstance(attr, ir.BoolAttr | ir.IntegerAttr | ir.FloatAttr | ir.StringAttr):
        return attr.value
    if isinstance(attr, ir.ArrayAttr):
        return tuple(composite_attribute(part) for part in attr)
    return Opaque(str(attr))


def items_of(dictionary: Any) -> dict[str, Any]:
    """Returns a dictionary attribute of MLIR as a dict: name -> attribute."""
    return {entry.name: entry.attr for entry in dictionary}


def function_type(function: Any) -> tuple[list[Any], list[Any]]:
    """Returns the MLIR types of a function's arguments, and those of its results."""
    type_ = function.attributes["function_type"].value
    return list(type_.inputs), list(type_.results)


def defining_op(value: Any) -> Any:
    """Returns the op that makes an MLIR value; None for the argument of a block."""
    return None if isinstance(value.owner, ir.Block) else value.owner.operation


def ops_in(root: Any) -> list[Any]:
    """Returns an op and all ops inside it, as a list that stays valid while ops are replaced."""
    found: list[Any] = []

    def visit(op: Any) -> Any:
        found.append(op)
        return ir.WalkResult.ADVANCE

    root.walk(visit)
    return found


def replace_op(op: Any, values: Iterable[Any]) -> None:
    """Erases an op; what read its results reads `values`."""
    for result, value in zip(op.results, values, strict=True):
        result.replace_all_uses_with(value)
    op.erase()


def cloned(op: Any, values: dict[Any, Any]) -> Any:
    """Inserts and returns a copy of an op; `values` maps operands, old -> new, and gets results."""
    copy = op.clone().operation
    for inner in ops_in(copy):
        for i, value in enumerate(inner.operands):
            if value in values:
                inner.operands[i] = values[value]
    values.update(zip(op.results, copy.results, strict=True))
    return copy


# Functions, meshes and shardings.

AxisRef = tuple[str, int, int]
"""An axis, or a part of one: (name, product of the sizes of its more major parts, size). The whole
axis has size 0: `("x", 1, 0)`. `("x", 2, 4)` is the minor part of an axis of size 2 x 4."""

Refs = tuple[AxisRef, ...]  # axes and parts of axes, major to minor

NO_AXES = Mesh(None, (), ())  # the mesh without axes, for shardings that split nothing

_PATH_PART = re.compile(r"""\[\s*['"]?(.*?)['"]?\s*\]|([^\[\].]+)""")


class Contents:
    """Holds a module's functions and meshes; translates its shardings to the mesh to compile for.

    That mesh is `mesh`; if left out, the module's first of several devices. The module numbers
    devices from 0 to `partitions - 1`, their positions in that mesh.
    """

    def __init__(self, module: Any, mesh: Mesh | None = None) -> None:
        self.functions = named_ops(module, "func.func")
        found: Any = module.operation.attributes
        names = ("mhlo.num_partitions", "mhlo.num_replicas")
        self.partitions = math.prod(found[name].value for name in names if name in found)
        meshes = named_ops(module, "sdy.mesh")
        # By name; None for those of a single device.
        self.meshes = {name: mesh_of(op.attributes["mesh"], sdy) for name, op in meshes.items()}
        several = [found for found in self.meshes.values() if found and found.size > 1]
        self._mesh = Mesh(None, mesh.sizes, mesh.axis_names) if mesh else next(iter(several), None)
        self._is_of_one_device = self.partitions == 1 and not several
        self._known: dict[Any, ShardingAttr | None] = {}

    def main(self) -> Any:
        """Returns the function to compile: `main`, or the only one; FrontendError without one."""
        main = self.functions.get("main")
        if main is None and len(self.functions) == 1:
            main = next(iter(self.functions.values()))
        if main is None or not main.regions[0].blocks:
            raise FrontendError(
                "the module has no function to compile",
                actual=f"functions: {', '.join(self.functions) or 'none'}",
                required="a public function `main`, or exactly one function",
            )
        return main

    def check_calls(self, whole: Container[str] = ()) -> None:
        """Raises FrontendError for recursion, callees without a body, too deep calls, too many ops.

        Composites whose names are in `whole` call nothing.
        """
        sizes: dict[str, int] = {}  # of functions, in ops with all calls inlined

        def size(name: str, around: tuple[str, ...]) -> int:
            if name in around:
                raise FrontendError(f"function @{name} calls itself")
            if name not in self.functions or not self.functions[name].regions[0].blocks:
                raise FrontendError(f"function @{name} has no body in the module")
            if len(around) > DEEPEST_CALLS:
                raise FrontendError(f"functions call each other more than {DEEPEST_CALLS} deep")
            if name not in sizes:
                ops = ops_in(self.functions[name])
                called = (callee for op in ops for callee in callees(op, whole))
                sizes[name] = len(ops) + sum(size(callee, (*around, name)) for callee in called)
            if sizes[name] > MOST_OPS:
                raise FrontendError(
                    f"the module has more than {MOST_OPS} ops with its calls inlined",
                    fix="keep repeated parts in a loop",
                )
            return sizes[name]

        size(self.main().attributes["sym_name"].value, ())

    @property
    def mesh(self) -> Mesh:
        """Returns the mesh to translate shardings to; its ids are the module's device numbers."""
        return self._mesh or NO_AXES

    def stated(self, attr: Any, rank: int) -> "Stated | None":
        """Returns a sharding, on its own mesh, of a tensor of rank `rank`; None if it says nothing.

        Those of a single device and of manual axes say nothing. `attr` is Shardy's attribute or
        GSPMD's text. FrontendError: it cannot be read, or the module lacks its mesh.
        """
        if isinstance(attr, str):
            return _tiled(attr, rank)
        sharding = sdy.TensorShardingAttr(attr)
        named = sharding.mesh_or_ref
        if not isinstance(named, ir.FlatSymbolRefAttr):  # it is written out in place
            mesh = mesh_of(named, sdy)
        elif named.value in self.meshes:
            mesh = self.meshes[named.value]
        else:
            raise FrontendError(f"a sharding names the mesh @{named.value}, which the module lacks")
        if mesh is None:
            return None
        # Axes that are said to be replicated split no open dim. Where these are all that is left,
        # as on jax's explicit axes, nothing is open.
        found = axes_of(sharding)
        replicated = refs_of(sharding.replicated_axes, sdy)
        used = {name for refs in (*found, replicated) for name, _, size in refs if not size}
        is_closed = bool(replicated) and all(
            n in used for n, size in mesh.shape.items() if size > 1
        )
        dims = map(sdy.DimensionShardingAttr, sharding.dimension_shardings)
        opened = tuple(not (dim.is_closed or is_closed) for dim in dims)
        return Stated(mesh, found, opened, refs_of(sharding.unreduced_axes, sdy))

    def atoms(self, other: Mesh, refs: Iterable[AxisRef]) -> Axes:
        """Returns the atoms of `mesh` that make up `refs`, axes of `other`, or raises MeshError."""
        if other.size == 1:
            return ()
        if self._mesh is None:
            self._mesh = other
        return tuple(a for ref in refs for a in part_atoms(self.mesh, other, *ref))

    def written(self, sharding: "Stated") -> ShardingAttr:
        """Returns a sharding in the axes of `mesh`; MeshError if it cannot be written in them."""
        if sharding.mesh == self.mesh or not any(sharding.dims):
            return ShardingAttr(sharding.dims, sharding.open)
        dims = [axis_refs(self.atoms(sharding.mesh, refs), self.mesh) for refs in sharding.dims]
        named = tuple(
            tuple((ref.name, ref.pre, 0 if ref.whole else ref.size) for ref in refs)
            for refs in dims
        )
        return ShardingAttr(named, sharding.open)

    def mark(self, attr: Any, rank: int, opened: Sequence[int] = ()) -> ShardingAttr | None:
        """Returns a sharding as a mark on `mesh`, with the dims `opened` open, too.

        None if it is of one device, manual, or partial: the plan decides where terms are added.
        """
        key = (attr, rank, tuple(opened))
        if key not in self._known:
            found = self.stated(attr, rank)
            marked = None if found is None or found.unreduced else self.written(found)
            if marked and opened:
                also = (d in opened for d in range(rank))
                marked = marked._replace(open=tuple(map(max, marked.open, also)))
            self._known[key] = marked
        return self._known[key]

    def marks_of(self, op: Any, ranks: Sequence[int]) -> list[ShardingAttr | None]:
        """Returns each result's mark; None if its sharding is of one device, manual or partial."""
        name = next(name for name in MARKS if name in op.attributes)
        attrs = shardings_of(op.attributes[name])
        attrs = attrs * len(ranks) if len(attrs) == 1 else attrs
        # A custom call `Sharding` of GSPMD may leave dims open.
        config = op.attributes.get("backend_config", None)
        text = config.value if isinstance(config, ir.StringAttr) else ""
        found = re.search(r"unspecified_dims=\[([\d,]*)\]", text)
        opened = _numbers(found[1]) if found else ()
        return [self.mark(attr, rank, opened) for attr, rank in zip(attrs, ranks, strict=True)]

    def boundary_marks(
        self, function: Any, what: str, is_main: bool = False
    ) -> tuple[ShardingAttr | None, ...]:
        """Returns the mark of each `argument` or `result` (`what`) of a function; None for no mark.

        SpecError: one is partial, and the function is the program's main one (`is_main`).
        """
        found = []
        is_result = what == "result"
        attributes = stated_of(function, "res_attrs" if is_result else "arg_attrs")
        types = function_type(function)[is_result]
        for i, (attrs, type_) in enumerate(zip(attributes, types, strict=True)):
            attr = next((shardings_of(attrs[name])[0] for name in MARKS if name in attrs), None)
            rank = tensor_type(type_).rank
            stated = None if attr is None else self.stated(attr, rank)
            if is_main and stated is not None:
                check_reduced((name for name, _, _ in stated.unreduced), f"{what} {i}")
            # jax says so of what is placed on a device: that it is whole says nothing of a mesh.
            is_placed = is_main and stated and stated.mesh == NO_AXES and self._is_of_one_device
            found.append(None if stated is None or is_placed else self.mark(attr, rank))
        return tuple(found)


def callees(op: Any, whole: Container[str] = ()) -> list[str]:
    """Returns the names of the functions that an op calls, none if it is a composite in `whole`."""
    if op.name == "func.call":
        return [op.attributes["callee"].value]
    if op.name == "stablehlo.composite":
        is_whole = op.attributes["name"].value in whole
        return [] if is_whole else [op.attributes["decomposition"].value]
    is_call = op.name == "stablehlo.custom_call"
    bodies = op.attributes.get("called_computations", ()) if is_call else ()
    return [body.value for body in bodies]


def named_ops(module: Any, kind: str) -> dict[str, Any]:
    """Returns name -> op of a module's functions (`func.func`) or meshes (`sdy.mesh`)."""
    operations = [item.operation for item in module.body.operations]
    return {op.attributes["sym_name"].value: op for op in operations if op.name == kind}


def stated_of(function: Any, name: str) -> list[dict[str, Any]]:
    """Returns the attributes of each argument (`arg_attrs`) or result (`res_attrs`), as dicts."""
    if name not in function.attributes:
        return [{} for _ in function_type(function)[name == "res_attrs"]]
    return [items_of(item) for item in function.attributes[name]]


def result_names(function: Any) -> tuple[str, ...]:
    """Returns the results' names as jax writes them, `['w']`; `result0`, ... without such."""
    return tuple(
        re.sub(r"^result", "", stated["jax.result_info"].value) or "result"
        if "jax.result_info" in stated
        else f"result{i}"
        for i, stated in enumerate(stated_of(function, "res_attrs"))
    )


def path_of(name: str) -> str:
    """Returns a pytree path in slashes: `params['w'][0].mu` -> `params/w/0/mu`."""
    return "/".join(a or b for a, b in _PATH_PART.findall(name))


class Stated(NamedTuple):
    """Holds a sharding as a module states it, in axes of the mesh that it names."""

    mesh: Mesh  # its device ids are positions among the devices that the module is for
    dims: tuple[Refs, ...]  # for each dim, what splits it
    open: tuple[bool, ...]  # for each dim, whether it may be split further
    unreduced: Refs = ()  # axes over which the value is not added up yet


def mesh_of(attr: Any, dialect: Any) -> Mesh | None:
    """Returns a mesh attribute of Shardy or StableHLO as a `Mesh`; None for a single device's."""
    mesh = dialect.MeshAttr(attr)
    axes = [dialect.MeshAxisAttr(x) for x in mesh.axes]
    ids = list(mesh.device_ids or ()) or None
    found = Mesh(ids, [axis.size for axis in axes], [axis.name for axis in axes])
    return None if found.size == 1 and (axes or ids) else found


def shardings_of(attr: Any) -> list[Any]:
    """Returns the shardings in an attribute as a list, of Shardy's attributes or GSPMD's texts."""
    if isinstance(attr, ir.StringAttr):
        text: str = attr.value.strip()
        is_tuple = text.startswith("{{") or text == "{}"
        return _EACH.findall(text[1:-1]) if is_tuple else [text]
    if sdy.TensorShardingAttr.isinstance(attr):
        return [attr]
    return list(sdy.TensorShardingPerValueAttr(attr).shardings)


def axes_of(attr: Any) -> tuple[Refs, ...]:
    """Returns for each dim the axes that split it, by an `sdy.sharding`."""
    dims = map(sdy.DimensionShardingAttr, sdy.TensorShardingAttr(attr).dimension_shardings)
    return tuple(refs_of(dim.axes, sdy) for dim in dims)


def refs_of(refs: Any, dialect: Any) -> Refs:
    """Returns MLIR's references to axes as `AxisRef`s; `dialect` is Shardy's or StableHLO's."""
    found = []
    for ref in map(dialect.AxisRefAttr, refs):
        info = ref.sub_axis_info
        sub = None if info is None else dialect.SubAxisInfoAttr(info)
        found.append((ref.name, sub.pre_size if sub else 1, sub.size if sub else 0))
    return tuple(found)


class Scope(NamedTuple):
    """Holds the meshes and axes of a manual region, such as the body of a `jax.shard_map`."""

    mesh: Mesh  # that the program is compiled for
    own: Mesh  # that the region is written for
    axes: Axes  # the atoms of `mesh` that its manual axes are, ascending
    held: Axes  # these, and those of the regions around it

    @property
    def is_whole(self) -> bool:
        """Returns whether all axes are manual, so that the region is one device's program."""
        return len(self.held) == len(self.mesh.atoms)


# GSPMD's text. `{devices=[2,1,4]<=[4,2]T(1,0) last_tile_dim_replicate}` splits dim 0 in two, and
# dim 1 not; what is left, 4, is replicated. Which device has which tile is a list of them, or the
# devices in order, reshaped to 4x2, transposed, and reshaped to 2x1x4. That is a mesh with an axis
# for each dim.

_TILES = re.compile(
    r"\{devices=\[(?P<tiles>[\d,]+)\](?:<=\[(?P<shape>[\d,]+)\](?:T\((?P<order>[\d,]+)\))?"
    r"|(?P<ids>[\d,]+))"
    r"(?: (?P<replicated>last_tile_dim_replicate)| last_tile_dims=\{(?P<kinds>[\w, ]*)\})?\}"
)
_NOT_TILED = re.compile(r"\{(replicated|manual|maximal device=\d+|unknown)?\}")
_EACH = re.compile(r"\{[^{}]*(?:\{[^{}]*\}[^{}]*)*\}")
_NOTES = re.compile(r"\s*(?:metadata=\{[^{}]*(?:\{[^{}]*\}[^{}]*)*\}|shard_(?:as|like) \d+)")


def _tiled(text: str, rank: int) -> Stated | None:
    closed = (False,) * rank
    text = _NOTES.sub("", text)
    bare = _NOT_TILED.fullmatch(text)
    if bare is not None:
        return Stated(NO_AXES, ((),) * rank, closed) if bare[1] == "replicated" else None
    found = _TILES.fullmatch(text)
    if found is None:
        raise FrontendError(f"cannot read the sharding {text[:100]}")
    tiles, kinds = _numbers(found["tiles"]), ["replicated"] * bool(found["replicated"])
    kinds += found["kinds"].split(", ") if found["kinds"] else []
    if len(tiles) - len(kinds) != rank:
        raise FrontendError(f"the sharding {text[:100]} is not of a tensor of rank {rank}")
    names = [*(f"dim {d}" for d in range(rank)), *(f"{kind} {i}" for i, kind in enumerate(kinds))]
    devices: Any = _numbers(found["ids"] or "")
    if not devices:
        shape = _numbers(found["shape"])
        order = _numbers(found["order"]) if found["order"] else range(len(shape))
        devices = np.arange(math.prod(shape)).reshape(shape).transpose(order).reshape(-1)
    mesh = Mesh(devices, tiles, names)
    if mesh.size == 1:
        return None
    dims = tuple(((names[d], 1, 0),) if tiles[d] > 1 else () for d in range(rank))
    unreduced = tuple((name, 1, 0) for name in names[rank:] if name.startswith("unreduced"))
    return Stated(mesh, dims, closed, unreduced)


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",") if part]
