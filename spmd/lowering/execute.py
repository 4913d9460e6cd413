"""Execute: runs the emitted module as a jax primitive inside `jax.shard_map` inside `jax.jit`.

So dispatch, donation, multi-process arrays, the compilation cache, profiling and `jax.export` are
jax's own. When jax lowers the primitive, the emitted module is merged into jax's module.
"""

import contextlib
import functools
import importlib
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from typing import Any

import jax
import numpy as np
from jax import jit as plain_jit  # users may put spmd.jit in its place
from jax.experimental import io_callback
from jax.experimental.layout import Layout
from jax.extend.core import Primitive
from jax.interpreters import mlir
from jax.sharding import NamedSharding, PartitionSpec
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import func, stablehlo

from spmd.errors import MeshError
from spmd.frontend.importer.contents import MARKS, ops_in, replace_op, tensor_type
from spmd.frontend.importer.handlers import SAME
from spmd.ir.description import CUSTOM_CALL
from spmd.ir.dialect.callbacks import CALLBACK, CHECK_CALLBACK, FLAG, INSPECT
from spmd.ir.program import Callback, Program
from spmd.ir.types import PACKED, TensorType, numpy_dtype
from spmd.launch.agree import check_same_program, digest, without_locations
from spmd.lowering.emit import Emitted, Placement, formats
from spmd.lowering.expand import LINKED
from spmd.lowering.local.callbacks import FREE
from spmd.lowering.local.composite import inline_region
from spmd.mesh.mesh import Mesh
from spmd.mesh.sharding import local_shape
from spmd.mesh.spec import jax_mesh, processes_of
from spmd.progress import kind_here

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
    # `jax.effects_barrier` waits for a program that calls Python. One with an ordered callback also
    # begins after the one before it that had one.
    return types, frozenset(_effect(c.is_ordered) for c in callbacks if c.has_effect)


def _lower(ctx: Any, *args: Any, module: str, callbacks: Callbacks, **_: Any) -> Any:
    source = ir.Module.parse(module)
    named = {ir.StringAttr(f.attributes["sym_name"]).value: f for f in source.body.operations}
    type_ = ir.FunctionType(ir.TypeAttr(named["main"].attributes["function_type"]).value)
    if len(type_.inputs) < len(args):  # those without elements are constants there
        args = tuple(arg for arg, aval in zip(args, ctx.avals_in, strict=True) if aval.size)
    name = mlir.merge_mlir_modules(
        ctx.module_context.module, "spmd_main", source, dst_symtab=ctx.module_context.symbol_table
    )
    if callbacks:  # the calls of their numbers become jax's own callback calls
        raised: list[Exception] = []
        for op in ops_in(ctx.module_context.symbol_table[name].operation):
            if op.name == CUSTOM_CALL and _target(op) in (CALLBACK, CHECK_CALLBACK):
                _emit(ctx, op, callbacks[op.attributes["number"].value], raised)
        if ctx.tokens_in is not None:  # ordered within: jax's tokens order programs
            ctx.set_tokens_out(ctx.tokens_in)
    return func.CallOp(list(type_.results), ir.FlatSymbolRefAttr.get(name), args).results


mlir.register_lowering(_program, _lower)


@dataclass(frozen=True)
class Outside:
    """What jax must know besides `Emitted`: mesh, weak types, absent devices, result shardings."""

    mesh: jax.sharding.Mesh  # the mesh of their shardings, with the user's axis types
    weak: tuple[bool, ...] = ()  # whether each result is weakly typed; none is if empty
    # descriptions of devices to compile for that are not here, in the mesh's order; None: the
    # program runs on the mesh's own devices
    devices: Sequence[Any] | None = None
    # shardings or formats of the results, written as the user's specs; those of `Emitted` if empty
    results: tuple[Placement, ...] = ()


