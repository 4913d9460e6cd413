"""Attention with a sequence split, gathered and round a ring: values and gradients."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import spmd
from spmd.ir.dialect import rule
from spmd.ops import attention, attention_split, from_zigzag, zigzag
from spmd.ops import attention_reference as reference
from spmd.ops import attention_splash as splash
from spmd.ops.attention import piece, piece_gradient
from tests.close import close, partitioned
from tests.ops.test_attention import (
    EVERY_FLOP_COUNTS,
    SPEC,
    Split,
    documents,
    loss,
    plain,
    recomputed,
    spread,
    tensors,
)

# The order.


def test_zigzag_order() -> None:
    assert zigzag(np.arange(8), 2, dim=0).tolist() == [0, 1, 6, 7, 2, 3, 4, 5]
    assert zigzag(np.arange(8), 4, dim=-1).tolist() == [0, 7, 1, 6, 2, 5, 3, 4]
    x = np.arange(96).reshape(2, 24, 2)
    for parts in (1, 2, 3, 4, 12):
        np.testing.assert_array_equal(from_zigzag(zigzag(x, parts), parts), x)
        traced = jax.jit(lambda x, parts=parts: zigzag(x, parts))(x)
        np.testing.assert_array_equal(traced, zigzag(x, parts))
    assert isinstance(zigzag(x, 2), np.ndarray)
    for parts in (5, 0):
        with pytest.raises(spmd.ArgumentError, match=r"dim 1 of \(2, 24, 2\) has no zigzag order"):
            zigzag(x, parts)


@pytest.mark.parametrize(
    ("packed", "window", "implementation"),
    [(False, None, "auto"), (True, None, "xla"), (True, 5, "auto")],
)
def test_the_reference_masks_by_where_tokens_are(
    packed: bool, window: int | None, implementation: Any
) -> None:
    args, ids = tensors(2, 16, 4, 2), documents(2, 16)

    def ours(*args: Any) -> Any:
        q, k, v, ids = (zigzag(x, 4) for x in args)
        segments = ids if packed else None
        out = attention(
            q, k, v, zigzag=4, segment_ids=segments, window=window, implementation=implementation
        )
        return from_zigzag(out, 4)

    want = loss(lambda q, k, v, ids: plain(q, k, v, True, ids if packed else None, window))
    close(jax.jit(loss(ours))(*args, ids), jax.jit(want)(*args, ids))


def test_what_has_no_order_is_said() -> None:
    q, k, v, _ = tensors(1, 12, 2, 2)
    with pytest.raises(spmd.ArgumentError, match="has no zigzag order for 4 parts"):
        attention(q, k, v, zigzag=4)
    with pytest.raises(spmd.ArgumentError, match="queries and keys of whole sequences"):
        attention(q, k, v, zigzag=2, positions=jnp.arange(12))
    _, longer, _, _ = tensors(1, 12, 2, 2, t=24)
    with pytest.raises(spmd.ArgumentError, match="zigzag=2"):
        attention(q, longer, longer, zigzag=2)


# Split.


def round_two(name: str, sizes: Any, spec: tuple[Any, ...], order: int = 1, **more: Any) -> Split:
    """With one spec for queries, keys, values and outputs, on a mesh of x=4, y=2."""
    return Split(name, sizes, (4, 2), spec, spec, order=order, **more)


ZIGZAG = round_two("zigzag, documents, grouped heads", (2, 16, 4, 2), ("y", "x"), 4, packed=True)
SPLITS = (
    ZIGZAG,
    round_two("heads too", (1, 16, 8, 2), (None, "x", "y"), 4),
    round_two("two axes the other way", (1, 32, 3, 1), (None, ("y", "x")), pieces=8),
    round_two("documents, everything seen", (2, 16, 2, 1), ("y", "x"), causal=False, packed=True),
    round_two("other keys", (1, 8, 2, 2), (None, "x"), causal=False, length=16),
    round_two("uneven", (1, 18, 2, 2), (None, "x"), pieces=0),
    round_two("a window", (1, 16, 2, 2), (None, "x"), 4, window=5, pieces=0),
)


@pytest.fixture
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """How keys reach all devices: large enough sizes are worth pieces, or a ring."""
    monkeypatch.setattr(attention_split, "LEAST_PIECE", 1)
    if request.param == "gathered":
        monkeypatch.setattr(rule, "MOST_PIECES", 1)
    name: str = request.param
    return name


def in_rounds(split: Split, dtype: Any = None) -> tuple[Any, Any]:
    """The compiled program, whose gradients lie as what they are of where that divides."""
    is_even = split.sizes[1] % 4 == 0 and (split.queries[0] is None or split.sizes[0] % 2 == 0)
    return split.compiled(dtype, (None, (spread(split.queries) if is_even else ...,) * 3))


def permutes(compiled: spmd.api.Compiled) -> list[str]:
    found = [c for c in compiled.collectives if c.kind == "collective_permute"]
    return [c.reason for c in found if "round" in c.reason]


@pytest.mark.parametrize(
    ("split", "way"),
    [(ZIGZAG, "gathered"), *((split, "round") for split in SPLITS)],
    indirect=["way"],
    ids=lambda given: getattr(given, "name", given).replace(" ", "_"),
)
def test_split(split: Split, way: str) -> None:
    compiled, args = in_rounds(split)
    value, grads = compiled(*map(split.ordered, args))
    found = value, tuple(from_zigzag(g, split.order) if split.order > 1 else g for g in grads)
    close(found, split.wanted(*args))
    hops = split.pieces - 1 if way == "round" else 0
    each = 2 + split.packed  # keys, values, segments; in the gradient two sums come along
    assert len(permutes(compiled)) == max(0, hops) * (2 * each + 2)


@pytest.mark.thorough
@pytest.mark.parametrize("way", ["gathered", "round"], indirect=True)
def test_sums_keep_the_dtype_of_their_terms(way: str) -> None:
    compiled, args = in_rounds(ZIGZAG, jnp.bfloat16)
    _, grads = compiled(*map(ZIGZAG.ordered, args))
    assert [g.dtype for g in grads] == [jnp.bfloat16] * 3
    wide = [x.astype(jnp.float32) for x in args[:4]]
    close(tuple(from_zigzag(g, 4) for g in grads), ZIGZAG.wanted(*wide, args[4])[1], 0.05)


def test_what_is_hidden_is_not_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the pieces of others the first device in order sees none: its share has no products."""
    monkeypatch.setattr(attention_split, "LEAST_PIECE", 1)
    mesh = spmd.make_mesh(x=4, y=2)
    q, k, v, _ = tensors(1, 16, 2, 2)
    # A key that nobody before it may see is not a number; whoever computes with it shows that.
    poisoned = k.at[:, 4:].set(jnp.nan)
    spec = (None, "x")
    step = spmd.jit(attention, mesh=mesh, in_specs=(spec,) * 3, out_specs=spec)
    close(step(q, poisoned, v)[:, :4], plain(q[:, :4], k[:, :4], v[:, :4], True))


