"""Composites at local shapes: a JAX function traced to the functions of a module.

before: `%3 = stablehlo.composite "my.op" %1, %2`         (at the shapes of one device)
after:  `%3 = call @my_op_1f3a(%1, %2)`, and `func @my_op_1f3a`, whatever is in it

What is traced joins the emitted module as it is: no stage looks into it, so custom calls of
kernels survive untouched. Names carry a digest of the text, so equal functions are one.
"""

from __future__ import annotations

import hashlib
from typing import Any, NamedTuple

import jax
from jaxlib.mlir import ir

from spmd.errors import SpmdError
from spmd.frontend.canonicalize import canonicalize
from spmd.frontend.import_stablehlo import import_module, signature
from spmd.frontend.trace import trace
from spmd.ir.program import OpKind
from spmd.ir.types import TensorType, numpy_dtype
from spmd.lowering.local import LocalOp
from spmd.planning.memory import peak_memory
from spmd.propagation.composites import (
    COMPOSITE,
    KERNEL,
    PLATFORM,
    WORKSPACE,
    Function,
    arguments_of,
    composite_of,
)

_WIDE = ("i64", "ui64", "f64", "complex<f64>")


class Traced(NamedTuple):
    """A composite at given shapes as functions of a module.

    Attributes:
      entry: the symbol of the one to call.
      functions: the text of each, in the order of the module.
      workspace: bytes that it is predicted to hold beside its operands and results.
    """

    entry: str
    functions: tuple[str, ...]
    workspace: int


class _Declined(Exception):
    """A kernel that is not for these shapes."""


def lower_composite(op: LocalOp) -> tuple[int, ...]:
    """The composite at local types, by the platform's kernel or by its decomposition."""
    platform = op.attrs.get(PLATFORM, "")
    is_kernel = platform in composite_of(op.op.kind).kernels
    types = tuple(op.b.types[v] for v in op.operands)
    attrs = {**op.attrs, KERNEL: is_kernel}
    traced = traced_composite(OpKind(COMPOSITE, types, op.result_types(), attrs))
    if is_kernel and traced is None:
        attrs = {**op.attrs, KERNEL: False}
        traced = traced_composite(OpKind(COMPOSITE, types, op.result_types(), attrs))
    if traced is None:
        raise SpmdError(
            f"composite {op.attrs['name']} has nothing that computes it here",
            op=", ".join(map(str, types)),
            source=op.op.loc.source,
            required=f"a kernel for {platform} that takes these shapes, or a decomposition",
            fix="pass decomposition= to spmd.register_composite",
        )
    attrs[WORKSPACE] = traced.workspace
    return op.b.op(COMPOSITE, op.operands, op.result_types(), attrs)


def traced_composite(kind: OpKind) -> Traced | None:
    """What computes a composite at its types; made once for each kind.

    None if its kernel is not for these shapes, or if there is no decomposition.

    Raises:
      SpmdError: a function whose results are not those of the composite.
    """
    composite = composite_of(kind)
    platform = kind.attrs.get(PLATFORM, "")
    is_kernel = kind.attrs.get(KERNEL, composite.decomposition is None)
    function = composite.kernels[platform] if is_kernel else composite.decomposition
    if function is None:
        return None
    bare = {name: value for name, value in kind.attrs.items() if name != WORKSPACE}
    cache = OpKind(kind.name, kind.operands, kind.results, bare)._cache
    if "composite.traced" not in cache:
        cache["composite.traced"] = _trace(function, kind, platform or "cpu")
    found: Traced | None = cache["composite.traced"]
    return found


def _trace(function: Function, kind: OpKind, platform: str) -> Traced | None:
    attributes = arguments_of(kind)

    def run(*operands: Any) -> Any:
        results = function(*operands, **attributes)
        if results is NotImplemented:
            raise _Declined
        return results

    structs = [jax.ShapeDtypeStruct(t.shape, numpy_dtype(t.dtype)) for t in kind.operands]
    try:
        with jax.enable_x64(any(t.dtype in _WIDE for t in (*kind.operands, *kind.results))):
            module, _, _ = trace(run, structs, {}, platform=platform)
    except _Declined:
        return None
    _check_results(kind, signature(module)[1], platform)
    workspace = _workspace(module, platform)
    return Traced(*_functions(module, kind.attrs["name"]), workspace)


def _check_results(kind: OpKind, results: tuple[TensorType, ...], platform: str) -> None:
    if results != kind.results:
        raise SpmdError(
            f"what computes composite {kind.attrs['name']} on {platform} has other results",
            op=f"({', '.join(map(str, kind.operands))})",
            actual=", ".join(map(str, results)),
            required=", ".join(map(str, kind.results)),
            fix="make the rule and the functions given to spmd.register_composite fit",
        )


def _workspace(module: ir.Module, platform: str) -> int:
    """Bytes that a traced function holds in between; nothing is known of what its calls hold."""
    try:
        program = canonicalize(import_module(module).program)
    except SpmdError:  # a kernel's own ops, which the compiler never has to look into
        return 0
    return peak_memory(program, (), platform).temporary


def _functions(module: ir.Module, name: str) -> tuple[str, tuple[str, ...]]:
    """The symbol to call and the functions' texts, with symbols that no other module has."""
    with module.context:
        digest = hashlib.sha256(str(module).encode()).hexdigest()[:12]
        prefix = "".join(c if c.isalnum() else "_" for c in name) + "_" + digest
        functions = [item.operation for item in module.body.operations]
        for function in functions:
            old = ir.StringAttr(function.attributes["sym_name"]).value
            new = prefix if old == "main" else f"{prefix}_{old}"
            ir.SymbolTable.replace_all_symbol_uses(old, new, module.operation)
            ir.SymbolTable.set_symbol_name(function, new)
            function.attributes["sym_visibility"] = ir.StringAttr.get("private")
        texts = tuple(
            str(f.get_asm(use_local_scope=True, enable_debug_info=False)) for f in functions
        )
    return prefix, texts
