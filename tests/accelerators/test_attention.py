"""Attention's kernels on real accelerators: as the reference, alone and partitioned.

On GPUs:

    SPMD_TEST_PLATFORM=cuda XLA_PYTHON_CLIENT_PREALLOCATE=false pytest tests/accelerators/test_attention.py
"""  # noqa: E501

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import spmd
from spmd.ir.dialect import rule
from spmd.ir.dialect.rule import MOST_PIECES
from spmd.ops import (
    attention,
    attention_cudnn,
    attention_reference,
    attention_splash,
    from_zigzag,
    zigzag,
)
from spmd.ops.attention import piece, piece_gradient
from tests.accelerators.devices import COUNT, DEVICES, PLATFORM
from tests.ops import test_attention as ours
from tests.ops.test_attention import documents

KERNEL: Any = attention_splash if PLATFORM == "tpu" else attention_cudnn
CALL = "tpu_custom_call" if PLATFORM == "tpu" else "__cudnn$fmha"


def tensors(b: int, s: int, n: int, k: int, t: int) -> Any:
    return ours.tensors(b, s, n, k, 64, t, jnp.bfloat16)


def close(got: Any, want: Any, what: str, tolerance: float = 2e-2) -> None:
    """Largest difference against the largest entry: bf16 has three digits."""

    def check(a: Any, b: Any) -> None:
        a, b = np.asarray(a, np.float32), np.asarray(b, np.float32)
        assert np.abs(a - b).max() <= tolerance * max(1.0, np.abs(b).max()), what

    jax.tree.map(check, tuple(got), tuple(want))


class Form(NamedTuple):
    """One use: sizes B, S, N, K, T, the masks, and where the queries start in their sequence."""

    name: str
    sizes: tuple[int, int, int, int, int]
    causal: bool = True
    packed: bool = False
    start: int = 0
    length: int = 256
    window: int | None = None


FORMS = (
    Form("causal", (2, 256, 4, 4, 256)),
    Form("everything_seen", (2, 256, 4, 4, 256), causal=False),
    Form("grouped", (2, 256, 8, 2, 256)),
    Form("one_key_head", (2, 256, 4, 1, 256)),
    Form("packed", (2, 256, 8, 2, 256), packed=True),
    Form("packed_everything", (2, 256, 4, 4, 256), causal=False, packed=True),
    Form("part_of_the_queries", (2, 64, 8, 2, 256), start=128),
    Form("packed_part", (2, 64, 8, 2, 256), packed=True, start=192),
    Form("odd_length", (2, 255, 4, 4, 255), length=255),
    Form("window", (2, 256, 8, 2, 256), window=100),
    Form("window_of_one", (2, 256, 4, 4, 256), window=1),
    Form("packed_window", (2, 256, 8, 2, 256), packed=True, window=100),
    Form("window_of_a_part", (2, 64, 8, 2, 256), start=128, window=100),
)


@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.name)
def test_kernel_and_reference(form: Form) -> None:
    b, s, _, _, t = form.sizes
    q, k, v, dout = tensors(*form.sizes)
    spec: dict[str, Any] = {
        "causal": form.causal, "segments": form.packed, "scale": 0.125, "length": form.length,
        "logits_dtype": "float32", **({} if form.window is None else {"window": form.window}),
    }  # fmt: skip
    masks: list[Any] = [jnp.arange(form.start, form.start + s, dtype=jnp.int32)]
    masks = masks if form.causal else []
    ids = documents(b, t)
    masks += [ids[:, form.start : form.start + s], ids] if form.packed else []
    if KERNEL.forward(q, k, v, *masks, **spec) is NotImplemented:
        pytest.skip("not for this kernel: the reference is taken")

    def both(kernel: Any) -> Any:
        def run(q: Any, k: Any, v: Any, dout: Any, out: Any, lse: Any) -> Any:
            return kernel.forward(q, k, v, *masks, **spec), kernel.gradient(
                q, k, v, out, lse, dout, *masks, **spec
            )

        return jax.jit(run)

    # The gradient of each takes what the forward pass of the reference kept: they are one contract.
    out, lse = jax.jit(lambda *x: attention_reference.forward(*x, *masks, **spec))(q, k, v)
    forward, gradient = both(KERNEL)(q, k, v, dout, out, lse)
    want_forward, want_gradient = both(attention_reference)(q, k, v, dout, out, lse)
    close(forward[:1], want_forward[:1], "output")
    close(forward[1:], want_forward[1:], "logsumexp", 1e-2)
    for name, a, c in zip(("dq", "dk", "dv"), gradient, want_gradient, strict=True):
        close((a,), (c,), name)


@pytest.mark.parametrize("is_before", [False, True])
@pytest.mark.parametrize("order", [1, 2])
def test_a_piece_of_the_keys(order: int, is_before: bool) -> None:
    q, k, v, dout = tensors(2, 256, 8, 2, 256)
    spec: dict[str, Any] = {
        "causal": True, "segments": False, "scale": 0.125, "length": 512,
        "logits_dtype": "float32", "zigzag": order,
    }  # fmt: skip
    so_far = jnp.ones(q.shape, jnp.float32), jnp.zeros((2, 8, 256))

    def both(kernel: Any) -> Any:
        def run(q: Any, k: Any, v: Any, dout: Any, out: Any, lse: Any) -> Any:
            kept = q, k, v, out, lse, dout, is_before, jnp.ones(q.shape, jnp.float32)
            found = piece(kernel.forward, q, k, v, is_before, *so_far, **spec)
            return found, piece_gradient(kernel.gradient, *kept, **spec)

        return jax.jit(run)

    seen = {**spec, "zigzag": 1, "causal": False}
    out, lse = jax.jit(lambda *x: attention_reference.forward(*x, **seen))(q, k, v)
    got = both(KERNEL)(q, k, v, dout, out, lse)
    want = both(attention_reference)(q, k, v, dout, out, lse)
    for what, a, c in zip(("forward", "gradient"), got, want, strict=True):
        close(a, c, what)


