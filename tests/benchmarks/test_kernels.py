"""Kinds of kernels of a step, and the peer's model that they are compared with."""

import dataclasses
import functools
from typing import Any

import jax
import numpy as np
import pytest

from benchmarks import torch_fsdp
from benchmarks.kernels import Kernel, kinds_of
from spmd.models.llama import fresh, model
from spmd.models.llama.named import named_config


def test_a_step_by_kind() -> None:
    step = [
        Kernel("nvjet_sm90_tst_128x256", 0.000, 0.004),
        Kernel("ncclDevKernel_AllGather_RING_LL", 0.003, 0.006),
        Kernel("loop_add_fusion_3", 0.006, 0.008),
        Kernel("MemcpyD2D", 0.007, 0.008),
    ]
    found = kinds_of([step, step])
    assert found.kinds == pytest.approx((4.0, 0.0, 2.0, 1.0))
    assert (found.busy, found.exposed, found.hidden) == pytest.approx((8.0, 2.0, 1.0))
    assert found.cells() == ["8.0", "4.0", "0.0", "2.0", "1.0", "2.0", "1.0"]


def test_the_peer_computes_our_model() -> None:
    torch = pytest.importorskip("torch")
    config = dataclasses.replace(named_config("quickstart"), num_hidden_layers=2, scan_layers=False)
    init = jax.jit(functools.partial(fresh.init, config=config))
    params = jax.device_get(init(jax.random.key(0)))
    peer = torch_fsdp._model(config).to_empty(device="cpu")
    names = {"before": "input_layernorm", "between": "post_attention_layernorm"}
    names |= {name: f"self_attn/{name}_proj" for name in "qkvo"}
    names |= {name: f"mlp/{name}_proj" for name in ("gate", "up", "down")}

    def of(path: str) -> Any:
        found: Any = params
        for part in path.split("/"):
            found = found[part]
        return torch.from_numpy(np.array(found["weight"]))

    state = {"embed.weight": of("embed_tokens"), "norm.weight": of("norm")}
    state["head.weight"] = of("lm_head" if "lm_head" in params else "embed_tokens")
    for i in range(2):
        for name, ours in names.items():
            state[f"layers.{i}.{name}.weight"] = of(f"layers/{i}/{ours}")
    peer.load_state_dict(state)
    tokens = np.random.RandomState(0).randint(0, config.vocab_size, (2, 33))
    with torch.no_grad():
        theirs = peer(torch.from_numpy(tokens)).numpy()
    wanted = jax.jit(functools.partial(model.forward, config=config))(params, tokens)
    np.testing.assert_allclose(theirs, wanted, atol=1e-4)
