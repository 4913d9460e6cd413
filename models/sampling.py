"""Drawing tokens from logits, each row in its own way, without sorting.

Shapes are in the names: B rows, V vocabulary, P alternatives.

Filters keep the logits from a threshold on. It is found bit by bit, by 32 sums over the row: exact,
and where V is split over devices only the sums are communicated.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

HIDDEN = np.float32(-np.inf)

WORD = 32
"""Tokens of a word of a mask."""

PARTS = 16
"""Of a row, in each of which its largest numbers are looked for: as many devices may share it."""

ALL = 2**WORD - 1
"""A word that allows all of its tokens."""


def words(vocab_size: int) -> int:
    """Words of a mask: bit i % 32 of word i // 32 says whether token i may be drawn."""
    return -(-vocab_size // WORD)


class SamplingParams(NamedTuple):
    """How each row is drawn, arrays (B,); `serving/engine/backend.py` says what fields mean."""

    temperature: Any
    top_k: Any
    top_p: Any
    min_p: Any
    repetition_penalty: Any
    frequency_penalty: Any
    presence_penalty: Any
    seed: Any


FIELDS: dict[str, tuple[Any, float]] = {
    "temperature": (np.float32, 0.0),
    "top_k": (np.int32, 0),
    "top_p": (np.float32, 1.0),
    "min_p": (np.float32, 0.0),
    "repetition_penalty": (np.float32, 1.0),
    "frequency_penalty": (np.float32, 0.0),
    "presence_penalty": (np.float32, 0.0),
    "seed": (np.uint32, 0),
}
"""Field of `SamplingParams` -> its dtype, and the value that changes nothing."""


class History(NamedTuple):
    """What each row's sequence says of its next token."""

    seen: Any  # (B, V) which tokens are in the sequence already, bools
    drawn: Any  # (B, V) how often each one has been drawn, int32
    bias: Any  # (B, V) what is added to the logits, float32
    allowed: Any  # (B, `words(V)`) a mask of the tokens that may be drawn, uint32


def sample(logits_BV: Any, params: SamplingParams, history: History, positions_B: Any) -> Any:
    """One token of each row.

    Args:
      positions_B: of the tokens that are drawn; with the seed they decide the draw.

    Returns:
      ids (B,), int32.
    """
    logits_BV = logits_BV + history.bias
    penalty_B1 = params.repetition_penalty[:, None]
    penalized_BV = jnp.where(logits_BV > 0, logits_BV / penalty_B1, logits_BV * penalty_B1)
    logits_BV = jnp.where(history.seen, penalized_BV, logits_BV)
    logits_BV -= params.frequency_penalty[:, None] * history.drawn.astype(jnp.float32)
    logits_BV -= params.presence_penalty[:, None] * (history.drawn > 0)
    bits_BWI = history.allowed[..., None] >> jnp.arange(WORD, dtype=jnp.uint32) & 1
    is_allowed_BV = bits_BWI.reshape(logits_BV.shape[0], -1)[:, : logits_BV.shape[1]] != 0
    logits_BV = jnp.where(is_allowed_BV, logits_BV, HIDDEN)
    greedy_B = jnp.argmax(logits_BV, axis=-1).astype(jnp.int32)

    def draw() -> Any:
        return jnp.where(params.temperature > 0, _draw(logits_BV, params, positions_B), greedy_B)

    drawn_B: Any = jax.lax.cond(jnp.any(params.temperature > 0), draw, lambda: greedy_B)
    return drawn_B


def _draw(logits_BV: Any, params: SamplingParams, positions_B: Any) -> Any:
    """The largest of logits + Gumbel noise is distributed as their softmax."""
    temperature_B = jnp.where(params.temperature > 0, params.temperature, 1.0)
    kept_BV = keep(logits_BV / temperature_B[:, None], params)

    def noise(seed: Any, position: Any) -> Any:
        key = jax.random.fold_in(jax.random.key(seed), position)
        return jax.random.gumbel(key, kept_BV.shape[1:])

    noise_BV = jax.vmap(noise)(params.seed, positions_B)
    return jnp.argmax(kept_BV + noise_BV, axis=-1).astype(jnp.int32)


def keep(logits_BV: Any, params: SamplingParams) -> Any:
    """Logits, minus infinity for those that `top_k`, `top_p` and `min_p`, in this order, drop."""
    logits_BV = jax.lax.cond(
        jnp.any((params.top_k > 0) | (params.top_p < 1)),
        lambda: _top_p(_top_k(logits_BV, params.top_k), params.top_p),
        lambda: logits_BV,
    )
    # Against the largest logit, so that dropping others before makes no difference.
    floor_B = jnp.max(logits_BV, axis=-1) + jnp.log(params.min_p)
    return jnp.where(logits_BV >= floor_B[:, None], logits_BV, HIDDEN)


def _top_k(logits_BV: Any, k_B: Any) -> Any:
    k_B = jnp.where(k_B > 0, k_B, logits_BV.shape[-1])

    def holds(kept_BV: Any) -> Any:
        return jnp.sum(kept_BV, axis=-1, dtype=jnp.int32) >= k_B

    return _keep_largest(logits_BV, holds)


def _top_p(logits_BV: Any, p_B: Any) -> Any:
    probabilities_BV = jax.nn.softmax(logits_BV, axis=-1)
    # Rounded, fewer than all may have a sum of 1: nothing reaches infinity, and all are kept.
    p_B = jnp.where(p_B < 1, p_B, jnp.inf)

    def holds(kept_BV: Any) -> Any:
        return jnp.sum(jnp.where(kept_BV, probabilities_BV, 0.0), axis=-1) >= p_B

    return _keep_largest(logits_BV, holds)


def _keep_largest(logits_BV: Any, holds: Callable[[Any], Any]) -> Any:
    """The largest logits, as few as make `holds` true; equal ones stay or go together."""
    bits = jax.lax.bitcast_convert_type(logits_BV, jnp.uint32)
    sign = jnp.uint32(1 << 31)
    order_BV = jnp.where(bits & sign != 0, ~bits, bits | sign)

    def step(i: Any, threshold_B: Any) -> Any:
        trial_B = threshold_B | (jnp.uint32(1) << (31 - i).astype(jnp.uint32))
        return jnp.where(holds(order_BV >= trial_B[:, None]), trial_B, threshold_B)

    threshold_B = jax.lax.fori_loop(0, 32, step, jnp.zeros(logits_BV.shape[:1], jnp.uint32))
    return jnp.where(order_BV >= threshold_B[:, None], logits_BV, HIDDEN)


class Report(NamedTuple):
    """Log-probabilities of the model itself: the engine's `Tokens` as arrays (B, ...)."""

    ids: Any
    logprobs: Any
    top_ids: Any
    top_logprobs: Any


def report(logits_BV: Any, ids_B: Any, alternatives: int, wanted: Any = True) -> Report:
    """What the model says of given tokens, and which it finds likeliest.

    Args:
      alternatives: P.
      wanted: whether the likeliest are; they are zero else. If that is known at run time alone,
        they are found one after the other: XLA's sort on GPUs cannot be in a CUDA graph, and a loop
        with a sort in it then waits for the host in every turn.
    """
    normalizer_B = jax.nn.logsumexp(logits_BV, axis=-1)
    # A masked sum, not a gather: it needs no communication of logits when V is split.
    is_id_BV = ids_B[:, None] == jnp.arange(logits_BV.shape[-1])
    chosen_B = jnp.sum(jnp.where(is_id_BV, logits_BV, 0.0), axis=-1)

    def likeliest() -> tuple[Any, Any]:
        top_BP, ids_BP = _largest(logits_BV, alternatives, by_turns=not isinstance(wanted, bool))
        return ids_BP, top_BP - normalizer_B[:, None]

    def none() -> tuple[Any, Any]:
        shape = (logits_BV.shape[0], alternatives)
        return jnp.zeros(shape, jnp.int32), jnp.zeros(shape, jnp.float32)

    top_ids_BP, top_BP = jax.lax.cond(wanted, likeliest, none) if alternatives else none()
    return Report(ids_B, chosen_B - normalizer_B, top_ids_BP, top_BP)


def _largest(x_BV: Any, count: int, *, by_turns: bool) -> tuple[Any, Any]:
    """As `jax.lax.top_k`: the largest of each row, largest first, and where they are.

    Those of each part of a row are candidates. If V is split over as many devices as divide
    `PARTS`, only these are communicated.

    Args:
      by_turns: whether they are found one after the other, without a sort.
    """
    rows, size = x_BV.shape
    length = -(-size // PARTS)
    padded = jnp.pad(x_BV, ((0, 0), (0, PARTS * length - size)), constant_values=HIDDEN)
    # The parts come first: TPUs compute with tiles of 8 rows, of which 2 parts would leave 6 empty.
    x_CBV = padded.reshape(rows, PARTS, length).swapaxes(0, 1)
    find = _by_turns if by_turns else jax.lax.top_k
    x_CBP, places_CBP = find(x_CBV, min(count, length))
    places_CBP += jnp.arange(PARTS, dtype=jnp.int32)[:, None, None] * length
    x_BQ, places_BQ = (x.swapaxes(0, 1).reshape(rows, -1) for x in (x_CBP, places_CBP))
    # A candidate's rank is how many are before it: larger ones, and equal ones further left.
    is_before_QQ = jnp.arange(x_BQ.shape[1])[:, None] > jnp.arange(x_BQ.shape[1])
    is_ahead_BQQ = x_BQ[:, None] > x_BQ[..., None]
    is_ahead_BQQ |= (x_BQ[:, None] == x_BQ[..., None]) & is_before_QQ
    rank_BQ = jnp.sum(is_ahead_BQQ, axis=-1, dtype=jnp.int32)
    is_it_BPQ = rank_BQ[:, None] == jnp.arange(count, dtype=jnp.int32)[:, None]
    largest_BP, places_BP = (
        jnp.sum(jnp.where(is_it_BPQ, x[:, None], 0), axis=-1) for x in (x_BQ, places_BQ)
    )
    return largest_BP, places_BP


def _by_turns(x_CBV: Any, count: int) -> tuple[Any, Any]:
    places_V = jnp.arange(x_CBV.shape[-1], dtype=jnp.int32)

    def turn(i: Any, carry: Any) -> Any:
        last_CB1, place_CB1, largest_CBP, places_CBP = carry
        # What comes behind the last one, in the order in which they are found.
        is_left_CBV = (x_CBV == last_CB1) & (places_V > place_CB1) | (x_CBV < last_CB1)
        left_CBV = jnp.where(is_left_CBV, x_CBV, HIDDEN)
        place_CB1 = jnp.argmax(left_CBV, axis=-1, keepdims=True).astype(jnp.int32)
        last_CB1 = jnp.max(left_CBV, axis=-1, keepdims=True)
        largest_CBP = largest_CBP.at[..., i].set(last_CB1[..., 0])
        return last_CB1, place_CB1, largest_CBP, places_CBP.at[..., i].set(place_CB1[..., 0])

    shape = x_CBV.shape[:2]
    found = tuple(jnp.zeros((*shape, count), dtype) for dtype in (x_CBV.dtype, jnp.int32))
    start = (jnp.full((*shape, 1), jnp.inf, x_CBV.dtype), jnp.full((*shape, 1), -1, jnp.int32))
    _, _, largest_CBP, places_CBP = jax.lax.fori_loop(0, count, turn, (*start, *found))
    return largest_CBP, places_CBP
