"""A gated linear recurrence, whose state has no positions: a page of the cache is a sequence's."""

import functools
import os
import tempfile
from typing import Any, NamedTuple

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import jax.numpy as jnp
from flax import nnx

import spmd
from spmd.models.decode import ServingShape
from spmd.models.decode.recurrence import linear_recurrence
from spmd.models.function import StateLeaf
from spmd.serving.language_bundle import continue_prompts, write_language_bundle

VOCABULARY, WIDTH, STATE, DEPTH = 256, 32, 64, 2


class Block(nnx.Module):
    def __init__(self, rngs):
        self.norm = nnx.RMSNorm(WIDTH, rngs=rngs)
        self.gate = nnx.Linear(WIDTH, STATE, rngs=rngs)
        self.new = nnx.Linear(WIDTH, STATE, rngs=rngs)
        self.out = nnx.Linear(STATE, WIDTH, rngs=rngs)

    def __call__(self, x, recur):
        normed = self.norm(x)
        decay = nnx.sigmoid(self.gate(normed))
        h = recur(decay, (1 - decay) * self.new(normed))  # decay * h of the token before + input
        return x + self.out(nnx.silu(h))


class Recurrent(nnx.Module):
    def __init__(self, rngs):
        self.embed = nnx.Embed(VOCABULARY, WIDTH, rngs=rngs)
        self.blocks = nnx.List([Block(rngs) for _ in range(DEPTH)])
        self.norm = nnx.RMSNorm(WIDTH, rngs=rngs)
        self.head = nnx.Linear(WIDTH, VOCABULARY, rngs=rngs)

    def __call__(self, tokens, recur):
        x = self.embed(tokens)
        for i, block in enumerate(self.blocks):
            x = block(x, functools.partial(recur, i))
        return x

    def logits(self, x):
        return self.head(self.norm(x))


def continue_text(model, prompt, count):
    """What the model itself goes on with, a token at a time: a plain loop, to compare with."""
    state = [jnp.zeros(STATE)] * DEPTH

    def recur(i, decay, new):
        state[i] = decay * state[i] + new
        return state[i]

    tokens = list(prompt)
    for position in range(len(prompt) + count - 1):
        x = model(jnp.array(tokens[position]), recur)
        if position == len(tokens) - 1:
            tokens.append(int(jnp.argmax(model.logits(x))))
    return tokens[len(prompt) :]


SPECS = {
    "weights/blocks/*/gate/": (None, "model"),
    "weights/blocks/*/new/": (None, "model"),
    "weights/blocks/*/out/": ("model", None),
    "weights/head/kernel": (None, "model"),
    "state/cache/": ("data", None, "model"),
}


class RecurrentRows(NamedTuple):  # a models.decode.RowsModel
    graph: Any
    vocab_size: int = VOCABULARY
    specs: Any = SPECS
    unread: tuple[str, ...] = ("weights/embed/",)

    def cache_leaves(self, shape, pages):
        state = StateLeaf((shape.groups, pages, STATE), "float32")
        return dict.fromkeys(range(DEPTH), state)

    def run(self, weights, cache, rows):
        new = {}

        def recur(i, decay_ARW, input_ARW):
            h_ARW, new[i] = linear_recurrence(cache[i], decay_ARW, input_ARW, rows)
            return h_ARW

        return nnx.merge(self.graph, weights)(rows["tokens"], recur), new

    def logits(self, weights, x_XH):
        return nnx.merge(self.graph, weights).logits(x_XH)


def export(model, out, shape, **more):
    graph, weights = nnx.split(model)
    write_language_bundle(out, RecurrentRows(graph), shape, weights, name="recurrent", **more)


if __name__ == "__main__":
    model, prompt = Recurrent(nnx.Rngs(0)), list(b"def f(x):")
    shape = ServingShape(8, 64, (8,), (64,), page=64, groups=4)  # a page a sequence
    with tempfile.TemporaryDirectory() as folder:
        export(model, f"{folder}/bundle", shape, platforms=("cpu",))
        mesh = spmd.make_mesh(data=4, model=2)
        ((tokens, _),) = continue_prompts(f"{folder}/bundle", mesh, shape, [prompt], 20)
        assert tokens == continue_text(model, prompt, 20)
    print(f"20 tokens on {mesh.size} devices, as a loop over tokens draws them")
