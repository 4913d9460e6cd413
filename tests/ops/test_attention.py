"""Attention against a plain softmax: values and gradients, alone and split in every way."""

import dataclasses
import functools
import math
import re
from types import SimpleNamespace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.cudnn import fused_attention_stablehlo as fused

import spmd
from spmd.ir.description import COMPOSITE
from spmd.ir.dialect import rule
from spmd.mesh.sharding import local_shape
from spmd.ops import attention, zigzag
from spmd.ops import attention_cudnn as cudnn
from spmd.ops import attention_reference as reference
from spmd.ops import attention_splash as splash
from tests.close import close

CHECKED = spmd.Options(check=True)
CPU = spmd.Topology("cpu:8").chip
SLOW = dataclasses.replace(CPU, flops=tuple((dtype, 1e6) for dtype, _ in CPU.flops))
EVERY_FLOP_COUNTS = spmd.Options(check=True, topology=spmd.Topology("cpu:8", SLOW))
"""Small programs are split as large ones are: what is not split takes longer than any exchange."""


def plain(
    q: Any, k: Any, v: Any, causal: bool, segments: Any = None, window: int | None = None
) -> Any:
    """Attention as the textbook has it, in float32, all weights at once."""
    groups = q.shape[2] // k.shape[2]
    k, v = (jnp.repeat(x, groups, 2).astype(jnp.float32) for x in (k, v))
    scores = jnp.einsum("bsnd,btnd->bnst", q.astype(jnp.float32), k) / math.sqrt(q.shape[-1])
    if causal:
        behind = np.arange(q.shape[1])[:, None] - np.arange(k.shape[1])
        seen = (behind >= 0) & (behind < (window or k.shape[1]))
        scores = jnp.where(seen, scores, -1e30)
    if segments is not None:
        queries, keys = segments if isinstance(segments, tuple) else (segments, segments)
        scores = jnp.where((queries[:, :, None] == keys[:, None, :])[:, None], scores, -1e30)
    return jnp.einsum("bnst,btnd->bsnd", jax.nn.softmax(scores, -1), v).astype(q.dtype)


def tensors(b: int, s: int, n: int, k: int, d: int = 8, t: int = 0, dtype: Any = None) -> Any:
    """q, k, v and weights of the outputs in a loss."""
    rng = np.random.default_rng(s * n + k)
    shapes = ((b, s, n, d), (b, t or s, k, d), (b, t or s, k, d), (b, s, n, d))
    return tuple(jnp.asarray(rng.standard_normal(shape), dtype or jnp.float32) for shape in shapes)


def documents(b: int, s: int) -> Any:
    """Ids of a few documents packed into each sequence."""
    return np.sort(np.random.default_rng(s).integers(0, 3, (b, s)), axis=1).astype(np.int32)


def loss(fn: Any, mark: Any = lambda name, x: x) -> Any:
    def run(q: Any, k: Any, v: Any, w: Any, *segments: Any) -> Any:
        out = mark("q", fn(mark("q", q), mark("k", k), mark("k", v), *segments))
        return jnp.sum(out.astype(jnp.float32) * mark("q", w).astype(jnp.float32))

    return jax.value_and_grad(run, (0, 1, 2))


