"""Computes sizes of symbolic dims, which are text as jax prints them: 16 of `2*n` for n = 8."""

import ast
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence

from spmd.errors import FrontendError

LONGEST = 1000  # characters of a dim at most
LARGEST = 1 << 62  # sizes, and all numbers on the way to them, are below it

Dim = int | str
"""The size of a dim: a number of elements, or an expression of symbols such as `"2*n + 1"`."""

_OPERATORS: Mapping[type, Callable[[int, int], int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Pow: operator.pow,
}
_NODES = (
    ast.BinOp, ast.Call, ast.Constant, ast.Load, ast.Name, ast.UnaryOp, ast.USub, *_OPERATORS,
)  # fmt: skip
_FUNCTIONS: Mapping[str, Callable[[int, int], int]] = {
    "floordiv": operator.floordiv, "max": max, "min": min, "mod": operator.mod,
}  # fmt: skip


def symbols_in(dims: Iterable[Dim]) -> tuple[str, ...]:
    """Returns the names of all symbols in dims, sorted: `("m", "n")` for `["2*n", "m + 1", 8]`."""
    trees = [_parsed(dim) for dim in dims if isinstance(dim, str)]
    nodes = [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Name)]
    return tuple(sorted({node.id for node in nodes} - set(_FUNCTIONS)))


def size_of(dim: Dim, symbols: Mapping[str, int]) -> int:
    """Returns the size of a dim in elements, given the value of each symbol by name.

    Raises:
      FrontendError: a symbol without a value, text that is no expression, an impossible size.

    Example:
      >>> size_of("2*n + 1", {"n": 8})
      17
    """
    if isinstance(dim, int):
        return dim
    size = _value(_parsed(dim), dim, symbols)
    if size < 0:
        raise FrontendError(f"the dim {dim} would be {size}", actual=_shown(symbols))
    return size


def sizes_of(dims: Sequence[Dim], symbols: Mapping[str, int]) -> tuple[int, ...]:
    """Returns the size of every dim of a shape, in order; raises as `size_of`."""
    return tuple(size_of(dim, symbols) for dim in dims)


def _shown(symbols: Mapping[str, int]) -> str:
    return ", ".join(f"{name}={value}" for name, value in symbols.items()) or "no symbol is known"


def _parsed(dim: str) -> ast.expr:
    # Text that somebody else wrote: Python's parser reads it, and nothing is run.
    try:
        if len(dim) > LONGEST:
            raise ValueError
        tree = ast.parse(dim.strip().replace("^", "**"), mode="eval").body  # jax writes n^2
        if not all(isinstance(node, _NODES) for node in ast.walk(tree)):
            raise ValueError
        return tree
    except (ValueError, SyntaxError, RecursionError, MemoryError):
        raise _not_a_dim(dim) from None


def _not_a_dim(dim: str) -> FrontendError:
    return FrontendError(
        f"{dim[:80]!r} is no size of a dim",
        required="a number, or symbols with +, -, *, ^, floordiv, mod, max and min",
    )


def _value(node: ast.expr, dim: str, symbols: Mapping[str, int]) -> int:
    match node:
        case ast.Constant(value=int() as number) if not isinstance(number, bool):
            return number
        case ast.Name(id=name) if name in symbols:
            return symbols[name]
        case ast.Name(id=name):
            raise FrontendError(
                f"the symbol {name} of the dim {dim} has no value",
                actual=_shown(symbols),
                fix=f"give it: symbols={{{name!r}: 128}}",
            )
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_value(operand, dim, symbols)
        case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
            function = _OPERATORS[type(op)]
        case ast.Call(func=ast.Name(id=name), args=[left, right]) if name in _FUNCTIONS:
            function = _FUNCTIONS[name]
        case _:
            raise _not_a_dim(dim)
    a, b = (_value(side, dim, symbols) for side in (left, right))
    divides = function in (operator.floordiv, operator.mod)
    too_large = function is operator.pow and not 0 <= b < 63
    value = LARGEST if too_large or (divides and not b) else function(a, b)
    if abs(value) >= LARGEST:
        raise FrontendError(f"the dim {dim} has no size for these symbols: {a}, {b}")
    return int(value)