def compile_emitted(
    emitted: Emitted, compiler_options: Mapping[str, Any], outside: Outside | None = None
) -> Any:
    """Compiles an emitted program with XLA.

    Returns jax's compiled program, which takes and returns flat global arrays; inside a
    `WithConstants` if it has constants. Raises LaunchError if another process of the mesh has
    another program or other options; not checked for devices that are not here (`outside.devices`).
    """
    outside = outside or Outside(jax_mesh(emitted.mesh))
    if outside.devices is None:
        _check_processes(emitted, compiler_options)
    if "@mosaic_gpu" in emitted.module:  # traced in another process, if it comes from a cache
        importlib.import_module("jax.experimental.mosaic.gpu")  # says where kernels' runtime is
    with x64_if(emitted.needs_x64), on_own_mesh(emitted.boundary_mesh, outside.devices):
        types = [*(constant.value.type for constant in emitted.constants), *emitted.argument_types]
        structs = [jax.ShapeDtypeStruct(t.shape, numpy_dtype(t.dtype)) for t in types]
        lowered = executable(emitted, outside).lower(*structs)
        compiled = lowered.compile(dict(compiler_options) or None)
        # jax compares arguments' layouts with XLA's, of which in 0.10 only XLA's states such bits.
        program = compiled._executable  # of which jax has no public name
        program._xla_in_layouts = [
            _Order(layout.major_to_minor, layout.tiling) if layout and type_.is_packed else layout
            for layout, type_ in zip(program._xla_in_layouts, types, strict=True)
        ]
        return WithConstants(compiled, emitted, outside) if emitted.constants else compiled


class _Order(Layout):
    """A layout that is equal to others of the same order and tiling, whatever an element's bits."""

    def __eq__(self, other: object) -> bool:
        order = getattr(other, "major_to_minor", None), getattr(other, "tiling", None)
        return (self.major_to_minor, self.tiling) == order

    __hash__ = Layout.__hash__


class WithConstants:
    """jax's compiled program, called with its constants in front of the given arguments.

    The constants are put on the devices when it is made, unless these are not here.
    """

    def __init__(self, compiled: Any, emitted: Emitted, outside: Outside) -> None:
        self.compiled, self.constants = compiled, list[jax.Array]()
        if outside.devices is None:
            shardings = emitted.named(emitted.constant_shardings, outside.mesh)
            for constant, sharding in zip(emitted.constants, shardings, strict=True):
                elements = constant.value.array()
                array = jax.make_array_from_callback(elements.shape, sharding, elements.__getitem__)
                self.constants.append(array)

    def __call__(self, *arguments: Any) -> Any:
        """Runs the program on the constants and the given flat arguments; returns flat results."""
        return self.compiled(*self.constants, *arguments)

    def __getattr__(self, name: str) -> Any:
        # One that is being copied has nothing yet, and is asked for special methods.
        return getattr(vars(self).get("compiled"), name)


def on_own_mesh(
    mesh: Mesh, devices: Sequence[Any] | None = None
) -> contextlib.AbstractContextManager[Any]:
    """Returns a context in which jax's current mesh is `mesh`, on `devices` (None: its own)."""
    return jax.set_mesh(jax_mesh(mesh, devices))


def cost_analysis(emitted: Emitted) -> Any:
    """Returns XLA's cost analysis of one device's program (`flops`, ...), which is not compiled."""
    types = (*emitted.argument_types, *(constant.value.type for constant in emitted.constants))
    shardings = (*emitted.arguments, *emitted.constant_shardings)
    structs = [
        jax.ShapeDtypeStruct(local_shape(t.shape, sharding, emitted.mesh), numpy_dtype(t.dtype))
        for t, sharding in zip(types, shardings, strict=True)
    ]
    run = _runner(emitted.module, emitted.result_types, emitted.callbacks)
    with x64_if(emitted.needs_x64):
        return plain_jit(run, keep_unused=True).lower(*structs).cost_analysis()


