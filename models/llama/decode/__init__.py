"""Llama with a KV cache, for the functions of `models.decode` that a server calls.

Modules, from the outside in:

    rows      what `models.decode` asks of a model
    layers    the transformer's layers over rows of tokens
"""

from spmd.models.llama.decode.rows import LlamaRows

__all__ = ["LlamaRows"]
