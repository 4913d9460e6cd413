"""Fresh parameters: their shapes, number and dtype, and that both forms are the same numbers."""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from models.llama import fresh, parameters
from models.llama.named import CONFIGS
from tests.models.llama.inverse import stack_layers

TINY = CONFIGS["tiny"]
UNROLLED = dataclasses.replace(TINY, scan_layers=False)


def paths_and_shapes(tree):
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {"/".join(key.key for key in path): leaf.shape for path, leaf in leaves}


def test_scanned_parameters_have_the_configs_shapes(tiny_params):
    expected = {
        path: (TINY.num_hidden_layers, *shape) if path.startswith("layers/") else shape
        for path, shape in TINY.parameter_shapes().items()
    }
    assert paths_and_shapes(tiny_params) == expected


@pytest.mark.parametrize("config", [TINY, UNROLLED])
@pytest.mark.parametrize("tied", [False, True])
def test_parameter_count_is_that_of_the_parameters(config, tied):
    config = dataclasses.replace(config, tie_word_embeddings=tied)
    structs = jax.eval_shape(functools.partial(fresh.init, config=config), jax.random.key(0))
    total = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(structs))
    assert total == config.parameter_count()


def test_scanned_and_unrolled_parameters_are_the_same_numbers(tiny_params):
    unrolled = jax.jit(functools.partial(fresh.init, config=UNROLLED))(jax.random.key(0))
    jax.tree.map(np.testing.assert_array_equal, stack_layers(unrolled), tiny_params)
    jax.tree.map(np.testing.assert_array_equal, parameters.unstack_layers(tiny_params), unrolled)


def test_parameter_dtype():
    config = dataclasses.replace(TINY, param_dtype="bfloat16")
    structs = jax.eval_shape(functools.partial(fresh.init, config=config), jax.random.key(0))
    assert {leaf.dtype for leaf in jax.tree.leaves(structs)} == {jnp.dtype("bfloat16")}
