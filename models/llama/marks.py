"""The points of the model at which a value can be marked.

Shapes are in the names, as in `model.py`.
"""

from collections.abc import Callable, Mapping

import jax

Mark = Callable[[str, jax.Array], jax.Array]
"""Called with a name of `MARK_POINTS` and the value there; returns the value."""

MARK_POINTS: Mapping[str, str] = {
    "inputs_embeds": "BSH",
    "q": "BS(ND)",
    "k": "BS(KD)",
    "v": "BS(KD)",
    "attention_weights": "BNST",
    "attention_output": "BSH",
    "mlp_output": "BSH",
    "logits": "BSV",
}
"""The points at which `mark` is called, with the dims of the value there.

`attention_weights` exists only with `attention="einsum"`."""


def no_marks(name: str, x: jax.Array) -> jax.Array:
    """A `mark` that marks nothing."""
    del name
    return x
