"""What a program of somebody else's package is, and the two sizes in which it is made."""

from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

import jax
import optax

import spmd
from benchmarks.corpus.program import Made, mark
from benchmarks.corpus.training import cross_entropy as cross_entropy

Value = TypeVar("Value")


class Size(NamedTuple):
    """Chooses between the numbers of a run on a CPU and those that a real machine is planned for.

    Example:
        batch, width = size((8, 32), (64, 4096))
    """

    real: bool

    def __call__(self, small: Value, real: Value) -> Value:
        return real if self.real else small


SMALL, REAL = Size(False), Size(True)

Make = Callable[[Size], Made]
"""A program: its docstring says what it computes, and it returns a step, arguments and marks.

It is called while jax traces, so that nothing large is made for a plan. So the step takes all
arrays as arguments; a program that cannot is marked `made_eagerly`.
"""


def made_eagerly(make: Make) -> Make:
    """Marks a program whose package keeps arrays inside of functions: it is called untraced."""
    make.eager = True  # type: ignore[attr-defined]
    return make


def concrete(make: Make) -> Made:
    """The small program, with arrays as arguments."""
    return _made(make, SMALL, lambda run: jax.jit(run)())


def abstract(make: Make) -> Made:
    """The real program, with shapes as arguments."""
    return _made(make, REAL, jax.eval_shape)


def _made(make: Make, size: Size, evaluate: Callable[[Callable[[], Any]], Any]) -> Made:
    found: list[Made] = []

    def arguments() -> Any:
        found.append(make(size))
        return found[-1].args

    if getattr(make, "eager", False):
        made = make(size)
        return made if size is SMALL else made._replace(args=jax.eval_shape(lambda: made.args))
    args = evaluate(arguments)
    return found[-1]._replace(args=args)


def marked(made: Made, mesh: spmd.Mesh) -> tuple[Any, ...]:
    """The arguments with the marks that `Made.specs` names."""
    return tuple(mark(arg, word, mesh) for arg, word in zip(made.args, made.specs, strict=True))


def normal(seed: int, *shape: int) -> Any:
    """Normal numbers."""
    return jax.random.normal(jax.random.key(seed), shape)


def integers(seed: int, high: int, *shape: int) -> Any:
    """Integers below `high`."""
    return jax.random.randint(jax.random.key(seed), shape, 0, high)


def training(loss: Callable[..., Any], params: Any, *batch: Any) -> Made:
    """A training step of AdamW.

    Args:
      loss: (params, *batch) -> a number.
      params: a pytree of arrays, two thirds of which get marked.
      batch: pytrees of arrays, which get split by their first dim.
    """
    optimizer = optax.adamw(1e-3, eps=1e-3)

    def step(params: Any, state: Any, *batch: Any) -> Any:
        value, grads = jax.value_and_grad(loss)(params, *batch)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    args = (params, optimizer.init(params), *batch)
    return Made(step, args, ("params", "open", *["batch"] * len(batch)))
