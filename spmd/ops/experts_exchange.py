"""Experts split over the devices that split the rows: a row is sent to the experts it has chosen.

Shapes are in the names, as in `spmd.ops.experts`, and

    N devices that exchange    E experts of one device    X choices of its own rows
    R choices that it computes at a time

Each device sorts its choices by their expert, and sends the others the number of each. From these
each device computes where the rows from each device are at each other one:

    device 0 has  a a b c c c        sends   a a b to device 0, c c c to 1
    device 1 has  a b b b d d        sends   a b b b to device 0, d d to 1
    device 0 gets a a b | a b b b    in turns of 5 choices: a a b a b, then b b
    device 1 gets c c c | d d        in one turn

An expert's outputs go back the same way. A turn has room for a quarter more choices than come if
experts are chosen equally often, so mostly there is one turn; if a device gets more, all devices of
its group take part in further turns. Nothing is dropped.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from spmd.ops import experts_local as local
from spmd.ops.experts_local import ExpertMlp, Turn

Send = Callable[[Any, Any, "Places", tuple[str, ...]], Any]
"""(rows to send, array for rows that arrive, places, axes) -> this array, with those rows in it."""

LANES = 128  # widths of rows stay multiples of this


class Places(NamedTuple):
    """For each device: where rows for it start, here and there; how many go to and come from it."""

    # here_N, sent_N: where the rows for each device start, and how many there are
    here_N: Any
    sent_N: Any
    there_N: Any  # where they start at that device
    got_N: Any  # how many rows come from each


def by_collective(x: Any, out: Any, places: Places, axes: tuple[str, ...]) -> Any:
    """Returns `out` with the rows that arrive, by `jax.lax.ragged_all_to_all` (TPUs and GPUs)."""
    return jax.lax.ragged_all_to_all(x, out, *places, axis_name=axes)


def by_gather(x: Any, out: Any, places: Places, axes: tuple[str, ...]) -> Any:
    """Returns `out` with the rows that arrive, taken out of an all-gather of all devices' rows."""
    rows, (here_NN, sent_NN, there_NN, _) = jax.lax.all_gather((x, places), axes)
    me = jax.lax.axis_index(axes)
    row_R1 = jnp.arange(out.shape[0])[:, None]
    first_N, count_N = there_NN[:, me], sent_NN[:, me]
    is_from_RN = (row_R1 >= first_N) & (row_R1 < first_N + count_N)
    device_R = jnp.argmax(is_from_RN, axis=1)
    place_R = here_NN[device_R, me] + row_R1[:, 0] - first_N[device_R]
    picked = rows[device_R, jnp.clip(place_R, 0, x.shape[0] - 1)]
    return jnp.where(jnp.any(is_from_RN, axis=1)[:, None], picked, out)


def forward(*operands: Any, count: int, axes: tuple[str, ...], send: Send, mlp: ExpertMlp) -> Any:
    """Returns (B, S, H): for each row of this device, the gated sum of its experts on any device.

    Operands are those of `experts_local.forward`. `axes` are the mesh axes of the devices that
    exchange, which split the experts evenly; `send` exchanges rows.
    """
    x_BSH, gates_BSC, chosen_BSC, _, *weights = operands  # each device knows which experts it has
    route = _Route.of(chosen_BSC, weights[0].shape[0], count, axes)
    x_XH = route.sorted(x_BSH)

    def turn(i: Any, out_XH: Any) -> Any:
        there, back, place_R, part = route.turn(i)
        room_RH = jnp.zeros((route.size, x_XH.shape[1]), x_XH.dtype)
        x_RH = send(x_XH, room_RH, there, axes)
        said_RH = local.said(x_RH[part.at_R], part, weights, mlp)
        return send(said_RH[place_R], out_XH, back, axes)

    out_XH = route.turns(turn, jnp.zeros_like(x_XH))
    is_any_TC = ((chosen_BSC > 0) & (chosen_BSC <= count)).reshape(route.place_TC.shape)
    gates_TC = jnp.where(is_any_TC, gates_BSC.reshape(route.place_TC.shape), 0)
    return route.summed(out_XH, gates_TC.astype(x_BSH.dtype)).reshape(x_BSH.shape)


