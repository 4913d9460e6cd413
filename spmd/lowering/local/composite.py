"""Composites at local shapes: their kernel or decomposition is traced for one device.

before: `%3 = stablehlo.composite "my.op" %1, %2`
after:  `%3 = multiply %1, %2; %4 = ...`, the ops of its decomposition, where there is no kernel;
        else the same op at the shapes of one device, which is emitted as
        `%3 = call @my_op_1f3a(%1, %2)`, with a `func @my_op_1f3a`

A kernel's functions are copied into the emitted module as they are, custom calls included. A digest
of the text in their names makes equal functions one.
"""

import hashlib
import math
import re
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import AbstractDevice, AbstractMesh, AxisType, PartitionSpec
from jaxlib.mlir import ir

from spmd.errors import SpmdError
from spmd.frontend.canonicalize import canonicalize
from spmd.frontend.importer.contents import ops_in, replace_op
from spmd.frontend.importer.module import import_module, signature
from spmd.frontend.trace import trace
from spmd.ir.description import COMPOSITE, FROM_MANUAL
from spmd.ir.dialect import composites
from spmd.ir.dialect.builder import Builder
from spmd.ir.dialect.composites import COMPOSITES, Function, arguments_of
from spmd.ir.dialect.manual import MANUAL, TO_MANUAL
from spmd.ir.program import Op, OpKind, Program, Region, Value
from spmd.ir.rewrite import append_ops
from spmd.ir.types import Attribute, TensorType, needs_x64, numpy_dtype, types_text
from spmd.lowering.local.table import LocalOp
from spmd.predict.memory import peak_memory
from spmd.predict.ops import exchanged_bytes


class TracedComposite(NamedTuple):
    """A traced composite: entry's name, texts of functions, program or None, workspace in bytes."""

    entry: str
    functions: tuple[str, ...]
    # the functions as a program; None if they have ops that the compiler does not know
    program: Program | None
    workspace: int  # predicted bytes that it holds beside its operands and results


class _Declined(Exception):
    """Raised while a kernel is traced that returns NotImplemented."""


def lower_composite(op: LocalOp) -> tuple[Value, ...]:
    """Appends a composite at one device's shapes, as its kernel or else its decomposition."""
    return append_composite(op.b, op.operands, op.result_types(), op.attrs)


def lower_exchanging(op: LocalOp, factor: int) -> tuple[Value, ...]:
    """Appends a composite whose kernel exchanges data over the atoms that split `factor`."""
    exchange, axes = op.rule.factors[factor].exchange, op.choice.assignment[factor]
    assert exchange is not None, "no factor that exchanges"
    attrs = {
        **op.attrs,
        composites.AXES: axes,
        composites.SENT: exchanged_bytes(exchange, op.choice.assignment, op.mesh),
        composites.MESH: op.mesh.atom_sizes,
    }
    return append_composite(op.b, op.operands, op.result_types(), attrs)


def append_composite(
    b: Builder,
    operands: Sequence[Value],
    results: Sequence[TensorType],
    attrs: Mapping[str, Attribute],
) -> tuple[Value, ...]:
    """Appends a composite as its kernel, else its decomposition; SpmdError if it has neither."""
    types, platform = tuple(b.types[v] for v in operands), attrs.get(composites.PLATFORM, "")
    for is_kernel in (True, False):
        kind = OpKind(COMPOSITE, types, tuple(results), {**attrs, composites.KERNEL: is_kernel})
        if is_kernel and platform not in COMPOSITES[kind.attrs["name"]].kernels:
            continue
        traced = traced_composite(kind)
        if traced is not None and traced.program is not None and not is_kernel:
            return append_ops(b, traced.program, operands, loc=b.loc)
        if traced is not None:
            more = {composites.WORKSPACE: traced.workspace}
            return b.op(COMPOSITE, operands, results, {**kind.attrs, **more})
    raise SpmdError(
        f"composite {attrs['name']} has nothing that computes it here",
        op=", ".join(map(str, types)),
        source=b.loc.source,
        required=f"a kernel for {platform} that takes these shapes, or a decomposition",
        fix="pass decomposition= to spmd.register_composite",
    )


