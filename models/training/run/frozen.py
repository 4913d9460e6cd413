"""Parameters that are not trained: they have no gradient and no optimizer state."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from spmd.errors import ArgumentError
from spmd.mesh.spec import match_patterns
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
        trees = structs._replace(state=None) if isinstance(structs, Stateful) else structs
        leaves, structure = jax.tree_util.tree_flatten_with_path(trees)
        paths = [jax.tree_util.keystr(path, simple=True, separator="/") for path, _ in leaves]
        held = [p is not None for p in match_patterns(self.patterns, paths, what="parameter")]
        if self.patterns and all(held):
            raise ArgumentError(
                "no parameter is trained",
                actual=f"frozen={self.patterns} matches all {len(paths)} of them",
                required="at least one that is trained",
                fix="freeze fewer",
            )
        self._held = jax.tree.unflatten(structure, held)
        if isinstance(structs, Stateful):
            state = jax.tree.map(lambda _: False, structs.state)
            self._held = Stateful(self._held.params, state)

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

    def sample(self, variables: Any) -> list[float]:
        """Two numbers that tell what is frozen from other weights: its norm, and a projection.

        Rounding changes both by some 1e-6 of the norm, other weights the second by about all of it.
        """
        return [float(x) for x in jax.device_get(_sample(self.split(variables)[1]))]

    def is_alike(self, variables: Any, saved: Sequence[float]) -> bool:
        """Whether what is frozen has this `sample`, but for rounding."""
        found = self.sample(variables)
        return max(abs(x - y) for x, y in zip(found, saved, strict=True)) <= 1e-4 * found[0]


@jax.jit
def _sample(kept: Any) -> tuple[jax.Array, jax.Array]:
    def along(x: jax.Array) -> jax.Array:
        numbers = [(d + 1.3) * jax.lax.broadcasted_iota(jnp.float32, x.shape, d)
                   for d in range(x.ndim)]  # fmt: skip
        return jnp.sum(x.astype(jnp.float32) * jnp.cos(sum(numbers, start=jnp.zeros(x.shape))))

    leaves = jax.tree.leaves(kept)
    norm = jnp.sqrt(sum(jnp.sum(jnp.square(x.astype(jnp.float32))) for x in leaves))
    return norm, sum((along(x) for x in leaves), start=jnp.zeros(()))
