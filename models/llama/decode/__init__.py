"""Llama with a KV cache: the functions that a server calls.

Modules, from the outside in:

    exports   the list of functions, one for each bucket of sizes, and how they are split
    steps     prefill (a chunk of one prompt), decode (a token of every slot), and what they do
    layers    the transformer's layers over rows of tokens
    cache     the state between calls: keys and values, and how each slot's tokens are drawn
"""

from models.llama.decode.cache import ServingShape, state_leaves
from models.llama.decode.exports import functions
from models.llama.decode.steps import chunk_logits

__all__ = ["ServingShape", "chunk_logits", "functions", "state_leaves"]
