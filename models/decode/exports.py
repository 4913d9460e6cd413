"""The functions that serving exports: one for each bucket of sizes, with their specs."""

import functools
import itertools
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from spmd.models import sampling
from spmd.models.decode.model import RowsModel
from spmd.models.decode.packing import PLAIN, row_shapes, width
from spmd.models.decode.shape import ServingShape, most_drafts, symbolic_pages
from spmd.models.decode.state import state_leaves
from spmd.models.decode.steps import adapt, allow, begin, step, turns
from spmd.models.function import Function
from spmd.models.training.checkpoints.tables import by_path, nested

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
    there are `turns_r4_t64` and its like, too, for rows that all slots may decode in; with
    `shape.adapters` there is `adapt`, steps read what it writes, and `plain_step_r4_t64` and its
    like are for calls in which no row has an adapter.

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
    own: list[Any] = [(begin, state, request), (allow, state, masks)]
    held = list[Any]()
    if shape.adapters:
        of_model: Any = model
        stacks = of_model.adapter_leaves(shape.adapters, shape.adapter_rank)
        leaves = {**leaves, "adapters": stacks}
        held = [{"adapters": jax.tree.map(lambda x: struct(x.shape, x.dtype), stacks)}]
        one = jax.tree.map(lambda x: struct(x.shape[1:], x.dtype), held[0])
        own.append((adapt, held[0], {"place": struct((), np.int32), **one}))
    found = [
        Function(
            fn.__name__,
            fn,
            (mine, given),
            ("state", "inputs"),
            ("state", "input"),
            {"kind": fn.__name__},
        )
        for fn, mine, given in own
    ]
    decoding = next((n for n in shape.rows if n >= shape.slots_of_group), shape.rows[-1])
    for length, rows in itertools.product(shape.lengths, shape.rows):
        kinds = ["step", *(["score"] if rows == shape.rows[-1] else [])]
        kinds += ["turns"] if shape.turns > 1 and rows <= decoding else []
        kinds += [PLAIN + kind for kind in kinds if held and kind != "score"]
        for kind in kinds:
            reads = [] if kind.startswith(PLAIN) else held
            reading: Sequence[Any] = ["read"] * len(reads)
            table = length // shape.page
            shapes = row_shapes(shape.slots_of_group, rows, table, kind, shape.adapters)
            inputs = {"rows": struct((shape.groups, width(shapes)), np.int32)}
            if kind.endswith("turns"):
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
                _adapted(fn) if reads else fn,
                (weights, *reads, state, inputs),
                ("weights", *reading, "state", "inputs"),
                ("weights", *reading, "state", "input"),
                {"kind": kind, "rows": rows, "length": length},
            ))  # fmt: skip
    # Most steps are those in which all slots decode: weights lie as these want them.
    primary = step_name("step", decoding, shape.lengths[-1])
    every = {"weights": weights, "state": state | (held[0] if held else {})}
    return found, leaves, default_specs(model, every), primary


def _adapted(fn: Callable[..., Any]) -> Callable[..., Any]:
    """A step that finds adapters among its weights."""
    return lambda weights, held, *rest: fn(
        nested(by_path(weights) | by_path(held["adapters"])), *rest
    )


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
