"""Symbolic dims of the arguments of a module that `jax.export` wrote."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from typing import Any

from jaxlib.mlir import ir

from spmd.frontend.refine import argument_dims
from spmd.frontend.sizes import LONGEST, Dim

_ASSERTION = "shape_assertion"
_SPECIFICATIONS = "polymorphic shapes specifications: "
_SHAPE = ".shape = ("

ArgumentDims = tuple[Dim | None, ...]
"""The size of each dim, as a number or an expression of symbols; None: the module says nothing."""


def exported_dims(exported: Any) -> list[ArgumentDims]:
    """The dims of the arguments of a `jax.export.Exported`."""
    shapes = [exported.in_avals[i].shape for i in exported.module_kept_var_idx]
    return [tuple(d if isinstance(d, int) else str(d) for d in shape) for shape in shapes]


def constraints_of(dim: Any) -> list[str]:
    """What `jax.export.symbolic_shape` was told of the symbols that are made with a dim's.

    It is text: `n >= 2`, `mod(n, 8) == 0`.
    """
    # jax keeps constraints to itself. For one on a remainder it adds `8*floordiv(n, 8) == n`, which
    # nobody wrote.
    stated = [constraint.debug_str for constraint in dim.scope._explicit_constraints]
    return [text for text in stated if "*floordiv(" not in text]


def stated_dims(module: ir.Module) -> list[ArgumentDims]:
    """The dims of the arguments of a module, as far as it says something of them.

    A type has `?` for a dim that is not static. What `jax.export` writes checks the arguments'
    shapes, and names the symbols in the message of a failure:

        ... polymorphic shapes specifications: args[0].shape = (n, 4),args[2].shape = (2*n,). ...

    Raises:
      FrontendError: an argument that is no ranked tensor.
    """
    dims: list[ArgumentDims] = list(argument_dims(module))
    dynamic = [i for i, argument in enumerate(dims) if None in argument]
    specifications = _specifications(module)
    if len(specifications) == len(dynamic):  # it names the arguments with symbolic dims, in order
        for i, stated in zip(dynamic, specifications, strict=True):
            if len(stated) == len(dims[i]):
                dims[i] = stated
    return dims


def _specifications(module: ir.Module) -> list[ArgumentDims]:
    for message in _messages(module):
        _, found, text = message.partition(_SPECIFICATIONS)
        if found:
            stated = text.partition(". Obtained")[0].split(_SHAPE)[1:]
            return [_shape(_in_brackets(part)) for part in stated]
    return []


def _in_brackets(text: str) -> str:
    """What stands in front of the bracket that closes one in front of the text."""
    depth = 1
    for position, letter in enumerate(text):
        depth += (letter == "(") - (letter == ")")
        if not depth:
            return text[:position]
    return text


def _messages(module: ir.Module) -> Sequence[str]:
    """What the assertions of a module's function say when they fail."""
    found: list[str] = []

    def visit(op: Any) -> Any:
        is_call = op.name == "stablehlo.custom_call"
        if is_call and op.attributes["call_target_name"].value == _ASSERTION:
            if "error_message" in op.attributes:
                found.append(op.attributes["error_message"].value)
            return ir.WalkResult.INTERRUPT
        return ir.WalkResult.ADVANCE

    with module.context:
        module.operation.walk(visit)
    return found


def _shape(text: str) -> ArgumentDims:
    """`n, 2*m, 4` as dims; nothing where it is no shape."""
    try:
        if len(text) > LONGEST:
            return ()
        parts = ast.parse(f"({text.rstrip(',')},)".replace("^", "**"), mode="eval").body
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return ()
    if not isinstance(parts, ast.Tuple):
        return ()
    return tuple(
        part.value
        if isinstance(part, ast.Constant) and isinstance(part.value, int)
        else ast.unparse(part)
        for part in parts.elts
    )
