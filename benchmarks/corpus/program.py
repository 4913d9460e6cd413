"""What a program of the corpus is, how its arguments are marked, and what its models share."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

import spmd
from spmd.mesh.spec import jax_mesh

MESHES: dict[str, dict[str, int]] = {
    "4x2": {"data": 4, "model": 2},
    "8x1": {"data": 8, "model": 1},
    "2x2x2": {"data": 2, "shard": 2, "model": 2},
}

QUICK_MESH = "4x2"
"""The mesh of the tests that are not heavy."""

MARKS = {
    "batch": "leading dim over `data`",
    "params": "two of three: largest dim over `model`, next over `shard` or `data`",
    "open": "not marked",
}
"""What a word of `Made.specs` marks. A dim that its axes don't divide stays unsplit."""


class Made(NamedTuple):
    """A function, its arguments, and a word of `MARKS` for each of these."""

    fn: Callable[..., Any]
    args: tuple[Any, ...]
    specs: tuple[str, ...]


class Program(NamedTuple):
    """A named program; `make`'s docstring says what it computes.

    Attributes:
      name: its name.
      make: makes it; one that is `on_mesh` is written for a mesh, and gets jax's.
      heavy: whether it takes long.
      on_mesh: whether it names axes of the mesh itself.
    """

    name: str
    make: Callable[..., Made]
    heavy: bool = False
    on_mesh: bool = False

    def made(self, mesh: spmd.Mesh) -> Made:
        """The program, for a mesh."""
        return self.make(jax_mesh(mesh)) if self.on_mesh else self.make()


def mark(tree: Any, word: str, mesh: spmd.Mesh) -> Any:
    """Marks the leaves of an argument."""
    leaves, treedef = jax.tree.flatten(tree)
    if word == "batch":
        leaves = [_mark_batch(leaf, mesh) for leaf in leaves]
    if word == "params":
        leaves = [leaf if i % 3 == 2 else _mark_param(leaf, mesh) for i, leaf in enumerate(leaves)]
    return jax.tree.unflatten(treedef, leaves)


def _mark_batch(leaf: Any, mesh: spmd.Mesh) -> Any:
    if not np.ndim(leaf) or np.shape(leaf)[0] % mesh.shape["data"]:
        return leaf
    return spmd.mark_sharding(leaf, mesh, ("data",))


def _mark_param(leaf: Any, mesh: spmd.Mesh) -> Any:
    shape = np.shape(leaf)
    spec: list[str | None] = [None] * len(shape)
    for axis in ("model", "shard" if "shard" in mesh.axis_names else "data"):
        for dim in sorted(range(len(shape)), key=lambda d: -shape[d]):
            if spec[dim] is None and shape[dim] and shape[dim] % mesh.shape[axis] == 0:
                spec[dim] = axis
                break
    return spmd.mark_sharding(leaf, mesh, tuple(spec)) if any(spec) else leaf


def normal(seed: int, *shape: int) -> Any:
    """Deterministic normal numbers."""
    return jnp.asarray(np.random.RandomState(seed).standard_normal(shape), np.float32)


def integers(seed: int, high: int, *shape: int) -> Any:
    """Deterministic integers below `high`."""
    return jnp.asarray(np.random.RandomState(seed).randint(0, high, shape), jnp.int32)


def trained(loss: Callable[..., Any], params: Any, *batch: Any, random: Any = None) -> Made:
    """(params, trace, *batch) -> (params, trace, loss, gradients), with SGD and momentum.

    Args:
      loss: of params, the batch, and `random`, a key, if there is one.
    """
    optimizer = optax.sgd(0.1, momentum=0.9)

    def step(params: Any, state: Any, *rest: Any) -> Any:
        value, grads = jax.value_and_grad(loss)(params, *rest)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value, grads

    keys = () if random is None else (random,)
    specs = ("params", "open", *["batch"] * len(batch), *["open"] * len(keys))
    return Made(step, (params, optimizer.init(params), *batch, *keys), specs)


def cross_entropy(logits: Any, labels: Any) -> Any:
    """The mean over everything."""
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()
