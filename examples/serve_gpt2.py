"""GPT-2 in flax NNX with transformers' weights: serve_gpt2.py GPT2_FOLDER BUNDLE."""

import os
import sys
import tempfile
from typing import Any, NamedTuple

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import jax
import jax.numpy as jnp
import torch
from flax import nnx
from transformers import GPT2Config, GPT2LMHeadModel

import spmd
from spmd.models.decode import ServingShape
from spmd.models.decode.attention import kv_leaves, write_and_attend
from spmd.serving.language_bundle import continue_prompts, write_language_bundle


class Block(nnx.Module):  # parts have transformers' names
    def __init__(self, config, rngs):
        width, heads = config.n_embd, (config.n_head, config.n_embd // config.n_head)
        self.ln_1 = nnx.LayerNorm(width, epsilon=config.layer_norm_epsilon, rngs=rngs)
        out = nnx.LinearGeneral(heads, width, axis=(-2, -1), rngs=rngs)
        self.attn = nnx.Dict(c_attn=nnx.LinearGeneral(width, (3, *heads), rngs=rngs), c_proj=out)
        self.ln_2 = nnx.LayerNorm(width, epsilon=config.layer_norm_epsilon, rngs=rngs)
        up, down = (width, 4 * width), (4 * width, width)
        self.mlp = nnx.Dict(c_fc=nnx.Linear(*up, rngs=rngs), c_proj=nnx.Linear(*down, rngs=rngs))

    def __call__(self, x_ARH, cache, rows):
        qkv_AR3KD = self.attn.c_attn(self.ln_1(x_ARH))
        q_ARKGD = qkv_AR3KD[:, :, 0, :, None]  # G is 1: every head has keys of its own
        kv_ARK2D = jnp.moveaxis(qkv_AR3KD[:, :, 1:], 2, 3)
        heads_ARKGD, cache = write_and_attend(cache, q_ARKGD, kv_ARK2D, rows)
        x_ARH = x_ARH + self.attn.c_proj(heads_ARKGD[..., 0, :])
        return x_ARH + self.mlp.c_proj(nnx.gelu(self.mlp.c_fc(self.ln_2(x_ARH)))), cache


class GPT2(nnx.Module):
    def __init__(self, config, rngs):
        self.wte = nnx.Embed(config.vocab_size, config.n_embd, rngs=rngs)
        self.wpe = nnx.Embed(config.n_positions, config.n_embd, rngs=rngs)
        self.h = nnx.List([Block(config, rngs) for _ in range(config.n_layer)])
        self.ln_f = nnx.LayerNorm(config.n_embd, epsilon=config.layer_norm_epsilon, rngs=rngs)

    def __call__(self, cache, rows):
        x_ARH = self.wte(rows["tokens"]) + self.wpe(jnp.maximum(rows["positions"], 0))
        new = {}
        for i, block in enumerate(self.h):
            x_ARH, new[str(i)] = block(x_ARH, cache[str(i)], rows)
        return x_ARH, new


SPECS = {  # biases, norms, keys and values are left to the compiler
    "weights/wte/": ("model", None),
    "weights/h/*/attn/c_attn/kernel": (None, None, "model", None),
    "weights/h/*/attn/c_proj/kernel": ("model", None, None),
    "weights/h/*/mlp/c_fc/kernel": (None, "model"),
    "weights/h/*/mlp/c_proj/kernel": ("model", None),
}


class GPT2Rows(NamedTuple):  # a models.decode.RowsModel: what a server asks of a language model
    config: Any
    graph: Any
    vocab_size: int
    specs: Any = SPECS
    unread: tuple[str, ...] = ()  # a step reads all of the embedding: it is the head, too

    def cache_leaves(self, shape, pages):
        heads, width, layers = self.config.n_head, self.config.n_embd, self.config.n_layer
        return {str(i): kv_leaves(shape, pages, heads, width // heads) for i in range(layers)}

    def run(self, weights, cache, rows):
        return nnx.merge(self.graph, weights)(cache, rows)

    def logits(self, weights, x_XH):
        model = nnx.merge(self.graph, weights)
        return model.wte.attend(model.ln_f(x_XH)).astype(jnp.float32)


def export(source, out, shape, **more):
    gpt2 = GPT2LMHeadModel.from_pretrained(source)
    config, tensors = gpt2.config, gpt2.transformer.state_dict()
    graph, abstract = nnx.split(nnx.eval_shape(lambda: GPT2(config, nnx.Rngs(0))))

    def read(path, leaf):  # h/0/ln_1/scale/value is h.0.ln_1.weight
        *part, name, _ = jax.tree_util.keystr(path, simple=True, separator="/").split("/")
        tensor = tensors[".".join([*part, "bias" if name == "bias" else "weight"])]
        return tensor.numpy().reshape(leaf.shape)

    weights = jax.tree.map_with_path(read, abstract)
    model, ends = GPT2Rows(config, graph, config.vocab_size), [config.eos_token_id]
    write_language_bundle(out, model, shape, weights, eos_token_ids=ends, name="gpt2", **more)


if __name__ == "__main__" and sys.argv[1:]:
    shape = ServingShape(slots=64, max_length=1024, rows=(64, 512), lengths=(256, 1024))
    export(sys.argv[1], sys.argv[2], shape, tokenizer_from=sys.argv[1])
elif __name__ == "__main__":
    torch.manual_seed(0)
    tiny = GPT2Config(vocab_size=256, n_embd=32, n_layer=2, n_head=4, initializer_range=0.5)
    gpt2, prompt = GPT2LMHeadModel(tiny).eval(), list(b"def f(x):")
    shape = ServingShape(8, 64, (8,), (64,), page=8, groups=4, cache_dtype="float32")
    with tempfile.TemporaryDirectory() as folder:
        gpt2.save_pretrained(f"{folder}/gpt2")
        export(f"{folder}/gpt2", f"{folder}/bundle", shape, platforms=("cpu",))
        mesh = spmd.make_mesh(data=4, model=2)
        ((tokens, _),) = continue_prompts(f"{folder}/bundle", mesh, shape, [prompt], 20)
    expected = gpt2.generate(torch.tensor([prompt]), max_new_tokens=20, do_sample=False)
    assert prompt + tokens == expected[0].tolist()
    print(f"20 tokens on {mesh.size} devices, as transformers draws them")
