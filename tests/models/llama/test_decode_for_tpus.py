"""What a step exchanges on eight chips that are not here: by its plan, nothing is compiled."""

import jax
import pytest

import spmd
from spmd.models import decode
from spmd.models.llama.config import LlamaConfig
from spmd.models.llama.decode import LlamaRows
from tests.models.llama.made import structs

CONFIG = LlamaConfig(
    vocab_size=32000, hidden_size=2048, intermediate_size=5504, num_hidden_layers=1,
    num_attention_heads=16, num_key_value_heads=8, max_position_embeddings=1024, dtype="bfloat16",
    param_dtype="bfloat16", scan_layers=False,
)  # fmt: skip


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("mesh", "groups", "rows"),
    [
        ((2, 4), 2, 128),
        pytest.param((1, 8), 1, 16, marks=pytest.mark.heavy),
        pytest.param((1, 8), 1, 128, marks=pytest.mark.heavy),
        pytest.param((2, 4), 2, 16, marks=pytest.mark.heavy),
    ],
)
def test_only_logits_and_tokens_travel_besides_sums(
    mesh: tuple[int, int], groups: int, rows: int
) -> None:
    """Rows, pages and which tokens were seen and drawn stay where they are."""
    placed = spmd.Mesh(None, mesh, ("data", "model"))
    shape = decode.ServingShape(16 * groups, 512, (rows,), (512,), groups=groups, top_logprobs=5)
    functions, _, specs, primary = decode.functions(LlamaRows(CONFIG), shape, structs(CONFIG))
    function = next(f for f in functions if f.name == primary)
    given = dict(zip(function.roles, function.args, strict=True))
    leaves = decode.state_leaves(LlamaRows(CONFIG), shape, 128)
    state = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), leaves)
    patterns = {k: [spmd.OPEN if e == "..." else e for e in spec] for k, spec in specs.items()}
    marked = spmd.mark_tree({"weights": given["weights"], "state": state}, placed, patterns)
    step = spmd.jit(function.fn, mesh=placed, donate_argnums=(1,))
    lowered = step.lower(
        marked["weights"], marked["state"], given["input"], topology=spmd.Topology("v5e:2x4")
    )
    # A layer has two sums, and the embedding one; of each a device sends at most twice its rows, be
    # it in one all-reduce or, with norms between, as a reduce-scatter and a gather.
    hidden = 2 * rows * CONFIG.hidden_size
    logits = 4 * 16 * CONFIG.vocab_size // mesh[1]
    # From a split over tokens to one over rows change logits that are drawn from, and with few rows
    # those that are reported: no slower than sums of partial maxima.
    assert sum(c.bytes for c in lowered.collectives) <= 3 * 2 * hidden + 1.75 * logits
    assert {axis for c in lowered.collectives if c.bytes > logits for axis in c.axes} <= {"model"}
