import dataclasses
import itertools
from typing import Any

import jax
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import spmd
from benchmarks.llama_step import train_step
from spmd.models.llama import marks, sharding
from spmd.models.llama.config import ConfigError
from spmd.models.llama.named import CONFIGS
from spmd.models.placement import axes_of, present
from tests.models.llama.made import assert_close, flat, structs

TINY = CONFIGS["tiny"]
UNROLLED = dataclasses.replace(TINY, scan_layers=False)
SHAPE = {"data": 4, "model": 2}


def test_the_tables_cover_every_parameter_and_every_point():
    parts = dataclasses.replace(TINY, attention_bias="qkvo", qk_norm=True, post_norms=True)
    chosen: Any = {"num_experts": 4, "num_experts_per_tok": 2, "swiglu_limit": 7.0}
    mixture = dataclasses.replace(parts, attention_sinks=True, **chosen)
    shapes = parts.parameter_shapes() | mixture.parameter_shapes()
    shapes |= CONFIGS["deepseek-v3"].parameter_shapes()
    dims = {sharding.alike(path): len(shape) for path, shape in shapes.items()}
    for table in sharding.TABLES.values():
        assert {path: len(spec) for path, spec in table.parameters.items()} == dims
        assert set(table.activations) == set(marks.MARK_POINTS)


def test_rules_of_parameters():
    scanned = sharding.parameter_rules(TINY, SHAPE)
    assert scanned["layers/self_attn/q_proj/weight"] == (None, "data", "model")
    assert scanned["layers/input_layernorm/weight"] == (None, None)
    assert scanned["embed_tokens/weight"] == ("model", "data")
    unrolled = sharding.parameter_rules(UNROLLED, SHAPE)
    assert unrolled["layers/*/self_attn/q_proj/weight"] == ("data", "model")
    assert len(unrolled) == len(scanned) == len(TINY.parameter_shapes())
    tied = dataclasses.replace(TINY, tie_word_embeddings=True)
    assert "lm_head/weight" not in sharding.parameter_rules(tied, SHAPE)
    config = dataclasses.replace(TINY, intermediate_size=66)
    rules = sharding.parameter_rules(config, {"data": 4, "model": 4})
    assert rules["layers/mlp/up_proj/weight"] == (None, None, "data")
    assert rules["layers/mlp/down_proj/weight"] == (None, "data", None)


def test_what_fits_is_not_dropped_and_an_axis_that_the_mesh_lacks_counts_as_one():
    assert sharding.dropped_marks(TINY, SHAPE) == ()
    everywhere = dict.fromkeys(sharding.MESH_AXES, 2)
    einsum = dataclasses.replace(TINY, attention="einsum", stages=2, stage_microbatches=2)
    assert sharding.activation_specs(einsum, everywhere) == sharding.ACTIVATION_SPECS
    fused = set(sharding.activation_specs(TINY, everywhere))
    assert fused == set(sharding.ACTIVATION_SPECS) - {"attention_weights"}
    rules = sharding.parameter_rules(TINY, {"data": 8})
    assert rules["layers/self_attn/q_proj/weight"] == (None, "data", None)
    assert sharding.activation_specs(TINY, {"data": 8})["logits"] == ("data", None, None)
    assert sharding.dropped_marks(TINY, {"data": 8}) == ()


@pytest.mark.parametrize("table", ["2d", "fsdp", "tensor-sequence"])
def test_behind_a_pipeline_sequences_are_split_over_its_stages(table: str) -> None:
    mesh = {"stage": 2, "data": 2, "model": 2}
    staged = dataclasses.replace(TINY, stages=2, stage_microbatches=2)
    specs = sharding.activation_specs(staged, mesh, sharding.TABLES[table])
    plain = sharding.activation_specs(TINY, mesh, sharding.TABLES[table])
    assert "stage" in axes_of(specs["logits"][0]) and "stage" not in axes_of(plain["logits"][0])
    assert {name for name in specs if specs[name] != plain[name]} == {"logits"}


@pytest.mark.parametrize("name", ["llama2-7b", "llama2-13b", "llama2-70b"])
def test_published_models_fit_eight_ways(name):
    for shape in ({"data": 8, "model": 1}, SHAPE, {"data": 1, "model": 8}):
        assert sharding.dropped_marks(CONFIGS[name], shape) == ()


def test_too_few_heads_leave_their_dims_open_and_axes_that_do_not_divide_are_named():
    specs = sharding.activation_specs(TINY, {"data": 2, "model": 4})
    assert specs["q"] == ("data", None, "model")
    assert specs["k"] == specs["v"] == ("data", None, ...)
    dropped = sharding.dropped_marks(TINY, {"data": 2, "model": 4})
    assert [sentence.split(":")[0] for sentence in dropped] == ["k", "v"]
    assert "model=4 does not divide 2 (dim 2), which is left to the compiler" in dropped[0]
    config = dataclasses.replace(TINY, hidden_size=36, num_attention_heads=6, num_key_value_heads=6)
    dropped = sharding.dropped_marks(config, SHAPE, sharding.TABLES["fsdp"])
    assert any("data=4 x model=2 does not divide 36" in text for text in dropped)


