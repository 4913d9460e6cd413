"""What XLA makes of decoding for a GPU that is not here, if jax's plugin for CUDA is."""

from __future__ import annotations

import re

import jax
import pytest

import spmd
from models.gpu_graphs import with_gpu_graphs
from models.llama import decode, model
from models.llama.config import LlamaConfig
from tests.compilers import needs_cuda_plugin

SHAPE = decode.ServingShape(
    slots=16, max_length=256, chunks=(64,), lengths=(256,), decode_steps=4, top_logprobs=5
)
CONFIG = LlamaConfig(
    vocab_size=512, hidden_size=256, intermediate_size=512, num_hidden_layers=2,
    num_attention_heads=4, num_key_value_heads=4, max_position_embeddings=256, dtype="bfloat16",
    param_dtype="bfloat16", scan_layers=False,
)  # fmt: skip
CACHE = "bf16[16,2,4,256,64]"


def compiled(kind: str) -> str:
    """The optimized HLO of a function."""
    weights = jax.eval_shape(lambda key: model.init(key, CONFIG), jax.random.key(0))
    functions, *_ = decode.functions(CONFIG, SHAPE, weights)
    function = next(f for f in functions if f.tags["kind"] == kind)
    mesh = spmd.Mesh(None, (1,), ("model",))
    donated = tuple(i for i, role in enumerate(function.roles) if role == "state")
    options = with_gpu_graphs(spmd.Options(), "cuda")
    jitted = spmd.jit(function.fn, mesh=mesh, donate_argnums=donated, options=options)
    return jitted.compile(*function.args, topology=spmd.Topology("h200:1")).as_text("hlo")


@needs_cuda_plugin
@pytest.mark.parametrize("kind", ["prefill", "score", "copy"])
def test_nothing_copies_a_whole_cache(kind: str) -> None:
    """A kernel that wants another layout of a slot's keys had XLA transpose those of all slots."""
    text = compiled(kind)
    assert CACHE in text
    assert "cudnn" in text or kind == "copy"
    assert not re.findall(rf"= {re.escape(CACHE)}\S* (?:copy|transpose)\(", text)


@needs_cuda_plugin
def test_nothing_in_the_loop_keeps_it_out_of_a_cuda_graph() -> None:
    """XLA has no command for its sort: with one in it a loop asks the host about every turn."""
    text = compiled("decode")
    assert "while(" in text and "conditional(" in text
    assert " sort(" not in text and "Sort" not in text