@pytest.mark.parametrize(
    ("heads", "key_heads", "causal", "packed", "blocks", "window"),
    [
        (4, 4, True, False, 1, None), (8, 2, True, False, 1, 3), (4, 1, True, True, 1, None),
        (4, 4, False, False, 1, None), (8, 2, False, True, 1, None), (8, 2, True, True, 3, 4),
        (4, 1, False, False, 3, None), (2, 2, True, False, 1, 1),
    ],
)  # fmt: skip
def test_reference(
    heads: int, key_heads: int, causal: bool, packed: bool, blocks: int, window: int | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    if blocks > 1:  # 10 queries in blocks of 4: the last one is padded
        monkeypatch.setattr(reference, "MOST_SCORES", 40)
        monkeypatch.setattr(reference, "SMALLEST_BLOCK", 4)
    args = tensors(2, 10, heads, key_heads)
    ids = documents(2, 10) if packed else None

    def ours(q: Any, k: Any, v: Any) -> Any:
        return attention(
            q, k, v, causal=causal, window=window, segment_ids=ids, implementation="xla"
        )

    want = loss(lambda q, k, v: plain(q, k, v, causal, ids, window))
    close(jax.jit(loss(ours))(*args), jax.jit(want)(*args))


def test_other_keys_than_queries_and_a_scale() -> None:
    q, k, v, _ = tensors(2, 4, 4, 2, t=10)
    segments = documents(2, 4), documents(2, 10)

    @jax.jit
    def both(q: Any, k: Any, v: Any) -> Any:
        got = attention(q, k, v, causal=False, segment_ids=segments, scale=0.5)
        want = plain(q * 0.5 * math.sqrt(8), k, v, False, segments)
        return (got, attention(q, k, v)), (want, plain(q, k, v, True))

    close(*both(q, k, v))


def test_halves() -> None:
    args = tensors(2, 16, 4, 2, dtype=jnp.bfloat16)
    value, grads = jax.jit(loss(attention))(*args)
    assert [g.dtype for g in grads] == [jnp.bfloat16] * 3
    wide = [x.astype(jnp.float32) for x in args]
    close((value, grads), jax.jit(loss(functools.partial(plain, causal=True)))(*wide), 0.05)


def test_a_query_that_sees_no_key_gives_no_nan() -> None:
    q, k, v, w = tensors(1, 4, 2, 2)
    segments = np.array([[0, 0, 5, 5]], np.int32), np.array([[0, 0, 1, 1]], np.int32)
    found = jax.jit(loss(lambda q, k, v: attention(q, k, v, segment_ids=segments)))(q, k, v, w)
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(found))
    np.testing.assert_array_equal(found[1][0][0, 2:], 0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"k": (2, 4, 3, 8), "v": (2, 4, 3, 8)}, "multiple of the key heads"),
        ({"v": (2, 5, 2, 8)}, r"k and v \(B, T, K, D\)"),
        ({"k": (1, 4, 2, 8), "v": (1, 4, 2, 8)}, "the same batch"),
        ({"segment_ids": (2, 3)}, r"segment_ids \(2, 3\), \(2, 3\)"),
        ({"implementation": "flash"}, "auto, composite, xla, cudnn"),
        ({"positions": (3,)}, r"positions \(3,\) for q \(2, 4, 4, 8\)"),
        ({"positions": (4,), "causal": False}, r"positions \(S,\) of a causal attention"),
        ({"window": 0}, "window=0, causal=True\n.*a window of at least one key"),
        ({"window": 4, "causal": False}, "window=4, causal=False\n.*of a causal"),
    ],
)
def test_what_does_not_fit_is_said(change: dict[str, Any], message: str) -> None:
    given = {"q": (2, 4, 4, 8), "k": (2, 4, 2, 8), "v": (2, 4, 2, 8), **change}
    made: dict[str, Any] = {
        n: jnp.zeros(s) if isinstance(s, tuple) else s for n, s in given.items()
    }
    q, k, v = (made.pop(name) for name in "qkv")
    with pytest.raises(spmd.ArgumentError, match=message):
        attention(q, k, v, **made)


# Split.


class Split(NamedTuple):
    """Attention on a mesh, with the marks of queries and outputs, and of keys and values.

    Attributes:
      sizes: B, S, N, K.
      mesh: sizes of the axes x, y and z.
      queries, keys: the specs.
      local: (B, S, N) and K that one device computes, if that is checked.
      length: of the keys, where it is another one.
      order: parts of the zigzag order.
      pieces: of the keys on one device, if that is checked; 0 where it takes them all at once.
    """

    name: str
    sizes: tuple[int, int, int, int]
    mesh: tuple[int, ...]
    queries: Any
    keys: Any
    local: tuple[tuple[int, int, int], int] = ((0, 0, 0), 0)
    packed: bool = False
    window: int | None = None
    causal: bool = True
    length: int = 0
    order: int = 1
    pieces: int = 4

    def ordered(self, x: Any) -> Any:
        return zigzag(x, self.order) if self.order > 1 else x

    def compiled(self, dtype: Any = None, out_specs: Any = None) -> tuple[spmd.Compiled, Any]:
        """The program of loss and gradients, and its arguments in their usual order."""
        mesh = spmd.make_mesh(**dict(zip("xyz", self.mesh, strict=False)))
        specs = {"q": spread(self.queries), "k": spread(self.keys)}
        args = tensors(*self.sizes, t=self.length, dtype=dtype)
        args += (documents(*self.sizes[:2]),) if self.packed else ()

        def ours(q: Any, k: Any, v: Any, segment_ids: Any = None) -> Any:
            return attention(
                q, k, v, causal=self.causal, segment_ids=segment_ids, zigzag=self.order,
                window=self.window,
            )  # fmt: skip

        step = loss(ours, lambda name, x: spmd.mark_sharding(x, mesh, specs[name]))
        jitted = spmd.jit(step, mesh=mesh, out_specs=out_specs, options=EVERY_FLOP_COUNTS)
        return jitted.compile(*map(self.ordered, args)), args

    def wanted(self, *args: Any) -> Any:
        """Loss and gradients by the textbook."""

        def want(q: Any, k: Any, v: Any, segments: Any = None) -> Any:
            return plain(q, k, v, self.causal, segments, self.window)

        return jax.jit(loss(want))(*args)