def check_no_callbacks(emitted: Emitted) -> None:
    """Raises MeshError if a program to be compiled ahead of time calls Python functions."""
    called = dict.fromkeys(c.label for c in emitted.callbacks if not c.inspects)
    if called:
        raise MeshError(
            "a program that calls Python cannot be compiled for a machine that is not here",
            actual=f"it calls {', '.join(called)}",
            fix="plan it alone, .lower(..., topology=...), or leave the calls out: "
            "spmd.Options(callbacks='drop') does so with jax.debug.print and jax.debug.callback",
        )


def _check_processes(emitted: Emitted, compiler_options: Mapping[str, Any]) -> None:
    """Raises LaunchError unless all processes of the mesh have this program and these options."""
    processes = processes_of(emitted.mesh)
    if len(processes) < 2:
        return
    more = {
        "shardings": digest(f"{emitted.arguments} {emitted.results}"),
        "donated arguments": str(emitted.donated),
    }
    if emitted.constants:  # which the module's text does not have
        found = [
            (c.value.type, c.sharding, sha256(c.value.data).digest()) for c in emitted.constants
        ]
        more["constants"] = digest(str(found))
    more |= {f"compiler option {k}": str(v) for k, v in compiler_options.items()}
    text = emitted.module
    texts = {"one device's program": (digest(without_locations(text)), lambda: text)}
    label = kind_here() or f"compiling {emitted.name}"
    check_same_program(label, texts, emitted.mesh, processes, more)


def x64_if(needed: bool) -> contextlib.AbstractContextManager[Any]:
    """Returns a context with jax's 64-bit types enabled if `needed`, else one without effect."""
    return jax.enable_x64(True) if needed else contextlib.nullcontext()


def executable(emitted: Emitted, outside: Outside | None = None) -> Any:
    """Returns a jitted function that runs a program: `(*constants, *arguments) -> results`.

    All are flat global arrays, constants first, as jax's C++ dispatch has them. Trace it within
    `on_own_mesh`. `outside`: what jax must know besides `emitted`; None: the mesh is enough.
    """
    outside = outside or Outside(jax_mesh(emitted.mesh))
    boundary = jax_mesh(emitted.boundary_mesh, outside.devices)
    run = _runner(emitted.module, emitted.result_types, emitted.callbacks, outside.weak)
    count = len(emitted.constants)

    mapped: Any = jax.shard_map(
        (lambda *args: run(*args[count:], *args[:count])) if count else run,
        mesh=boundary,
        in_specs=emitted.specs((*emitted.constant_shardings, *emitted.arguments)),
        out_specs=emitted.specs(emitted.results),
        check_vma=False,
    )
    arguments, results = map(
        formats, emitted.named_ends(outside.mesh), (emitted.argument_orders, emitted.result_orders)
    )

    def run_all(*args: Any) -> Any:
        # Descriptions of devices know no memories: there jax sees by this where results lie.
        made = list(mapped(*args))
        for i in emitted.result_hosts:
            made[i] = jax.device_put(made[i], jax.memory.Space.Host)
        return tuple(made)

    return plain_jit(
        run_all if outside.devices and emitted.result_hosts else mapped,
        in_shardings=(*emitted.named(emitted.constant_shardings, outside.mesh), *arguments),
        out_shardings=outside.results or results,
        donate_argnums=[count + i for i in emitted.donated],
        keep_unused=True,
    )


def executable_on(
    module: str, out_types: Sequence[TensorType], mesh: Mesh, callbacks: Callbacks = ()
) -> Any:
    """Returns a function from host arrays to jax arrays that runs an unpartitioned module.

    Every device of the mesh has all arguments and results; if the module has a `jax.shard_map`, XLA
    partitions the rest. Callbacks of `jax.debug` do nothing.
    """
    quiet = [replace(c, function=lambda *_: ()) if c.is_debug else c for c in callbacks]
    run = _runner(module, tuple(out_types), tuple(quiet))
    whole = NamedSharding(jax_mesh(mesh), PartitionSpec())
    jitted = plain_jit(run, keep_unused=True, out_shardings=whole)

    def run_there(*args: Any) -> Any:
        with on_own_mesh(mesh):
            return jitted(*jax.device_put(args, whole))

    return run_there


