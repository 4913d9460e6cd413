"""A state for each sequence, for models without positions: recurrences instead of attention.

Shapes are in the names, as in `spmd.models.decode.model`; x stands for the dims of one state. Pages
have `max_length` positions, so a sequence has one page, and the page is the sequence's state:

    slot 1 begins anew    its first row has the position 0: it sees zeros, whatever its page holds
    slot 2 goes on        its first row sees what the call before left in its page
    slot 3 has no rows    its page stays as it is
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from spmd.errors import ArgumentError
from spmd.models.decode.model import Rows
from spmd.models.decode.packing import taken


def read_states(pool_ANx: Any, rows: Rows) -> Any:
    """What each slot's first row sees.

    Args:
        rows: `table`, `first` and `positions`, as `Rows` says.

    Returns:
        (A, B, x): zeros for slots that begin anew, and anything for those without rows.

    Raises:
        ArgumentError: slots have several pages.
    """
    if rows["table"].shape[2] != 1:
        raise ArgumentError(
            "a state without positions lies in one page",
            actual=f"tables of {rows['table'].shape[2]} pages a sequence",
            required="one page a sequence",
            fix="set the page of ServingShape to its max_length, which is then the only length",
        )
    groups_A1 = jnp.arange(pool_ANx.shape[0])[:, None]
    # How many pages there are is known to types alone, so the index cannot be compared with it.
    states = pool_ANx.at[groups_A1, rows["table"][:, :, 0]]
    states_ABx = states.get(mode="clip", wrap_negative_indices=False)
    first_AB = jnp.minimum(rows["first"][:, :-1], rows["positions"].shape[1] - 1)
    begins_AB = jnp.take_along_axis(rows["positions"], first_AB, axis=1) == 0
    return jnp.where(_beside(begins_AB, states_ABx), 0, states_ABx)


def write_states(pool_ANx: Any, states_ABx: Any, rows: Rows) -> Any:
    """The pool with the new states of the slots that have rows.

    Args:
        states_ABx: those behind each slot's last row.
        rows: `table` and `first`, as `Rows` says.
    """
    groups_A1 = jnp.arange(pool_ANx.shape[0])[:, None]
    has_rows_AB = rows["first"][:, 1:] > rows["first"][:, :-1]
    # `drop` ignores pages that do not exist.
    page_AB = jnp.where(has_rows_AB, rows["table"][:, :, 0], np.iinfo(np.int32).max)
    return pool_ANx.at[groups_A1, page_AB].set(
        states_ABx.astype(pool_ANx.dtype), mode="drop", wrap_negative_indices=False
    )


def linear_recurrence(pool_ANx: Any, decay_ARx: Any, input_ARx: Any, rows: Rows) -> tuple[Any, Any]:
    """`h = decay * h_before + input` of each row, where `h_before` is of its slot's row before.

    All rows are computed together by an associative scan (Blelloch, *Prefix sums and their
    applications*, 1990), which is cut where slots begin. A chunk gives what its rows would one at
    a time, up to rounding.

    Args:
        decay_ARx, input_ARx: of each row; they broadcast to (A, R, x), and are computed with in the
            pool's dtype.

    Returns:
        (h (A, R, x) of each row, the pool with the state behind each slot's last row).

    Example:
        >>> h_ARW, layer = linear_recurrence(layer, decay_ARW, input_ARW, rows)
    """
    dtype = pool_ANx.dtype
    decay_ARx, input_ARx = jnp.broadcast_arrays(decay_ARx.astype(dtype), input_ARx.astype(dtype))
    count, slots = rows["slots"].shape[1], rows["first"].shape[1] - 1
    slot_AR = jnp.clip(rows["slots"], 0, slots - 1)
    is_first_AR = taken(rows["first"], slot_AR) == jnp.arange(count)
    # A slot's first row takes its state in, and nothing of the slot before.
    before_ARx = taken(read_states(pool_ANx, rows), slot_AR)
    cut_ARx = _beside(is_first_AR, input_ARx)
    input_ARx = jnp.where(cut_ARx, decay_ARx * before_ARx + input_ARx, input_ARx)
    _, _, h_ARx = jax.lax.associative_scan(_then, (cut_ARx, decay_ARx, input_ARx), axis=1)
    last_AB = jnp.clip(rows["first"][:, 1:] - 1, 0, count - 1)
    return h_ARx, write_states(pool_ANx, taken(h_ARx, last_AB), rows)


def _then(first: tuple[Any, Any, Any], second: tuple[Any, Any, Any]) -> tuple[Any, Any, Any]:
    """Two steps as one, a2 * (a1 * h + b1) + b2; behind a cut what came before does not count."""
    (cut1, a1, b1), (cut2, a2, b2) = first, second
    # A product with 0 would not do: NaN in one sequence is none of the others' business.
    return cut1 | cut2, a1 * a2, jnp.where(cut2, b2, a2 * b1 + b2)


def _beside(flags: Any, like: Any) -> Any:
    """Flags with as many dims of size 1 behind them as broadcasting takes."""
    return flags.reshape(*flags.shape, *(1,) * (like.ndim - flags.ndim))
