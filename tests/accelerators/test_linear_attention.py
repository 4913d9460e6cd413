"""Linear attention on GPUs: its kernels beside what XLA makes of float32, values and gradients."""

from typing import Any

import jax
import jax.numpy as jnp
import pytest

import spmd
from spmd.ops import linear_attention
from tests.accelerators.devices import COUNT, DEVICES
from tests.close import close
from tests.ops.test_linear_attention import made


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("delta", [False, True])
@pytest.mark.parametrize("sizes", [(2, 300, 2, 4, 128, 128), (1, 1024, 8, 8, 64, 32)], ids=str)
def test_values_and_gradients(sizes: Any, delta: bool, packed: bool) -> None:
    x = {name: jnp.asarray(each) for name, each in made(sizes, delta, False).items()}
    x["k"] *= 0.9  # rounded, none is longer than 1
    rounded = {
        n: each.astype(jnp.bfloat16) if n in ("q", "k", "v") else each for n, each in x.items()
    }
    ids = jnp.arange(sizes[1])[None] // 90 * jnp.ones((sizes[0], 1), jnp.int32)

    def loss(x: Any) -> Any:
        out, last = linear_attention(
            x["q"], x["k"], x["v"], x["decay"], x.get("beta"), state_BNDP=x["state"],
            segment_ids=ids if packed else None,
        )  # fmt: skip
        return jnp.sum(jnp.sin(out.astype(jnp.float32))) + jnp.sum(jnp.cos(last)), (out, last)

    both = jax.value_and_grad(loss, has_aux=True)
    mesh = spmd.make_mesh(devices=DEVICES[:COUNT], x=COUNT)
    compiled = spmd.jit(both, mesh=mesh).compile(rounded)
    if DEVICES[0].platform == "gpu":
        assert "triton" in compiled.as_text("emitted")
    wide = {name: each.astype(jnp.float32) for name, each in rounded.items()}
    (_, got), dgot = compiled(rounded)
    (_, want), dwant = jax.jit(both)(wide)
    close((got, dgot), (want, dwant), 0.02)
