"""Llama: configuration, model, sharding tables, weights and text generation."""

from models.llama.config import CONFIGS, ConfigError, LlamaConfig, RopeScaling, named_config
from models.llama.model import forward, init, loss

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