def gradient(*operands: Any, count: int, axes: tuple[str, ...], send: Send, mlp: ExpertMlp) -> Any:
    """Returns gradients of rows, gates and weights; operands are `forward`'s, then `dout`."""
    x_BSH, gates_BSC, chosen_BSC, _, *weights, dout_BSH = operands
    route = _Route.of(chosen_BSC, weights[0].shape[0], count, axes)
    width = x_BSH.shape[-1]
    sent_XW = jnp.concatenate([route.sorted(x_BSH), route.sorted(dout_BSH)], axis=1)
    sent_XW = _with(sent_XW, gates_BSC.reshape(-1)[route.order_X])

    def turn(i: Any, sums: Any) -> Any:
        there, back, place_R, part = route.turn(i)
        room_RW = jnp.zeros((route.size, sent_XW.shape[1]), sent_XW.dtype)
        got_RW = send(sent_XW, room_RW, there, axes)[part.at_R]
        x_RH, dout_RH = got_RW[:, :width], got_RW[:, width : 2 * width]
        gates_R = jnp.where(part.is_here_R1[:, 0], _without(got_RW, 2 * width, gates_BSC.dtype), 0)
        pull = local.pull_of(x_RH, gates_R, part, weights, mlp)
        dx_RH, dgates_R, *dweights = pull(jnp.where(part.is_here_R1, dout_RH, 0))
        found_XW, *before = sums
        owed_RW = _with(dx_RH, dgates_R)[place_R]
        return send(owed_RW, found_XW, back, axes), *local.with_terms(before, dweights)

    nothing_XW = _with(jnp.zeros_like(sent_XW[:, :width]), jnp.zeros_like(gates_BSC.reshape(-1)))
    zeros = (jnp.zeros(x.shape, jnp.float32) for x in weights)
    found_XW, *dweights = route.turns(turn, (nothing_XW, *zeros))
    dx_BSH = route.summed(found_XW[:, :width]).reshape(x_BSH.shape)
    dgates_X = _without(found_XW, width, gates_BSC.dtype)[route.place_TC.reshape(-1)]
    cast = (total.astype(x.dtype) for total, x in zip(dweights, weights, strict=True))
    return dx_BSH, dgates_X.reshape(gates_BSC.shape), *cast


