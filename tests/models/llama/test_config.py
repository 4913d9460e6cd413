import dataclasses

import pytest

from models.llama.config import CONFIGS, ConfigError, LlamaConfig, named_config

TINY = CONFIGS["tiny"]


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
        ({"param_dtype": "int8"}, "param_dtype is 'int8'"),
    ],
)
def test_bad_sizes_are_errors(changes, message):
    with pytest.raises(ConfigError, match=message):
        dataclasses.replace(TINY, **changes)


def test_unknown_name_lists_the_known_ones():
    with pytest.raises(
        ConfigError, match="no model is called 'llama9'; there are tiny, quickstart"
    ):
        named_config("llama9")


@pytest.mark.parametrize(
    ("name", "count"),
    [
        ("llama2-7b", 6_738_415_616),
        ("llama2-13b", 13_015_864_320),
        ("llama2-70b", 68_976_648_192),
    ],
)
def test_published_parameter_counts(name, count):
    assert named_config(name).parameter_count() == count


def test_quickstart_is_small():
    assert 1e6 < named_config("quickstart").parameter_count() < 5e6


def test_tying_saves_one_table():
    tied = dataclasses.replace(TINY, tie_word_embeddings=True)
    saved = TINY.parameter_count() - tied.parameter_count()
    assert saved == TINY.vocab_size * TINY.hidden_size


def test_flops_per_token_of_both_conventions():
    config = LlamaConfig(
        vocab_size=10,
        hidden_size=4,
        intermediate_size=6,
        num_hidden_layers=3,
        num_attention_heads=2,
    )
    layer = 4 * 4 * 4 + 3 * 4 * 6 + 2 * 4
    multiplied = 3 * layer + 4 + 10 * 4
    attention = 3 * 4 * 100  # layers x width of all heads x sequence
    assert config.flops_per_token(100, "causal") == 6 * multiplied + 6 * attention
    assert config.flops_per_token(100, "palm") == 6 * (multiplied + 40) + 12 * attention
    tied = dataclasses.replace(config, tie_word_embeddings=True)
    assert tied.flops_per_token(100, "causal") == config.flops_per_token(100, "causal")


def test_an_unknown_attention_is_said():
    with pytest.raises(ConfigError, match="attention is 'flash', not one of"):
        dataclasses.replace(TINY, attention="flash")
