"""`Stateful`: parameters, and what a model keeps from step to step without its being trained."""

from typing import Any, NamedTuple

import jax.numpy as jnp

from spmd.errors import ArgumentError
from spmd.models.training.checkpoints import tables

TAKEN = frozenset(
    ("step", "samples", "seconds", "loss", "grad_norm", "update_norm", "learning_rate", "skipped")
)
"""Names of numbers that every step has."""


class Stateful(NamedTuple):
    """What `init` returns of a model that has a state: means of batch norms, keys, counts.

    `loss` takes it in the place of parameters, and returns (mean loss, the next state), perhaps
    with metrics behind. Gradients, the optimizer and the norm are those of `params` alone. A step
    that is skipped keeps the state. Of several microbatches, each gets the one before's.

    Example:
        >>> def init(key):
        ...     return Stateful({"w": jax.random.normal(key, (64, 64))}, {"mean": jnp.zeros(64)})
        >>> def loss(variables, batch):
        ...     params, state = variables
        ...     y = batch["x"] @ params["w"]
        ...     mean = 0.9 * state["mean"] + 0.1 * y.mean(0)
        ...     return jnp.mean((y - batch["y"]) ** 2), {"mean": mean}
    """

    params: Any  # any tree of floats; they are trained
    state: Any  # any tree, also of integers and of `jax.random.key`s


def parted(variables: Any) -> tuple[Any, Any]:
    """(what is trained, the state), None where there is no state."""
    return tuple(variables) if isinstance(variables, Stateful) else (variables, None)


def joined(params: Any, state: Any, like: Any) -> Any:
    """A `Stateful` where `like` is one; otherwise the parameters."""
    return Stateful(params, state) if isinstance(like, Stateful) else params


def parts_of_loss(result: Any, variables: Any) -> tuple[Any, Any, dict[str, Any]]:
    """(loss, next state, metrics) of what a loss function of `variables` returned.

    Raises:
        ArgumentError: it returned something else, or metrics that are no scalars with free names.
    """
    has_state = isinstance(variables, Stateful)
    loss, *rest = result if isinstance(result, tuple) else (result,)
    state = rest.pop(0) if has_state and rest else None
    metrics = rest.pop() if rest else {}
    is_dict = isinstance(metrics, dict)
    wrong = [n for n, x in metrics.items() if n in TAKEN or jnp.shape(x)] if is_dict else [metrics]
    wrong += rest
    if wrong or jnp.shape(loss):
        raise ArgumentError(
            f"the loss of a model with{'' if has_state else 'out'} a state returned another thing",
            actual=f"metrics with {wrong[0]!r}" if wrong else f"a loss of shape {jnp.shape(loss)}",
            required=f"the mean loss{', the next state' * has_state}, and perhaps metrics: scalars "
            f"by names other than {', '.join(sorted(TAKEN))}",
            fix="let `init` return `Stateful(params, state)` if the model has a state",
        )
    return loss, state, {name: jnp.asarray(x, jnp.float32) for name, x in metrics.items()}


def loss_and_state(result: Any, variables: Any) -> tuple[Any, Any, dict[str, Any]]:
    """`parts_of_loss` of a training step, whose state has to be like the one that it was given.

    Raises:
        ArgumentError: it is not, or as `parts_of_loss`.
    """
    loss, state, metrics = parts_of_loss(result, variables)
    if not isinstance(variables, Stateful):
        return loss, None, metrics
    found, wanted = _structs(state), _structs(variables.state)
    differ = [path for path in {**wanted, **found} if found.get(path) != wanted.get(path)]
    if differ:
        path = differ[0]
        raise ArgumentError(
            f"the loss returned another state than it was given, in {len(differ)} leaves",
            actual=f"{path or 'it'}: {found.get(path, 'none')}",
            required=f"{path or 'it'}: {wanted.get(path, 'none')}",
            fix="return a state of the same paths, shapes and dtypes",
        )
    # By its leaves: libraries' own nodes may remember more of a call than their arrays.
    return loss, tables.like(variables.state, tables.by_path(state)), metrics


def check_trained(variables: Any) -> None:
    """Raises an error that names the parameters which have no gradient.

    Raises:
        ArgumentError: there are some.
    """
    structs = tables.by_path(parted(variables)[0])
    wrong = [p for p, leaf in structs.items() if not jnp.issubdtype(leaf.dtype, jnp.inexact)]
    if wrong:
        raise ArgumentError(
            f"{len(wrong)} of {len(structs)} parameters cannot be trained: they are no floats",
            actual=f"{wrong[0] or 'it'}: {structs[wrong[0]].dtype}",
            required="floats",
            fix="let `init` return `Stateful(params, state)` with them in `state`, and `loss` "
            "(mean loss, the next state); or leave them out, if they never change",
        )


def _structs(tree: Any) -> dict[str, str]:
    return {p: f"{jnp.result_type(x)}{list(jnp.shape(x))}" for p, x in tables.by_path(tree).items()}
