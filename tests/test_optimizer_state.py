"""Un-annotated optimizer state is split like the parameters, and made that way."""

from __future__ import annotations

import math
from typing import Any

import jax
import pytest

import spmd
from tests.programs import Training, llama


@pytest.fixture(scope="module", params=["adamw", "adafactor"])
def compiled(request: Any) -> tuple[Training, spmd.Compiled]:
    training = llama(spmd.make_mesh(data=4, model=2), request.param, scan=True)
    return training, training.compile()


def test_leaves_of_a_parameters_shape_get_its_sharding(
    compiled: tuple[Training, spmd.Compiled],
) -> None:
    training, program = compiled
    by_path = {
        jax.tree_util.keystr(path): leaf
        for path, leaf in jax.tree_util.tree_flatten_with_path(training.marked_params)[0]
    }
    structs = jax.eval_shape(training.optimizer.init, training.params)
    leaves = jax.tree_util.tree_flatten_with_path(structs)[0]
    shardings = jax.tree.leaves(program.in_shardings[1])
    found = 0
    for (path, leaf), sharding in zip(leaves, shardings, strict=True):
        parameter = next(
            (p for key, p in by_path.items() if jax.tree_util.keystr(path).endswith(key)), None
        )
        if parameter is None or parameter.shape != leaf.shape:
            continue
        found += 1
        assert sharding.is_equivalent_to(parameter.sharding, leaf.ndim), (path, sharding)
    assert found >= len(by_path)


def test_state_is_created_in_pieces(compiled: tuple[Training, spmd.Compiled]) -> None:
    training, program = compiled
    state = program.init(1, training.optimizer.init, training.marked_params)
    wanted = jax.tree.leaves(program.in_shardings[1])
    for leaf, sharding in zip(jax.tree.leaves(state), wanted, strict=True):
        assert leaf.sharding == sharding
        pieces = [shard.data.shape for shard in leaf.addressable_shards]
        assert pieces == [sharding.shard_shape(leaf.shape)] * 8
    whole = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(state))
    largest = max(math.prod(leaf.shape) for leaf in jax.tree.leaves(state))
    per_device = sum(
        math.prod(leaf.addressable_shards[0].data.shape) for leaf in jax.tree.leaves(state)
    )
    assert per_device < whole / 3
    hlo = jax.jit(training.optimizer.init, out_shardings=program.in_shardings[1])
    text = hlo.lower(training.marked_params).compile().as_text()
    from spmd.explain.hlo import largest_values

    for value in largest_values(text, 3):
        assert value.elements < largest, value


def test_results_lie_like_the_donated_arguments(
    compiled: tuple[Training, spmd.Compiled],
) -> None:
    _, program = compiled
    for number in (0, 1):
        inputs = jax.tree.leaves(program.in_shardings[number])
        outputs = jax.tree.leaves(program.out_shardings[number])
        assert inputs == outputs
