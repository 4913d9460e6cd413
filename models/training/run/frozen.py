"""Parameters that are not trained: they have no gradient and no optimizer state."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from spmd.errors import ArgumentError
from spmd.mesh.spec import match_patterns
from spmd.models.training.checkpoints import tables
from spmd.models.training.run.stateful import Stateful


class Frozen:
    """Tells the parameters that are trained from those that are not.

    Args:
        patterns: globs over the paths of those that are not, as marks have them.
        structs: the parameters, or a `Stateful`, whose state is not asked about.

    Raises:
        SpecError: a pattern matches no parameter.
        ArgumentError: nothing is left to be trained.
    """

    def __init__(self, patterns: Sequence[str], structs: Any) -> None:
        self.patterns = tuple(patterns)
        asked = structs._replace(state=None) if isinstance(structs, Stateful) else structs
        paths = list(tables.by_path(asked))
        held = [p is not None for p in match_patterns(self.patterns, paths, what="parameter")]
        if self.patterns and all(held):
            raise ArgumentError(f"no parameter is trained: all {len(held)} are frozen")
        self._held = jax.tree.unflatten(jax.tree.structure(asked), held)
        if isinstance(structs, Stateful):
            self._held = Stateful(self._held.params, jax.tree.map(lambda _: False, structs.state))

    def split(self, variables: Any) -> tuple[Any, Any]:
        """Two trees like `variables`: what a step may change, and the rest; None in the gaps."""
        if not self.patterns:
            return variables, None
        trained = jax.tree.map(lambda held, x: None if held else x, self._held, variables)
        return trained, jax.tree.map(lambda held, x: x if held else None, self._held, variables)

    def merge(self, trained: Any, kept: Any) -> Any:
        """The tree of which `split` made the two."""
        if not self.patterns:
            return trained
        return jax.tree.map(
            lambda x, held: held if x is None else x, trained, kept, is_leaf=lambda x: x is None
        )

    def sums(self, variables: Any) -> list[float]:
        """Two sums by which what is frozen is known again: a projection of it, and its norm.

        However layers are stacked and arrays split, the first one is the same within 1e-4 of the
        norm; that of other weights is not.
        """
        return [float(x) for x in jax.device_get(_sums(self.split(variables)[1]))]


@jax.jit
def _sums(tree: Any) -> tuple[jax.Array, jax.Array]:
    projected = squares = jnp.zeros(())
    for leaf in jax.tree.leaves(tree):
        x = jnp.atleast_1d(leaf).astype(jnp.float32)
        projected += jnp.sum(jnp.sum(x * jnp.cos(1.3 * jnp.arange(x.shape[-1])), axis=-1))
        squares += jnp.sum(jnp.sum(x * x, axis=-1))
    return projected, jnp.sqrt(squares)
