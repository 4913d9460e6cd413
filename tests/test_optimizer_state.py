"""Un-annotated optimizer state is split like the parameters, and made that way."""

import math
from typing import Any

import jax
import pytest

import spmd
from tests.programs import Training, arrays_made, llama

Made = tuple[Training, spmd.Compiled]


@pytest.fixture(
    scope="module", params=["adamw", pytest.param("adafactor", marks=pytest.mark.heavy)]
)
def compiled(request: Any) -> Made:
    training = llama(spmd.make_mesh(data=4, model=2), request.param, scan=True)
    return training, training.compile()


def is_factored(training: Training) -> bool:
    return "FactoredState" in str(jax.eval_shape(training.optimizer.init, training.params))


@pytest.mark.thorough
def test_leaves_of_a_parameters_shape_get_its_sharding(compiled: Made) -> None:
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
    # Adafactor keeps whole-shaped state only for what it does not factor: the norms.
    assert found >= (3 if is_factored(training) else len(by_path))


def test_state_is_created_in_pieces(compiled: Made) -> None:
    training, program = compiled
    state = program.init(1, training.optimizer.init, training.marked_params)
    wanted = jax.tree.leaves(program.in_shardings[1])
    for leaf, sharding in zip(jax.tree.leaves(state), wanted, strict=True):
        assert leaf.sharding == sharding
        pieces = [shard.data.shape for shard in leaf.addressable_shards]
        assert pieces == [sharding.shard_shape(leaf.shape)] * 8
    whole = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(state))
    own = [leaf.addressable_shards[0].data.shape for leaf in jax.tree.leaves(state)]
    assert sum(map(math.prod, own)) < whole / 2


def test_creating_the_state_never_makes_a_split_leaf_whole(compiled: Made) -> None:
    training, program = compiled
    shardings = program.in_shardings[1]
    creation = jax.jit(training.optimizer.init, out_shardings=shardings)
    text = str(creation.lower(training.marked_params).compile().as_text())
    shapes = {shape for _, shape in arrays_made(text)}
    state = jax.eval_shape(training.optimizer.init, training.params)
    pairs = zip(jax.tree.leaves(state), jax.tree.leaves(shardings), strict=True)
    split = [leaf for leaf, sharding in pairs if not sharding.is_fully_replicated]
    largest = max(split, key=lambda leaf: math.prod(leaf.shape))
    assert largest.shape not in shapes


def test_results_lie_like_the_donated_arguments(compiled: Made) -> None:
    _, program = compiled
    for number in (0, 1):
        inputs, outputs = program.in_shardings[number], program.out_shardings[number]
        assert jax.tree.leaves(inputs) == jax.tree.leaves(outputs)
