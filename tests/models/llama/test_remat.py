"""Recomputing activations changes neither the loss nor a gradient, and keeps less."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import spmd
from spmd.models.llama import objective
from spmd.models.llama.config import ConfigError
from spmd.models.llama.named import CONFIGS
from spmd.models.llama.remat import check_can_offload, checkpoint_policy
from tests.models.llama.layers import stack_layers, unstack_layers
from tests.models.llama.made import assert_close, fresh_params, structs

TINY = dataclasses.replace(CONFIGS["tiny"], num_hidden_layers=4)
TOKENS = jax.random.randint(jax.random.key(1), (2, 17), 0, 256)

VARIANTS = [
    {"remat": "full", "remat_every": 2},
    {"remat": "save:q,mlp_output", "scan_layers": False, "remat_every": 3},
    pytest.param({"remat": "full"}, marks=pytest.mark.heavy),
    pytest.param({"remat": "dots_no_batch", "remat_every": 4}, marks=pytest.mark.heavy),
    pytest.param({"remat": "save_attention"}, marks=pytest.mark.heavy),
]


def loss_of(changes):
    config = dataclasses.replace(TINY, **changes)
    return lambda params: objective.loss(params, TOKENS[:, :-1], TOKENS[:, 1:], config)


@pytest.fixture(scope="module")
def params():
    return fresh_params(TINY)


@pytest.fixture(scope="module")
def expected(params):
    return jax.jit(jax.value_and_grad(loss_of({})))(params)


@pytest.mark.thorough
@pytest.mark.parametrize("changes", VARIANTS, ids=str)
def test_loss_and_gradients_are_equal(params, expected, changes):
    is_scanned = changes.get("scan_layers", True)
    given = params if is_scanned else unstack_layers(params)
    loss, grads = jax.jit(jax.value_and_grad(loss_of(changes)))(given)
    grads = grads if is_scanned else stack_layers(grads)
    np.testing.assert_allclose(loss, expected[0], rtol=1e-6)
    assert_close(grads, expected[1], rtol=2e-4, atol=1e-6)


def kept(params, changes):
    """Bytes of what the forward pass keeps for the backward pass, but for parameters."""
    given = params if changes.get("scan_layers", True) else unstack_layers(params)
    _, backward = jax.eval_shape(lambda p: jax.vjp(loss_of(changes), p), given)
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(backward))


@pytest.mark.thorough
def test_what_is_kept_shrinks(params):
    def kept_with(remat, **changes):
        return kept(params, {"remat": remat, **changes})

    everything, nothing = kept_with("none"), kept_with("full")
    assert nothing < kept_with("save_attention") < everything
    assert nothing < kept_with("dots_no_batch") <= kept_with("dots") < everything
    assert nothing < kept_with("full", remat_every=4) < everything
    assert nothing < kept_with("full", remat_every=2) < kept_with("full", remat_every=4)
    unrolled = kept_with("none", scan_layers=False)
    assert kept_with("full", scan_layers=False, remat_every=3) < unrolled


@pytest.mark.thorough
def test_a_scan_that_is_written_out_recomputes_late():
    """Each layer's recomputation waits for its gradient: else a compiler does all of it at once."""
    mesh = spmd.Mesh(None, (2,), ("data",))
    grad = jax.grad(loss_of({"remat": "full"}))
    for trips, layers in ((0, 0), (TINY.num_hidden_layers, TINY.num_hidden_layers)):
        step = spmd.jit(grad, mesh=mesh, options=spmd.Options(unroll=trips))
        text = step.lower(structs(TINY), topology=spmd.Topology("v5e:1x2")).as_text("optimized")
        assert text.count("stablehlo.optimization_barrier") == layers


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("all", "remat 'all' is no policy; there are none, full, dots"),
        ("save:", "is no policy"),
        ("save:q,w", "nothing is called 'w'; there are inputs_embeds, q"),
    ],
)
def test_unknown_policies_are_named(text, message):
    with pytest.raises(ConfigError, match=message):
        checkpoint_policy(text)


def test_offloading_needs_another_memory_and_goes_there(params):
    assert checkpoint_policy("offload:q,k") is not None
    check_can_offload("offload:q,k", "cuda")
    with pytest.raises(ConfigError, match="no other memory to offload to; use save:q,k or run"):
        check_can_offload("offload:q,k", "cpu")
    text = str(jax.make_jaxpr(jax.grad(loss_of({"remat": "offload:q"})))(params))
    assert "<host>" in text or "pinned_host" in text


def test_groups_have_to_divide_scanned_layers():
    with pytest.raises(ConfigError, match="remat_every 3 does not divide 4 layers"):
        dataclasses.replace(TINY, remat="full", remat_every=3)
    with pytest.raises(ConfigError, match="remat_every 2 does not divide 1 and 3 layers"):
        dataclasses.replace(TINY, remat_every=2, sliding_window=8, max_window_layers=1)


@pytest.mark.parametrize("z", [0.0, 0.1])
def test_cross_entropy_against_numpy_and_z_loss_adds_the_squared_normalizer(z):
    logits = jax.random.normal(jax.random.key(0), (2, 3, 5))
    targets = jnp.array([[0, 1, 2], [3, 4, 0]])
    normalizer = np.log(np.exp(logits).sum(-1))
    chosen = jnp.take_along_axis(logits, targets[..., None], -1)[..., 0]
    found = jax.jit(functools.partial(objective.cross_entropy, z_loss=z))(logits, targets)
    wanted = np.mean(normalizer - chosen + z * normalizer**2)
    np.testing.assert_allclose(found, wanted, rtol=1e-6)
