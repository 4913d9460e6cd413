"""jax.random with every key implementation: the same bits, whatever the sharding."""

from functools import partial, update_wrapper
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks.corpus.program import Made, Program, normal

IMPLS = ("threefry2x32", "rbg", "unsafe_rbg")


def sampling(impl: str) -> Made:
    """Bits, uniform, normal, categorical, permutation, split, fold_in and other samplers."""

    def fn(key: Any, logits: Any) -> Any:
        keys = jax.random.split(key, 12)
        each = jax.random.split(jax.random.fold_in(key, 7), logits.shape[0])
        noisy = jnp.sin(logits) + jax.random.normal(keys[0], logits.shape)
        return {
            "bits": jax.random.bits(keys[1], logits.shape),
            "uniform": jax.random.uniform(keys[2], logits.shape),
            "normal": (noisy, jax.random.truncated_normal(keys[3], -1, 1, logits.shape)),
            "categorical": jax.random.categorical(keys[4], logits),
            "permutation": jax.random.permutation(keys[5], 16),
            "shuffled": jax.random.permutation(keys[6], logits, axis=0),
            "choice": jax.random.choice(keys[7], 16, (4,), replace=False),
            "bernoulli": jax.random.bernoulli(keys[8], 0.3, logits.shape),
            "integers": jax.random.randint(keys[9], logits.shape, 0, 100),
            "exponential": jax.random.exponential(keys[10], logits.shape),
            "gumbel": jax.random.gumbel(keys[11], logits.shape, jnp.bfloat16),
            "each": jax.vmap(lambda key, row: jax.random.uniform(key, row.shape))(each, logits),
            "keys": keys,
        }

    return Made(fn, (jax.random.key(3, impl=impl), normal(0, 8, 16)), ("open", "batch"))


def rejection() -> Made:
    """Samplers that loop until they accept: gamma, beta, poisson, dirichlet, and their kin."""

    def fn(key: Any, rate: Any) -> Any:
        keys = jax.random.split(key, 6)
        return {
            "gamma": jax.random.gamma(keys[0], rate),
            "beta": jax.random.beta(keys[1], rate, 2.0),
            "poisson": jax.random.poisson(keys[2], rate),
            "dirichlet": jax.random.dirichlet(keys[3], rate),
            "laplace": jax.random.laplace(keys[4], rate.shape),
            "multivariate": jax.random.multivariate_normal(keys[5], rate, jnp.eye(4)),
        }

    return Made(fn, (jax.random.key(4), jnp.abs(normal(0, 8, 4)) + 0.5), ("open", "batch"))


def programs() -> list[Program]:
    """One program for each implementation, and the samplers by rejection."""
    every = {impl: update_wrapper(partial(sampling, impl), sampling) for impl in IMPLS}
    return [
        *(Program(f"random.{impl}", f, heavy=impl != "threefry2x32") for impl, f in every.items()),
        Program("random.rejection", rejection, heavy=True),
    ]