def test_rings_inside_scans_and_recomputed_layers() -> None:
    mesh = spmd.make_mesh(x=4, y=2)
    q, k, v, w = tensors(2, 16, 2, 2)

    specs = (("y", "x"),) * 3
    textbook = recomputed(functools.partial(plain, causal=True), w)
    how: dict[str, Any] = {"mesh": mesh, "in_specs": specs, "out_specs": (None, specs)}
    how["options"] = EVERY_FLOP_COUNTS
    assert permutes(partitioned(recomputed(attention, w), q, k, v, plain=textbook, **how))


# What the planner makes of it, and what is said.


@functools.cache
def planned(topology: str, length: int, order: int = 1, heads: int = 4) -> spmd.Lowered:
    """A training step of attention alone, eight devices with a part of the sequence each.

    They do not divide the heads, along which a sequence would be exchanged otherwise.
    """
    mesh, spec = spmd.Mesh(None, (8,), ("seq",)), (None, "seq")
    shapes = [(1, length, n, 128) for n in (36, heads, heads)]
    args = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes]

    def run(q: Any, k: Any, v: Any) -> Any:
        return jnp.sum(attention(q, k, v, zigzag=order).astype(jnp.float32))

    specs = (spec,) * 3
    step = spmd.jit(
        jax.value_and_grad(run, (0, 1, 2)), mesh=mesh, in_specs=specs, out_specs=(None, specs)
    )
    return step.lower(*args, topology=spmd.Topology(topology))


