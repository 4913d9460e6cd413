"""A training step of scanned layers whose stacked matrices Muon updates, by Newton-Schulz.

Shapes are in the names: L layers, T tokens, M model, H hidden.
"""

from typing import Any

import jax
import jax.numpy as jnp

import spmd
from benchmarks.programs.program import Built, marked

TOKENS, MODEL, HIDDEN = 32_768, 1024, 4096
SPECS = {"up": (None, "data", "model"), "down": (None, "model", "data")}
SHAPES = {"up": (MODEL, HIDDEN), "down": (HIDDEN, MODEL)}


def build(mesh: spmd.Mesh, layers: int, hint: Any = None) -> Built:
    """The step.

    Args:
      mesh: with axes `data` and `model`.
      hint: the spec of stacked matrices (L, rows, columns) while they are multiplied; None: open.
    """

    def loss(params: Any, x_TM: Any, y_TM: Any) -> Any:
        def layer(x_TM: Any, w: Any) -> Any:
            hidden_TH = jax.nn.gelu(x_TM @ w["up"].astype(jnp.bfloat16))
            x_TM = x_TM + hidden_TH @ w["down"].astype(jnp.bfloat16)
            return spmd.mark_sharding(x_TM, mesh, ("data", None)), None

        out_TM = jax.lax.scan(layer, x_TM.astype(jnp.bfloat16), params)[0]
        return jnp.mean((out_TM.astype(jnp.float32) - y_TM) ** 2)

    def moved(momentum: Any) -> Any:
        tall = momentum.shape[-2] > momentum.shape[-1]
        x = (momentum.mT if tall else momentum).astype(jnp.bfloat16)
        if hint is not None:
            x = spmd.mark_sharding(x, mesh, hint)
        x = newton_schulz(x)
        return (x.mT if tall else x).astype(jnp.float32)

    def step(params: Any, momenta: Any, x_TM: Any, y_TM: Any) -> Any:
        value, gradients = jax.value_and_grad(loss)(params, x_TM, y_TM)
        momenta = jax.tree.map(lambda m, g: 0.95 * m + g, momenta, gradients)
        params = jax.tree.map(lambda p, m: p - 0.02 * moved(m), params, momenta)
        return params, momenta, value

    params = {name: marked(mesh, SPECS[name], (layers, *shape)) for name, shape in SHAPES.items()}
    rows = marked(mesh, ("data", None), (TOKENS, MODEL))
    return Built(step, (params, params, rows, rows), donate=(0, 1))


def newton_schulz(x: Any) -> Any:
    """Matrices (L, rows, columns) -> nearly orthogonal ones, in five steps (Jordan et al. 2024)."""
    x = x / (jnp.sqrt(jnp.sum(x * x, axis=(1, 2), keepdims=True)) + 1e-7)
    for _ in range(5):
        gram = jnp.einsum("lij,lkj->lik", x, x)
        step = -4.775 * gram + 2.0315 * jnp.einsum("lij,ljk->lik", gram, gram)
        x = 3.4445 * x + jnp.einsum("lij,ljk->lik", step, x)
    return x
