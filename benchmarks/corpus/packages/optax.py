"""optax: optimizers and wrappers, on a network wide enough for bytes to matter."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
import optax.contrib

from benchmarks.corpus.optimizers import loss_fn, matrices, step_of
from benchmarks.corpus.packages.program import Make, Size, normal
from benchmarks.corpus.program import Made

RATE = 1e-2


def labels(params: Any) -> Any:
    return jax.tree.map(lambda p: "matrix" if p.ndim == 2 else "vector", params)


OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "adafactor": lambda: optax.adafactor(RATE, min_dim_size_to_factor=8),
    "apply_if_finite": lambda: optax.apply_if_finite(optax.adamw(RATE, eps=1e-3), 3),
    "clipped_accumulated": lambda: optax.MultiSteps(
        optax.chain(optax.clip_by_global_norm(0.5), optax.adamw(RATE, eps=1e-3)), 2
    ).gradient_transformation(),
    "freezing": lambda: optax.freeze(lambda params: jax.tree.map(lambda p: p.ndim == 1, params)),
    "inject_hyperparams": lambda: optax.inject_hyperparams(optax.adamw)(
        optax.warmup_cosine_decay_schedule(0.0, RATE, 2, 10), eps=1e-3
    ),
    "lamb": lambda: optax.lamb(RATE, eps=1e-3),
    "lbfgs": lambda: optax.lbfgs(memory_size=4),
    "masked": lambda: optax.chain(
        optax.masked(optax.add_decayed_weights(0.1), matrices), optax.sgd(RATE, 0.9)
    ),
    "partition": lambda: optax.partition(
        {"matrix": optax.contrib.muon(RATE), "vector": optax.adam(RATE, eps=1e-3)}, labels
    ),
    "acprop": lambda: optax.contrib.acprop(RATE),
    "ademamix": lambda: optax.contrib.ademamix(RATE, eps=1e-3),
    "cocob": lambda: optax.contrib.cocob(RATE),
    "dadapt_adamw": lambda: optax.contrib.dadapt_adamw(RATE),
    "dog": lambda: optax.contrib.dog(RATE),
    "mechanic": lambda: optax.contrib.mechanize(optax.sgd(RATE)),
    "momo_adam": lambda: optax.contrib.momo_adam(RATE),
    "muon": lambda: optax.contrib.muon(RATE),
    "private": lambda: optax.contrib.differentially_private_aggregate(0.1, 0.5, jax.random.key(0)),
    "prodigy": lambda: optax.contrib.prodigy(RATE),
    "reduce_on_plateau": lambda: optax.chain(
        optax.sgd(RATE), optax.contrib.reduce_on_plateau(patience=2)
    ),
    "schedule_free": lambda: optax.contrib.schedule_free_adamw(RATE, eps=1e-3),
    "sophia": lambda: optax.contrib.sophia(RATE),
}


def network(size: Size, per_example: bool = False) -> tuple[Any, Any]:
    """Parameters of two layers, and a batch; a small one where each example has gradients."""
    real = (512, 2048, 256) if per_example else (2048, 8192, 4096)
    inner, hidden, batch = size((16, 32, 8), real)
    params = {
        "w_in": normal(0, inner, hidden) / inner**0.5,
        "b": jnp.zeros(hidden),
        "w_out": normal(1, hidden, inner) / hidden**0.5,
    }
    return params, {"x": normal(2, batch, inner), "y": normal(3, batch, inner)}


def program(name: str) -> Make:
    """A step of one of `OPTIMIZERS`."""

    def make(size: Size) -> Made:
        each, optimizer = name == "private", OPTIMIZERS[name]()
        params, batch = network(size, each)
        args = (params, optimizer.init(params), batch)
        return Made(step_of(optimizer, each), args, ("params", "open", "batch"))

    make.__name__, make.__doc__ = name, f"A step of `{name}` on a network of two layers."
    return make


def lookahead(size: Size) -> Made:
    """optax.lookahead, whose parameters are pairs of fast and slow ones."""
    optimizer = optax.lookahead(optax.adam(RATE, eps=1e-3), sync_period=2, slow_step_size=0.5)

    def step(params: Any, state: Any, batch: Any) -> Any:
        value, grads = jax.value_and_grad(lambda p: loss_fn(p, batch))(params.fast)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    params, batch = network(size)
    params = optax.LookaheadParams.init_synced(params)
    return Made(step, (params, optimizer.init(params), batch), ("params", "open", "batch"))


def sharpness_aware(size: Size) -> Made:
    """optax.contrib.sam, which takes a second gradient inside its update."""
    optimizer = optax.contrib.sam(
        optax.sgd(RATE), optax.sgd(0.05), reset_state=False, opaque_mode=True
    )

    def step(params: Any, state: Any, batch: Any) -> Any:
        value, grads = jax.value_and_grad(loss_fn)(params, batch)
        updates, state = optimizer.update(
            grads, state, params, grad_fn=lambda params, _: jax.grad(loss_fn)(params, batch)
        )
        return optax.apply_updates(params, updates), state, value

    params, batch = network(size)
    return Made(step, (params, optimizer.init(params), batch), ("params", "open", "batch"))


PROGRAMS = (*map(program, OPTIMIZERS), lookahead, sharpness_aware)
