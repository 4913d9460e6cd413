"""Models of transformers, tiny and with random weights: forward and training as torch has them."""

from typing import Any

import pytest

pytest.importorskip("spmd.torch", reason="needs torch and torchax: .[torch]", exc_type=ImportError)
pytest.importorskip("transformers", reason="needs transformers: .[peers]")

import torch
import transformers
from torch.nn import functional as F

import spmd
import spmd.torch
from tests.torch.modules import check_steps, images, seeded, tokens

LAYERS = {"num_hidden_layers": 1, "num_attention_heads": 4, "hidden_size": 16}
LLAMA_RULES = {
    **{f"*.{name}_proj.weight": ("model", None) for name in ("q", "k", "v", "gate", "up")},
    **{f"*.{name}_proj.weight": (None, "model") for name in ("o", "down")},
    "lm_head.weight": ("model", None),
    "input_ids": ("data", None),
}
BERT_RULES = {
    **{f"*.{name}.weight": ("model", None) for name in ("query", "key", "value")},
    "*.attention.output.dense.weight": (None, "model"),
    "*.intermediate.dense.weight": ("model", None),
    "input_ids": ("data", None),
}
VIT_RULES = {"*classifier.weight": (None, "model"), "pixel_values": ("data",)}


def llama(**given):
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=32, intermediate_size=32, num_key_value_heads=2, use_cache=False,
            **LAYERS, **given,
        )
    )  # fmt: skip


def bert(dropout=0.0):
    return transformers.BertForMaskedLM(
        transformers.BertConfig(
            vocab_size=32, intermediate_size=32, max_position_embeddings=32,
            hidden_dropout_prob=dropout, attention_probs_dropout_prob=dropout, **LAYERS,
        )
    )  # fmt: skip


def vit():
    return transformers.ViTForImageClassification(
        transformers.ViTConfig(
            intermediate_size=32, image_size=8, patch_size=4, num_labels=10,
            hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, **LAYERS,
        )
    )  # fmt: skip


MODELS: dict[str, Any] = {
    "llama, eager": (lambda: llama(attn_implementation="eager"), LLAMA_RULES),
    "llama, sdpa": (lambda: llama(attn_implementation="sdpa"), LLAMA_RULES),
    "llama, tied": (lambda: llama(tie_word_embeddings=True), LLAMA_RULES),
    "bert": (bert, BERT_RULES),
    "vit": (vit, VIT_RULES),
}
QUICK = "llama, sdpa"
EACH = [QUICK, *(pytest.param(name, marks=pytest.mark.heavy) for name in MODELS if name != QUICK)]


def language(model, input_ids):
    return model(input_ids=input_ids, labels=input_ids).loss


def classes(model, pixel_values, y):
    return F.cross_entropy(model(pixel_values=pixel_values).logits, y)


@pytest.mark.parametrize("name", EACH)
def test_forward(mesh, name):
    make, rules = MODELS[name]
    module = seeded(make).eval()
    inputs = {"pixel_values": images()[0]} if name == "vit" else {"input_ids": tokens()}
    found = spmd.torch.shard(module, mesh, rules)(**inputs)
    with torch.no_grad():
        wanted = module(**inputs)
    assert type(found) is type(wanted)
    torch.testing.assert_close(found.logits, wanted.logits, rtol=1e-5, atol=1e-5)


@pytest.mark.thorough
@pytest.mark.parametrize("name", EACH)
def test_three_steps(mesh, name):
    make, rules = MODELS[name]
    if name == "vit":
        check_steps(make, classes, mesh, rules, images())
    else:
        check_steps(make, language, mesh, rules, (tokens(),))
