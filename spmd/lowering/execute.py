"""Execute: the emitted module as a JAX primitive inside `shard_map` inside `jax.jit`.

So dispatch, donation, multi-process arrays, the compilation cache, profiling and `jax.export` are
jax's own. The module is merged into the surrounding one when jax lowers the primitive.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax import jit as plain_jit  # users may put spmd.jit in its place
from jax.extend.core import Primitive
from jax.interpreters import mlir
from jax.sharding import NamedSharding, PartitionSpec
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import func, stablehlo

from spmd.errors import MeshError, UnsupportedOpError
from spmd.frontend.importer.attributes import MARKS
from spmd.frontend.importer.handlers import LEAVES, SAME
from spmd.ir.program import Callback
from spmd.ir.types import TensorType, numpy_dtype
from spmd.launch.agree import check_same_program, digest
from spmd.lowering.emitted import Emitted, Placement, formats
from spmd.lowering.host import effects_of, emit_callbacks, silent
from spmd.lowering.local.composite import inline_region
from spmd.lowering.xla_options import options_within
from spmd.mesh.mesh import Mesh
from spmd.mesh.sharding import Sharding
from spmd.mesh.spec import jax_mesh, partition_spec
from spmd.mesh.topology import Topology

_program = Primitive("spmd_program")
_program.multiple_results = True


Callbacks = tuple[Callback, ...]


@_program.def_effectful_abstract_eval  # type: ignore[untyped-decorator]
def _abstract(
    *_: Any,
    out_types: tuple[TensorType, ...],
    weak: tuple[bool, ...],
    callbacks: Callbacks,
    **__: Any,
) -> tuple[list[Any], frozenset[Any]]:
    types = [
        jax.core.ShapedArray(t.shape, numpy_dtype(t.dtype), weak_type=is_weak)
        for t, is_weak in zip(out_types, weak, strict=True)
    ]
    return types, effects_of(callbacks)


def _lower(ctx: Any, *args: Any, module: str, callbacks: Callbacks, **_: Any) -> Any:
    source = ir.Module.parse(module)
    named = {ir.StringAttr(f.attributes["sym_name"]).value: f for f in source.body.operations}
    main = named["main"]
    type_ = ir.FunctionType(ir.TypeAttr(main.attributes["function_type"]).value)
    results = type_.results
    if len(type_.inputs) < len(args):  # those without elements are constants there
        args = tuple(arg for arg, aval in zip(args, ctx.avals_in, strict=True) if aval.size)
    name = mlir.merge_mlir_modules(
        ctx.module_context.module, "spmd_main", source, dst_symtab=ctx.module_context.symbol_table
    )
    if callbacks:
        emit_callbacks(ctx, ctx.module_context.symbol_table[name], callbacks)
        if ctx.tokens_in is not None:  # ordered within: jax's tokens order programs
            ctx.set_tokens_out(ctx.tokens_in)
    return func.CallOp(list(results), ir.FlatSymbolRefAttr.get(name), args).results


mlir.register_lowering(_program, _lower)


@dataclass(frozen=True)
class Outside:
    """What jax is told of a program's arguments and results, besides what the program says."""

    mesh: jax.sharding.Mesh  # the mesh that they lie on: the program's, with the user's axis types
    weak: tuple[bool, ...] = ()  # whether the type of each result is weak; none is if empty
    # descriptions of devices that are not here, in the mesh's order; the process's own by id if
    # None
    devices: Sequence[Any] | None = None
    # how the results lie, in the user's words; as the program says if empty
    results: tuple[Placement, ...] = ()


def compile_emitted(
    emitted: Emitted, compiler_options: Mapping[str, Any], outside: Outside | None = None
) -> Any:
    """Hands an emitted program to XLA, once all processes of the mesh have shown the same one.

    Returns:
      jax's compiled program: it takes and returns flat global arrays. One `WithConstants` if it
      has some, which looks the same.

    Raises:
      LaunchError: another process of the job has another program.
      RuntimeError: XLA refuses it.
    """
    outside = outside or Outside(jax_mesh(emitted.mesh))
    if outside.devices is None:
        _check_processes(emitted, compiler_options)
    with x64_if(emitted.needs_x64), on_own_mesh(emitted.boundary_mesh, outside.devices):
        constants = [constant.value.type for constant in emitted.constants]
        structs = [
            jax.ShapeDtypeStruct(t.shape, numpy_dtype(t.dtype))
            for t in (*constants, *emitted.argument_types)
        ]
        lowered = executable(emitted, outside).lower(*structs)
        compiled = lowered.compile(dict(compiler_options) or None)
        if not constants:
            return compiled
        return WithConstants(compiled, emitted, outside)


