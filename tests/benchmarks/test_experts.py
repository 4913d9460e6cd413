"""Experts over many TPUs: layers written by hand, and what their kernels count as."""

from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType

from benchmarks import experts, experts_peers
from benchmarks.hlo.modelled import estimated_cycles
from spmd.measure.hlo import parse_module_text
from spmd.ops import experts_exchange, experts_local
from tests.ops.test_attention import close
from tests.ops.test_experts import loss, operands, plain


@pytest.fixture
def mesh(devices8: Any) -> jax.sharding.Mesh:
    axes = {"data": 2, "expert": 2, "model": 2}
    types = (AxisType.Auto,) * 3
    return jax.make_mesh(tuple(axes.values()), tuple(axes), types, devices=devices8)


PEERS = {
    "one-hot": lambda mesh: experts_peers.one_hot(mesh, 8.0),
    "gathered": experts_peers.gathered,
    "exchanged": lambda mesh: experts_peers.exchanged(mesh, 8.0),
}


@pytest.mark.thorough
@pytest.mark.parametrize("name", PEERS)
def test_layers_by_hand_are_right(
    name: str, mesh: jax.sharding.Mesh, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With room for all tokens they give what a loop over the experts gives."""
    monkeypatch.setattr(experts_local, "INTERPRET", True)
    monkeypatch.setattr(jax.lax, "ragged_all_to_all", by_gather)
    args = operands(b=8, count=4)
    close(jax.jit(loss(PEERS[name](mesh)))(*args), jax.jit(loss(plain))(*args))


def by_gather(x: Any, out: Any, *places: Any, axis_name: str) -> Any:
    """CPUs have no such collective."""
    return experts_exchange.by_gather(x, out, experts_exchange.Places(*places), (axis_name,))


def test_products_by_experts_count_rows_that_are_expected() -> None:
    text = """HloModule m, is_scheduled=true, num_partitions=8

ENTRY %main (p: bf16[64,16], q: bf16[2,16,32]) -> bf16[64,32] {
  %p = bf16[64,16]{1,0} parameter(0)
  %q = bf16[2,16,32]{2,1,0} parameter(1)
  ROOT %ragged-dot-none.1 = bf16[64,32]{1,0} custom-call(%p, %q), custom_call_target="tpu_custom_call", operand_layout_constraints={bf16[64,16]{1,0}, bf16[2,16,32]{2,1,0}}, metadata={}
}
"""  # noqa: E501
    case: Any = SimpleNamespace(topology=SimpleNamespace(peak_flops=lambda dtype: 1e3))
    *_, product = parse_module_text(text).computations["main"]
    whole = 2 * 64 * 16 * 32
    assert estimated_cycles(product) == 0
    assert experts.ragged(case, 1e9)(product) == pytest.approx(whole / 1e3)
    assert experts.ragged(case, 1e4)(product) == pytest.approx(1e4 / 1e3)


def test_places_that_an_expert_lacks_drop_tokens(mesh: jax.sharding.Mesh) -> None:
    x, gates, _, *weights = operands(b=8, count=4)
    chosen = np.zeros((*x.shape[:2], 1), np.int32)
    out = jax.jit(experts_peers.one_hot(mesh, 1.0))(x, gates[..., :1], chosen, *weights)
    want = jax.jit(plain)(x, gates[..., :1], chosen, *weights)
    kept = -(-x.shape[1] // 4)
    close(out[:, :kept], want[:, :kept])
    assert not jnp.any(out[:, kept:])