SEQUENCE = Split("sequence", (2, 16, 4, 2), (8,), (None, "x"), (), ((2, 2, 4), 2))
SPLITS = (
    Split("more devices than key heads", (2, 8, 8, 2), (2, 2, 2), (None, None, ("x", "y", "z")),
          (None, None, "x"), ((2, 8, 1), 1)),
    Split("one key head, uneven", (2, 5, 7, 1), (4, 2), ("y", None, "x"), ("y",),
          ((1, 5, 2), 1), packed=True),
    Split("uneven sequence", (2, 10, 4, 2), (4, 2), ("y", "x"), ("y",), ((1, 3, 4), 2),
          packed=True),
    Split("sequence and heads", (2, 8, 8, 2), (2, 2, 2), ("x", "y", "z"), ("x", None, "z"),
          ((1, 8, 2), 1)),
    Split("window of a sequence", (2, 10, 4, 2), (4, 2), ("y", "x"), ("y",), ((1, 3, 4), 2),
          window=4),
)  # fmt: skip


def spread(spec: Any) -> tuple[Any, ...]:
    return (*spec, *(None,) * (4 - len(spec)))


def locally(lowered: spmd.Lowered | spmd.Compiled) -> dict[str, list[tuple[int, ...]]]:
    """The composites as planned: name -> the shapes of the operands on one device."""
    plan = lowered.stages.plan
    return {
        op.kind.attrs["name"]: [
            local_shape(type_.shape, sharding, plan.mesh)
            for type_, sharding in zip(op.kind.operands, plan.choice(op).operands, strict=True)
        ]
        for op in plan.program.walk()
        if op.name == COMPOSITE
    }


@pytest.mark.usefixtures("exact_plans")
@pytest.mark.parametrize("split", SPLITS, ids=lambda split: split.name.replace(" ", "_"))
def test_split(split: Split) -> None:
    compiled, args = split.compiled()
    close(compiled(*args), split.wanted(*args))
    for queries, keys, *_ in locally(compiled).values():
        assert (queries[:3], keys[2]) == split.local
        whole = keys[1] == split.sizes[1]
        assert whole or keys[1] == queries[1], "all keys of its heads, or those of its queries"
    assert len(locally(compiled)) == 2