def traced_composite(kind: OpKind) -> TracedComposite | None:
    """Returns a kind's kernel or decomposition (attribute `KERNEL` says which), traced once.

    Returns None if the kernel declines these shapes, or there is no decomposition. Raises SpmdError
    if the function fails, or its results have other types than the composite's.
    """
    composite = COMPOSITES[kind.attrs["name"]]
    platform = kind.attrs.get(composites.PLATFORM, "")
    is_kernel = kind.attrs.get(composites.KERNEL, composite.decomposition is None)
    function = composite.kernels[platform] if is_kernel else composite.decomposition
    if function is None:
        return None
    # The workspace is known only after tracing, and is added to the op's kind: the kind without it
    # is the key, so that planning, lowering and emission trace a kernel once between them.
    bare = {name: value for name, value in kind.attrs.items() if name != composites.WORKSPACE}
    cache = OpKind(kind.name, kind.operands, kind.results, bare)._cache
    if "composite.traced" not in cache:
        cache["composite.traced"] = _trace(function, kind, platform or "cpu")
    found: TracedComposite | None = cache["composite.traced"]
    return found


def _trace(function: Function, kind: OpKind, platform: str) -> TracedComposite | None:
    attributes = arguments_of(kind)
    sizes, axes = kind.attrs.get(composites.MESH, ()), kind.attrs.get(composites.AXES, ())
    # Pallas asks jax for the kind of the default device, whatever platform it lowers for; from jax
    # 0.11 on for GPUs, too. So where none of the platform is here, one stands in for it.
    device = _STAND_INS.get(platform)
    device = None if device and jax.default_backend() == device.platform else device
    lowers_for: AbstractContextManager[Any] = nullcontext()
    if device is not None:
        lowers_for = jax.sharding.use_abstract_mesh(AbstractMesh((), (), abstract_device=device))
    if axes:
        attributes["axes"] = tuple(map(_atom_name, axes))

    def run(*operands: Any) -> Any:
        results = function(*operands, **attributes)
        if results is NotImplemented:
            raise _Declined
        return results

    structs = [jax.ShapeDtypeStruct(t.shape, numpy_dtype(t.dtype)) for t in kind.operands]
    whole: Callable[..., Any] = run
    if axes:
        # Explicit axes, as jax 0.11 makes them, ask for a mesh of devices around the trace.
        names, auto = tuple(map(_atom_name, range(len(sizes)))), (AxisType.Auto,) * len(sizes)
        mesh = AbstractMesh(tuple(sizes), names, axis_types=auto, abstract_device=device)
        spec = PartitionSpec()  # every device has its own, which nothing here looks at
        whole = jax.shard_map(run, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False)
    try:
        with jax.enable_x64(needs_x64((*kind.operands, *kind.results))), lowers_for:
            module = trace(whole, structs, {}, platform=platform).module
    except _Declined:
        return None
    except Exception as error:
        raise SpmdError(
            f"what computes composite {kind.attrs['name']} on {platform} fails at local shapes",
            op=types_text(kind.operands),
            actual=f"{type(error).__name__}: {error}".strip()[:400],
            fix="correct it, or let a kernel return NotImplemented for these shapes",
        ) from error
    results = signature(module)[1]
    if results != kind.results:
        raise SpmdError(
            f"what computes composite {kind.attrs['name']} on {platform} has other results",
            op=types_text(kind.operands),
            actual=", ".join(map(str, results)),
            required=", ".join(map(str, kind.results)),
            fix="make the rule and the functions given to spmd.register_composite fit",
        )
    program = None
    with suppress(SpmdError):  # it has ops that the compiler need not understand here
        program = canonicalize(import_module(module).program)
    if axes:
        program = program and _of_one_device(program)
        _inline_manual(module, sizes)
    # Of a kernel nothing is known but what is around its calls.
    workspace = peak_memory(program, (), platform).temporary if program else 0
    with module.context:  # no other module has functions of these names
        digest = hashlib.sha256(str(module).encode()).hexdigest()[:12]
        entry = "".join(c if c.isalnum() else "_" for c in kind.attrs["name"]) + "_" + digest
        functions = [item.operation for item in module.body.operations]
        for made in functions:
            old = ir.StringAttr(made.attributes["sym_name"]).value
            new = entry if old == "main" else f"{entry}_{old}"
            ir.SymbolTable.replace_all_symbol_uses(old, new, module.operation)
            ir.SymbolTable.set_symbol_name(made, new)
            made.attributes["sym_visibility"] = ir.StringAttr.get("private")
        how = {"use_local_scope": True, "enable_debug_info": False}
        texts = tuple(str(made.get_asm(**how)) for made in functions)
    return TracedComposite(entry, texts, program, workspace)


