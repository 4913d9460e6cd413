"""Llama: configuration, model, sharding tables and text generation."""

from models.llama.config import CONFIGS, ConfigError, LlamaConfig, named_config
from models.llama.model import forward, init, loss

__all__ = ["CONFIGS", "ConfigError", "LlamaConfig", "forward", "init", "loss", "named_config"]
