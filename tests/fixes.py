"""What a `fix:` line says in code: it parses, its names are there, its calls take what they get.

`pieces` finds the code in a text, `problems` what is wrong with it. `tests/conftest.py` holds every
error that a test raises against this, and `tests/test_fixes.py` all texts of the sources.
"""

import ast
import builtins
import inspect
import re
from collections.abc import Iterator
from typing import Any

import jax
import jax.export
import jax.numpy as jnp
import numpy as np
import optax

import spmd
from spmd.api import Compiled
from spmd.models.training.run.stateful import Stateful

_BEGINS = re.compile(r"(?<![\w.\])])(?:[A-Za-z_]\w*(?:\.\w+)*|\.\w+)\(|\b\w+=(?=[\[({'\"])")
_PAIRS = {"(": ")", "[": "]", "{": "}"}

NAMES: dict[str, Any] = {
    **vars(builtins), **{name: getattr(spmd, name) for name in spmd.__all__}, "jax": jax,
    "jnp": jnp, "np": np, "optax": optax, "spmd": spmd, "P": jax.sharding.PartitionSpec,
    "PartitionSpec": jax.sharding.PartitionSpec, "Stateful": Stateful,
    "fp8_state": spmd.ops.fp8_state,
}  # fmt: skip
"""What users have imported, and may write without more."""

OF_TORCH = ("torch", "module", "model", "tensor")
"""Names in fixes of `spmd.torch`, which are not looked up: PyTorch may not be installed."""

METHODS = ("compile", "item", "load_state_dict", "lower", "optimizer_state_dict", "tolist")
"""What begins with a dot: methods of what the user has, of which the sentence says what it is."""

THINGS: dict[str, Any] = {
    "array": jax.Array, "compiled": Compiled, "exported": jax.export.Exported, "step": None,
}  # fmt: skip
"""Names that stand for a thing of the user's -> its class; None: a function of the user's."""


def pieces(text: str) -> Iterator[str]:
    """Yields the calls and the keyword arguments in a text, outer ones only."""
    end = 0
    for found in _BEGINS.finditer(text):
        if found.start() < end:
            continue
        begin, end = found.start(), _end(text, found.end() - found[0].endswith("("))
        while more := re.match(r"\.\w+\(", text[end:]):
            end = _end(text, end + more.end() - 1)
        yield text[begin:end]


def _end(text: str, at: int) -> int:
    """Returns where the bracket or string that begins at `at` ends, if it does."""
    opened: list[str] = []
    while at < len(text):
        letter = text[at]
        if letter in "'\"":
            closing = text.find(letter, at + 1)
            at = len(text) if closing < 0 else closing
        elif letter in _PAIRS:
            opened.append(_PAIRS[letter])
        elif opened and letter == opened[-1]:
            opened.pop()
        at += 1
        if not opened:
            return at
    return at


def problems(text: str) -> list[str]:
    """Says what is wrong with the code in the text of a fix."""
    return [f"{piece}: {why}" for piece in pieces(text) for why in _problems(piece)]


def _problems(piece: str) -> Iterator[str]:
    if piece.startswith("."):
        name = re.match(r"\.(\w+)", piece)
        if name is None or name[1] not in METHODS:
            yield "it is a method of nothing that is known"
        return
    code = f"dict({piece})" if re.match(r"\w+=", piece) else piece
    try:
        tree = ast.parse(code, mode="eval")
    except SyntaxError as error:
        yield f"it does not parse ({error.msg})"
        return
    for call in ast.walk(tree):
        if isinstance(call, ast.Call):
            yield from _call_problems(call)


def _call_problems(call: ast.Call) -> Iterator[str]:
    try:
        called = _meant(call.func)
    except (AttributeError, LookupError) as error:
        yield f"{ast.unparse(call.func)} is not there ({error})"
        return
    given = [*call.args, *(k.value for k in call.keywords)]
    is_own = any(isinstance(x, ast.Constant) and x.value is ... for x in given)
    if called is None or is_own:  # a function of the user's, or his own arguments
        return
    try:
        signature = inspect.signature(called)
    except (TypeError, ValueError):
        return
    of_thing = isinstance(call.func, ast.Attribute) and _is_thing(call.func.value)
    own = [None] if of_thing else []
    try:
        signature.bind(*own, *call.args, **{str(k.arg): k.value for k in call.keywords})
    except TypeError as error:
        yield f"{ast.unparse(call)}: {error}"


def _is_thing(node: ast.expr) -> bool:
    return isinstance(node, ast.Call) or (isinstance(node, ast.Name) and node.id in THINGS)


def _meant(node: ast.expr) -> Any:
    """Returns what an expression stands for: of a call, the class that it makes one of."""
    if isinstance(node, ast.Attribute):
        inside = _meant(node.value)
        return None if inside is None else getattr(inside, node.attr)
    if isinstance(node, ast.Call):
        return _meant(node.func)
    name = getattr(node, "id", "")
    return None if name in OF_TORCH else {**NAMES, **THINGS}[name]
