"""Functions, trees and specs as a manifest describes them."""

import dataclasses
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.export import is_symbolic_dim

from spmd.api import path_name
from spmd.frontend.artifact import CustomCalls
from spmd.frontend.sizes import symbols_in
from spmd.models.placement import OPEN, Entry
from spmd.serving.bundle.function import ROLES, BundleError, Function, StateLeaf
from spmd.serving.bundle.manifest import (
    STORED_AS,
    ArgumentEntry,
    Entrypoint,
    Filled,
    LeafEntry,
    Manifest,
    StoredFile,
    Symbol,
)
from spmd.serving.bundle.manifest_json import check, check_fill, check_name
from spmd.serving.bundle.placement import check_specs
from spmd.serving.bundle.trees import template_of


def check_manifest(manifest: Manifest) -> None:
    """What can be said before weights are written: everything fits.

    Raises:
      BundleError: something does not.
    """
    entrypoints = manifest.functions.values()
    given = [leaf for entry in entrypoints for leaf in entry.inputs]
    made = [
        dataclasses.replace(leaf, path=f"outputs/{leaf.path}")
        for entry in entrypoints
        for leaf in entry.outputs
    ]
    check_specs(manifest.specs, [*manifest.weights, *manifest.state, *given, *made])
    later = StoredFile(0, "")  # of files nothing is known yet
    names = [*manifest.tokenizer, *(f for e in entrypoints for f in e.modules.values())]
    check(dataclasses.replace(manifest, files=dict.fromkeys(names, later)), "the bundle")


def entrypoint(
    function: Function, out: Any, modules: Mapping[str, str], calls: Sequence[CustomCalls]
) -> Entrypoint:
    """What a manifest says of a function.

    Args:
      out: structs of what it returns, a state included.
      modules: platform -> file.
      calls: what its modules call.

    Raises:
      BundleError: arguments, outputs or a state that no bundle can have.
    """
    arguments = arguments_of(function)
    outputs = outputs_of(function, arguments, out)
    return Entrypoint(
        name=function.name,
        tags=dict(function.tags),
        modules=modules,
        arguments=arguments,
        outputs=leaves_of(outputs, ""),
        tree=template_of(outputs),
        custom_calls=_most([c.custom_calls for c in calls]),
        composites=_most([c.composites for c in calls]),
    )


def _most(counts: Sequence[Mapping[str, int]]) -> dict[str, int]:
    names = sorted({name for count in counts for name in count})
    return {name: max(count.get(name, 0) for count in counts) for name in names}


def arguments_of(function: Function) -> tuple[ArgumentEntry, ...]:
    """The arguments of a function.

    Raises:
      BundleError: names or roles that cannot be.
    """
    check_name(function.name, "a function")
    names, roles = function.arg_names, function.roles
    if not len(names) == len(roles) == len(function.args):
        raise BundleError(
            f"function {function.name} has {len(function.args)} arguments, {len(names)} names and "
            f"{len(roles)} roles"
        )
    if len(set(names)) != len(names) or not set(roles) <= set(ROLES):
        raise BundleError(
            f"function {function.name}: names of arguments have to differ, and roles are "
            f"{', '.join(ROLES)}; they are {names} and {roles}"
        )
    arguments = []
    for name, role, struct in zip(names, roles, function.args, strict=True):
        # What the bundle owns has one name in all functions.
        leaves = leaves_of(struct, {"input": name, "read": "state"}.get(role, role))
        arguments.append(ArgumentEntry(name, role, leaves))
    return tuple(arguments)


def outputs_of(function: Function, arguments: Sequence[ArgumentEntry], out: Any) -> Any:
    """What a function returns besides the state.

    Raises:
      BundleError: another state than it takes, or none.
    """
    held = next((i for i, a in enumerate(arguments) if a.role == "state"), None)
    if held is None:
        return out
    if not isinstance(out, tuple | list) or len(out) != 2:
        raise BundleError(
            f"function {function.name} has a state and has to return (state, outputs)"
        )
    state, outputs = out
    given = arguments[held].leaves
    if leaves_of(state, "state") != given:
        both = zip(leaves_of(state, "state"), given, strict=False)
        differing = next((f"{b.path}: {a} for {b}" for a, b in both if a != b), "another structure")
        raise BundleError(
            f"function {function.name} returns another state than it takes: {differing}"
        )
    return outputs


# Leaves