def test_gradients_of_gathered_keys_are_sums_over_the_parts_of_the_queries(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(rule, "MOST_PIECES", 1)  # nothing goes round
    compiled, args = SEQUENCE.compiled()
    sums = [c for c in compiled.collectives if c.kind in ("all_reduce", "reduce_scatter")]
    assert {c.axes for c in sums} == {("x",)}
    k, v = args[1:3]
    assert sum(c.bytes for c in sums) >= 2 * (k.nbytes + v.nbytes) * 7 // 8  # both gradients' sums
    gathers = [c for c in compiled.collectives if c.kind == "all_gather"]
    assert not [c for c in gathers if "spmd.attention" in c.reason]
    assert compiled.verify(*args)


def recomputed(fn: Any, w: Any) -> Any:
    """Loss and gradients of two layers of the same function, scanned."""

    def run(q: Any, k: Any, v: Any) -> Any:
        @jax.checkpoint
        def layer(x: Any, scale: Any) -> Any:
            return fn(x * scale, k, v), None

        return jnp.sum(jax.lax.scan(layer, q, jnp.asarray([0.5, 2.0]))[0] * w)

    return jax.value_and_grad(run, (0, 1, 2))


def test_mapped_scanned_and_recomputed(devices8: Any) -> None:
    mesh = spmd.make_mesh(x=4, y=2)
    q, k, v, w = tensors(6, 8, 4, 2)
    q, w = (x.reshape(3, 2, 8, 4, 8) for x in (q, w))
    k, v = k[:2], v[:2]
    segments = documents(2, 8)

    def mapped(fn: Any) -> Any:
        return recomputed(jax.vmap(fn, (0, None, None)), w)

    ours = mapped(lambda q, k, v: attention(q, k, v, segment_ids=segments))
    want = jax.jit(mapped(lambda q, k, v: plain(q, k, v, True, segments)))(q, k, v)
    specs = ((None, "y", None, "x"), ("y",), ("y",))
    compiled = spmd.jit(ours, mesh=mesh, in_specs=specs, options=CHECKED).compile(q, k, v)
    close(compiled(q, k, v), want)
    assert set(locally(compiled)) == {"spmd.attention", "spmd.attention_grad"}
    close(jax.jit(ours)(q, k, v), want)


@pytest.mark.parametrize("mark", [(), (None, None, ("x", "y"))])
def test_queries_that_are_a_part_of_a_sequence(mark: tuple[Any, ...], devices8: Any) -> None:
    """What whole sequences give for these queries; where they are is known when it runs."""
    mesh = spmd.make_mesh(x=4, y=2)
    q, k, v, w = tensors(2, 16, 8, 2, t=32)

    def part(start: Any, q: Any, k: Any, v: Any) -> Any:
        q = spmd.mark_sharding(q, mesh, mark)
        out = attention(q, k, v, positions=start + jnp.arange(16))
        return jnp.sum(out * w), out

    def wanted(start: Any, q: Any, k: Any, v: Any) -> Any:
        whole = jax.lax.dynamic_update_slice_in_dim(jnp.zeros((2, 32, 8, 8)), q, start, 1)
        out = jax.lax.dynamic_slice_in_dim(plain(whole, k, v, True), start, 16, 1)
        return jnp.sum(out * w), out

    ours, theirs = (jax.value_and_grad(f, (1, 2, 3), has_aux=True) for f in (part, wanted))
    theirs = jax.jit(theirs)
    compiled = spmd.jit(ours, mesh=mesh, options=CHECKED).compile(jnp.int32(0), q, k, v)
    for start in (0, 5, 16):
        close(compiled(jnp.int32(start), q, k, v), theirs(start, q, k, v))
    mapped = jax.jit(jax.vmap(lambda start: part(start, q, k, v)[1]))(jnp.arange(3))
    close(mapped, jnp.stack([theirs(start, q, k, v)[0][1] for start in range(3)]))


def test_costs_know_the_mask_and_that_there_are_no_weights() -> None:
    def planned(causal: bool, length: int = 2048, chip: str = "h200:8", **options: Any) -> Any:
        args = [jax.ShapeDtypeStruct((8, length, 8, 128), jnp.bfloat16)] * 3
        fn = functools.partial(attention, causal=causal, **options)
        step = spmd.jit(fn, mesh=spmd.Mesh(None, (8,), ("x",)), in_specs=(("x",),) * 3)
        return step.lower(*args, topology=spmd.Topology(chip))

    half, whole = planned(True), planned(False)
    assert 1.8 < whole.timeline.compute_seconds / half.timeline.compute_seconds < 2.2
    quarter = planned(True, window=512)
    assert 1.8 < half.timeline.compute_seconds / quarter.timeline.compute_seconds < 2.2
    flops = 4 * 2048 * 2048 * 8 * 128
    for chip, efficiency in (("h200:8", 0.63), ("a100:8", 1.0), ("v5e:2x4", 1.0)):  # as measured
        seconds = flops / (spmd.Topology(chip).peak_flops("bf16") * efficiency)
        found = planned(False, chip=chip).timeline.compute_seconds
        assert found == pytest.approx(seconds, rel=0.05)
    weights = 8 * 2048 * 2048 * 4
    assert half.predicted_memory.temporary < weights / 4
    assert planned(True, 1024, implementation="xla").predicted_memory.temporary > weights / 4


# Kernels, as far as a CPU can tell. `tests/accelerators/test_attention.py` runs them.

SPEC: dict[str, Any] = dict(causal=True, segments=False, scale=0.125, logits_dtype="float32")


@pytest.mark.thorough
@pytest.mark.parametrize(("packed", "window"), [(True, None), (False, 100), (True, 1)])
def test_the_splash_kernel_computes_what_the_reference_does(
    packed: bool, window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(splash, "INTERPRET", True)
    q, k, v, w = tensors(1, 256, 2, 1, d=192 if packed else 64)
    spec = {**SPEC, "length": 256, "segments": packed}
    spec |= {} if window is None else {"window": window}
    masks = [jnp.arange(256)]
    masks += [documents(1, 256)] * 2 if packed else []

    def both(kernel: Any) -> Any:
        def run(q: Any, k: Any, v: Any, w: Any) -> Any:
            out, lse = kernel.forward(q, k, v, *masks, **spec)
            return out, lse, kernel.gradient(q, k, v, out, lse, w, *masks, **spec)

        return jax.jit(run)(q, k, v, w)

    close(both(splash), both(reference), 1e-4)


def kernel_calls(topology: str, split: bool = False, **sizes: Any) -> str:
    """Targets of the custom calls of a program of the forward and the backward pass."""
    width, length = sizes.get("width", 128), sizes.get("length", 256)
    dtype, packed = sizes.get("dtype", jnp.bfloat16), sizes.get("packed", False)
    window = sizes.get("window")
    mesh = spmd.Mesh(None, (4,), ("x",))
    rows, heads = (1, (3, 1)) if split else (4, (4, 2))  # else heads or rows would be split
    q, k = (jax.ShapeDtypeStruct((rows, length, n, width), dtype) for n in heads)
    args = [q, k, k, jax.ShapeDtypeStruct((rows, length), jnp.int32)]
    spec = (None, "x") if split else ("x",)
    marks = {"q": spread(spec), "k": spread(() if split else spec)}

    def ours(q: Any, k: Any, v: Any, segments: Any) -> Any:
        return attention(q, k, v, window=window, segment_ids=segments if packed else None)

    step = loss(ours, lambda name, x: spmd.mark_sharding(x, mesh, marks[name]))
    lowered = spmd.jit(step, mesh=mesh).lower(
        *args[:3], q, args[3], topology=spmd.Topology(topology)
    )
    return lowered.as_text("emitted")


@pytest.mark.thorough
def test_which_programs_get_cudnn() -> None:
    own = kernel_calls("h200:4")
    assert "fmhaSoftmax(" in own and "fmhaSoftmaxBackward(" in own and "CAUSAL" in own
    packed = kernel_calls("h200:4", packed=True)
    assert "fmhaScaleBiasSoftmax(" in packed and "CAUSAL" in packed
    part = kernel_calls("h200:4", split=True)
    assert "fmhaScaleBiasSoftmaxBackward(" in part and "NO_MASK" in part and "CAUSAL" not in part
    for other in ({"width": 256}, {"width": 36}, {"dtype": jnp.float32}):
        assert "cudnn" not in kernel_calls("h200:4", **other), other
    assert "cudnn" not in kernel_calls("h200:4", length=9, packed=True)
    assert "cudnn" in kernel_calls("h200:4", length=9)


def test_cudnn_gets_wide_heads_on_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cudnn, "capability", lambda: cudnn.HOPPER)
    assert "fmhaSoftmaxBackward(" in kernel_calls("h200:4", width=192)
    assert "cudnn" not in kernel_calls("h200:4", width=264)


def windows_of(text: str) -> set[int]:
    """The windows that calls of cuDNN's kernels are given; 0 is none."""
    return {int(n) for n in re.findall(r"sliding_window_length\W+22: (\d+)", text)}


def test_cudnn_gets_a_window_of_its_own_or_in_the_bias() -> None:
    own = kernel_calls("h200:4", window=64)
    assert "fmhaSoftmaxBackward(" in own and windows_of(own) == {64}
    for other in ({"packed": True}, {"split": True}):
        biased = kernel_calls("h200:4", window=64, **other)
        assert "fmhaScaleBiasSoftmaxBackward(" in biased and windows_of(biased) == {0}
    assert windows_of(kernel_calls("h200:4", window=256)) == {0}


@pytest.mark.thorough
def test_which_programs_get_splash() -> None:
    assert kernel_calls("v5e:2x2").count("@tpu_custom_call") == 3
    assert kernel_calls("v5e:2x2", packed=True).count("@tpu_custom_call") == 3
    assert kernel_calls("v5e:2x2", window=100).count("@tpu_custom_call") == 3
    # Of a long sequence each device takes a part; with a window its keys do not go round.
    part = {"split": True, "length": 16_384, "window": 8192}
    for other in (part, {"length": 96}, {"width": 32}, {"dtype": jnp.float16}):
        assert "tpu_custom_call" not in kernel_calls("v5e:2x2", **other), other


def test_a_part_of_the_queries_is_hidden_by_a_bias(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bias that cuDNN gets stands for the positions and for segments."""
    q, k, _, _ = tensors(2, 4, 2, 2, t=16, dtype=jnp.bfloat16)
    masks = (jnp.arange(8, 12), documents(2, 16)[:, 8:12], documents(2, 16))
    spec = {**SPEC, "length": 16, "segments": True}
    # The kernel, replaced by what says what it was given.
    kernel = SimpleNamespace(bind=lambda *given, mask_type, **_: (given[3], mask_type))
    monkeypatch.setattr(fused, "_dot_product_attention_fwd_p", kernel)
    bias, mask_type = cudnn.forward(q, k, k, *masks, **spec)
    narrow, _ = cudnn.forward(q, k, k, *masks, **spec, window=3)
    assert bias.shape == (2, 1, 4, 16) and bias.dtype == jnp.bfloat16
    assert mask_type == fused.MaskType.NO_MASK
    seen = (np.arange(8, 12)[:, None] >= np.arange(16)) & (
        masks[1][:, :, None] == masks[2][:, None, :]
    )
    np.testing.assert_array_equal(np.asarray(bias[:, 0] == 0), seen)
    assert float(bias.min()) < -1e12
    seen &= np.arange(8, 12)[:, None] - 3 < np.arange(16)
    np.testing.assert_array_equal(np.asarray(narrow[:, 0] == 0), seen)


@pytest.mark.parametrize("spec", [("y", None, "x"), (None, "x", None)])
def test_sinks(spec: tuple[Any, ...]) -> None:
    """A key more that all see, with the score that the sink says and no value."""
    q, k, v, w = tensors(2, 16, 4, 4)
    sinks_N = jnp.asarray([-1.0, 0.0, 2.0, 5.0])
    ids, mesh = documents(2, 16), spmd.make_mesh(x=4, y=2)

    def wanted(q: Any, k: Any, v: Any, sinks_N: Any) -> Any:
        scores = jnp.einsum("bsnd,btnd->bnst", q, k) * q.shape[-1] ** -0.5
        visible = jnp.tri(16, dtype=bool) & (ids[:, None, :, None] == ids[:, None, None, :])
        scores = jnp.where(visible, scores, -jnp.inf)
        sink = jnp.broadcast_to(sinks_N[:, None, None], (*scores.shape[:3], 1))
        weights = jax.nn.softmax(jnp.concatenate([scores, sink], -1), axis=-1)[..., :-1]
        return jnp.sum(jnp.einsum("bnst,btnd->bsnd", weights, v) * w)

    def ours(q: Any, k: Any, v: Any, sinks_N: Any) -> Any:
        marked = (spmd.mark_sharding(x, mesh, (*spec, None)) for x in (q, k, v))
        return jnp.sum(attention(*marked, segment_ids=ids, sinks_N=sinks_N) * w)

    given = q, k, v, sinks_N
    step = spmd.jit(jax.value_and_grad(ours, range(4)), mesh=mesh, options=EVERY_FLOP_COUNTS)
    close(step(*given), jax.jit(jax.value_and_grad(wanted, range(4)))(*given))
    with pytest.raises(spmd.ArgumentError, match=r"sinks \(3,\)"):
        attention(q, k, v, sinks_N=sinks_N[:3])
