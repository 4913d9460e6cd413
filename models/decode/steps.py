"""What one call computes, as functions of (weights, state, inputs), whatever the model.

A step runs rows of many slots through the model: one row of each slot that decodes, and beside them
chunks of prompts. Behind a slot's last row the next token may be drawn:

    begin(slot 2)                           how its tokens will be drawn; the prompt's tokens count
    step(tokens 0..7 of slot 2)             slot 2 holds 8 tokens
    step(tokens 8..11 of slot 2, draws)     12 tokens; the first new one is drawn
    step(the latest token of slot 2, draws) 13 tokens; the second one is drawn

Behind a slot's latest token a step may run guesses of the next ones, its *drafts*, and draw behind
each row. What is drawn behind a row counts if it was guessed right up to there, and so is the token
that would have been drawn without drafts:

    step(latest token of slot 2, drafts 5 8 3; draws 4)   5 8 1 6 are drawn: 5, 8 and 1 count

The tokens that were drawn stay on the device, too: a step may begin before the host has seen those
of the step before. All shapes are fixed, and nothing here knows of a mesh. The state is donated, so
XLA updates it in place. Shapes are in the names, as in `spmd.models.decode.model`, and

    D drawn tokens of a group    P alternatives    W words of a mask    T turns
"""

import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from spmd.models import sampling
from spmd.models.decode import packing
from spmd.models.decode.model import Rows, RowsModel
from spmd.models.decode.state import State

SCORED = 1024
"""Rows of a group whose logits are there at once: of all tokens of a vocabulary they are large."""

NONE = -1
"""No position, no row; as a token the latest one of its slot."""


def begin(state: State, request: Rows) -> tuple[State, dict[str, Any]]:
    """Sets up a slot for another sequence.

    Args:
        state: as `state_leaves` says.

            - `slot`: of all groups; those of the first group come first.
            - `seen` (V,): which tokens occur in the sequence.
            - `drawn` (V,): how often each one was drawn in it; not 0 where a sequence is resumed.
            - `bias` (V,): what is added to its logits.
            - `sampling/FIELD`: scalars, its sampling parameters.

    Returns:
        (state, no outputs).
    """
    slots = state["tokens"].shape[1]
    group, slot = request["slot"] // slots, request["slot"] % slots

    def put(array_AB: Any, value: Any) -> Any:
        rest = (jnp.zeros((), slot.dtype),) * value.ndim
        return jax.lax.dynamic_update_slice(array_AB, value[None, None], (group, slot, *rest))

    everything = jnp.full(state["allowed"].shape[2:], sampling.ALL, jnp.uint32)
    new = {name: request[name] for name in ("seen", "drawn", "bias", "sampling")}
    new["allowed"] = everything
    given = jax.tree.map(put, {name: state[name] for name in new}, new)
    return {**state, **given}, {}


def allow(state: State, request: Rows) -> tuple[State, dict[str, Any]]:
    """Says which tokens some slots may draw, from now on.

    Args:
        state: as `state_leaves` says.

            - `changed` (A, B): which slots' masks change.
            - `masks` (A, B, W): what they become, as `sampling.words` says.

    Returns:
        (state, no outputs).
    """
    masks_ABW = jnp.where(request["changed"][..., None], request["masks"], state["allowed"])
    return {**state, "allowed": masks_ABW}, {}


def adapt(adapters: State, given: Rows) -> tuple[State, dict[str, Any]]:
    """Writes one of `adapters` in its `place`; returns (those of all places, no outputs)."""
    put = functools.partial(jax.lax.dynamic_update_index_in_dim, index=given["place"], axis=0)
    own = {"adapters": given["adapters"]}
    return jax.tree.map(put, adapters, own), {}


