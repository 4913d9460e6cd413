"""Configs, by name and of one's own; fresh parameters, their number and their arithmetic."""

import dataclasses
import json

import jax
import numpy as np
import pytest

from spmd.models.llama.config import ConfigError, LlamaConfig
from spmd.models.llama.flops import flops_per_token
from spmd.models.llama.named import CONFIGS, named_config
from tests.models.llama.layers import stack_layers, unstack_layers
from tests.models.llama.made import flat, fresh_params

TINY = CONFIGS["tiny"]
UNROLLED = dataclasses.replace(TINY, scan_layers=False)


def test_scanned_parameters_have_the_configs_shapes_and_are_the_unrolled_ones(tiny_params):
    expected = {
        path: (TINY.num_hidden_layers, *shape) if path.startswith("layers/") else shape
        for path, shape in TINY.parameter_shapes().items()
    }
    assert {path: leaf.shape for path, leaf in flat(tiny_params).items()} == expected
    unrolled = fresh_params(UNROLLED)
    jax.tree.map(np.testing.assert_array_equal, stack_layers(unrolled), tiny_params)
    jax.tree.map(np.testing.assert_array_equal, unstack_layers(tiny_params), unrolled)


def test_flops_per_token_of_both_conventions():
    config = LlamaConfig(
        vocab_size=10, hidden_size=4, intermediate_size=6, num_hidden_layers=3,
        num_attention_heads=2,
    )  # fmt: skip
    layer = 4 * 4 * 4 + 3 * 4 * 6 + 2 * 4
    multiplied = 3 * layer + 4 + 10 * 4
    attention = 3 * 4 * 100  # layers x width of all heads x sequence
    assert flops_per_token(config, 100, "causal") == 6 * multiplied + 6 * attention
    assert flops_per_token(config, 100, "palm") == 6 * (multiplied + 40) + 12 * attention
    tied = dataclasses.replace(config, tie_word_embeddings=True)
    assert flops_per_token(tied, 100, "causal") == flops_per_token(config, 100, "causal")
    # A token sees as many before it as there are, 19 at most: (1 + ... + 19 + 81 * 20) / 100.
    windows = dataclasses.replace(config, sliding_window=20, max_window_layers=1)
    seen = 100 / 2 + 2 * (20 - 20 * 20 / 2 / 100)
    assert flops_per_token(windows, 100, "causal") == 6 * multiplied + 12 * 4 * seen
    assert flops_per_token(windows, 100, "palm") == flops_per_token(config, 100, "palm")
    assert flops_per_token(windows, 8, "causal") == flops_per_token(config, 8, "causal")
    # Of five experts as wide as the MLP a token takes two; and there is the router.
    experts = dataclasses.replace(config, num_experts=5, num_experts_per_tok=2)
    more = 6 * 3 * (3 * 4 * 6 + 5 * 4)
    for convention in ("causal", "palm"):
        both = [flops_per_token(c, 100, convention) for c in (config, experts)]
        assert both[1] - both[0] == more


def test_flops_of_latent_attention_and_of_experts_in_some_layers():
    """DeepSeek-V3 is published with 37 billion parameters that a token goes through."""
    config = named_config("deepseek-v3")
    attention = 3 * 128 * (192 + 128) * 61 * 4096
    each = (flops_per_token(config, 4096) - attention) / 6 + config.vocab_size * config.hidden_size
    assert round(each / 1e9, 1) == 37.6


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": 0}, "hidden_size must be positive"),
        ({"num_hidden_layers": -1}, "num_hidden_layers must be positive"),
        ({"num_key_value_heads": 0}, "num_key_value_heads must be positive"),
        ({"hidden_size": 30}, "hidden_size 30 does not divide"),
        ({"num_key_value_heads": 3}, "no multiple of num_key_value_heads 3"),
        ({"head_dim": 5}, "has to be even"),
        ({"dtype": "float64"}, "dtype is 'float64'"),
        ({"model_type": "gpt2"}, "model_type is 'gpt2', not one of"),
        ({"attention_bias": "kv"}, "attention_bias is 'kv', not one of"),
        ({"sliding_window": 0}, "sliding_window must be positive"),
        ({"max_window_layers": -1}, "max_window_layers must be positive"),
        ({"num_experts": 4}, "num_experts_per_tok is 0; a token takes from 1 to 4"),
        ({"num_experts": 4, "num_experts_per_tok": 5}, "num_experts_per_tok is 5"),
        ({"param_dtype": "int8"}, "param_dtype is 'int8'"),
        ({"attention": "flash"}, "attention is 'flash', not one of"),
        ({"matmul": "int8"}, "matmul is 'int8'"),
        ({"kv_lora_rank": 8, "qk_rope_head_dim": 4}, "latent attention has a kv_lora_rank, qk_"),
        ({"v_head_dim": 8}, "latent attention has a kv_lora_rank, qk_"),
        ({"n_shared_experts": 1}, "are of models with num_experts"),
        ({"swiglu_limit": 7.0}, "are of models with num_experts"),
        ({"attention_sinks": True, "attention": "einsum"}, "einsum attention knows no sinks"),
        ({"num_experts": 4, "num_experts_per_tok": 2, "n_group": 3}, "n_group has to divide"),
        ({"num_experts": 4, "num_experts_per_tok": 2, "first_k_dense_replace": 2}, "n_group has"),
    ],
)
def test_bad_sizes_are_errors(changes, message):
    with pytest.raises(ConfigError, match=message):
        dataclasses.replace(TINY, **changes)


