"""Specs as users give them, as one spelled-out spec for each argument and result."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax
from jax.sharding import PartitionSpec

from spmd.api.arguments import with_key_dims
from spmd.errors import SpecError
from spmd.frontend.marks import Entries
from spmd.ir.types import TensorType
from spmd.mesh.mesh import Mesh
from spmd.mesh.spec import OPEN, dims_of, match_patterns, spec_entries

Specs = Sequence[Any] | Mapping[str, Any] | None
"""For each argument or result a spec, or None (open); or names (or patterns of them) -> specs."""


# ---------------------------------------------------------------------------------------------
# Of functions of pytrees.


def arg_specs(in_specs: Any, args: Sequence[Any], argnums: Sequence[int], count: int) -> list[Any]:
    """The spec of each leaf of the positional arguments, None for open ones.

    Args:
      in_specs: one entry for each positional argument, static ones counted: a spec, a pytree of
        specs that is a prefix of the argument, or None. None for all open.
      args: the positional arguments without the static ones.
      argnums: their numbers, static ones counted.
      count: how many positional arguments there are, static ones counted.

    Raises:
      SpecError: as many entries as there are not arguments, or of another structure.
    """
    if in_specs is None:
        return [None] * len(jax.tree.leaves(args))
    if not isinstance(in_specs, tuple | list) or len(in_specs) != count:
        raise SpecError(
            f"in_specs needs one entry for each of the {count} positional arguments",
            actual=repr(in_specs)[:120],
            fix="use None for arguments that are open",
        )
    return [
        spec
        for number, arg in zip(argnums, args, strict=True)
        for spec in _spread(in_specs[number], arg, f"argument {number}")
    ]


def out_entries(
    out_specs: Any, out_tree: Any, names: Sequence[str], mesh: Mesh
) -> tuple[Entries | None, ...]:
    """The spelled-out spec of each leaf of the result, None for open ones.

    Raises:
      SpecError: specs of another structure, or one that does not fit its leaf.
    """
    leaves = jax.tree.leaves(out_tree)
    specs = _spread(out_specs, out_tree, "the result")
    return tuple(
        None if spec is None else _result_entries(leaf, spec, f"result {name}", mesh)
        for leaf, spec, name in zip(leaves, specs, names, strict=True)
    )


def _result_entries(leaf: Any, spec: Any, what: str, mesh: Mesh) -> Entries:
    found = spec_entries(spec, len(leaf.shape), mesh, what=what)
    dims_of(found, leaf.shape, mesh, what=what)
    return with_key_dims(found, leaf)


def _spread(specs: Any, tree: Any, what: str) -> list[Any]:
    """A prefix pytree of specs as one spec a leaf.

    Beside a tuple or list of results, a tuple or list of as many entries is one spec for each.
    """
    is_each = (
        type(tree) in (tuple, list) and type(specs) in (tuple, list) and len(specs) == len(tree)
    )
    if is_each and all(_is_spec(spec) for spec in specs):
        return [
            s for spec, part in zip(specs, tree, strict=True) for s in _spread(spec, part, what)
        ]
    if _is_spec(specs):
        return [specs] * len(jax.tree.leaves(tree))
    try:
        spread = jax.tree.map(
            lambda spec, sub: [spec] * len(jax.tree.leaves(sub)), specs, tree, is_leaf=_is_spec
        )
    except (ValueError, TypeError) as error:
        raise SpecError(
            f"the specs of {what} don't match its structure",
            actual=str(jax.tree.structure(specs, is_leaf=_is_spec)),
            required=f"a prefix of {jax.tree.structure(tree)}",
            fix="give a spec for each leaf, or one for a whole branch",
        ) from error
    parts = jax.tree.leaves(spread, is_leaf=lambda x: isinstance(x, list))
    return [spec for part in parts for spec in part]


def _is_spec(x: Any) -> bool:
    if x is None or isinstance(x, PartitionSpec | str):
        return True
    return type(x) in (tuple, list) and all(
        e is None or e is ... or isinstance(e, str | int) or e is OPEN
        or (type(e) in (tuple, list) and all(isinstance(n, str | int) for n in e))
        for e in x
    )  # fmt: skip


# ---------------------------------------------------------------------------------------------
# Of modules.


def flat_entries(
    specs: Specs, types: Sequence[TensorType], names: Sequence[str], mesh: Mesh, what: str
) -> tuple[Entries | None, ...]:
    """The spelled-out spec of each argument or result of a module, None for open ones.

    Args:
      specs: what the user gave.
      types, names: of the arguments or results.
      mesh: the mesh.
      what: `argument` or `result`, for errors.

    Raises:
      SpecError: more or fewer specs, one for nothing, or one that does not fit.
    """
    if specs is None:
        return (None,) * len(types)
    if isinstance(specs, Mapping):
        found = match_patterns(specs, names, what=what)
        specs = [None if pattern is None else specs[pattern] for pattern in found]
    if len(specs) != len(types):
        raise SpecError(
            f"{len(specs)} {what} specs for a module with {len(types)} {what}s",
            fix="give one spec for each, None for open ones",
        )
    return tuple(
        None if spec is None else spec_entries(spec, t.rank, mesh, what=f"{what} {name}")
        for spec, t, name in zip(specs, types, names, strict=True)
    )
