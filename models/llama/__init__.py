"""Llama and its relatives: configuration, model, sharding tables, weights and text generation.

A Llama is, in what follows, a model of any `config.MODEL_TYPES`: Mistral, Qwen and mixtures of
experts are Llamas with a difference, and each difference is a field of `LlamaConfig`.
"""

from models.llama.config import ConfigError, LlamaConfig, RopeScaling
from models.llama.fresh import init
from models.llama.model import forward
from models.llama.named import CONFIGS, named_config
from models.llama.objective import loss

__all__ = [
    "CONFIGS",
    "ConfigError",
    "LlamaConfig",
    "RopeScaling",
    "forward",
    "init",
    "loss",
    "named_config",
]