def step(
    weights: Any,
    state: State,
    inputs: Mapping[str, Any],
    *,
    shapes: packing.Shapes,
    alternatives: int,
    drafts: int = 0,
    model: RowsModel,
) -> tuple[State, dict[str, Any]]:
    """Runs rows of slots through the model, and draws tokens behind some of them.

    Args:
        state: as `state_leaves` says.
        inputs:

            - `alternatives` (): whether the likeliest tokens are wanted beside drawn ones.
            - `rows` (A, W): `spmd.models.decode.model.Rows` and what follows, packed.
            - `tokens` (A, R): -1 is the latest drawn token of the row's slot.
            - `draws` (A, D): rows behind which a token is drawn; -1 is none. Of a slot they are
              its last row and rows just before it: those in front of drafts. The last token that
              counts becomes the slot's latest one.
            - `targets` (A, R), if they are among `shapes`: the token behind each row; their
              log-probabilities are reported as well.
        shapes: of what is packed in `rows`, as `packing.row_shapes` says.
        alternatives: P.
        drafts: of a slot at most.
        model: the model.

    Returns:
        (state, {"drawn": report (A, D)}), with targets also {"scores": report (A, R)}; reports are
        packed.
    """
    rows = packing.unpack_rows(inputs["rows"], shapes)
    x_ARH, state = _run(weights, state, rows, model)
    wanted = inputs["alternatives"]
    drawn_AD, state = _draw(weights, state, x_ARH, rows, (alternatives, wanted), drafts, model)
    outputs = {"drawn": packing.pack_report(drawn_AD)}
    if "targets" in rows:
        outputs["scores"] = _scores(weights, x_ARH, rows["targets"], alternatives, model)
    return state, outputs


def turns(
    weights: Any,
    state: State,
    inputs: Mapping[str, Any],
    *,
    shapes: packing.Shapes,
    count: int,
    model: RowsModel,
) -> tuple[State, dict[str, Any]]:
    """Runs `count` steps in which all rows decode, each behind what the one before drew.

    Args:
        state: as `state_leaves` says.
        inputs: `rows` (A, W), as for the first `step`; no row has drafts.
        shapes: as for `step`.
        model: the model.

    Returns:
        (state, {"drawn": packed report of each turn (T, A, D), without likeliest tokens}).
    """
    rows = packing.unpack_rows(inputs["rows"], shapes)

    def turn(state: State, number: Any) -> tuple[State, Any]:
        positions_AR = rows["positions"]
        positions_AR = jnp.where(positions_AR == NONE, NONE, positions_AR + number)
        now = {**rows, "positions": positions_AR}
        x_ARH, state = _run(weights, state, now, model)
        drawn_AD, state = _draw(weights, state, x_ARH, now, (0, False), 0, model)
        return state, packing.pack_report(drawn_AD)

    state, made_TAD = jax.lax.scan(turn, state, jnp.arange(count, dtype=jnp.int32))
    return state, {"drawn": made_TAD}


def _scores(weights: Any, x_ARH: Any, targets_AR: Any, alternatives: int, model: RowsModel) -> Any:
    """The packed report (A, R) of given tokens; logits are there of `SCORED` rows at a time."""
    shape = targets_AR.shape

    def score(block: Any) -> Any:
        logits_XV = model.logits(weights, _flat(block[0]))
        made = sampling.report(logits_XV, _flat(block[1]), alternatives)
        return packing.pack_report(_in_groups(made, block[1].shape))

    if shape[1] <= SCORED or shape[1] % SCORED:
        return score((x_ARH, targets_AR))
    blocks = (x.reshape(shape[0], -1, SCORED, *x.shape[2:]) for x in (x_ARH, targets_AR))
    made = jax.lax.map(score, tuple(jnp.moveaxis(x, 1, 0) for x in blocks))
    return jnp.moveaxis(made, 0, 1).reshape(*shape, -1)


def _run(weights: Any, state: State, rows: Rows, model: RowsModel) -> tuple[Any, State]:
    """Hidden states (A, R, H) behind the last layer, and the state with the rows in its cache."""
    tokens_AR = rows["tokens"]
    tokens_AR = jnp.where(
        tokens_AR == NONE, packing.taken(state["tokens"], rows["slots"]), tokens_AR
    )
    x_ARH, cache = model.run(weights, state["cache"], {**rows, "tokens": tokens_AR})
    return x_ARH, {**state, "cache": cache}


