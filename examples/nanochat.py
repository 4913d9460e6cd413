"""nanochat's transformer and its optimizer, as one writes them for one device, on eight.

The model is that of karpathy/nanochat (July 2026): value embeddings, a smear of the token before,
norms without parameters, squared ReLUs, sliding windows, capped logits. Its optimizer is Muon with
the Polar Express (Amsel et al., 2025) and NorMuon's scales (Li et al., 2025) for the layers'
matrices, AdamW for the rest. There each process owns some of the matrices, and 250 lines send
gradients and parameters around. Here nothing is said of devices but how the batch is split.

Shapes are in the names: B sequences, T tokens, M model, H heads, D of a head, V ids; O, I a
matrix's outputs and inputs.
"""

import os

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

from pydoc_data import topics
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import spmd

CAP, BASE, GATES, SMEAR = 15.0, 100_000, 12, 24
POLAR = (  # the quintic polynomials of five iterations
    (8.156554524902461, -22.48329292557795, 15.878769915207462),
    (4.042929935166739, -2.808917465908714, 0.5000178451051316),
    (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
    (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
    (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
)


class Config(NamedTuple):
    ids: int = 256
    layers: int = 4
    heads: int = 2
    width: int = 128
    tokens: int = 256
    windows: str = "SSSL"  # short and long ones, over and over; the last layer's is long

    def has_values(self, layer):
        return layer % 2 == (self.layers - 1) % 2

    def window(self, layer):
        kind = self.windows[layer % len(self.windows)]
        short = -(-self.tokens // 4 // 128) * 128 + 1
        return None if kind == "L" or layer == self.layers - 1 else short


def init(key, c, dtype=jnp.float32):
    """Float32 parameters, but for embeddings of this dtype."""
    keys = iter(jax.random.split(key, 99 + 9 * c.layers))
    width = c.width

    def uniform(size, *shape):
        return jax.random.uniform(next(keys), shape, minval=-size, maxval=size)

    def layer(n):
        square = {name: uniform((3 / width) ** 0.5, width, width) for name in "qkv"}
        made = {**square, "o": jnp.zeros((width, width)), "down": jnp.zeros((width, 4 * width))}
        made["up"] = uniform(0.4 * (3 / width) ** 0.5, 4 * width, width)
        gate = jax.random.uniform(next(keys), (c.heads, GATES), maxval=0.02)
        return {**made, "gate": gate} if c.has_values(n) else made

    share = jnp.arange(c.layers) / max(c.layers - 1, 1)
    owners = [n for n in range(c.layers) if c.has_values(n)]
    return {
        "embed": (0.8 * jax.random.normal(next(keys), (c.ids, width))).astype(dtype),
        "head": 0.001 * jax.random.normal(next(keys), (c.ids, width)),
        "values": {str(n): uniform((3 / width) ** 0.5, c.ids, width).astype(dtype) for n in owners},
        "layers": [layer(n) for n in range(c.layers)],
        "scale": 1.15 - 0.10 * share,
        "first": 0.20 - 0.15 * share,
        "smear_gate": jax.random.uniform(next(keys), (1, SMEAR), maxval=0.02),
        "smear": jnp.zeros(1),
        "backout": jnp.full(1, 0.2),
    }


def norm(x):
    return x * jax.lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + jnp.finfo(x.dtype).eps)


def linear(x, w_OI):
    return x @ w_OI.T.astype(x.dtype)


@jax.custom_vjp
def squared_relu(x):
    return jnp.square(jax.nn.relu(x))


# Its root is all that the gradient needs, so that `x` need not be kept beside it.
squared_relu.defvjp(lambda x: (squared_relu(x),) * 2, lambda y, dy: (2 * jnp.sqrt(y) * dy,))


def rotated(x_BTHD):
    half = x_BTHD.shape[-1] // 2
    angles = jnp.arange(x_BTHD.shape[1])[:, None] / BASE ** (jnp.arange(half) / half)
    cos, sin = (f(angles)[:, None, None].astype(x_BTHD.dtype) for f in (jnp.cos, jnp.sin))
    halves = x_BTHD.reshape(*x_BTHD.shape[:-1], 2, half)
    other = jnp.flip(halves, -2) * jnp.concatenate([sin, -sin], -2)
    return (halves * cos + other).reshape(x_BTHD.shape)


def attend(w, x_BTM, values_BTM, window, heads):
    q, k, v = (linear(x_BTM, w[n]).reshape(*x_BTM.shape[:2], heads, -1) for n in "qkv")
    if "gate" in w:
        gate_BTH = 3 * jax.nn.sigmoid(linear(x_BTM[..., :GATES], w["gate"]))
        v += gate_BTH[..., None] * values_BTM.reshape(v.shape)
    q, k = (1.2 * norm(rotated(x)) for x in (q, k))
    return linear(spmd.ops.attention(q, k, v, window=window).reshape(x_BTM.shape), w["o"])


def capped(x):
    return CAP * jnp.tanh(x.astype(jnp.float32) / CAP)


@jax.custom_vjp
def losses(logits_BTV, targets_BT):
    return with_kept(logits_BTV, targets_BT)[0]


def with_kept(logits_BTV, targets_BT):
    sums_BT = jnp.log(jnp.sum(jnp.exp(capped(logits_BTV)), -1))  # none is too large for `exp`
    target_BT = jnp.take_along_axis(logits_BTV, targets_BT[..., None], -1)[..., 0]
    return sums_BT - capped(target_BT), (logits_BTV, targets_BT, sums_BT)


def backward(kept, d_BT):
    # Where all logits are, XLA keeps no float32 ones from the forward pass.
    logits_BTV, targets_BT, sums_BT = jax.lax.optimization_barrier(kept)
    x_BTV = capped(logits_BTV)
    is_target_BTV = targets_BT[..., None] == jnp.arange(x_BTV.shape[-1])
    d_BTV = d_BT[..., None] * (jnp.exp(x_BTV - sums_BT[..., None]) - is_target_BTV)
    return (d_BTV * (1 - (x_BTV / CAP) ** 2)).astype(logits_BTV.dtype), None


losses.defvjp(with_kept, backward)


def loss_of(params, ids_BT, targets_BT, c, dtype=jnp.float32):
    x = norm(params["embed"].astype(dtype)[ids_BT])
    gate = params["smear"] * jax.nn.sigmoid(linear(x[:, 1:, :SMEAR], params["smear_gate"]))
    x = first = middle = jnp.concatenate([x[:, :1], x[:, 1:] + gate.astype(dtype) * x[:, :-1]], 1)
    for n, w in enumerate(params["layers"]):
        x = params["scale"][n].astype(dtype) * x + params["first"][n].astype(dtype) * first
        values = params["values"][str(n)].astype(dtype)[ids_BT] if c.has_values(n) else None
        x += attend(w, norm(x), values, c.window(n), c.heads)
        x += linear(squared_relu(linear(norm(x), w["up"])), w["down"])
        if n == c.layers // 2:
            middle = x
    x = norm(x - params["backout"].astype(dtype) * middle)
    return losses(linear(x, params["head"]), targets_BT).mean()


# The optimizer


def rates(c):
    """Name -> (learning rate, beta1, beta2, weight decay) of what AdamW updates."""
    wide = (c.width / 768) ** -0.5
    return {
        "embed": (0.2 * wide, 0.8, 0.995, 0.001),
        "head": (0.004 * wide, 0.8, 0.96, 0.01),
        "values": (0.1 * wide, 0.8, 0.995, 0.01),
        "scale": (0.005, 0.8, 0.95, 0.05),
        "first": (0.5, 0.96, 0.95, 0.0),
        **dict.fromkeys(("smear_gate", "smear", "backout"), (0.2, 0.8, 0.95, 0.0)),
    }


def adamw(p, g, state, count, rate, share):
    lr, beta1, beta2, decay = rate
    lr *= share
    wide, g, mean, square = (x.astype(jnp.float32) for x in (p, g, state["mean"], state["square"]))
    mean += (1 - beta1) * (g - mean)
    square += (1 - beta2) * (g * g - square)
    step = lr / (1 - beta1**count) * mean / (jnp.sqrt(square / (1 - beta2**count)) + 1e-10)
    kept = {"mean": mean.astype(p.dtype), "square": square.astype(p.dtype)}
    return (wide * (1 - lr * decay) - step).astype(p.dtype), kept


def size(x, axis=(-2, -1)):
    return jnp.sqrt(jnp.sum(jnp.square(x.astype(jnp.float32)), axis, keepdims=True))


def muon(p_OI, g_OI, state, dtype, lr, momentum=0.95, beta2=0.9):
    outputs, inputs = p_OI.shape
    mean = state["mean"] + (1 - momentum) * (g_OI - state["mean"])
    x = (g_OI + momentum * (mean - g_OI)).astype(dtype)
    x *= (size(x) / outputs**0.5 / jnp.maximum(size(x, -1), 1e-6)).astype(dtype)  # rows alike
    x /= (size(x) * 1.01 + 1e-6).astype(dtype)
    for a, b, c in POLAR:  # towards the nearest matrix with orthogonal rows, or columns
        square = x.T @ x if outputs > inputs else x @ x.T
        square = b * square + c * (square @ square)
        x = a * x + (x @ square if outputs > inputs else square @ x)
    x = x.astype(jnp.float32)
    x *= min(outputs, inputs) ** 0.5 / jnp.maximum(size(x), 1e-6)
    axis = -1 if outputs >= inputs else -2
    found = jnp.mean(jnp.square(x), axis, keepdims=True)
    square = state["square"] + (1 - beta2) * (found - state["square"])
    each = jax.lax.rsqrt(jnp.maximum(square, 1e-10))
    x *= each * size(jnp.sqrt(found)) / jnp.maximum(size(jnp.sqrt(found) * each), 1e-10)
    return p_OI - lr * max(1.0, outputs / inputs) ** 0.5 * x, {"mean": mean, "square": square}


def start(params):
    def of_matrix(p):
        shape = (p.shape[0], 1) if p.shape[0] >= p.shape[1] else (1, p.shape[1])
        return {"mean": jnp.zeros_like(p), "square": jnp.zeros(shape)}

    def of_other(p):
        return {"mean": jnp.zeros_like(p), "square": jnp.zeros_like(p)}

    rest = {name: jax.tree.map(of_other, p) for name, p in params.items() if name != "layers"}
    return {
        **rest,
        "layers": jax.tree.map(of_matrix, params["layers"]),
        "count": jnp.zeros((), jnp.int32),
    }


def train_step(params, state, ids_BT, targets_BT, c, share=1.0, dtype=jnp.float32):
    """A step with this share of the learning rates."""
    loss, grads = jax.value_and_grad(loss_of)(params, ids_BT, targets_BT, c, dtype)
    count, new, kept = state["count"] + 1, {}, {}
    for name, p in params.items():
        rate = None if name == "layers" else rates(c)[name]
        leaves, tree = jax.tree.flatten(p)
        mine = jax.tree.leaves(state[name], is_leaf=lambda x: "mean" in x)
        found = [
            muon(*each, dtype, 0.02 * share) if rate is None else adamw(*each, count, rate, share)
            for each in zip(leaves, jax.tree.leaves(grads[name]), mine, strict=True)
        ]
        new[name], kept[name] = (jax.tree.unflatten(tree, x) for x in zip(*found, strict=True))
    return new, {**kept, "count": count}, loss


def batch(step, text, c, rows=16):
    starts = np.random.default_rng(step).integers(0, len(text) - c.tokens, rows)
    windows = text[starts[:, None] + np.arange(c.tokens + 1)].astype(np.int32)
    return windows[:, :-1], windows[:, 1:]


def main():
    c = Config()
    text = np.frombuffer("".join(topics.topics.values()).encode(), np.uint8)

    def step(params, state, ids, targets):
        return train_step(params, state, ids, targets, c)

    mesh = spmd.make_mesh(data=8)
    specs = (None, None, ("data",), ("data",))
    ours = spmd.jit(step, mesh=mesh, in_specs=specs, donate_argnums=(0, 1))
    params = init(jax.random.key(0), c)
    steps: dict[str, Any] = {"one device": jax.jit(step), "eight devices": ours}
    for name, run in steps.items():
        now, state, loss = params, start(params), 0.0
        for number in range(10):
            now, state, loss = run(now, state, *batch(number, text, c))
        print(f"{name}: loss {loss:.2f} after 10 steps")
    compiled = ours.compile(params, start(params), *batch(0, text, c))
    print(repr(compiled))
    spec = compiled.in_shardings[1]["embed"]["mean"].spec
    print(f"AdamW's mean of the embedding: {spec}, which nobody marked")


if __name__ == "__main__":
    main()
