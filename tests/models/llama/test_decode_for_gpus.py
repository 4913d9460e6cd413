"""What XLA makes of a step for a GPU that is not here, if jax's plugin for CUDA is."""

import functools
import re

import jax
import pytest

import spmd
from spmd.models import decode
from spmd.models.gpu_options import gpu_options
from spmd.models.llama.config import LlamaConfig
from spmd.models.llama.decode import LlamaRows
from tests.compilers import needs_cuda_plugin
from tests.models.llama.made import structs

SHAPE = decode.ServingShape(16, 256, (64,), (256,), top_logprobs=5, turns=4)
CONFIG = LlamaConfig(
    vocab_size=512, hidden_size=256, intermediate_size=512, num_hidden_layers=2,
    num_attention_heads=4, num_key_value_heads=4, max_position_embeddings=256, dtype="bfloat16",
    param_dtype="bfloat16", scan_layers=False,
)  # fmt: skip
PAGES = 48
POOL = f"{PAGES},64,4,2,64]"
"""How the shape of a layer's pool ends; XLA may leave the group out."""


@functools.cache
def compiled(kind: str) -> str:
    weights = structs(CONFIG)
    functions, *_ = decode.functions(LlamaRows(CONFIG), SHAPE, weights)
    function = next(f for f in functions if f.tags["kind"] == kind)
    leaves = decode.state_leaves(LlamaRows(CONFIG), SHAPE, PAGES)
    held = {
        "weights": weights,
        "state": jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), leaves),
    }
    args = [
        held.get(role, given) for role, given in zip(function.roles, function.args, strict=True)
    ]
    mesh = spmd.Mesh(None, (1,), ("model",))
    donated = tuple(i for i, role in enumerate(function.roles) if role == "state")
    options = spmd.Options(compiler_options=gpu_options({}, "cuda", 64))
    jitted = spmd.jit(function.fn, mesh=mesh, donate_argnums=donated, options=options)
    return jitted.compile(*args, topology=spmd.Topology("h200:1")).as_text("hlo")


@needs_cuda_plugin
@pytest.mark.parametrize("kind", ["step", "score", "turns"])
def test_nothing_copies_a_whole_pool(kind: str) -> None:
    """A kernel or a scatter that wants another layout of the pages would have all of them moved."""
    text = compiled(kind)
    assert POOL in text
    assert "triton" in text
    assert not re.findall(rf"= bf16\[[0-9,]*{re.escape(POOL)}\S* (?:copy|transpose)\(", text)


@needs_cuda_plugin
@pytest.mark.parametrize("kind", ["step", "turns"])
def test_nothing_in_a_step_keeps_it_out_of_a_cuda_graph(kind: str) -> None:
    """XLA has no command for its sort: with one in it a branch asks the host."""
    text = compiled(kind)
    assert "conditional(" in text and (kind == "step" or "while(" in text)
    assert " sort(" not in text and "Sort" not in text