def leaves_of(tree: Any, name: str) -> tuple[LeafEntry, ...]:
    """The leaves of an argument or result; paths begin with its name, if it has one.

    Raises:
      BundleError: a leaf that no bundle can hold.
    """
    flat, _ = jax.tree_util.tree_flatten_with_path(tree)
    paths = ("/".join(filter(None, (name, path_name(path)))) for path, _ in flat)
    return tuple(_leaf(path or "result", x) for path, (_, x) in zip(paths, flat, strict=True))


def _leaf(path: str, x: Any) -> LeafEntry:
    if not hasattr(x, "shape") or not hasattr(x, "dtype"):
        raise BundleError(f"{path} is {type(x).__name__}, which has no shape and dtype")
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        raise BundleError(f"{path} is a key of jax.random; pass jax.random.key_data(key) instead")
    dtype = jnp.dtype(x.dtype).name
    if dtype not in STORED_AS:
        raise BundleError(f"{path} is {dtype}, not one of {', '.join(STORED_AS)}")
    shape = tuple(str(size) if is_symbolic_dim(size) else int(size) for size in x.shape)
    return LeafEntry(path, shape, dtype)


# Symbols

_CONSTRAINTS = {
    "at_least": re.compile(r"(\w+)\s*>=\s*(\d+)"),
    "at_most": re.compile(r"(\w+)\s*<=\s*(\d+)"),
    "multiple_of": re.compile(r"mod\(\s*(\w+)\s*,\s*(\d+)\s*\)\s*==\s*0"),
}


def symbols_of(functions: Sequence[Function]) -> dict[str, Symbol]:
    """The symbols in the shapes of arguments, with what `jax.export.symbolic_shape` was told.

    Raises:
      BundleError: a constraint that a manifest has no words for, or two functions whose symbols of
        one name have different ones.
    """
    found: dict[str, Symbol] = {}
    for function in functions:
        shapes = [x.shape for x in jax.tree.leaves(function.args) if hasattr(x, "shape")]
        dims = [dim for shape in shapes for dim in shape if is_symbolic_dim(dim)]
        # jax keeps constraints to itself. For one on a remainder it adds `8*floordiv(n, 8) == n`,
        # which nobody wrote.
        stated = (c.debug_str for dim in dims for c in dim.scope._explicit_constraints)
        constraints = dict.fromkeys(text for text in stated if "*floordiv(" not in text)
        for name in symbols_in(map(str, dims)):
            symbol = _symbol(function.name, name, constraints)
            if found.setdefault(name, symbol) != symbol:
                raise BundleError(
                    f"function {function.name}: the symbol {name} is {symbol}, and in another "
                    f"function {found[name]}; make it once, by one jax.export.symbolic_shape"
                )
    return found


def _symbol(function: str, name: str, constraints: Iterable[str]) -> Symbol:
    bounds: dict[str, int] = {}
    for constraint in constraints:
        matches = {
            field: pattern.fullmatch(constraint.strip()) for field, pattern in _CONSTRAINTS.items()
        }
        if not any(matches.values()):
            raise BundleError(
                f"function {function}: symbols of a bundle can be told `{name} >= 2`, "
                f"`{name} <= 64` and `mod({name}, 8) == 0`, not `{constraint}`"
            )
        bounds |= {field: int(m[2]) for field, m in matches.items() if m and m[1] == name}
    return Symbol(**bounds)


def state_leaves(state: Any) -> tuple[Filled, ...]:
    """The leaves of a tree of `StateLeaf`s, or of `ShapeDtypeStruct`s: zeros."""
    arrays = jax.tree.leaves(state)
    fills = [x.fill if isinstance(x, StateLeaf) else 0 for x in arrays]
    leaves = tuple(
        Filled(leaf.path, leaf.shape, leaf.dtype, fill)
        for leaf, fill in zip(leaves_of(state, "state"), fills, strict=True)
    )
    for leaf in leaves:
        check_fill(leaf)
    return leaves


def plain_specs(specs: Mapping[str, Any]) -> dict[str, tuple[Entry, ...]]:
    """Specs as `spmd.mark_sharding` takes them, for JSON."""
    found: dict[str, tuple[Entry, ...]] = {}
    for pattern, spec in specs.items():
        plain: list[Entry] = []
        for entry in (spec,) if isinstance(spec, str) else () if spec is None else spec:
            if entry is ... or entry is jax.sharding.PartitionSpec.UNCONSTRAINED:
                plain.append(OPEN)
            elif entry is None or isinstance(entry, str):
                plain.append(entry)
            elif isinstance(entry, tuple | list) and all(isinstance(name, str) for name in entry):
                plain.append(tuple(entry))
            else:
                raise BundleError(f"the spec of {pattern!r} has the entry {entry!r}; name the axis")
        found[pattern] = tuple(plain)
    return found
