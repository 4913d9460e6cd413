"""Unroll: writes out a loop of few trips, as a copy of its body for each trip.

before: `%9 = while(%i = 0, %x = %0) { %w = dynamic_slice %1, %i; ...; return %i + 1, %x @ %w }`
after:  `%w0 = slice %1 [0:1]; ...; %w1 = slice %1 [1:2]; ...`

The loop's counter is then constant, so each trip reads its slice of a stacked tensor directly. What
one loop stacks for another (a scan's residuals for its gradient) is read slice by slice, too; only
what reads the whole stack gets a concatenate. As in a Python loop over layers, backends overlap the
communication of one layer with the next layer's work, and copy nothing. Compiling takes longer.

With remat (`jax.checkpoint`) a gradient's loop computes again what the forward loop computed. Once
both are written out, backends would merge the equal ops, and keep all results live. So residuals
that remat reads go through a barrier with the cotangents of their trip:

    %x1, %g1 = optimization_barrier %x, %g; %y1 = tanh %x1    // `tanh %x` was computed before
"""

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from spmd.ir.control_flow import Index, integer_of
from spmd.ir.description import BROADCAST, CONSTANT, DYNAMIC_SLICE, RESHAPE
from spmd.ir.dialect.builder import Builder
from spmd.ir.program import Op, OpKind, Program, Value, walk_region
from spmd.ir.rewrite import Now, edit_ops, remove_dead, repeat_op
from spmd.ir.types import numpy_dtype

_FOLDED: Mapping[str, Callable[..., int]] = {
    "stablehlo.add": operator.add, "stablehlo.subtract": operator.sub,
    "stablehlo.multiply": operator.mul, "stablehlo.maximum": max, "stablehlo.minimum": min,
    "stablehlo.negate": operator.neg, "stablehlo.convert": int,
    "stablehlo.select": lambda which, yes, no: yes if which else no,
    "stablehlo.clamp": lambda low, x, high: min(max(x, low), high),
}  # fmt: skip
"""Name of an op on integer scalars, such as counters and indices -> how it is computed here."""

_COMPARED: Mapping[str, Callable[[int, int], bool]] = {
    name: getattr(operator, name.lower()) for name in ("EQ", "NE", "LT", "LE", "GT", "GE")
}


def unroll(program: Program, most: int) -> Program:
    """Writes out loops known to take at most `most` trips, but no loop around such a loop."""
    index = Index(program)
    chosen: dict[Value, int] = {}
    for op in program.walk():  # inner loops first
        trips = index.trips.get(op.results[0]) if op.is_loop and op.results else None
        inside = (o for region in op.regions for o in walk_region(region) if o.results)
        holds = any(o.results[0] in chosen for o in inside)
        if trips is not None and trips <= most and not holds:
            chosen[op.results[0]] = trips
    if not chosen:
        return program
    return remove_dead(edit_ops(program, _Unroller(index, chosen).edit, chosen))


class _Collected(NamedTuple):
    """Holds a stacked tensor as it was before, and the slices written since, by index in dim 0."""

    under: Value
    pieces: Mapping[int, Value]


class _Same(dict[Value, Value]):
    """Maps a loop body's values to new values, and values from outside of it to themselves."""

    def __missing__(self, value: Value) -> Value:
        return value


