"""Llama and its relatives: configuration, model, sharding tables, weights and text generation.

A Llama is, in what follows, a model of any `config.MODEL_TYPES`: Mistral, Qwen and mixtures of
experts are Llamas with a difference, and each difference is a field of `LlamaConfig`.
"""

from spmd.models.llama.config import ConfigError, LlamaConfig, RopeScaling
from spmd.models.llama.fresh import init
from spmd.models.llama.model import forward
from spmd.models.llama.named import CONFIGS, named_config
from spmd.models.llama.objective import loss

__all__ = [
    "CONFIGS", "ConfigError", "LlamaConfig", "RopeScaling", "forward", "init", "loss",
    "named_config",
]  # fmt: skip