def test_configs_survive_json_and_have_names():
    config = dataclasses.replace(named_config("llama3.2-1b"), eos_token_id=(1, 2))
    assert LlamaConfig(**json.loads(json.dumps(dataclasses.asdict(config)))) == config
    assert hash(config) == hash(dataclasses.replace(config))
    with pytest.raises(
        ConfigError, match="no model is called 'llama9'; there are tiny, quickstart"
    ):
        named_config("llama9")
    assert 1e6 < named_config("quickstart").parameter_count() < 5e6


PARAMETERS = """
    llama2-7b 6_738_415_616  llama2-13b 13_015_864_320  llama2-70b 68_976_648_192
    llama3-8b 8_030_261_248  llama3-70b 70_553_706_496  llama3.1-8b 8_030_261_248
    llama3.1-70b 70_553_706_496  llama3.1-405b 405_853_388_800  llama3.2-1b 1_235_814_400
    llama3.2-3b 3_212_749_824  llama3.3-70b 70_553_706_496  mistral-7b 7_241_732_096
    mistral-7b-v0.3 7_248_023_552  qwen2.5-0.5b 494_032_768  qwen2.5-1.5b 1_543_714_304
    qwen2.5-3b 3_085_938_688  qwen2.5-7b 7_615_616_512  qwen2.5-14b 14_770_033_664
    qwen2.5-32b 32_763_876_352  qwen2.5-72b 72_706_203_648  qwen3-0.6b 596_049_920
    qwen3-1.7b 1_720_574_976  qwen3-4b 4_022_468_096  qwen3-8b 8_190_735_360
    qwen3-14b 14_768_307_200  qwen3-32b 32_762_123_264  mixtral-8x7b 46_702_792_704
    mixtral-8x22b 140_620_634_112  qwen3-30b-a3b 30_532_122_624  qwen3-235b-a22b 235_093_634_560
    deepseek-v2-lite 15_706_484_224  deepseek-v3 671_026_419_200  gpt-oss-20b 20_914_757_184
    gpt-oss-120b 116_829_156_672
"""
WORDS = PARAMETERS.split()


@pytest.mark.parametrize(("name", "count"), [*zip(WORDS[::2], WORDS[1::2], strict=True)])
def test_published_parameter_counts(name, count):
    assert named_config(name).parameter_count() == int(count)


def test_published_rotary_embeddings():
    """As in the published config.json files."""
    assert named_config("llama2-7b").rope_theta == 10_000
    assert named_config("llama3-8b").rope_theta == 500_000
    assert named_config("llama3-70b").rope_scaling is None
    published = named_config("llama3.2-1b").rope_scaling  # as `weights/test_config.py` reads it
    assert published is not None
    for name, factor in {"llama3.1-405b": 8, "llama3.2-3b": 32, "llama3.3-70b": 8}.items():
        config = named_config(name)
        assert config.rope_scaling == dataclasses.replace(published, factor=factor)
        assert config.max_position_embeddings == 131_072
    assert [named_config(f"llama3.2-{size}").head_width for size in ("1b", "3b")] == [64, 128]
