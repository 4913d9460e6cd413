"""Llama with a KV cache: the functions that a server calls.

Modules, from the outside in:

    exports   the list of functions, one for each bucket of sizes, and how they are split
    steps     begin (a sequence in a slot), step (rows of many slots), and what they do
    layers    the transformer's layers over rows of tokens
    cache     the state between calls: pages of keys and values, and how tokens are drawn
"""

from models.llama.decode.cache import PAGES, ServingShape, state_leaves
from models.llama.decode.exports import functions, step_name
from models.llama.decode.steps import row_logits

__all__ = ["PAGES", "ServingShape", "functions", "row_logits", "state_leaves", "step_name"]