def _runner(
    module: str,
    out_types: tuple[TensorType, ...],
    callbacks: Callbacks,
    weak: tuple[bool, ...] = (),
) -> Callable[..., Any]:
    weak = weak or (False,) * len(out_types)
    how = {"module": module, "out_types": out_types, "weak": weak, "callbacks": callbacks}
    return lambda *args: tuple(_program.bind(*args, **how))


def without_shardings(module: ir.Module) -> str:
    """Returns a module's text without sharding annotations, except those of a `jax.shard_map`."""
    with module.context:
        copy = ir.Module.parse(str(module.operation.get_asm(enable_debug_info=True)))
        ops = ops_in(copy.operation)
        is_manual = any(op.name == "sdy.manual_computation" for op in ops)
        for op in ops:
            for name in (*MARKS, "arg_attrs", "res_attrs"):
                if name in op.attributes:
                    del op.attributes[name]
            if op.name in SAME:
                replace_op(op, op.operands)
            elif op.name == "sdy.constant":
                with ir.InsertionPoint(op), op.location:
                    replace_op(op, [stablehlo.ConstantOp(op.attributes["value"]).result])
            elif op.name == "sdy.named_computation":
                inline_region(op)
            elif (
                op.name == "sdy.sharding_group"
                or (op.name == "sdy.mesh" and not is_manual)
                or _target(op) == INSPECT
            ):
                op.erase()
        functions = [op for op in copy.body.operations if op.operation.name == "func.func"]
        if len(functions) == 1:
            functions[0].attributes["sym_name"] = ir.StringAttr.get("main")
        return str(copy.operation.get_asm(enable_debug_info=True))


# Compiler options for XLA that are set unless the user sets them; each one was measured.

DEFAULTS: dict[str, dict[str, str | bool | int]] = {
    # With one collective at a time a gather is awaited before the next reduce-scatter may begin,
    # and products wait for both. A 7B's 8 layers over two H200s: 172 ms with 4, 176 with 1.
    "cuda": {"xla_gpu_experimental_parallel_collective_overlap_limit": 4},
    # Without them no gather is asynchronous on v4 and v5p; v5e does as if both were set. No option
    # was found that makes sums asynchronous.
    "tpu": {
        "xla_enable_async_all_gather": "true",
        "xla_tpu_enable_async_collective_fusion_fuse_all_gather": "true",
    },
}
"""Platform -> default options. jaxlib 0.10 and 0.11 know those of GPUs, libtpu 0.0.42 of TPUs."""

EIGHT_BIT: dict[str, dict[str, str | bool | int]] = {
    # XLA tries Triton's products first, 16 s for each shape, and takes cuBLASLt's in any case.
    "cuda": {"xla_gpu_enable_triton_gemm": False}
}
"""Platform -> more default options, for programs that multiply matrices of 8-bit floats."""