class _Route(NamedTuple):
    """The order of this device's choices by expert; how many choices each device has for each."""

    # the places of this device's choices, sorted by their expert; those of none are last
    order_X: Any
    place_TC: Any  # where each row's choices are in that order
    counts_NE: Any  # how many choices each device has of each of the experts here
    sizes_NN: Any  # how many choices each device has for each
    me: Any
    # choices, size, most: choices of each row, of a turn, and that may come
    choices: int
    size: int
    most: int

    @staticmethod
    def of(chosen_BSC: Any, here: int, count: int, axes: tuple[str, ...]) -> "_Route":
        chosen_X, devices = chosen_BSC.reshape(-1), count // here
        key_X = jnp.where((chosen_X > 0) & (chosen_X <= count), chosen_X - 1, count)
        is_chosen = key_X[:, None] == jnp.arange(count)
        counts = jax.lax.all_gather(jnp.sum(is_chosen, axis=0, dtype=jnp.int32), axes)
        counts = counts.reshape(devices, devices, here)
        me = jax.lax.axis_index(axes)
        choices, total = chosen_BSC.shape[-1], chosen_X.shape[0]
        most = devices * (total // choices) * min(choices, here)  # no row chooses an expert twice
        order_X, place_X = local.sorted_by(key_X)
        return _Route(
            order_X,
            place_X.reshape(-1, choices),
            counts[:, me],
            jnp.sum(counts, axis=2),
            me,
            choices,
            local.turn_size(total, most),
            most,
        )

    def sorted(self, x_BSH: Any) -> Any:
        return x_BSH.reshape(-1, x_BSH.shape[-1])[self.order_X // self.choices]

    def summed(self, x_XH: Any, weights_TC: Any = None) -> Any:
        """Returns (T, H): for each row, the sum of its choices' rows of `x_XH`, times weights."""

        def term(c: int) -> Any:
            term_TH = x_XH[self.place_TC[:, c]]
            return term_TH if weights_TC is None else term_TH * weights_TC[:, c, None]

        return local.summed(map(term, range(self.choices)))

    def turn(self, i: Any) -> tuple[Places, Places, Any, Turn]:
        """Returns places to send turn `i`'s rows and results, where rows are sorted, the `Turn`."""
        start, me = i * self.size, self.me
        # Rows from a device lie behind those from the devices before it; a turn takes of that the
        # part from `start` on.
        before_NN = jnp.cumsum(self.sizes_NN, axis=0) - self.sizes_NN
        first_NN = jnp.clip(start - before_NN, 0, self.sizes_NN)
        last_NN = jnp.clip(start + self.size - before_NN, 0, self.sizes_NN)
        sent_NN, there_NN = last_NN - first_NN, jnp.maximum(before_NN + first_NN - start, 0)
        here_NN = jnp.cumsum(self.sizes_NN, axis=1) - self.sizes_NN + first_NN
        there = Places(here_NN[me], sent_NN[me], there_NN[me], sent_NN[:, me])
        back = Places(there_NN[:, me], sent_NN[:, me], here_NN[:, me], sent_NN[me])
        # What arrives, sorted by expert: from each device come those of the first expert, of the
        # second, ...
        here = self.counts_NE.shape[1]
        ends = jnp.cumsum(self.counts_NE.reshape(-1))
        row_R = start + jnp.arange(self.size)
        piece_R = jnp.sum(row_R[:, None] >= ends, axis=1)
        expert_R = jnp.where(row_R < ends[-1], piece_R % here, here)
        at_R, place_R = local.sorted_by(expert_R)
        ends_E = jnp.sum(expert_R[:, None] <= jnp.arange(here), axis=0, dtype=jnp.int32)
        is_first_R1 = (jnp.arange(self.size) < ends_E[-1])[:, None]
        return there, back, place_R, Turn(at_R, at_R, is_first_R1, ends_E)

    def turns(self, turn: Callable[[Any, Any], Any], carry: Any) -> Any:
        """Returns `carry` after `turn(i, carry)` for each turn that the busiest device needs."""
        return local.in_turns(
            self.size, self.most, lambda: jnp.max(jnp.sum(self.sizes_NN, axis=0)), turn, carry
        )


def _with(x_RH: Any, gates_R: Any) -> Any:
    """Returns rows with the bits of their gates appended, so that both are sent together."""
    wide_R = gates_R.astype(jnp.promote_types(gates_R.dtype, x_RH.dtype))
    bits_RK = jax.lax.bitcast_convert_type(wide_R, x_RH.dtype).reshape(wide_R.shape[0], -1)
    padding = -bits_RK.shape[1] % LANES if x_RH.shape[1] % LANES == 0 else 0
    return jnp.concatenate([x_RH, jnp.pad(bits_RK, ((0, 0), (0, padding)))], axis=1)


def _without(x_RW: Any, width: int, dtype: Any) -> Any:
    wide = jnp.promote_types(dtype, x_RW.dtype)
    parts = wide.itemsize // x_RW.dtype.itemsize
    bits_RK = x_RW[:, width : width + parts]
    if parts == 1:
        bits_RK = bits_RK[:, 0]
    return jax.lax.bitcast_convert_type(bits_RK, wide).astype(dtype)
