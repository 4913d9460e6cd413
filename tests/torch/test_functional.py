"""`functional`: a torch module inside of jax, and `call_jax`: jax inside of a torch module."""

import pytest

pytest.importorskip("spmd.torch", reason="needs torch and torchax: .[torch]", exc_type=ImportError)

import jax
import jax.numpy as jnp
import numpy as np
import torch
from torch import nn

import spmd
import spmd.torch
from tests.torch.modules import cnn, images, seeded


def test_it_is_the_module():
    module, pixels = seeded(cnn).eval(), images()[0]
    weights, call = spmd.torch.functional(module)
    assert set(weights) == set(module.state_dict())
    found = jax.jit(call)(weights, pixels.numpy())
    np.testing.assert_allclose(found, module(pixels).detach(), rtol=1e-5, atol=1e-5)
    doubled = {**weights, "5.bias": weights["5.bias"] + 1}  # they are arguments, not constants
    np.testing.assert_allclose(jax.jit(call)(doubled, pixels.numpy()), found + 1, rtol=1e-4)


class Heads(nn.Module):
    """Attention that is given to it, whose results are a tree."""

    def __init__(self):
        super().__init__()
        self.qkv = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))

    def forward(self, x, attend):
        heads = attend(*(p(x).unflatten(-1, (2, 4)) for p in self.qkv))
        return {"heads": heads.flatten(-2), "sum": heads.sum()}

    def first(self, x):
        return self.qkv[0](x)


def plain(q, k, v):
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)


def with_jax(q, k, v):
    return spmd.torch.call_jax(lambda q, k, v: spmd.ops.attention(q, k, v), q, k, v)


def test_an_op_of_jax_in_the_module(mesh):
    module, x = seeded(Heads).eval(), torch.randn(4, 6, 8)
    weights, call = spmd.torch.functional(module)
    specs = (None, ("data", None, None))
    compute = spmd.jit(lambda weights, x: call(weights, x, with_jax), mesh=mesh, in_specs=specs)
    found, wanted = compute(weights, jnp.array(x.numpy())), module(x, plain)
    np.testing.assert_allclose(found["heads"], wanted["heads"].detach(), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(found["sum"], wanted["sum"].detach(), rtol=1e-4, atol=1e-4)
    _, first = spmd.torch.functional(module, Heads.first)
    np.testing.assert_allclose(first(weights, x.numpy()), module.first(x).detach(), atol=1e-6)


def test_errors():
    with pytest.raises(spmd.ArgumentError, match="no torch module"):
        spmd.torch.functional(jnp.sin)
    weights, call = spmd.torch.functional(nn.Dropout().train())
    with pytest.raises(spmd.FrontendError, match="random numbers"):
        call(weights, np.ones(3, np.float32))
    with pytest.raises(spmd.ArgumentError, match="outside of a trace"):
        spmd.torch.call_jax(jnp.sin, torch.ones(3))