@pytest.mark.parametrize("config", [TINY, UNROLLED])
def test_marked_structs_carry_the_tables_shardings(mesh, config):
    for path, leaf in flat(sharding.mark_params(structs(config), mesh, config)).items():
        name = "/".join(part for part in path.split("/") if not part.isdecimal())
        own = [present(entry, mesh.shape) for entry in sharding.PARAMETER_SPECS[name]]
        lead = (None,) * (leaf.ndim - len(own))
        expected = jax.sharding.NamedSharding(leaf.sharding.mesh, P(*lead, *own))
        assert leaf.sharding.is_equivalent_to(expected, leaf.ndim), path


def test_marked_batch_is_split_over_data(mesh):
    batch = sharding.mark_batch({"inputs": np.zeros((8, 6), np.int32)}, mesh)
    assert {shard.data.shape for shard in batch["inputs"].addressable_shards} == {(2, 6)}


def test_nothing_but_the_batch_is_split_over_replicas():
    shape = {"replica": 2, "data": 2, "model": 2}
    for name, table in sharding.TABLES.items():
        assert "replica" in str(table.batch), name
        for spec in sharding.parameter_rules(TINY, shape, table).values():
            assert "replica" not in str(spec), name


def test_experts_are_on_their_axis_or_on_the_batchs():
    config = dataclasses.replace(TINY, num_experts=4, num_experts_per_tok=2)
    path = "layers/mlp/experts/down_proj/weight"
    shape = {"data": 2, "expert": 2, "model": 2}
    assert sharding.parameter_rules(config, shape)[path] == (None, "expert", "data", "model")
    assert sharding.parameter_rules(config, SHAPE)[path] == (None, None, "data", "model")
    folded = sharding.parameter_rules(config, SHAPE, sharding.table_named("2d-experts"))
    assert folded[path] == (None, "data", None, "model")
    everything = sharding.parameter_rules(config, shape, sharding.table_named("2d-all"))
    assert everything[path] == (None, "expert", "data", "model")
    assert everything["layers/self_attn/q_proj/weight"] == (None, ("data", "expert"), "model")
    assert sharding.activation_specs(config, shape)["logits"] == (("data", "expert"), None, "model")
    (note,) = sharding.dropped_marks(dataclasses.replace(config, num_experts=3), shape)[:1]
    assert "expert=2 does not divide 3 (dim 0), which stays whole" in note


def test_tables_by_name():
    fsdp = sharding.parameter_rules(TINY, SHAPE, sharding.table_named("fsdp"))
    assert fsdp["layers/mlp/up_proj/weight"] == (None, None, ("data", "model"))
    tensor = sharding.parameter_rules(TINY, SHAPE, sharding.table_named("tensor"))
    assert tensor["layers/mlp/up_proj/weight"] == (None, "model", None)
    sequence = sharding.activation_specs(TINY, SHAPE, sharding.table_named("2d-sequence"))
    assert sequence["mlp_output"] == ("data", "model", None)
    assert sequence["q"] == ("data", None, "model")
    with pytest.raises(ConfigError, match="no sharding is called 'zero'; there are 2d, 2d-seq"):
        sharding.table_named("zero")


QUICK = (("2d-sequence", True),)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("name", "hybrid"),
    [
        pytest.param(*case, marks=() if case in QUICK else pytest.mark.heavy)
        for case in itertools.product(sharding.TABLES, (False, True))
    ],
)
def test_every_table_trains_alike(devices8, tiny_params, name, hybrid):
    table, optimizer = sharding.TABLES[name], optax.sgd(0.1)
    if hybrid:
        ici = {"replica": 1, "data": 2, "model": 2}
        mesh = spmd.HybridMesh(ici, {"replica": 2}, devices=devices8)
    else:
        mesh = spmd.make_mesh(data=4, model=2, devices=devices8)
    tokens_BS = np.random.default_rng(0).integers(0, 256, (8, 16)).astype(np.int32)
    batch = {"inputs": tokens_BS, "targets": np.roll(tokens_BS, -1, 1)}
    state = optimizer.init(tiny_params)
    step = train_step(TINY, optimizer, sharding.activation_marks(mesh, TINY, table))
    wanted, _, loss = jax.jit(step)(tiny_params, state, batch)
    found, _, found_loss = spmd.jit(step, mesh=mesh)(
        sharding.mark_params(tiny_params, mesh, TINY, table),
        state,
        sharding.mark_batch(batch, mesh, table),
    )
    np.testing.assert_allclose(found_loss, loss, rtol=1e-5)
    assert_close(found, wanted, rtol=1e-4, atol=1e-5)
