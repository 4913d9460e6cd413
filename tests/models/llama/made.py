"""Fresh parameters and the forward pass, compiled once for all tests; trees compared."""

import functools
from typing import Any

import jax
import numpy as np

import spmd
from spmd.models.llama import fresh, model, sharding
from spmd.models.llama.config import LlamaConfig


@functools.cache
def fresh_params(config: LlamaConfig, seed: int = 0) -> Any:
    return jax.jit(functools.partial(fresh.init, config=config))(jax.random.key(seed))


def structs(config: LlamaConfig) -> Any:
    return jax.eval_shape(functools.partial(fresh.init, config=config), jax.random.key(0))


def shardings_of(config: LlamaConfig, mesh: spmd.Mesh) -> Any:
    """Of a model's parameters."""
    return jax.tree.map(lambda s: s.sharding, sharding.mark_params(structs(config), mesh, config))


def flat(tree: Any) -> dict[str, Any]:
    """Path -> leaf."""
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {"/".join(key.key for key in path): leaf for path, leaf in leaves}


@functools.cache
def forward(config: LlamaConfig) -> Any:
    return jax.jit(functools.partial(model.forward, config=config))


def assert_close(found: Any, wanted: Any, rtol: float, atol: float = 0.0) -> None:
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=rtol, atol=atol), found, wanted)
