"""The functions that serving exports: one for each bucket of sizes, with their specs."""

import functools
import itertools
import re
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from spmd.models import sampling
from spmd.models.decode.model import RowsModel
from spmd.models.decode.packing import row_shapes, width
from spmd.models.decode.shape import ServingShape, most_drafts, symbolic_pages
from spmd.models.decode.state import state_leaves
from spmd.models.decode.steps import allow, begin, step, turns
from spmd.models.function import Function

SPECS: Mapping[str, tuple[Any, ...]] = {
    "state/tokens": ("data", None),
    "state/seen": ("data", None, "..."),
    "state/drawn": ("data", None, "..."),
    "state/bias": ("data", None, "..."),
    "state/allowed": ("data", None, "..."),
    "state/sampling/": ("data", None),
    "state/cache/": ("data", None, *("...",) * 6),
}
"""The beginning of a path -> spec, of what is there whatever the model.

A spec is cut to a tensor's rank, or filled up with None. Groups of slots and pages are split over
`data`. What a model says of its weights and its cache comes before; of a cache of which it says
nothing, the compiler decides how entries are split.
"""


def functions(
    model: RowsModel, shape: ServingShape, weights: Any
) -> tuple[list[Function], Any, Mapping[str, tuple[Any, ...]], str]:
    """Lists the functions to export.

    With rows (4, 16) and lengths (64, 128) these are

        begin    step_r4_t64     step_r16_t64     score_r16_t64
        allow    step_r4_t128    step_r16_t128    score_r16_t128

    where `score` is a step that also reports the log-probabilities of given tokens: of the most
    rows alone, as few ask for it, and each function takes its time to compile. With `shape.turns`
    there are `turns_r4_t64` and its like, too, for rows that all slots may decode in.

    Args:
        weights: tree of `jax.ShapeDtypeStruct`s.

    Returns:
        (functions, tree of the state's `StateLeaf`s, specs by path pattern, the name of the
        function whose plan decides what the specs leave open). How many pages there are is a
        symbol of the functions, `shape.PAGES`.
    """
    struct: Any = jax.ShapeDtypeStruct
    leaves = state_leaves(model, shape, symbolic_pages(shape))
    state = jax.tree.map(lambda leaf: struct(leaf.shape, leaf.dtype), leaves)
    vocabulary = (model.vocab_size,)
    request = {
        "slot": struct((), np.int32),
        "seen": struct(vocabulary, np.bool_),
        "drawn": struct(vocabulary, np.int32),
        "bias": struct(vocabulary, np.float32),
        "sampling": {name: struct((), dtype) for name, (dtype, _) in sampling.FIELDS.items()},
    }
    masks = {
        "changed": struct(state["tokens"].shape, np.bool_),
        "masks": struct(state["allowed"].shape, np.uint32),
    }
    found = [
        Function(
            fn.__name__,
            fn,
            (state, given),
            ("state", "inputs"),
            ("state", "input"),
            {"kind": fn.__name__},
        )
        for fn, given in ((begin, request), (allow, masks))
    ]
    decoding = next((n for n in shape.rows if n >= shape.slots_of_group), shape.rows[-1])
    for length, rows in itertools.product(shape.lengths, shape.rows):
        kinds = ["step", *(["score"] if rows == shape.rows[-1] else [])]
        kinds += ["turns"] if shape.turns > 1 and rows <= decoding else []
        for kind in kinds:
            shapes = row_shapes(
                shape.slots_of_group, rows, length // shape.page, scores=kind == "score"
            )
            inputs = {"rows": struct((shape.groups, width(shapes)), np.int32)}
            if kind == "turns":
                fn = functools.partial(turns, shapes=shapes, count=shape.turns, model=model)
            else:
                inputs["alternatives"] = struct((), np.bool_)
                fn = functools.partial(
                    step,
                    shapes=shapes,
                    alternatives=shape.top_logprobs,
                    drafts=most_drafts(shape.drafts, shape.page, shape.max_length),
                    model=model,
                )
            found.append(Function(
                step_name(kind, rows, length),
                fn,
                (weights, state, inputs),
                ("weights", "state", "inputs"),
                ("weights", "state", "input"),
                {"kind": kind, "rows": rows, "length": length},
            ))  # fmt: skip
    # Most steps are those in which all slots decode: weights lie as these want them.
    primary = step_name("step", decoding, shape.lengths[-1])
    return found, leaves, default_specs(model, {"weights": weights, "state": state}), primary


def step_name(kind: str, rows: int, length: int) -> str:
    """What the function of a kind (`step`, `score`, `turns`) with these sizes is called."""
    return f"{kind}_r{rows}_t{length}"


def default_specs(model: RowsModel, tree: Any) -> dict[str, tuple[Any, ...]]:
    """Specs by path pattern, in which numbers are `*`; each is as long as the tensor's rank."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    specs, found = {**model.specs, **SPECS}, {}
    for keys, leaf in leaves:
        path = jax.tree_util.keystr(keys, simple=True, separator="/")
        pattern = re.sub(r"([/.])\d+(?=[/.]|$)", r"\1*", path)
        spec = next((specs[start] for start in specs if pattern.startswith(start)), None)
        if spec is not None:
            rank = len(leaf.shape)
            found[pattern] = (*spec, *(None,) * rank)[:rank]
    return found
