"""A training step of nanochat's transformer (karpathy/nanochat, `nanochat/gpt.py`): Muon and AdamW.

Layers are written out. Norms have no parameters, queries and keys are normed behind RoPE, the MLP
squares a ReLU, logits are capped. Muon updates the layers' matrices, AdamW embedding and head.
Value embeddings are left out.

Shapes are in the names: B sequences, T tokens, M model, H heads, D of a head, V tokens known.
"""

from typing import Any

import jax
import jax.numpy as jnp
import optax

import spmd
from benchmarks.programs.program import Built, marked, structs_of

VOCABULARY, WIDTH, HEAD, LAYERS = 65_536, 1280, 128, 20
BATCH, TOKENS = 32, 2048
CAP = 15.0

MATRICES = {
    "q": (WIDTH, WIDTH),
    "k": (WIDTH, WIDTH),
    "v": (WIDTH, WIDTH),
    "o": (WIDTH, WIDTH),
    "up": (WIDTH, 4 * WIDTH),
    "down": (4 * WIDTH, WIDTH),
}


def build(mesh: spmd.Mesh, layers: int = LAYERS) -> Built:
    """The step on a mesh with an axis `data`: rows of matrices and of the batch are split."""
    optimizer = optax.contrib.muon(
        0.02, adam_learning_rate=3e-3, muon_weight_dimension_numbers=_muons_share
    )

    def step(params: Any, state: Any, tokens_BT: Any, targets_BT: Any) -> Any:
        loss, gradients = jax.value_and_grad(_loss)(params, tokens_BT, targets_BT)
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, loss

    def matrix(shape: tuple[int, ...]) -> Any:
        return marked(mesh, ("data", None), shape)

    layer = {name: matrix(shape) for name, shape in MATRICES.items()}
    params = {
        "embedding": matrix((VOCABULARY, WIDTH)),
        "head": matrix((VOCABULARY, WIDTH)),
        "layers": [layer] * layers,
    }
    tokens = marked(mesh, ("data", None), (BATCH, TOKENS), jnp.int32)
    state = structs_of(optimizer.init, params)
    return Built(step, (params, state, tokens, tokens), donate=(0, 1))


def _muons_share(params: Any) -> Any:
    """Which parameters Muon updates: a layer's matrices."""
    nothing: Any = jax.tree.map(lambda _: None, params)
    muon = optax.contrib.MuonDimensionNumbers()
    return nothing | {"layers": jax.tree.map(lambda _: muon, params["layers"])}


def _loss(params: Any, tokens_BT: Any, targets_BT: Any) -> Any:
    x_BTM = _norm(params["embedding"].astype(jnp.bfloat16)[tokens_BT])
    for layer in params["layers"]:
        weights = jax.tree.map(lambda w: w.astype(jnp.bfloat16), layer)
        x_BTM = x_BTM + _attention(weights, _norm(x_BTM))
        hidden = jnp.square(jax.nn.relu(_norm(x_BTM) @ weights["up"]))
        x_BTM = x_BTM + hidden @ weights["down"]
    head_VM = params["head"].astype(jnp.bfloat16)
    logits_BTV = jnp.einsum("btm,vm->btv", _norm(x_BTM), head_VM).astype(jnp.float32)
    capped_BTV = CAP * jnp.tanh(logits_BTV / CAP)
    return optax.softmax_cross_entropy_with_integer_labels(capped_BTV, targets_BT).mean()


def _norm(x: Any) -> Any:
    mean = jnp.mean(jnp.square(x.astype(jnp.float32)), -1, keepdims=True)
    return (x * jax.lax.rsqrt(mean + 1e-6)).astype(x.dtype)


def _attention(weights: Any, x_BTM: Any) -> Any:
    def heads(name: str) -> Any:
        return (x_BTM @ weights[name]).reshape(*x_BTM.shape[:2], WIDTH // HEAD, HEAD)

    q_BTHD, k_BTHD, v_BTHD = _norm(_rotated(heads("q"))), _norm(_rotated(heads("k"))), heads("v")
    scores = jnp.einsum("bthd,bshd->bhts", q_BTHD, k_BTHD).astype(jnp.float32) / HEAD**0.5
    earlier = jnp.tril(jnp.ones(scores.shape[-2:], bool))
    shares = jax.nn.softmax(jnp.where(earlier, scores, -jnp.inf), -1).astype(x_BTM.dtype)
    return jnp.einsum("bhts,bshd->bthd", shares, v_BTHD).reshape(x_BTM.shape) @ weights["o"]


def _rotated(x_BTHD: Any) -> Any:
    tokens, width = x_BTHD.shape[1], x_BTHD.shape[-1]
    angle = jnp.arange(tokens)[:, None] / 10_000 ** (jnp.arange(0, width, 2) / width)
    cos, sin = (f(angle)[:, None].astype(x_BTHD.dtype) for f in (jnp.cos, jnp.sin))
    a, b = jnp.split(x_BTHD, 2, -1)
    return jnp.concatenate([a * cos + b * sin, b * cos - a * sin], -1)
