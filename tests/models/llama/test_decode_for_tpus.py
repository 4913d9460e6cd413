"""What decoding exchanges on eight chips that are not here: by its plan, nothing is compiled."""

from __future__ import annotations

from collections import Counter

import jax
import pytest

import spmd
from models.llama import decode, model
from models.llama.config import LlamaConfig

CONFIG = LlamaConfig(
    vocab_size=32000, hidden_size=2048, intermediate_size=5504, num_hidden_layers=1,
    num_attention_heads=16, num_key_value_heads=8, max_position_embeddings=1024, dtype="bfloat16",
    param_dtype="bfloat16", scan_layers=False,
)  # fmt: skip


@pytest.mark.parametrize("slots", [8, 16])
def test_only_logits_and_tokens_travel_besides_sums(slots: int) -> None:
    """Which tokens were seen and drawn lies as the loop needs it: nothing is moved around it."""
    mesh = spmd.Mesh(None, (1, 8), ("data", "model"))
    shape = decode.ServingShape(slots, 512, (64,), (512,), decode_steps=10, top_logprobs=5)
    weights = jax.eval_shape(lambda key: model.init(key, CONFIG), jax.random.key(0))
    functions, _, specs, primary = decode.functions(CONFIG, shape, weights)
    function = next(f for f in functions if f.name == primary)
    given = dict(zip(function.roles, function.args, strict=True))
    owned = {"weights": given["weights"], "state": given["state"]}
    patterns = {k: [spmd.OPEN if e == "..." else e for e in spec] for k, spec in specs.items()}
    marked = spmd.mark_tree(owned, mesh, patterns)
    step = spmd.jit(function.fn, mesh=mesh, donate_argnums=(1,))
    lowered = step.lower(
        marked["weights"], marked["state"], given["input"], topology=spmd.Topology("v5e:2x4")
    )
    once = [c for c in lowered.collectives if c.count == 1]
    assert not once, "exchanged around the loop"
    # A layer has two sums, and the embedding one.
    kinds = Counter(c.kind for c in lowered.collectives)
    assert kinds == {"all_reduce": 3, "all_to_all": 1, "all_gather": 1}