class _Unroller:
    def __init__(self, index: Index, chosen: Mapping[Value, int]) -> None:
        self.index, self.chosen = index, chosen
        self.known: dict[Value, int] = {}  # integers that were worked out
        self.stacks: dict[Value, _Collected] = {}  # values of which pieces are known
        self.number: dict[Value, Value] = {}  # the same for values that are computed alike
        # a kind of op and its operands' numbers -> the loop that computed it first, the results
        self.first: dict[tuple[OpKind, tuple[Value, ...]], tuple[Value, tuple[Value, ...]]] = {}
        self.sliced: dict[tuple[Value, int], Value] = {}  # (stack, place) -> its first slice
        self.widened: dict[Value, Value] = {}  # value with one more dim in front -> the value
        self.loop = -1  # that is being written
        # of its trip: numbers of what other loops handed it -> what that is behind a barrier; new
        # values for old ones; what it gets from the trip before
        self.handed: dict[Value, Value | None] = {}
        self.env = _Same()
        self.cotangents: list[Value] = []

    def edit(self, b: Builder, op: Op, _now: Now) -> Sequence[Value]:
        """Appends a loop's body once for each trip; returns the values of the loop's results."""
        body, carried = op.regions[1], list(op.operands)
        self.loop = op.results[0]
        for _ in range(self.chosen[self.loop]):
            env = self.env = _Same(zip(body.args, carried, strict=True))
            pairs = zip(body.args, body.results, strict=True)
            new = [a for a, result in pairs if a != result and b.types[a].rank]
            self.handed, self.cotangents = {}, [a for a in new if env[a] not in self.stacks]
            for inner in body.ops:
                repeat_op(b, inner, env, self._rewrite)
            carried = [env[v] for v in body.results]
        results = []
        for value in carried:
            stack = self.stacks.get(value)
            # A stack of which every piece was written is its pieces side by side: written one by
            # one they would be written into a copy of what was there before.
            if stack is not None and len(stack.pieces) == b.types[value].shape[0]:
                value = b.concatenate([stack.pieces[i] for i in range(len(stack.pieces))], 0)
                self.stacks[value] = stack
            results.append(value)
        return results

    def _rewrite(self, b: Builder, op: Op, operands: tuple[Value, ...]) -> Sequence[Value] | None:
        integer = self._folded(op.kind, operands)
        if integer is not None:
            value = b.constant(np.array(integer), op.kind.results[0].dtype)
            self.known[value] = integer
            return (value,)
        if op.name == DYNAMIC_SLICE:
            return self._sliced(b, op.kind, operands)
        if op.name == "stablehlo.dynamic_update_slice":
            value, piece, *starts = operands
            (made,) = b.repeat(op.kind, operands)
            place = self._place(starts, op.kind.operands[0].shape, op.kind.operands[1].shape)
            if place is not None:
                stack = self.stacks.get(value, _Collected(value, {}))
                self.stacks[made] = _Collected(stack.under, {**stack.pieces, place: piece})
            return (made,)
        return self._repeated(b, op.kind, operands)

    def _repeated(self, b: Builder, kind: OpKind, operands: tuple[Value, ...]) -> Sequence[Value]:
        """Appends an op, its residuals behind a barrier if it recomputes; returns its results."""
        source = self.widened.get(operands[0]) if len(operands) == 1 else None
        if source is not None and _widens(kind, -1) and b.types[source] == kind.results[0]:
            return (source,)
        key = kind, tuple(self.number.get(v, v) for v in operands)
        loop, first = self.first.get(key, (self.loop, ()))
        if loop != self.loop and not self.handed.keys().isdisjoint(key[1]):
            return b.repeat(kind, tuple(self._late(b, v) for v in operands))
        made = b.repeat(kind, operands)
        self.number.update(zip(made, first or made, strict=True))
        self.first.setdefault(key, (self.loop, made))
        if _widens(kind, 1):
            self.widened[made[0]] = operands[0]
        return made

    def _late(self, b: Builder, value: Value) -> Value:
        """Returns a value; if it is another loop's residual, behind a barrier with cotangents."""
        number = self.number.get(value, value)
        if number not in self.handed:
            return value
        late = self.handed[number]
        if late is None:  # barriers next to each other are one, see `separate`
            late = self.handed[number] = b.barrier([value])[0]
            for argument in self.cotangents:
                self.env[argument] = b.barrier([self.env[argument]])[0]
        return late

    def _integer(self, value: Value) -> int | None:
        known = self.known.get(value)
        return integer_of(self.index.producers, value) if known is None else known

    def _folded(self, kind: OpKind, operands: Sequence[Value]) -> int | None:
        """Returns an op's result if it is a known integer or bool scalar, else None."""
        if len(kind.results) != 1 or kind.results[0].rank:
            return None
        dtype = numpy_dtype(kind.results[0].dtype)
        if not np.issubdtype(dtype, np.integer) and dtype != np.bool_:
            return None
        if kind.name == CONSTANT:
            return int(kind.attrs["value"].array())
        given: list[Any] = [self._integer(v) for v in operands]
        if not given or None in given:
            return None
        fold = _FOLDED.get(kind.name)
        direction = kind.attrs.get("comparison_direction")
        if direction is not None:
            fold = next((f for word, f in _COMPARED.items() if word in str(direction)), None)
        found = None if fold is None else int(fold(*given))
        fits = found is not None and (
            dtype == np.bool_ or np.iinfo(dtype).min <= found <= np.iinfo(dtype).max
        )
        return found if fits else None

    def _place(self, starts: Sequence[Value], shape: Sequence[int], piece: Sequence[int]) -> Any:
        """Returns a piece's index in dim 0, an int; None if not known or not `(1, *shape[1:])`."""
        known = [self._integer(v) for v in starts]
        if not shape or tuple(piece) != (1, *shape[1:]) or None in known[:1]:
            return None
        return min(max(known[0] or 0, 0), shape[0] - 1)  # as the ops clamp it

    def _sliced(
        self, b: Builder, kind: OpKind, operands: Sequence[Value]
    ) -> Sequence[Value] | None:
        value, *starts = operands
        shape, piece = kind.operands[0].shape, kind.results[0].shape
        place = self._place(starts, shape, piece)
        if place is None:
            return None
        stack = self.stacks.get(value, _Collected(value, {}))
        written = stack.pieces.get(place)
        if written is None:
            made = b.slice_dim(stack.under, 0, place, place + 1)
            self.number[made] = self.sliced.setdefault((stack.under, place), made)
            return (made,)
        whole = self.widened.get(written, written)
        self.handed.setdefault(self.number.get(whole, whole), None)
        return (written,)


def _widens(kind: OpKind, more: int) -> bool:
    """Returns whether an op only adds `more` leading dims of size 1, or drops them if negative."""
    if kind.name not in (RESHAPE, BROADCAST):
        return False
    before, after = kind.operands[0].shape, kind.results[0].shape
    if more < 0:
        before, after = after, before
    dims = tuple(kind.attrs.get("broadcast_dimensions", range(1, len(after))))
    return after == (1,) * abs(more) + before and dims == tuple(range(1, len(after)))
