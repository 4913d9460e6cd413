"""Trees of arrays as tables of paths; parameters with layers stacked or unrolled.

Checkpoints hold nested dicts of arrays, whatever Python classes the state is made of, and a table
of shapes, dtypes and specs that a person can read.

    unrolled    layers/0/mlp/up_proj/weight (M, H), layers/1/mlp/up_proj/weight (M, H), ...
    stacked     layers/mlp/up_proj/weight (L, M, H)
"""

import re
from collections import Counter
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from spmd.models.training.errors import shortened

Table = dict[str, dict[str, Any]]
"""Path -> `shape`, `dtype` and `spec` of an array."""

UNROLLED = re.compile(r"^(?P<head>(?:.*/)?layers)/(?P<index>\d+)/(?P<rest>.+)$")
STACKED = re.compile(r"^(?P<head>(?:.*/)?layers)/(?P<rest>(?!\d+/).+)$")
SHOWN = 3


def by_path(tree: Any) -> dict[str, Any]:
    """The leaves of a tree by path, such as `params/layers/0/mlp/up_proj/weight`."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {jax.tree_util.keystr(p, simple=True, separator="/"): leaf for p, leaf in leaves}


def nested(leaves: Mapping[str, Any]) -> dict[str, Any]:
    """Nested dicts made of leaves by path.

    Example:
        >>> nested({"a/b": 1, "a/c": 2})
        {'a': {'b': 1, 'c': 2}}
    """
    root: dict[str, Any] = {}
    for path, leaf in leaves.items():
        *parents, last = path.split("/")
        place = root
        for parent in parents:
            place = place.setdefault(parent, {})
        place[last] = leaf
    return root


def like(tree: Any, leaves: Mapping[str, Any]) -> Any:
    """A tree of the same structure as `tree` whose leaves are those of `leaves`, by path."""
    return jax.tree.unflatten(jax.tree.structure(tree), [leaves[path] for path in by_path(tree)])


def without_keys(leaves: Mapping[str, Any]) -> dict[str, Any]:
    """Arrays or structs, with the data of key arrays, which can be saved, in their place."""
    return {path: _key_data(leaf) if _is_key(leaf) else leaf for path, leaf in leaves.items()}


def with_keys(leaves: Mapping[str, Any], wanted: Mapping[str, Any]) -> dict[str, Any]:
    """Arrays of `without_keys` -> arrays as in `wanted`."""
    return {
        path: jax.random.wrap_key_data(leaf, impl=wanted[path].dtype)
        if _is_key(wanted[path])
        else leaf
        for path, leaf in leaves.items()
    }


def _is_key(leaf: Any) -> bool:
    return bool(jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key))


def _key_data(leaf: Any) -> Any:
    if isinstance(leaf, jax.Array):
        return jax.random.key_data(leaf)
    data = jax.eval_shape(jax.random.key_data, jax.ShapeDtypeStruct(leaf.shape, leaf.dtype))
    return jax.ShapeDtypeStruct(data.shape, data.dtype, sharding=leaf.sharding)


def describe(leaves: Mapping[str, Any]) -> Table:
    """Shape, dtype and spec of every array, as `meta.json` has them."""
    table = {}
    for path, leaf in leaves.items():
        spec = leaf.sharding.spec if isinstance(leaf.sharding, NamedSharding) else ()
        readable = [list(entry) if isinstance(entry, tuple) else entry for entry in spec]
        table[path] = {"shape": list(leaf.shape), "dtype": str(leaf.dtype), "spec": readable}
    return table


def mismatch(
    saved: Mapping[str, Any], wanted: Mapping[str, Any], *, any_dtype: bool = False
) -> str | None:
    """How saved arrays differ from those that are wanted.

    Args:
        saved: path -> `shape` and `dtype`, from `meta.json`.
        wanted: path -> struct.

    Returns:
        A sentence; None if they are the same.
    """
    missing = [path for path in wanted if path not in saved]
    extra = [path for path in saved if path not in wanted]
    if missing or extra:
        parts = [f"it lacks {shortened(missing, SHOWN)}"] * bool(missing)
        parts += [f"it has {shortened(extra, SHOWN)} that this run lacks"] * bool(extra)
        return " and ".join(parts)
    for path, struct in wanted.items():
        have = (tuple(saved[path]["shape"]), saved[path]["dtype"])
        want = (tuple(struct.shape), have[1] if any_dtype else str(struct.dtype))
        if have != want:
            return f"{path} is {have[1]} {list(have[0])} and has to be {want[1]} {list(want[0])}"
    return None


# Layers: stacked <-> unrolled


def is_stacked(paths: Any) -> bool | None:
    """Whether layers are stacked (one array for all layers); None if there are no layers."""
    if any(UNROLLED.match(path) for path in paths):
        return False
    return True if any(STACKED.match(path) for path in paths) else None


def other_layout(wanted: Mapping[str, Any]) -> dict[str, Any]:
    """The structs of the other layout: stacked if `wanted` is unrolled, unrolled if it is stacked.

    The shardings stay the same; a stack's leading dim is not split.
    """
    stacks = is_stacked(wanted) is False
    structs: dict[str, Any] = {}
    counts: Counter[str] = Counter()
    for path, leaf in wanted.items():
        match = (UNROLLED if stacks else STACKED).match(path)
        if match is None or not (stacks or leaf.shape):
            structs[path] = leaf
        elif stacks:
            name = f"{match['head']}/{match['rest']}"
            counts[name] += 1
            structs[name] = _struct((counts[name], *leaf.shape), leaf, (None, *leaf.sharding.spec))
        else:
            for index in range(leaf.shape[0]):
                name = f"{match['head']}/{index}/{match['rest']}"
                structs[name] = _struct(leaf.shape[1:], leaf, leaf.sharding.spec[1:])
    return structs


def _struct(shape: tuple[int, ...], leaf: Any, spec: Any) -> jax.ShapeDtypeStruct:
    sharding = NamedSharding(leaf.sharding.mesh, PartitionSpec(*spec))
    return jax.ShapeDtypeStruct(shape, leaf.dtype, sharding=sharding)


def convert(leaves: Mapping[str, Any], wanted: Mapping[str, Any]) -> dict[str, Any]:
    """Arrays in `other_layout(wanted)` -> arrays as in `wanted`, with its shardings.

    Both are in memory at the same time.
    """
    unstacks = is_stacked(wanted) is False
    converted = {}
    for path, struct in wanted.items():
        match = (UNROLLED if unstacks else STACKED).match(path)
        if match is None or path in leaves:
            converted[path] = leaves[path]
        elif unstacks:
            stack, index = leaves[f"{match['head']}/{match['rest']}"], int(match["index"])
            converted[path] = jax.jit(_layer, out_shardings=struct.sharding)(stack, index)
        else:
            rows = [leaves[f"{match['head']}/{i}/{match['rest']}"] for i in range(struct.shape[0])]
            join = jax.jit(lambda *layers: jnp.stack(layers), out_shardings=struct.sharding)
            converted[path] = join(*rows)
    return converted


def _layer(stack: Any, index: Any) -> Any:
    return jax.lax.dynamic_index_in_dim(stack, index, keepdims=False)
