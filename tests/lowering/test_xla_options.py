"""Options for XLA."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest

import spmd
from spmd.lowering.xla_options import DEFAULTS, options_within, xla_options


@pytest.mark.parametrize("platform", DEFAULTS)
def test_this_version_of_jaxlib_knows_them(platform: str) -> None:
    if platform == "tpu":
        pytest.skip("libtpu knows them, not jaxlib")
    options: Any = DEFAULTS[platform]
    jax.jit(jnp.sin).lower(1.0).compile(options)


def test_what_the_user_says_stays() -> None:
    (flag,) = DEFAULTS["cuda"]
    assert xla_options("cuda", {flag: 1}) == {flag: 1}
    assert xla_options("cuda", {"other": True}) == {**DEFAULTS["cuda"], "other": True}
    assert xla_options("cpu", {}) == {}


def test_a_memory_limit_reaches_the_scheduler_of_gpus() -> None:
    flag, gib = "xla_gpu_memory_limit_slop_factor", 1 << 30
    gpus = spmd.Topology("h200:8")
    given = [options_within(limit * gib, 6 * gib, gpus, {})[flag] for limit in (1, 7, 14, 60, 900)]
    assert given == sorted(given)
    assert given[0] == 1
    assert given[-1] == 95
    assert options_within(14 * gib, 0, gpus, {flag: 50}) == {flag: 50}  # the user's own stays
    assert options_within(14 * gib, 0, spmd.Topology("v5e:2x4"), {}) == {}
