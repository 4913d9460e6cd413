"""Language models as functions that a server calls, over rows of tokens of many sequences.

    model = LlamaRows(config)                     # or whatever else is a `RowsModel`
    functions(model, ServingShape(...), weights)  # what to export

Modules, from the outside in:

    exports    the list of functions, one for each bucket of sizes, and how they are split
    steps      begin (a sequence in a slot), allow (which tokens), step (rows of many slots)
    state      what lives on the devices between calls
    model      what a model has to say: its cache, its layers, its logits
    attention  keys and values in pages, for models that have them
    recurrence one state for each sequence, for models that have that
    shape      the sizes
"""

from spmd.models.decode.exports import functions, step_name
from spmd.models.decode.model import RowsModel
from spmd.models.decode.shape import PAGES, ServingShape
from spmd.models.decode.state import state_leaves

__all__ = [
    "PAGES", "RowsModel", "ServingShape", "functions", "state_leaves", "step_name",
]  # fmt: skip