def xla_options(platform: str, program: Program, given: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns XLA's options for a local program: defaults, and `given` by the user, which win."""
    chosen = DEFAULTS.get(platform, {})
    kinds = {op.kind for op in program.walk()}
    products = [kind for kind in kinds if kind.about.flops is not None]
    if any(kind.operands[0].dtype.startswith("f8") for kind in products):
        chosen = {**chosen, **EIGHT_BIT.get(platform, {})}
    return {**chosen, **given}


# Python functions that a program calls: the calls in its module become jax's own.
#
# `mlir.emit_python_callback` writes what a backend needs (a custom call on CPUs and GPUs, send and
# receive on TPUs) and keeps the function alive with the executable.

_Arrays = Sequence[np.ndarray[Any, Any]]


@functools.cache
def _effect(ordered: bool) -> Any:
    # It has no public name. Of jax's ordered effects this one may be in a program for several
    # devices; that of `jax.debug.callback` may not.
    (effect,) = jax.make_jaxpr(lambda: io_callback(lambda: (), (), ordered=ordered))().effects
    return effect


def _target(op: Any) -> str:
    name = "call_target_name"
    return str(op.attributes[name].value) if name in op.attributes else ""


def _emit(ctx: Any, op: Any, callback: Callback, raised: list[Exception]) -> None:
    """Replaces the MLIR op `op`, which calls or checks a callback, by jax's own callback call.

    If one device calls for all, an exception goes into `raised`, from where the check raises it.
    """
    operands, results = list(op.operands), list(op.results)
    is_linked = LINKED in op.attributes
    is_shared = FREE in op.attributes and op.attributes[FREE].value
    types = [_aval(result.type) for result in results[1 : -1 if is_linked else None]]

    def check(*_: Any) -> _Arrays:
        if not raised:
            raise RuntimeError(f"{callback.label} raised in another process, which says what")
        trace = "".join(traceback.format_exception(raised[-1]))  # XLA hands on no more
        raise RuntimeError(f"{callback.label} raised\n{trace}")

    def call(*args: Any) -> _Arrays:
        """Returns (1 if its error is in `raised`, else 0; *results; last argument if linked)."""
        args, link = (args[:-1], args[-1:]) if is_linked else (args, ())
        flag = 0
        try:
            found = _on_cpu(callback.function, args)
            # They are of the types that were promised; Python's own numbers are converted.
            dtypes = [jax.dtypes.canonicalize_dtype(result.dtype) for result in found]
            have = ", ".join(f"{d}{list(r.shape)}" for r, d in zip(found, dtypes, strict=True))
            want = ", ".join(f"{t.dtype}{list(t.shape)}" for t in types)
            if have != want:
                raise TypeError(f"the callback returned ({have}) instead of ({want})")
            arrays = [np.asarray(result, t.dtype) for result, t in zip(found, types, strict=True)]
        except Exception as error:
            if not is_shared:
                raise
            raised[:] = [error]
            flag, arrays = 1, [np.zeros(t.shape, t.dtype) for t in types]
        return (np.asarray(flag, numpy_dtype(FLAG.dtype)), *arrays, *map(np.asarray, link))

    with ir.InsertionPoint(op), op.location:
        avals_in, avals_out = ([_aval(v.type) for v in values] for values in (operands, results))
        made, _, _ = mlir.emit_python_callback(
            ctx.replace(primitive=None, avals_in=avals_in, avals_out=avals_out),
            check if _target(op) == CHECK_CALLBACK else call,
            None,
            operands,
            avals_in,
            avals_out,
            has_side_effect=True,
            returns_token=False,
        )
    replace_op(op, made)


def _aval(type_: Any) -> Any:
    tensor = tensor_type(type_)
    return jax.core.ShapedArray(tensor.shape, numpy_dtype(tensor.dtype))


ALIGNMENT = 64
"""Bytes: XLA's on CPUs."""


def _on_cpu(function: Callable[..., Any], args: Sequence[Any]) -> Sequence[Any]:
    """Calls `function` with `args` on jax's CPU (if none, as they are); returns numpy arrays."""
    try:
        cpu = jax.local_devices(backend="cpu")[0]
    except RuntimeError:
        return [np.asarray(result) for result in function(*args)]
    # An array that jax copies is there once one of its threads has copied it, and all of them may
    # wait for this call: one that it takes as it is, is there at once. Packed ones stay numpy's.
    given = [
        np.array(x) if x.dtype in PACKED else jax.device_put(_aligned(x), cpu, may_alias=True)
        for x in map(np.asarray, args)
    ]
    with jax.default_device(cpu):
        return [np.asarray(result) for result in function(*given)]


def _aligned(x: Any) -> Any:
    """A copy at an address of which XLA takes arrays as they are."""
    memory = np.empty(x.nbytes + ALIGNMENT, np.uint8)
    begin = -memory.ctypes.data % ALIGNMENT
    copied = memory[begin : begin + x.nbytes].view(x.dtype).reshape(x.shape)
    copied[...] = x
    return copied
