import dataclasses
import functools

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import spmd
from models.llama import model, sharding
from models.llama.config import CONFIGS

TINY = CONFIGS["tiny"]
UNROLLED = dataclasses.replace(TINY, scan_layers=False)
SHAPE = {"data": 4, "model": 2}


@pytest.fixture(scope="module")
def mesh(devices8):
    return spmd.make_mesh(data=4, model=2, devices=devices8)


def structs(config):
    return jax.eval_shape(functools.partial(model.init, config=config), jax.random.key(0))


def flat(tree):
    leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
    return {"/".join(key.key for key in path): leaf for path, leaf in leaves}


def test_the_tables_cover_every_parameter_and_every_point():
    shapes = TINY.parameter_shapes()
    assert set(sharding.PARAMETER_SPECS) == set(shapes)
    assert {path: len(spec) for path, spec in sharding.PARAMETER_SPECS.items()} == {
        path: len(shape) for path, shape in shapes.items()
    }
    assert set(sharding.ACTIVATION_SPECS) == set(model.MARK_POINTS)


def test_rules_of_scanned_and_unrolled_layers():
    scanned = sharding.parameter_rules(TINY, SHAPE)
    assert scanned["layers/self_attn/q_proj/weight"] == (None, "data", "model")
    assert scanned["layers/input_layernorm/weight"] == (None, None)
    assert scanned["embed_tokens/weight"] == ("model", "data")
    unrolled = sharding.parameter_rules(UNROLLED, SHAPE)
    assert unrolled["layers/*/self_attn/q_proj/weight"] == ("data", "model")
    assert len(unrolled) == len(scanned) == len(TINY.parameter_shapes())


def test_tied_parameters_have_no_rule_for_the_output():
    tied = dataclasses.replace(TINY, tie_word_embeddings=True)
    assert "lm_head/weight" not in sharding.parameter_rules(tied, SHAPE)


def test_what_fits_is_not_dropped():
    assert sharding.dropped_marks(TINY, SHAPE) == ()
    einsum = dataclasses.replace(TINY, attention="einsum")
    assert sharding.activation_specs(einsum, SHAPE) == sharding.ACTIVATION_SPECS
    fused = set(sharding.activation_specs(TINY, SHAPE))
    assert fused == set(sharding.ACTIVATION_SPECS) - {"attention_weights"}


@pytest.mark.parametrize("name", ["llama2-7b", "llama2-13b", "llama2-70b"])
def test_published_models_fit_eight_ways(name):
    for shape in ({"data": 8, "model": 1}, SHAPE, {"data": 1, "model": 8}):
        assert sharding.dropped_marks(CONFIGS[name], shape) == ()


def test_too_few_heads_leave_their_dims_open_and_say_so():
    specs = sharding.activation_specs(TINY, {"data": 2, "model": 4})
    assert specs["q"] == ("data", None, "model")
    assert specs["k"] == specs["v"] == ("data", None, ...)
    dropped = sharding.dropped_marks(TINY, {"data": 2, "model": 4})
    assert [sentence.split(":")[0] for sentence in dropped] == ["k", "v"]
    assert "axis 'model' of size 4 does not divide 2" in dropped[0]


def test_parameters_that_do_not_divide_stay_whole_there():
    config = dataclasses.replace(TINY, intermediate_size=66)
    rules = sharding.parameter_rules(config, {"data": 4, "model": 4})
    assert rules["layers/mlp/up_proj/weight"] == (None, None, "data")
    assert rules["layers/mlp/down_proj/weight"] == (None, "data", None)


def test_an_axis_that_the_mesh_lacks_counts_as_one():
    rules = sharding.parameter_rules(TINY, {"data": 8})
    assert rules["layers/self_attn/q_proj/weight"] == (None, "data", None)
    assert sharding.activation_specs(TINY, {"data": 8})["logits"] == ("data", None, None)
    assert sharding.dropped_marks(TINY, {"data": 8}) == ()


@pytest.mark.parametrize("config", [TINY, UNROLLED])
def test_marked_structs_carry_the_tables_shardings(mesh, config):
    marked = flat(sharding.mark_params(structs(config), mesh, config))
    for path, leaf in marked.items():
        name = "/".join(part for part in path.split("/") if not part.isdecimal())
        lead = (None,) * (leaf.ndim - len(sharding.PARAMETER_SPECS[name]))
        expected = jax.sharding.NamedSharding(
            leaf.sharding.mesh, P(*lead, *sharding.PARAMETER_SPECS[name])
        )
        assert leaf.sharding.is_equivalent_to(expected, leaf.ndim), path


def test_marked_batch_is_split_over_data(mesh):
    batch = sharding.mark_batch({"inputs": np.zeros((8, 6), np.int32)}, mesh)
    assert {shard.data.shape for shard in batch["inputs"].addressable_shards} == {(2, 6)}


def test_marks_do_not_change_what_is_computed(mesh, tiny_params):
    tokens_BS = np.random.default_rng(0).integers(0, 256, (8, 16)).astype(np.int32)
    plain = jax.jit(functools.partial(model.forward, config=TINY))(tiny_params, tokens_BS)
    mark = sharding.activation_marks(mesh, TINY)
    marked = jax.jit(lambda p, t: model.forward(p, t, TINY, mark))(
        sharding.mark_params(tiny_params, mesh, TINY), sharding.mark_batch(tokens_BS, mesh)
    )
    np.testing.assert_allclose(marked, plain, rtol=1e-4, atol=1e-5)
