"""Attention over pages on real accelerators: the platform's kernel beside plain loops, in place.

See `test_attention.py` for the command.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import spmd
from spmd.ops import paged_attention, paged_update
from tests.accelerators.devices import COUNT, DEVICES
from tests.ops.test_paged import Case, Sizes, attended, ragged, step, step_case


def check(sizes: Sizes, seeds: int, dtype: Any, tolerance: float, window: int | None = None) -> Any:
    """Compiled once by us, with the platform's kernels; several batches beside loops over rows."""

    def run(q: Any, pool: Any, *rest: Any) -> Any:
        scales, sinks = (next((x for x in rest[4:] if x.ndim == rank), None) for rank in (5, 2))
        return paged_attention(q, pool, *rest[:4], scales=scales, sinks_KG=sinks, window=window)

    def rounded(case: Case) -> Case:
        pool = case.pool if sizes.quantized else jnp.asarray(case.pool, dtype)
        return case._replace(q=jnp.asarray(case.q, dtype), pool=pool)

    mesh = spmd.make_mesh(devices=DEVICES[:COUNT], x=COUNT)
    cases = [rounded(ragged(sizes, seed)) for seed in range(seeds)]
    compiled = spmd.jit(run, mesh=mesh).compile(*cases[0].operands)
    for case in cases:
        got = np.asarray(compiled(*case.operands), np.float32)
        plain = case._replace(q=np.asarray(case.q, np.float64))
        want = attended(plain, window)
        scale = max(1.0, float(np.abs(want).max()))
        np.testing.assert_allclose(got, want, rtol=tolerance, atol=tolerance * scale)
    return compiled


@pytest.mark.parametrize("quantized", [False, True])
@pytest.mark.parametrize("groups", [1, 3, 8])
@pytest.mark.parametrize(("slots", "rows"), [(16, 8), (4, 160)], ids=["few rows", "chunks"])
@pytest.mark.parametrize("page", [16, 64, 128])
def test_paged_attention(page: int, slots: int, rows: int, groups: int, quantized: bool) -> None:
    sizes = Sizes(
        a=1, b=slots, r=rows, p=page, m=512 // page, k=2, g=groups, d=128, quantized=quantized,
        sinks=groups > 1,
    )  # fmt: skip
    compiled = check(sizes, 3, jnp.bfloat16, 2e-2)
    if DEVICES[0].platform == "gpu":
        assert "triton" in compiled.as_text("emitted")


@pytest.mark.parametrize(("width", "window"), [(64, None), (64, 300), (128, None)])
def test_prompts(width: int, window: int | None) -> None:
    """As many rows as the kernel for Hopper takes."""
    sizes = Sizes(b=3, r=1200, p=64, m=20, k=2, g=4, d=width)
    check(sizes, 2, jnp.bfloat16, 2e-2, window)


@pytest.mark.parametrize("width", [64, 256])
def test_other_widths(width: int) -> None:
    check(Sizes(b=4, r=48, p=64, m=4, d=width), 3, jnp.bfloat16, 2e-2)


@pytest.mark.parametrize("window", [1, 100, 300])
@pytest.mark.parametrize(("slots", "rows"), [(16, 8), (4, 160)], ids=["few rows", "chunks"])
def test_windows(slots: int, rows: int, window: int) -> None:
    sizes = Sizes(a=1, b=slots, r=rows, p=64, m=8, k=2, g=4, d=128)
    compiled = check(sizes, 3, jnp.bfloat16, 2e-2, window)
    if DEVICES[0].platform == "gpu":
        assert "triton" in compiled.as_text("emitted")


def test_float32() -> None:
    check(Sizes(b=4, r=48, p=64, m=4, d=64), 3, jnp.float32, 1e-4)


def test_many_pages() -> None:
    """Elements beyond the 2^31st of a pool."""
    pages = (1 << 31) // (64 * 8 * 2 * 128) + 64
    rng = np.random.default_rng(0)
    q = jnp.asarray(rng.standard_normal((1, 4, 8, 4, 128)), jnp.bfloat16)
    new = jnp.asarray(rng.standard_normal((1, 4, 8, 2, 128)), jnp.bfloat16)
    slots = jnp.arange(4, dtype=jnp.int32)[None]
    first, positions = jnp.arange(5, dtype=jnp.int32)[None], jnp.zeros((1, 4), jnp.int32)
    table = (pages - 1 - jnp.arange(4, dtype=jnp.int32))[None, :, None]

    def run(new: Any, q: Any) -> Any:
        pool = jnp.zeros((1, pages, 64, 8, 2, 128), jnp.bfloat16)
        pool = paged_update(pool, new, table, slots, positions)
        return paged_attention(q, pool, table, slots, positions, first)

    mesh = spmd.make_mesh(devices=DEVICES[:1], x=1)
    got = spmd.jit(run, mesh=mesh)(new, q)  # each row sees its own value alone
    want = np.broadcast_to(np.asarray(new, np.float32)[:, :, :, 1][:, :, :, None], q.shape)
    np.testing.assert_allclose(np.asarray(got, np.float32), want, rtol=1e-2)


def test_a_layer_works_in_place() -> None:
    args = [jnp.asarray(x) for x in step_case(Sizes(a=COUNT, b=8, r=32, p=64, m=8, d=128))]
    args[:3] = [x.astype(jnp.bfloat16) for x in args[:3]]
    mesh = spmd.make_mesh(devices=DEVICES[:COUNT], x=COUNT)
    specs = (("x",),) * len(args)
    compiled = spmd.jit(step, mesh=mesh, in_specs=specs, donate_argnums=0).compile(*args)
    want = jax.jit(step)(*args)
    assert compiled.memory.aliased == args[0].nbytes // COUNT
    assert compiled.memory.temporary < args[0].nbytes // COUNT
    for got, wanted in zip(compiled(*args), want, strict=True):
        got, wanted = (np.asarray(x, np.float32) for x in (got, wanted))
        np.testing.assert_allclose(got, wanted, rtol=2e-2, atol=2e-2)
