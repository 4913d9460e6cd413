"""Partitioned training, training on one device and PyTorch's have the same losses."""

import dataclasses
import functools

import numpy as np
import pytest

import spmd
from spmd.models.llama.named import CONFIGS
from spmd.models.training.data.source import PackedTokens, from_documents, whole
from tools.compare_training import apart, losses

STEPS = 20


@functools.cache
def found():
    tokens = np.random.default_rng(0).integers(0, 256, 4096).astype(np.uint8)
    config = dataclasses.replace(CONFIGS["tiny"], initializer_range=0.1)
    mesh = spmd.make_mesh(data=4, model=2)
    text = whole(from_documents([tokens], 256))
    return losses(config, PackedTokens([text], seq_len=16, batch_size=8), STEPS, mesh)


@pytest.mark.heavy
def test_one_device():
    assert len(found()["jax"]) == STEPS
    assert apart(found(), "jax") < 1e-4
    assert len({round(loss, 3) for loss in found()["spmd"]}) > STEPS // 2


@pytest.mark.heavy
def test_pytorch():
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    assert len(found()["torch"]) == STEPS
    assert apart(found(), "torch") < 1e-4