@pytest.mark.skipif(COUNT < 2, reason="one device")
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("pieces", [1, MOST_PIECES], ids=["gathered", "round"])
@pytest.mark.parametrize("order", [1, COUNT])
def test_a_long_sequence(
    order: int, pieces: int, packed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rule, "MOST_PIECES", pieces)
    mesh, spec, length = spmd.make_mesh(devices=DEVICES[:COUNT], x=COUNT), (None, "x"), 1024 * COUNT
    args = *tensors(1, length, 8, 2, length), documents(1, length)

    def loss(order: int) -> Any:
        def run(q: Any, k: Any, v: Any, w: Any, ids: Any) -> Any:
            out = attention(q, k, v, segment_ids=ids if packed else None, zigzag=order)
            return jnp.sum(out.astype(jnp.float32) * w)

        return jax.value_and_grad(run, (0, 1, 2))

    specs = (spec,) * 3
    step = spmd.jit(loss(order), mesh=mesh, in_specs=(*specs, spec, spec), out_specs=(None, specs))
    compiled = step.compile(*(zigzag(x, order) for x in args))
    value, grads = compiled(*(zigzag(x, order) for x in args))
    want, want_grads = jax.jit(loss(1))(*args)
    close((value,), (want,), "loss", 5e-2)
    close((from_zigzag(x, order) for x in grads), want_grads, "gradients")
    assert CALL in compiled.as_text("emitted") and CALL in compiled.as_text("hlo")


SPLITS = {"batch": ("x", None, None), "heads": (None, None, "x"), "sequence": (None, "x", None)}


@pytest.mark.skipif(COUNT < 2, reason="one device")
@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("heads", [(8, 8), (8, 1)])
@pytest.mark.parametrize("name", SPLITS)
def test_partitioned(name: str, heads: tuple[int, int], packed: bool) -> None:
    mesh = spmd.make_mesh(devices=DEVICES[:COUNT], x=COUNT)
    q, k, v, w = tensors(COUNT, 512, *heads, 512)
    ids = documents(COUNT, 512)
    spec = (*SPLITS[name], None)
    keys = spec if name == "batch" or (name == "heads" and heads[1] % COUNT == 0) else (None,) * 4

    def loss(mark: Any, implementation: Any) -> Any:
        def run(q: Any, k: Any, v: Any, w: Any) -> Any:
            out = attention(
                mark(q, spec), mark(k, keys), mark(v, keys),
                segment_ids=ids if packed else None, implementation=implementation,
            )  # fmt: skip
            return jnp.sum(mark(out, spec).astype(jnp.float32) * mark(w, spec))

        return jax.value_and_grad(run, (0, 1, 2))

    marked = loss(lambda x, s: spmd.mark_sharding(x, mesh, s), "auto")
    compiled = spmd.jit(marked, mesh=mesh, options=spmd.Options(check=True)).compile(q, k, v, w)
    value, grads = compiled(q, k, v, w)
    want, want_grads = jax.jit(loss(lambda x, _: x, "xla"))(q, k, v, w)
    close((value,), (want,), "loss", 5e-2)
    close(grads, want_grads, name)
    takes_parts = PLATFORM != "tpu"
    if name != "sequence" or takes_parts:
        assert CALL in compiled.as_text("emitted") and CALL in compiled.as_text("hlo")


@pytest.mark.skipif(PLATFORM != "gpu", reason="cuDNN")
def test_jax_has_the_same_on_one_gpu() -> None:
    q, k, v, w = tensors(2, 256, 8, 2, 256)

    def loss(implementation: Any) -> Any:
        def run(q: Any, k: Any, v: Any) -> Any:
            out = attention(q, k, v, segment_ids=documents(2, 256), implementation=implementation)
            return jnp.sum(out.astype(jnp.float32) * w)

        return jax.jit(jax.grad(run, (0, 1, 2)))

    close(loss("cudnn")(q, k, v), loss("xla")(q, k, v), "gradients")


@pytest.mark.skipif(
    PLATFORM != "gpu" or attention_cudnn.capability() < attention_cudnn.HOPPER,
    reason="cuDNN on Hopper",
)
@pytest.mark.parametrize("width", [192, 256])
def test_wide_heads(width: int) -> None:
    q, k, v, w = ours.tensors(2, 256, 4, 2, width, 256, jnp.bfloat16)
    run = lambda q, k, v: jnp.sum(attention(q, k, v).astype(jnp.float32) * w)  # noqa: E731
    mesh = spmd.make_mesh(devices=DEVICES[:1], x=1)
    compiled = spmd.jit(jax.grad(run, (0, 1, 2)), mesh=mesh).compile(q, k, v)
    close(compiled(q, k, v), jax.jit(jax.grad(run, (0, 1, 2)))(q, k, v), "gradients")
    assert "fmhaSoftmaxBackward" in compiled.as_text("hlo")


def test_what_no_kernel_takes_is_computed_by_the_reference() -> None:
    q, k, v, _ = (x.astype(jnp.float16)[..., :36] for x in tensors(2, 64, 4, 2, 64))
    compiled = spmd.jit(attention, mesh=spmd.make_mesh(devices=DEVICES[:1], x=1)).compile(q, k, v)
    assert CALL not in compiled.as_text("emitted")
    close((compiled(q, k, v),), (attention(q, k, v),), "output")