class WithConstants:
    """jax's compiled program, and the constants that it takes in front of its arguments.

    Of these every process places the pieces of its own devices; none if the devices are not here.
    """

    def __init__(self, compiled: Any, emitted: Emitted, outside: Outside) -> None:
        self.compiled, self.constants = compiled, list[jax.Array]()
        if outside.devices is None:
            shardings = emitted.constant_shardings(outside.mesh)
            for constant, sharding in zip(emitted.constants, shardings, strict=True):
                elements = constant.value.array()
                array = jax.make_array_from_callback(elements.shape, sharding, elements.__getitem__)
                self.constants.append(array)

    def __call__(self, *arguments: Any) -> Any:
        """Runs the program on flat arguments."""
        return self.compiled(*self.constants, *arguments)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.compiled, name)


def on_own_mesh(
    mesh: Mesh, devices: Sequence[Any] | None = None
) -> contextlib.AbstractContextManager[Any]:
    """A context in which `executable` can be traced, whatever mesh the user has set around."""
    return jax.set_mesh(jax_mesh(mesh, devices))


def compile_within(
    limit: int,
    emitted: Emitted,
    topology: Topology,
    compiler_options: Mapping[str, Any],
    outside: Outside | None = None,
) -> Any:
    """As `compile_emitted`, for a program that has been planned within a limit of bytes.

    Where XLA takes more than the limit, its scheduler is told of it; of both programs the smaller
    one is kept. It is not told at once, for then it also slows down what fits.
    """
    free = compile_emitted(emitted, compiler_options, outside)
    used, around = _memory(free)
    within = options_within(limit, around, topology, compiler_options)
    if used <= limit or within == compiler_options:
        return free
    tight = compile_emitted(emitted, within, outside)
    return tight if _memory(tight)[0] < used else free


def _memory(compiled: Any) -> tuple[int, int]:
    """Bytes that a program takes of a device, and those of arguments and results among them."""
    use = compiled.memory_analysis()
    if use is None:
        return 0, 0
    around = use.argument_size_in_bytes + use.output_size_in_bytes - use.alias_size_in_bytes
    return around + use.temp_size_in_bytes, around


def check_no_callbacks(emitted: Emitted) -> None:
    """MeshError if a program that is compiled for elsewhere calls Python, which takes a runtime."""
    if emitted.callbacks:
        raise MeshError(
            "a program that calls Python cannot be compiled for a machine that is not here",
            actual=f"it calls {', '.join(dict.fromkeys(c.label for c in emitted.callbacks))}",
            fix="plan it alone (`lower(topology=...)`), or leave the calls out: "
            "Options(callbacks='drop') does so with jax.debug.print and jax.debug.callback",
        )


def _check_processes(emitted: Emitted, compiler_options: Mapping[str, Any]) -> None:
    """Every process of the mesh has this program: a collective of two programs hangs."""
    more = {
        "shardings": digest(f"{emitted.arguments} {emitted.results}"),
        "donated arguments": str(emitted.donated),
    }
    if jax.process_count() > 1 and emitted.constants:  # which the module's text does not have
        found = hashlib.sha256()
        for value, sharding in emitted.constants:
            found.update(f"{value.type} {sharding}".encode())
            found.update(value.data)
        more["constants"] = found.hexdigest()[:12]
    more |= {f"compiler option {k}": str(v) for k, v in compiler_options.items()}
    mesh = emitted.mesh
    check_same_program(emitted.name, emitted.module, mesh, jax_mesh(mesh), more)


def x64_if(needed: bool) -> contextlib.AbstractContextManager[Any]:
    """A context in which jax keeps elements of 64 bits, if needed; else all is as configured."""
    return jax.enable_x64(True) if needed else contextlib.nullcontext()


