import dataclasses
import json

import pytest

from models.llama.config import ConfigError, LlamaConfig
from models.llama.named import CONFIGS, named_config

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
        ({"model_type": "gpt2"}, "model_type is 'gpt2', not one of"),
        ({"attention_bias": "kv"}, "attention_bias is 'kv', not one of"),
        ({"sliding_window": 0}, "sliding_window must be positive"),
        ({"max_window_layers": -1}, "max_window_layers must be positive"),
        ({"num_experts": 4}, "num_experts_per_tok is 0; a token takes from 1 to 4"),
        ({"num_experts": 4, "num_experts_per_tok": 5}, "num_experts_per_tok is 5"),
        ({"param_dtype": "int8"}, "param_dtype is 'int8'"),
    ],
)
def test_bad_sizes_are_errors(changes, message):
    with pytest.raises(ConfigError, match=message):
        dataclasses.replace(TINY, **changes)


def test_a_config_survives_json():
    config = dataclasses.replace(named_config("llama3.2-1b"), eos_token_id=(1, 2))
    assert LlamaConfig(**json.loads(json.dumps(dataclasses.asdict(config)))) == config
    assert hash(config) == hash(dataclasses.replace(config))


def test_tying_saves_one_table():
    tied = dataclasses.replace(TINY, tie_word_embeddings=True)
    saved = TINY.parameter_count() - tied.parameter_count()
    assert saved == TINY.vocab_size * TINY.hidden_size


def test_an_unknown_attention_is_said():
    with pytest.raises(ConfigError, match="attention is 'flash', not one of"):
        dataclasses.replace(TINY, attention="flash")
