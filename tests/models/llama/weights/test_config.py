"""config.json files: the published ones, what transformers writes, and what is refused."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from spmd.models.llama.config import ConfigError, RopeScaling
from spmd.models.llama.named import CONFIGS
from spmd.models.llama.weights.config import parse_config, read_config, to_hf

PUBLISHED: dict[str, dict[str, Any]] = json.loads(
    Path(__file__).with_name("published.json").read_text()
)
"""Model -> its config.json as published, all keys."""

LLAMA2_7B, LLAMA32_1B = PUBLISHED["llama2-7b"], PUBLISHED["llama3.2-1b"]
MISTRAL_7B, MIXTRAL_8X7B = PUBLISHED["mistral-7b"], PUBLISHED["mixtral-8x7b"]
QWEN25_7B, QWEN3_30B_A3B = PUBLISHED["qwen2.5-7b"], PUBLISHED["qwen3-30b-a3b"]


def explicit(config):
    """The same model with nothing left to defaults."""
    return dataclasses.replace(
        config,
        num_key_value_heads=config.kv_heads,
        head_dim=None if config.kv_lora_rank else config.head_width,
    )


def test_published_files_are_the_named_configs(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(LLAMA2_7B))
    for path in (tmp_path, tmp_path / "config.json"):
        assert explicit(read_config(path)) == explicit(CONFIGS["llama2-7b"])
    assert len(PUBLISHED) == 8
    for name, published in PUBLISHED.items():
        assert explicit(parse_config(published)) == explicit(CONFIGS[name])


def test_newer_files_keep_all_of_the_rotary_embedding_in_one_place():
    newer = {key: value for key, value in LLAMA32_1B.items() if not key.startswith("rope")}
    newer["rope_parameters"] = {**LLAMA32_1B["rope_scaling"], "rope_theta": 500000.0}
    assert parse_config(newer) == parse_config(LLAMA32_1B)
    plain = {**newer, "rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}
    assert parse_config(plain).rope_theta == 1e6
    assert parse_config(plain).rope_scaling is None


def test_what_a_file_leaves_out_is_transformers_default():
    config = parse_config({"model_type": "llama"})
    assert config.rms_norm_eps == 1e-6
    assert config.max_position_embeddings == 2048
    assert (config.vocab_size, config.rope_theta) == (32_000, 10_000.0)
    assert (config.bos_token_id, config.eos_token_id) == (1, 2)
    mistral = parse_config({"model_type": "mistral"})
    assert (mistral.kv_heads, mistral.sliding_window, mistral.max_window_layers) == (8, 4096, 0)
    qwen2, qwen3 = (parse_config({"model_type": name}) for name in ("qwen2", "qwen3"))
    assert (qwen2.attention_bias, qwen2.qk_norm, qwen2.sliding_window) == ("qkv", False, None)
    assert (qwen3.attention_bias, qwen3.qk_norm, qwen3.head_dim) == ("none", True, 128)
    assert qwen3.eos_token_id is None
    mixtral, experts = (parse_config({"model_type": name}) for name in ("mixtral", "qwen3_moe"))
    assert (mixtral.num_experts, mixtral.num_experts_per_tok, mixtral.rope_theta) == (8, 2, 1e6)
    assert (mixtral.norm_topk_prob, mixtral.sliding_window) == (True, None)
    assert (experts.num_experts, experts.expert_width, experts.norm_topk_prob) == (128, 768, False)
    assert explicit(parse_config({"model_type": "gpt_oss"})) == explicit(CONFIGS["gpt-oss-120b"])


def test_windows_are_in_the_last_layers():
    sliding = {**QWEN25_7B, "use_sliding_window": True, "sliding_window": 512}
    assert parse_config(sliding).window_spans == ((range(28), None),)
    some = parse_config({**sliding, "max_window_layers": 20})
    assert some.window_spans == ((range(20), None), (range(20, 28), 512))
    types = ["full_attention"] * 3 + ["sliding_attention"] * 25
    named = parse_config({**sliding, "layer_types": types})
    assert named.window_spans == ((range(3), None), (range(3, 28), 512))
    for wrong, message in (
        ({**sliding, "layer_types": types[::-1]}, "layer_types has to be full_attention for some"),
        ({**QWEN25_7B, "layer_types": types}, "use_sliding_window is not true"),
        ({**sliding, "sliding_window": 0}, "sliding_window must be a positive integer"),
        ({**sliding, "use_sliding_window": 1}, "use_sliding_window must be true or false"),
        ({**sliding, "attention_bias": True}, "a qwen2 of this kind is not supported: attention_b"),
        ({**sliding, "use_mrope": True}, "use_mrope is true, not false"),
        ({**MISTRAL_7B, "layer_types": types}, "unknown keys layer_types"),
        ({**QWEN3_30B_A3B, "num_local_experts": 4}, "num_local_experts and num_experts disagree"),
        ({**QWEN3_30B_A3B, "num_experts": "8"}, 'num_experts must be an integer, not "8"'),
        ({**QWEN3_30B_A3B, "norm_topk_prob": 1}, "norm_topk_prob must be true or false, not"),
        ({**QWEN3_30B_A3B, "mlp_only_layers": [0]}, r"mlp_only_layers is \[0\], not \[\]"),
        ({**MIXTRAL_8X7B, "router_jitter_noise": 0.1}, "router_jitter_noise is 0.1, not 0.0"),
        ({**MISTRAL_7B, "architectures": ["LlamaForCausalLM"]}, "architectures is"),
    ):
        with pytest.raises(ConfigError, match=message):
            parse_config(wrong)


def test_gemmas_have_a_window_in_all_layers_but_some():
    gemma = {"model_type": "gemma3_text", "num_hidden_layers": 7}
    config = parse_config(gemma)
    assert config.window_spans == ((range(5), 4096), (range(5, 6), None), (range(6, 7), 4096))
    older = {**gemma, "sliding_window_pattern": 2, "rope_theta": 1e5, "rope_local_base_freq": 100}
    assert parse_config(older).window_spans[:2] == ((range(1), 4096), (range(1, 2), None))
    ropes = {"full_attention": {"rope_theta": 1e5}, "sliding_attention": {"rope_theta": 100}}
    newer = {**gemma, "sliding_window_pattern": 2, "rope_parameters": ropes}
    assert parse_config(newer) == parse_config(older)
    yarn = {**ropes, "sliding_attention": {"rope_type": "yarn", "factor": 2.0}}
    full, sliding = "full_attention", "sliding_attention"
    for wrong, message in (
        ({"layer_types": [sliding, full, full, *[sliding] * 4]}, "full_attention for every so"),
        ({"rope_parameters": yarn}, "rope_parameters of sliding_attention are not supported"),
        ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping is 50.0, not null"),
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention is true"),
    ):
        with pytest.raises(ConfigError, match=message):
            parse_config({**gemma, **wrong})


def test_scaling_is_read_where_transformers_and_older_files_have_it():
    scaling = {**LLAMA32_1B["rope_scaling"]}
    del scaling["original_max_position_embeddings"]
    inner = parse_config({**LLAMA32_1B, "rope_scaling": scaling})
    assert inner.rope_scaling is not None
    assert inner.rope_scaling.original_max_position_embeddings == 131_072
    outer = parse_config(
        {**LLAMA32_1B, "rope_scaling": scaling, "original_max_position_embeddings": 4096}
    )
    assert outer.rope_scaling is not None
    assert outer.rope_scaling.original_max_position_embeddings == 4096
    config = parse_config({**LLAMA2_7B, "rope_scaling": {"type": "linear", "factor": 4}})
    assert config.rope_scaling == RopeScaling(rope_type="linear", factor=4.0)


@pytest.mark.parametrize("name", CONFIGS)
def test_what_is_written_is_read(name):
    config = dataclasses.replace(CONFIGS[name], eos_token_id=(3, 4))
    assert parse_config(json.loads(json.dumps(to_hf(config, "bfloat16")))) == explicit(config)


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("llama2-70b", {}),
        ("llama3.1-8b", {}),
        ("llama3.2-1b", {"attention_bias": "qkvo"}),
        ("mistral-7b", {}),
        ("mistral-7b-v0.3", {}),
        ("qwen2.5-0.5b", {}),
        ("qwen2.5-7b", {"sliding_window": 512, "max_window_layers": 20}),
        ("qwen3-8b", {"sliding_window": 512}),
        ("qwen3-0.6b", {"attention_bias": "qkvo"}),
        ("mixtral-8x7b", {"sliding_window": 512}),
        ("qwen3-30b-a3b", {"sliding_window": 512, "norm_topk_prob": False}),
    ],
)
def test_transformers_reads_what_is_written_and_the_reverse(name, changes):
    transformers = pytest.importorskip("transformers")
    config = explicit(dataclasses.replace(CONFIGS[name], **changes))
    theirs = transformers.AutoConfig.for_model(**to_hf(config, "bfloat16"))
    assert parse_config(theirs.to_dict()) == config
    assert str(theirs.dtype).endswith("bfloat16")


# What is refused


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "gpt2"}, "model_type is 'gpt2'; only 'llama', 'mistral', 'qwen2', 'qwen3'"),
        ({"model_type": None}, 'add "model_type": "llama"'),
        ({"architectures": ["LlamaForSequenceClassification"]}, "architectures is"),
        ({"attention_bias": "yes"}, 'attention_bias must be true or false, not "yes"'),
        ({"mlp_bias": True}, "mlp_bias is true, not false"),
        ({"hidden_act": "gelu"}, 'hidden_act is "gelu", not "silu"'),
        ({"pretraining_tp": 2}, "pretraining_tp is 2, not 1"),
        ({"sliding_window": 4096}, "sliding_window is 4096, not null"),
        ({"quantization_config": {"bits": 4}}, "quantization_config: weights of"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor is 0.5, not 1.0"),
        ({"attention_dropout": 0.1}, "attention_dropout is 0.1, not 0.0"),
        ({"qk_norm": 1, "alibi": 0}, "unknown keys alibi, qk_norm, .*--ignore_config_keys alibi,q"),
        ({"hidden_size": "4096"}, 'hidden_size must be an integer, not "4096"'),
        ({"hidden_size": 4096.0}, "hidden_size must be an integer, not 4096.0"),
        ({"num_hidden_layers": True}, "num_hidden_layers must be an integer, not true"),
        ({"tie_word_embeddings": 1}, "tie_word_embeddings must be true or false, not 1"),
        ({"rms_norm_eps": "x"}, 'rms_norm_eps must be a number, not "x"'),
        ({"eos_token_id": "</s>"}, "eos_token_id must be a token id or null"),
        ({"hidden_size": 0}, "hidden_size must be positive"),
        ({"rope_scaling": "linear"}, "rope_scaling must be an object or null"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2}}, 'rope_type "dynamic" of rope_scaling'),
        ({"rope_scaling": {"rope_type": "linear"}}, "of type linear has no factor"),
        ({"rope_scaling": {"factor": 2.0}}, "has a factor, 2.0, but no rope_type"),
        (
            {"rope_scaling": {"rope_type": "linear", "factor": 2, "low_freq_factor": 1}},
            "lacks: low",
        ),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 2.0}}, "needs low_freq_factor"),
        ({"rope_parameters": {"partial_rotary_factor": 0.5}}, "must be 1: whole heads"),
        ({"rope_parameters": {"rope_theta": 5.0}, "rope_theta": 6.0}, "rope_theta is 6.0, and 5.0"),
        (
            {
                "rope_parameters": {"rope_type": "linear", "factor": 2.0},
                "rope_scaling": {"rope_type": "linear", "factor": 3.0},
            },
            "disagree",
        ),
    ],
)
def test_what_would_compute_something_else_is_refused(changes, message, tmp_path):
    file = tmp_path / "config.json"
    file.write_text(json.dumps({**LLAMA2_7B, **changes}))
    with pytest.raises(ConfigError, match=message) as caught:
        read_config(file)
    assert str(caught.value).startswith(f"{file}: ")
    assert "\n" not in str(caught.value)


def test_unknown_keys_can_be_passed_over():
    odd = {**LLAMA2_7B, "unsloth_version": "2024.9"}
    assert parse_config(odd, ignore_keys=["unsloth_version"]) == parse_config(LLAMA2_7B)
    with pytest.raises(ConfigError, match="mlp_bias"):  # what changes the model cannot be
        parse_config({**LLAMA2_7B, "mlp_bias": True}, ignore_keys=["mlp_bias"])


@pytest.mark.parametrize(
    ("content", "message"), [("{", "is not JSON"), ("[]", "holds list, not a JSON object")]
)
def test_no_config_at_all(content, message, tmp_path):
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        read_config(tmp_path)
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(ConfigError, match=message):
        read_config(tmp_path)


def test_what_transformers_would_not_read_is_not_written():
    config = dataclasses.replace(CONFIGS["tiny"], hidden_size=30, head_dim=8)
    with pytest.raises(ConfigError, match="transformers refuses a hidden_size, 30"):
        to_hf(config, "float32")
    for name, changes, message in (
        ("tiny", {"sliding_window": 8}, "has no llama with a window of 8 from layer 0"),
        ("tiny", {"qk_norm": True, "attention_bias": "qkv"}, "attention_bias 'qkv', qk_norm True"),
        ("mistral-7b", {"max_window_layers": 2}, "no mistral with a window of 4096 from layer 2"),
        ("qwen2.5-7b", {"attention_bias": "none"}, "no qwen2 with attention_bias 'none'"),
        ("tiny", {"num_experts": 2, "num_experts_per_tok": 1}, "no llama with num_experts 2"),
        ("mixtral-8x7b", {"norm_topk_prob": False}, "no mixtral with norm_topk_prob False"),
        ("mixtral-8x7b", {"moe_intermediate_size": 8}, "no mixtral with moe_intermediate_size 8"),
    ):
        with pytest.raises(ConfigError, match=message):
            to_hf(dataclasses.replace(CONFIGS[name], **changes), "float32")
