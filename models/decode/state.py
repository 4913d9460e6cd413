"""The state that lives on the devices between calls: the model's cache, and how tokens are drawn.

Shapes are in the names, as in `models.decode.model`.
"""

from typing import Any

import numpy as np

from spmd.models import sampling
from spmd.models.decode.model import RowsModel
from spmd.models.decode.shape import ServingShape
from spmd.models.function import StateLeaf

State = dict[str, Any]
"""A tree of arrays as `state_leaves` describes it, or a part of one."""


def state_leaves(model: RowsModel, shape: ServingShape, pages: Any) -> Any:
    """Describes the arrays of the state.

    - `cache`: the model's.
    - `tokens` (A, B): the latest drawn token of each slot.
    - `seen` (A, B, V): whether a token occurs in the sequence.
    - `drawn` (A, B, V): how often a token was drawn in it.
    - `bias` (A, B, V): what is added to the model's logits.
    - `allowed` (A, B, V / 32): tokens that may be drawn: bit i % 32 of word i // 32 is of token i.
    - `sampling/FIELD` (A, B): the sampling parameters of each slot.

    Args:
        pages: N, a number or `symbolic_pages(shape)`.

    Returns:
        A tree of `StateLeaf`s.
    """
    slots, vocab = (shape.groups, shape.slots_of_group), model.vocab_size
    return {
        "cache": model.cache_leaves(shape, pages),
        "tokens": StateLeaf(slots, "int32"),
        "seen": StateLeaf((*slots, vocab), "bool"),
        "drawn": StateLeaf((*slots, vocab), "int32"),
        "bias": StateLeaf((*slots, vocab), "float32"),
        "allowed": StateLeaf((*slots, sampling.words(vocab)), "uint32", sampling.ALL),
        "sampling": {
            name: StateLeaf(slots, np.dtype(dtype).name, neutral)
            for name, (dtype, neutral) in sampling.FIELDS.items()
        },
    }
