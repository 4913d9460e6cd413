"""One step of every optax optimizer that a learning rate is enough for, of chains and wrappers."""

import inspect
import warnings
from collections.abc import Callable
from functools import partial, update_wrapper
from typing import Any

import jax
import jax.numpy as jnp
import optax
import optax.contrib

from benchmarks.corpus.program import Made, Program, normal

LEARNING_RATE = 1e-2


def loss_fn(params: Any, batch: Any) -> Any:
    h = jnp.tanh(batch["x"] @ params["w_in"] + params["b"])
    return jnp.mean((h @ params["w_out"] - batch["y"]) ** 2)


def step_of(optimizer: Any) -> Callable[..., Any]:
    """A step of an optimizer, which gets what it may ask for."""
    extended = optax.with_extra_args_support(optimizer)

    def step(params: Any, state: Any, batch: Any) -> Any:
        def value_fn(params: Any, obj_fn: Any = None) -> Any:  # line searches pass on the extras
            return loss_fn(params, batch)

        value, grads = jax.value_and_grad(value_fn)(params)
        extras = {"value": value, "grad": grads, "value_fn": value_fn, "obj_fn": value_fn}
        updates, state = extended.update(grads, state, params, **extras)
        return optax.apply_updates(params, updates), state, value

    return step


def optimizer_step(make: Callable[[], Any]) -> Made:
    """The second step of the optimizer on a two-layer network."""
    optimizer = make()
    step = step_of(optimizer)
    params = {"w_in": normal(0, 16, 32), "b": normal(1, 32), "w_out": normal(2, 32, 8)}
    batch = {"x": normal(3, 8, 16), "y": normal(4, 8, 8)}
    params, state, _ = jax.jit(step)(params, optimizer.init(params), batch)
    return Made(step, (params, state, batch), ("params", "open", "batch"))


def constructors(module: Any) -> dict[str, Callable[[], Any]]:
    """The functions of a module that make an optimizer from a learning rate."""
    found: dict[str, Callable[[], Any]] = {}
    for name, make in sorted(vars(module).items()):
        if name.startswith(("_", "scale_by_")) or not inspect.isfunction(make):
            continue
        construct = partial(constructed, make)
        try:
            optimizer = construct()
        except (TypeError, ValueError):
            continue
        if hasattr(optimizer, "init") and hasattr(optimizer, "update"):
            found[name] = construct
    return found


def constructed(make: Callable[..., Any]) -> Any:
    """The optimizer, with a key where it takes one, even if it is deprecated."""
    key = {"key": jax.random.key(0)} if "key" in inspect.signature(make).parameters else {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return make(learning_rate=LEARNING_RATE, **key)


def matrices(params: Any) -> Any:
    return jax.tree.map(lambda p: p.ndim == 2, params)


CHAINS: dict[str, Callable[[], Any]] = {
    "polyak_sgd": lambda: optax.polyak_sgd(max_learning_rate=LEARNING_RATE),
    "clip_schedule": lambda: optax.chain(
        optax.clip_by_global_norm(0.5),
        optax.adamw(optax.warmup_cosine_decay_schedule(0.0, 1e-2, 2, 10), mask=matrices),
    ),
    "apply_if_finite": lambda: optax.apply_if_finite(optax.adamw(LEARNING_RATE, eps=1e-3), 3),
    "accumulated": lambda: optax.MultiSteps(
        optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(LEARNING_RATE, eps=1e-3)), 2
    ).gradient_transformation(),
    "inject_hyperparams": lambda: optax.inject_hyperparams(optax.adamw)(
        optax.warmup_cosine_decay_schedule(0.0, LEARNING_RATE, 2, 10), eps=1e-3
    ),
    "partition": lambda: optax.partition(
        {True: optax.contrib.muon(LEARNING_RATE), False: optax.adam(LEARNING_RATE, eps=1e-3)},
        matrices,
    ),
}
QUICK = {"adafactor", "lamb", "chain.clip_schedule"}


def programs() -> list[Program]:
    """All of them, in the order of their names."""
    named = constructors(optax)
    named |= {f"contrib.{name}": make for name, make in constructors(optax.contrib).items()}
    named |= {f"chain.{name}": make for name, make in CHAINS.items()}
    steps = {name: partial(optimizer_step, make) for name, make in named.items()}
    return [
        Program(f"optax.{name}", update_wrapper(made, optimizer_step), heavy=name not in QUICK)
        for name, made in steps.items()
    ]
