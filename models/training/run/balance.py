"""Biases by which experts are chosen: they follow the loads of each step, and no gradient.

They balance experts without a loss (Wang et al. 2024, *Auxiliary-loss-free load balancing strategy
for mixture-of-experts*; DeepSeek-AI 2024, *DeepSeek-V3*, section 2.1.2).
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

BIAS = "e_score_correction_bias"
"""The name of such a parameter (..., E). What comes as its gradient are the loads: how often each
expert was taken in the batch."""


class Balance(NamedTuple):
    """Tells the biases from what an optimizer updates, and moves them."""

    rate: float = 0.0  # how far a bias moves in a step; with 0 they are like other parameters

    def split(self, tree: Any) -> tuple[Any, Any]:
        """Two trees like `tree`: one with None for the biases, one with None for all else."""
        if not self.rate:
            return tree, None
        rest, biases = (
            jax.tree_util.tree_map_with_path(
                lambda path, x, kept=kept: x if (BIAS in str(path[-1])) == kept else None, tree
            )
            for kept in (False, True)
        )
        return rest, biases

    def merge(self, rest: Any, biases: Any) -> Any:
        """The tree of which `split` made the two."""
        if not self.rate:
            return rest
        return jax.tree.map(
            lambda *two: two[two[0] is None], rest, biases, is_leaf=lambda x: x is None
        )

    def moved(self, bias: jax.Array, loads: jax.Array) -> jax.Array:
        """`bias + rate * sign(mean of a layer's loads - load)`."""
        taken = loads.astype(jnp.int32)
        mean, rest = jnp.divmod(jnp.sum(taken, axis=-1, keepdims=True), taken.shape[-1])
        # In halves, as integers: a mean between two of them differs from both.
        towards = jnp.sign(2 * mean + (rest > 0) - 2 * taken)
        return bias + self.rate * towards.astype(bias.dtype)


OFF = Balance()


def largest_load(loads: Any) -> dict[str, jax.Array]:
    """The metric: the largest load over the mean, in the layer where that is the largest."""
    found = [jnp.max(x / jnp.mean(x, axis=-1, keepdims=True)) for x in jax.tree.leaves(loads)]
    return {"largest_load": jnp.max(jnp.stack(found))} if found else {}