def executable(emitted: Emitted, outside: Outside | None = None) -> Any:
    """A jitted function of constants and flat global arguments that runs an emitted program.

    Constants come first, where jax's C++ dispatch puts such values. It is traced `on_own_mesh`.
    """
    outside = outside or Outside(jax_mesh(emitted.mesh))
    boundary = jax_mesh(emitted.boundary_mesh, outside.devices)
    run = _runner(emitted.module, emitted.result_types, emitted.callbacks, outside.weak)
    count = len(emitted.constants)

    def specs(shardings: Sequence[Sharding]) -> tuple[PartitionSpec, ...]:
        return tuple(partition_spec(sharding, emitted.boundary_mesh) for sharding in shardings)

    mapped = jax.shard_map(
        (lambda *args: run(*args[count:], *args[:count])) if count else run,
        mesh=boundary,
        in_specs=(*specs([c.sharding for c in emitted.constants]), *emitted.argument_specs),
        out_specs=specs(emitted.results),
        check_vma=False,
    )
    where = outside.mesh
    arguments = formats(emitted.argument_shardings(where), emitted.argument_orders)
    results = formats(emitted.result_shardings(where), emitted.result_orders)
    return plain_jit(
        mapped,
        in_shardings=(*emitted.constant_shardings(where), *arguments),
        out_shardings=outside.results or results,
        donate_argnums=[count + i for i in emitted.donated],
        keep_unused=True,
    )


def executable_on(
    module: str, out_types: Sequence[TensorType], where: Any, callbacks: Callbacks = ()
) -> Any:
    """A function of host arrays that runs a whole program (its text) on a jax device or a mesh.

    On a mesh, that of the program's manual regions, every device holds all arguments and results;
    what is between is left to XLA's partitioner. Callbacks that only look do nothing.
    """
    run, place = _runner(module, tuple(out_types), silent(callbacks)), where
    more: dict[str, Any] = {}
    if isinstance(where, Mesh):
        place = NamedSharding(jax_mesh(where), PartitionSpec())
        more = {"out_shardings": place}
    jitted = plain_jit(run, keep_unused=True, **more)

    def run_there(*args: Any) -> Any:
        with on_own_mesh(where if isinstance(where, Mesh) else Mesh([where.id], (1,), ("one",))):
            return jitted(*jax.device_put(args, place))

    return run_there


def _runner(
    module: str,
    out_types: tuple[TensorType, ...],
    callbacks: Callbacks,
    weak: tuple[bool, ...] = (),
) -> Callable[..., Any]:
    weak = weak or (False,) * len(out_types)

    def run(*args: Any) -> Any:
        found = _program.bind(
            *args, module=module, out_types=out_types, weak=weak, callbacks=callbacks
        )
        return tuple(found)

    return run


def without_shardings(module: ir.Module) -> str:
    """A module's text without anything that says how values lie on devices, but for manual regions.

    UnsupportedOpError for a manual region as GSPMD's text has it, which only its partitioner runs.
    """
    target = "call_target_name"
    if _holds(module, lambda op: target in op.attributes and op.attributes[target].value == LEAVES):
        raise UnsupportedOpError(
            "a jax.shard_map in a module for GSPMD cannot be run unpartitioned",
            fix="lower the program with jax_use_shardy_partitioner=True, and verify that",
        )
    with module.context:
        copy = ir.Module.parse(str(module.operation.get_asm(enable_debug_info=True)))
        if not _holds(copy, lambda op: op.name == "sdy.manual_computation"):
            for item in list(copy.body.operations):
                if item.operation.name == "sdy.mesh":
                    item.operation.erase()
        copy.operation.walk(_without_sharding)
        functions = [op for op in copy.body.operations if op.operation.name == "func.func"]
        if len(functions) == 1:
            functions[0].attributes["sym_name"] = ir.StringAttr.get("main")
        return str(copy.operation.get_asm(enable_debug_info=True))


def _holds(module: ir.Module, is_wanted: Callable[[Any], bool]) -> bool:
    found = False

    def visit(op: Any) -> Any:
        nonlocal found
        found = found or is_wanted(op)
        return ir.WalkResult.INTERRUPT if found else ir.WalkResult.ADVANCE

    module.operation.walk(visit)
    return found


def _without_sharding(op: Any) -> Any:
    for name in (*MARKS, "arg_attrs", "res_attrs"):
        if name in op.attributes:
            del op.attributes[name]
    if op.name in SAME:
        _replace(op, op.operands)
    elif op.name == "sdy.constant":
        with ir.InsertionPoint(op), op.location:
            _replace(op, [stablehlo.ConstantOp(op.attributes["value"]).result])
    elif op.name == "sdy.named_computation":
        inline_region(op)
    elif op.name == "sdy.sharding_group":
        op.erase()
    return ir.WalkResult.ADVANCE


def _replace(op: Any, values: Sequence[Any]) -> None:
    for result, value in zip(op.results, values, strict=True):
        result.replace_all_uses_with(value)
    op.erase()