def _draw(
    weights: Any,
    state: State,
    x_ARH: Any,
    rows: Rows,
    alternatives: tuple[int, Any],
    drafts: int,
    model: RowsModel,
) -> tuple[sampling.Report, State]:
    """The tokens behind some rows, reported, and the state in which they are the latest ones.

    `alternatives` is how many likeliest ones are reported, and whether they are wanted.
    """
    draws_AD = rows["draws"]
    slots_AD = packing.taken(rows["slots"], draws_AD)
    is_next_AD = (draws_AD == _behind(draws_AD, NONE) + 1) & (draws_AD > 0)
    is_next_AD &= slots_AD == _behind(slots_AD, NONE)
    depth_AD = jnp.zeros_like(draws_AD)
    for _ in range(drafts):
        depth_AD = jnp.where(is_next_AD, _behind(depth_AD, 0) + 1, 0)
    # The head is the largest product of all: only rows that need it go through it.
    logits_XV = model.logits(weights, _flat(packing.taken(x_ARH, draws_AD)))
    of_slots = {name: packing.taken(x_AB, slots_AD) for name, x_AB in state["sampling"].items()}
    params = sampling.SamplingParams(**{name: _flat(x) for name, x in of_slots.items()})
    # The position of the new token goes into the random key, so a request draws the same tokens
    # whichever slot it is in, and whatever is run beside it.
    positions_X = _flat(packing.taken(rows["positions"], draws_AD)) + 1
    fields = sampling.History._fields
    history = sampling.History(*(_flat(packing.taken(state[name], slots_AD)) for name in fields))
    for back in range(drafts):  # a row's own token and those before it, as far as they are drafts
        token_AD = packing.taken(rows["tokens"], draws_AD - back)
        draft_X = _flat(jnp.where(depth_AD > back, token_AD, NONE))
        is_draft_XV = draft_X[:, None] == jnp.arange(history.seen.shape[1])
        history = history._replace(
            seen=history.seen | is_draft_XV, drawn=history.drawn + is_draft_XV
        )
    ids_X = sampling.sample(logits_XV, params, history, positions_X)
    made = sampling.report(logits_XV, ids_X, *alternatives)
    made = _in_groups(made, draws_AD.shape)
    slots_AD = jnp.where(draws_AD == NONE, NONE, slots_AD)
    # A token counts if those before it do, and are the drafts that were run behind them.
    next_AD = packing.taken(rows["tokens"], draws_AD + 1)
    is_right_AD = _behind(made.ids == next_AD, False)
    counts_AD = depth_AD == 0
    for depth in range(1, drafts + 1):
        counts_AD |= (depth_AD == depth) & is_right_AD & _behind(counts_AD, False)
    return made, _advance(state, made.ids, jnp.where(counts_AD, slots_AD, NONE), depth_AD, drafts)


def _behind(x_AD: Any, first: Any) -> Any:
    """Each entry moved to the next place of its group."""
    return jnp.concatenate([jnp.full_like(x_AD[:, :1], first), x_AD[:, :-1]], axis=1)


def _advance(state: State, ids_AD: Any, slots_AD: Any, depth_AD: Any, drafts: int) -> State:
    """Makes drawn tokens the latest ones of their slots, the deepest last; -1 is no slot."""
    slots = state["tokens"].shape[1]
    tokens_AB = state["tokens"]
    for depth in range(drafts + 1):
        is_it_ADB = (slots_AD[..., None] == jnp.arange(slots)) & (depth_AD == depth)[..., None]
        ids_AB = jnp.max(jnp.where(is_it_ADB, ids_AD[..., None], NONE), axis=1)
        tokens_AB = jnp.where(ids_AB == NONE, tokens_AB, ids_AB)
    # Of what all slots hold of all tokens, just these numbers are read and written.
    group_A1 = jnp.arange(len(ids_AD))[:, None]
    place = group_A1, jnp.where(slots_AD == NONE, slots, slots_AD), ids_AD
    seen_ABV = state["seen"].at[place].set(True, mode="drop")
    drawn_ABV = state["drawn"].at[place].add(1, mode="drop")
    return {**state, "tokens": tokens_AB, "seen": seen_ABV, "drawn": drawn_ABV}


def _flat(x: Any) -> Any:
    """(A, R, ...) -> (A * R, ...)."""
    return x.reshape(-1, *x.shape[2:])


def _in_groups(tree: Any, shape: tuple[int, ...]) -> Any:
    """(A * R, ...) -> (A, R, ...), every leaf."""
    return jax.tree.map(lambda x: x.reshape(*shape, *x.shape[1:]), tree)