def test_long_sequences_go_round_and_short_ones_are_gathered() -> None:
    long, short = planned("h200:8", 131_072, 8), planned("h200:8", 2048, 8)
    assert not [c for c in long.collectives if c.kind == "all_gather"]
    assert [c for c in short.collectives if c.kind == "all_gather"]
    said = "\nrings\n  spmd.attention: 8 pieces {} seq in zigzag order, at "
    assert said.format("go round") in long.explain(prices=False)
    assert said.format("are gathered over") in short.explain(prices=False)


@pytest.mark.parametrize("topology", ["h200:8", pytest.param("v5p:2x2x2", marks=pytest.mark.heavy)])
def test_zigzag_order_takes_half_the_time(topology: str) -> None:
    usual, balanced = planned(topology, 131_072), planned(topology, 131_072, 8)
    ratio = usual.timeline.compute_seconds / balanced.timeline.compute_seconds
    assert 1.75 < ratio < 1.95, "7.5 pieces instead of 4, and what joins them"
    assert balanced.timeline.exposed_seconds < 0.02 * balanced.timeline.seconds


def test_a_ring_holds_pieces_and_gathering_holds_all(monkeypatch: pytest.MonkeyPatch) -> None:
    keys = 2 * 131_072 * 36 * 128 * 2
    ring = planned("h200:8", 131_072, 8, heads=36)
    monkeypatch.setattr(rule, "MOST_PIECES", 1)
    gathered = planned.__wrapped__("h200:8", 131_072, 8, heads=36)
    saved = gathered.predicted_memory.temporary - ring.predicted_memory.temporary
    assert saved > keys / 2


# Kernels, as far as a CPU can tell.


@pytest.mark.thorough
@pytest.mark.parametrize("goes_round", [False, True])
def test_pieces_get_kernels(goes_round: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not goes_round:
        monkeypatch.setattr(rule, "MOST_PIECES", 1)
    text = planned.__wrapped__("h200:8", 131_072, 8).as_text("emitted")
    # One kernel with a causal mask, of the own piece, and one for both halves of any other.
    assert text.count("CAUSAL") == 2
    assert text.count("fmhaSoftmax(") == 2 and text.count("fmhaSoftmaxBackward(") == 2
    assert "ScaleBias" not in text
    text = planned.__wrapped__("v5p:2x2x2", 131_072, 8).as_text("emitted")
    assert text.count("@tpu_custom_call") >= 6, "the gradient takes two"


@pytest.mark.thorough
@pytest.mark.parametrize("order", [1, 2])
def test_a_piece_by_the_splash_kernel(order: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(splash, "INTERPRET", True)
    q, k, v, w = tensors(1, 256, 2, 1, d=64)
    spec = {**SPEC, "length": 512, "zigzag": order}
    so_far = jnp.ones_like(q), jnp.zeros((1, 2, 256))

    def both(kernel: Any) -> Any:
        @jax.jit
        def run(is_before: Any, q: Any, k: Any, v: Any, w: Any) -> Any:
            out, lse = piece(kernel.forward, q, k, v, is_before, *so_far, **spec)
            kept = out, lse, w, is_before, jnp.ones_like(q)
            return out, lse, piece_gradient(kernel.gradient, q, k, v, *kept, **spec)

        return [run(is_before, q, k, v, w) for is_before in (False, True)]

    close(both(splash), both(reference), 1e-4)
