"""What counts as a stack between two loops, and what is left alone."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax

import spmd
from spmd.ir.control_flow import Index
from spmd.ir.program import Program
from spmd.lowering.recompute import pairs_of, recompute
from tests.close import close
from tests.lowering.rewrites.local_programs import arguments, run

MESH = spmd.Mesh(None, (2,), ("a",))
ROWS = 4


@dataclass(frozen=True, eq=False)
class Loops:
    """A loop that collects what it makes, and one that reads it.

    Attributes:
      trips: how often both run; also the length of the stack.
      write, read: what counts in either of them, where it begins, and its step.
      place: where they look, of what counts.
      after: what else the forward loop hands on, of its stack.
    """

    trips: int = 3
    write: tuple[type, int, int] = (jnp.int32, 0, 1)
    read: tuple[type, int, int] = (jnp.int32, 2, -1)
    place: Callable[[Any], Any] = lambda i: i
    after: Callable[[Any], Any] = lambda stack: jnp.zeros(2)

    def __call__(self, x: Any) -> Any:
        empty = jnp.zeros((self.trips, *x.shape))

        def forward(_: Any, carry: Any) -> Any:
            i, y, stack, _ = carry
            piece = jnp.tanh(y * i.astype(jnp.float32))
            stack = lax.dynamic_update_slice_p.bind(stack, piece[None], *at(i, x))
            return i + self.write[0](self.write[2]), jnp.sin(y), stack, self.after(stack)

        def backward(_: Any, carry: Any) -> Any:
            i, y = carry
            piece = lax.dynamic_slice_p.bind(stack, *at(i, x), slice_sizes=(1, *x.shape))[0]
            return i + self.read[0](self.read[2]), jnp.cos(y) + piece * i.astype(jnp.float32)

        def at(i: Any, x: Any) -> list[Any]:
            i = self.place(i)
            return [i, *(jnp.zeros((), i.dtype) for _ in x.shape)]

        first = self.write[0](self.write[1])
        after = self.after(empty)
        _, y, stack, after = lax.fori_loop(0, self.trips, forward, (first, x, empty, after))
        _, y = lax.fori_loop(0, self.trips, backward, (self.read[0](self.read[1]), y))
        return y, after


STACKS = {
    "backwards": Loops(),
    "forwards": Loops(read=(jnp.int32, 0, 1)),
    "written from the end": Loops(write=(jnp.int32, 2, -1)),
    "counted from elsewhere": Loops(
        write=(jnp.int32, 5, 1), read=(jnp.int32, 5, 1), place=lambda i: i - 5
    ),
    "one trip": Loops(trips=1, read=(jnp.int32, 0, 1)),
}

OTHERS = {
    "looked at while it is filled": Loops(after=lambda stack: stack.sum((0, 1))),
    "handed on twice": Loops(after=lambda stack: stack),
    "counted by another type": Loops(read=(jnp.int8, 2, -1)),
    "not filled": Loops(write=(jnp.int32, 0, 2)),
    "read beyond its end": Loops(read=(jnp.int32, 1, 1)),
}


def local(fn: Callable[..., Any]) -> Program:
    """One device's program, which makes nothing again."""
    x = jax.ShapeDtypeStruct((ROWS, 2), jnp.float32)
    options = spmd.Options(recompute=False)
    lowered = spmd.jit(fn, mesh=MESH, in_specs=(("a", None),), options=options).lower(x)
    return lowered.stages.optimized.program


def pairs_in(program: Program) -> int:
    return len(pairs_of(program.body, Index(program)))


@pytest.mark.parametrize("name", [*STACKS, *OTHERS])
def test_a_stack_is_written_once_everywhere_and_read_by_one_loop(name: str) -> None:
    program = local(STACKS.get(name) or OTHERS[name])
    assert pairs_in(program) == (name in STACKS)
    less, _ = recompute(program, MESH, spmd.Topology("h200:2"), 1.0, 1 << 40)
    args = [a / 10 for a in arguments(program, MESH)]
    close(run(less, MESH, args), run(program, MESH, args), 1e-5)


def test_a_counter_beyond_its_type_fills_no_stack() -> None:
    """It is not run: XLA clamps places in their own type, and writes where nothing is."""
    assert pairs_in(local(Loops(130, (jnp.int8, 0, 1), (jnp.int8, 0, 1)))) == 0
