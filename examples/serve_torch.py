"""A torch language model as a bundle: its layers are torch's, and attention is given to them."""

import os
import tempfile
from typing import Any, NamedTuple

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import jax.numpy as jnp
import torch
from torch import nn
from torch.nn import functional as F

import spmd
import spmd.torch
from spmd.models.decode import ServingShape
from spmd.models.decode.attention import kv_leaves, write_and_attend
from spmd.serving.language_bundle import continue_prompts, write_language_bundle

VOCABULARY, LENGTH, WIDTH, HEADS, DEPTH = 256, 64, 32, 4, 2


def causal(layer, *qkv):
    """Attention of whole sequences (batch, length, heads, width), in plain torch."""
    q, k, v = (x.transpose(1, 2) for x in qkv)
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x, layer, attend):
        normed = self.norm_1(x)
        q, k, v = (p(normed).unflatten(-1, (HEADS, -1)) for p in (self.q, self.k, self.v))
        x = x + self.out(attend(layer, q, k, v).flatten(-2))
        return x + self.down(F.gelu(self.up(self.norm_2(x))))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(DEPTH))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens, positions, attend=causal):
        x = self.embed(tokens) + self.places(positions)
        for layer, block in enumerate(self.blocks):
            x = block(x, layer, attend)
        return x

    def logits(self, x):
        return self.head(self.norm(x))


@torch.no_grad()
def continue_text(model, prompt, count):
    """What the module itself goes on with, in plain torch, to compare with."""
    tokens = list(prompt)
    for _ in range(count):
        x = model(torch.tensor([tokens]), torch.arange(len(tokens))[None])
        tokens.append(int(model.logits(x)[0, -1].argmax()))
    return tokens[len(prompt) :]


SPECS = {  # torch keeps (out, in); of keys, values and biases the compiler decides
    "weights/head.": ("model", None),
    "weights/blocks.*.q.weight": ("model", None),
    "weights/blocks.*.out.weight": (None, "model"),
    "weights/blocks.*.up.weight": ("model", None),
    "weights/blocks.*.down.weight": (None, "model"),
}


class TorchRows(NamedTuple):  # a models.decode.RowsModel
    layers: Any  # functions of (weights, ...), as spmd.torch.functional makes them
    logits: Any
    vocab_size: int = VOCABULARY
    specs: Any = SPECS
    unread: tuple[str, ...] = ("weights/embed.", "weights/places.")

    def cache_leaves(self, shape, pages):
        return dict.fromkeys(range(DEPTH), kv_leaves(shape, pages, HEADS, WIDTH // HEADS))

    def run(self, weights, cache, rows):
        new = {}

        def attend(layer, *qkv):
            def paged(q_ARKD, *kv_ARKD):  # arrays of jax
                q_ARKGD, kv_ARK2D = q_ARKD[..., None, :], jnp.stack(kv_ARKD, axis=3)
                heads_ARKGD, new[layer] = write_and_attend(cache[layer], q_ARKGD, kv_ARK2D, rows)
                return heads_ARKGD[..., 0, :]

            return spmd.torch.call_jax(paged, *qkv)

        return self.layers(weights, rows["tokens"], jnp.maximum(rows["positions"], 0), attend), new


def export(model, out, shape, **more):
    weights, layers = spmd.torch.functional(model)
    _, logits = spmd.torch.functional(model, Model.logits)
    write_language_bundle(out, TorchRows(layers, logits), shape, weights, name="torch", **more)


if __name__ == "__main__":
    torch.manual_seed(0)
    model, prompt = Model().eval(), list(b"def f(x):")
    shape = ServingShape(8, LENGTH, (8,), (LENGTH,), page=8, groups=4, cache_dtype="float32")
    with tempfile.TemporaryDirectory() as folder:
        export(model, f"{folder}/bundle", shape, platforms=("cpu",))
        mesh = spmd.make_mesh(data=4, model=2)
        ((tokens, _),) = continue_prompts(f"{folder}/bundle", mesh, shape, [prompt], 20)
    assert tokens == continue_text(model, prompt, 20)
    print(f"20 tokens on {mesh.size} devices, as torch draws them")