_STAND_INS = {
    "cuda": AbstractDevice("NVIDIA H100", None, "gpu"),
    "tpu": AbstractDevice("TPU v5e", 1, "tpu"),
}
"""Platform -> the device for which Pallas lowers kernels if none of the platform is here."""


# Functions of one device that exchange with others by jax's collectives.
#
# jax knows the groups of a collective only inside a `shard_map`. So a function is traced inside one
# over all devices, with the mesh's atoms as axes, and then its body takes the place of that:
#
# before: func @main(%0) { %1 = sdy.manual_computation(%0) (%2) { %3 = all_gather %2 ... } }
# after:  func @main(%0) { %3 = all_gather %0 ... }


def _atom_name(atom: int) -> str:
    return f"atom{atom}"


def _inline_manual(module: ir.Module, sizes: Sequence[int]) -> None:
    """Replaces a module's one `shard_map` by its body, in place, with groups of device numbers."""
    atom_of = {_atom_name(atom): atom for atom in range(len(sizes))}
    with module.context, ir.Location.unknown():
        for op in ops_in(module.operation):
            # From jax 0.11 on groups are axes of a mesh, which is a symbol of the module.
            text = str(op.attributes["replica_groups"]) if "replica_groups" in op.attributes else ""
            if "axes" in text:
                atoms = [atom_of[name] for name in re.findall(r'"(\w+)"', text)]
                others = [atom for atom in range(len(sizes)) if atom not in atoms]
                devices = np.arange(math.prod(sizes)).reshape(sizes).transpose([*others, *atoms])
                groups: Any = devices.reshape(-1, math.prod(sizes[atom] for atom in atoms))
                op.attributes["replica_groups"] = ir.DenseElementsAttr.get(groups.copy())
        for item in list(module.body.operations):
            if item.operation.name != "func.func":
                item.operation.erase()
        blocks = [f.operation.regions[0].blocks[0] for f in module.body.operations]
        for op in [op.operation for block in blocks for op in block]:
            if op.name == "sdy.manual_computation":
                inline_region(op)


def inline_region(op: Any) -> None:
    """Replaces an MLIR op, whose one region runs once, by the ops of that region, in place."""
    block = op.regions[0].blocks[0]
    for argument, operand in zip(block.arguments, op.operands, strict=True):
        argument.replace_all_uses_with(operand)
    *inside, end = block.operations
    for item in inside:
        item.move_before(op)
    replace_op(op, end.operands)


def _of_one_device(program: Program) -> Program:
    """Returns a program with its one `shard_map` replaced by its body, to predict memory with."""

    def flat(op: Op) -> tuple[Op, ...]:
        if op.name == MANUAL:
            return tuple(inner for part in op.regions[0].ops for inner in flat(part))
        if op.name in (TO_MANUAL, FROM_MANUAL):  # another name of its operand
            types = op.kind.operands
            return (op._replace(kind=OpKind("stablehlo.reshape", types, types, {})),)
        return (op,)

    ops = tuple(part for op in program.body.ops for part in flat(op))
    ends = {op.results: op.regions[0].results for op in program.body.ops if op.name == MANUAL}
    inside = {v: x for outer, inner in ends.items() for v, x in zip(outer, inner, strict=True)}
    results = tuple(inside.get(v, v) for v in program.body.results)
    return program._replace(body=Region(program.body.args, ops, results))
