"""Linear attention beside its recurrence, position by position: values, gradients, meshes."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import spmd
from spmd.ops import linear_attention, linear_attention_chunks, linear_attention_triton
from spmd.ops.linear_attention_chunks import _inverse
from tests import close as comparing
from tests.compilers import needs_cuda_plugin
from tests.ops.test_attention import EVERY_FLOP_COUNTS

close = functools.partial(comparing.close, least=1e-3)

NAMES = ("q", "k", "v", "decay", "beta", "state")


def made(
    sizes: tuple[int, ...], delta: bool, packed: bool, dtype: Any = np.float32
) -> dict[str, Any]:
    """Operands of sizes B, S, K, N, D, P; keys of length 1, as of the delta rule."""
    b, s, k, n, d, p = sizes
    rng = np.random.default_rng(0)
    x = {
        "q": rng.standard_normal((b, s, k, d)),
        "k": rng.standard_normal((b, s, k, d)),
        "v": rng.standard_normal((b, s, n, p)),
        "decay": -rng.exponential(0.3, (b, s, n)),
        "state": rng.standard_normal((b, n, d, p)),
    }
    x["k"] /= np.linalg.norm(x["k"], axis=-1, keepdims=True)
    if delta:
        x["beta"] = rng.uniform(0, 1, (b, s, n))
    found = {name: np.asarray(each, dtype) for name, each in x.items()}
    if packed:
        found["ids"] = np.cumsum(rng.uniform(size=(b, s)) < 0.3, axis=1).astype(np.int32)
    return found


def plain(x: dict[str, Any]) -> Any:
    """The definition: one position after the other."""
    q, k, v, decay, state = (x[name] for name in ("q", "k", "v", "decay", "state"))
    repeats = v.shape[2] // q.shape[2]
    q, k = (jnp.repeat(each, repeats, axis=2) for each in (q, k))
    ids = x.get("ids", np.zeros(v.shape[:2], np.int32))
    starts = jnp.pad(ids[:, 1:] != ids[:, :-1], ((0, 0), (1, 0)))

    def step(state: Any, at: Any) -> Any:
        q, k, v, decay, beta, is_start = at
        kept = jnp.where(is_start[:, None], 0, jnp.exp(decay))
        state = kept[..., None, None] * state
        if beta is not None:
            v = beta[..., None] * (v - jnp.einsum("bnd,bndp->bnp", k, state))
        state += jnp.einsum("bnd,bnp->bndp", k, v)
        return state, jnp.einsum("bnd,bndp->bnp", q, state) * q.shape[-1] ** -0.5

    xs = jax.tree.map(
        lambda each: jnp.moveaxis(each, 1, 0), (q, k, v, decay, x.get("beta"), starts)
    )
    last, out = jax.lax.scan(step, state, xs)
    return jnp.moveaxis(out, 0, 1), last


def ours(x: dict[str, Any], **more: Any) -> Any:
    return linear_attention(
        x["q"], x["k"], x["v"], x["decay"], x.get("beta"), state_BNDP=x["state"],
        segment_ids=x.get("ids"), **more,
    )  # fmt: skip


def of_all(function: Any) -> Any:
    """Values, and the gradients of all floats through both results."""

    def loss(floats: Any, rest: Any) -> Any:
        out, last = function({**floats, **rest})
        total = jnp.sum(jnp.sin(out)) + jnp.sum(jnp.cos(last))
        return total, (out, last)

    def run(x: dict[str, Any]) -> Any:
        rest = {name: each for name, each in x.items() if name == "ids"}
        floats = {name: each for name, each in x.items() if name != "ids"}
        (_, values), gradients = jax.value_and_grad(loss, has_aux=True)(floats, rest)
        return values, gradients

    return run


@settings(deadline=None, max_examples=5)
@given(
    sizes=st.tuples(*(st.integers(1, n) for n in (2, 40, 2, 3, 4, 4))),
    delta=st.booleans(), packed=st.booleans(), chunk=st.integers(1, 64),
)  # fmt: skip
def test_chunks_are_the_recurrence(sizes: Any, delta: bool, packed: bool, chunk: int) -> None:
    b, s, k, groups, d, p = sizes
    with jax.enable_x64(True):
        x = made((b, s, k, k * groups, d, p), delta, packed, np.float64)
        close(of_all(lambda x: ours(x, chunk=chunk))(x), of_all(plain)(x), 1e-11)


def test_equal_keys_do_not_blow_up() -> None:
    """The worst system there is: every key the same, nothing forgotten, all replaced."""
    lower = jnp.tril(jnp.ones((64, 64)), -1)
    want = np.eye(64) - np.eye(64, k=-1)
    np.testing.assert_allclose(_inverse(lower), want, atol=1e-6)


def test_a_sequence_in_pieces() -> None:
    """Decoding: a prompt, then a token at a time, each from the state behind the one before."""
    x = made((2, 9, 1, 2, 3, 4), True, False)
    want, last = plain(x)
    state, found = x["state"], []
    for begin, end in ((0, 6), (6, 7), (7, 8), (8, 9)):
        part = {name: each[:, begin:end] for name, each in x.items() if name != "state"}
        out, state = ours({**part, "state": state})
        found.append(out)
    close((np.concatenate(found, 1), state), (want, last), 1e-5)
    batched = jax.vmap(lambda x: ours(jax.tree.map(lambda each: each[None], x)))(x)
    close(jax.tree.map(lambda each: each[:, 0], batched), (want, last), 1e-5)


SPLITS = {
    "sequence over 2": ((2, 24, 2, 4, 4, 4), {"x": 2}, (None, "x", None, None)),
    "sequence over 8": ((1, 40, 1, 2, 4, 4), {"x": 8}, (None, "x", None, None)),
    "an odd length over 4": ((1, 13, 2, 2, 4, 4), {"x": 4}, (None, "x", None, None)),
    "fewer positions than devices": ((1, 3, 1, 1, 4, 4), {"x": 4}, (None, "x", None, None)),
    "batch and sequence": ((2, 24, 2, 2, 4, 4), {"x": 2, "y": 2}, ("y", "x", None, None)),
    "sequence over two axes, the other way": (
        (1, 24, 1, 2, 4, 4), {"x": 2, "y": 4}, (None, ("y", "x"), None, None),
    ),
    "heads and sequence": ((1, 24, 2, 4, 4, 4), {"x": 2, "y": 4}, (None, "x", "y", None)),
    "more devices than key heads": ((2, 8, 1, 4, 4, 4), {"x": 4}, (None, None, "x", None)),
    "the width of values": ((2, 8, 1, 2, 4, 8), {"x": 4}, (None, None, None, "x")),
}  # fmt: skip
PASSED = ("sequence over 8", "sequence over two axes, the other way")
"""Those where nothing else is as fast: heads do not divide."""


@pytest.mark.parametrize("delta", [False, True])
@pytest.mark.parametrize("split", SPLITS)
def test_on_meshes(split: str, delta: bool, devices8: Any) -> None:
    sizes, axes, spec = SPLITS[split]
    mesh = spmd.make_mesh(devices=devices8[: int(np.prod([*axes.values()]))], **axes)
    x = made(sizes, delta, packed=True)

    def marked(x: dict[str, Any]) -> Any:
        out, last = ours({**x, "v": spmd.mark_sharding(x["v"], mesh, spec)}, chunk=4)
        return spmd.mark_sharding(out, mesh, spec), last

    compiled = spmd.jit(of_all(marked), mesh=mesh, options=EVERY_FLOP_COUNTS).compile(x)
    close(compiled(x), jax.jit(of_all(plain))(x), 3e-5)
    if split not in PASSED:
        return
    # The state goes on once, for the gradient, too (of few chunks, which are no loop), and the
    # state's gradient comes back; no part of the sequence is sent, and no M.
    sent = [c for c in compiled.collectives if "go on" in c.reason]
    assert len(sent) == 2 * (int(np.prod([*axes.values()])) - 1)
    b, _, _, n, d, p = sizes
    assert {(c.kind, c.bytes) for c in sent} == {("collective_permute", 4 * b * n * d * p)}
    # Beside sums of results there is one segment id, of the position before a part.
    others = [c for c in compiled.collectives if c not in sent and not c.kind.endswith("permute")]
    assert all(c.kind in ("all_reduce", "reduce_scatter") for c in others), others


def test_one_device_holds_a_state_for_each_chunk() -> None:
    """What the gradient takes grows with the sequence, not with its square."""

    def temporary(length: int) -> int:
        x = made((1, length, 1, 2, 16, 16), True, False)
        compiled = jax.jit(of_all(ours)).lower(x).compile()
        stats: Any = compiled.memory_analysis()
        return int(stats.temp_size_in_bytes)

    assert temporary(2048) < 2.2 * temporary(1024)


def test_transformers_compute_the_same() -> None:
    torch = pytest.importorskip("torch")
    pytest.importorskip("transformers")
    from transformers.models.qwen3_next import modeling_qwen3_next as qwen

    x = made((2, 70, 2, 4, 8, 8), True, False)
    q, k, v, decay, beta, state = (torch.from_numpy(x[n]) for n in NAMES)
    want = qwen.torch_chunk_gated_delta_rule(
        q, k, v, g=decay, beta=beta, initial_state=state, output_final_state=True
    )
    close(ours(x), tuple(each.numpy() for each in want), 1e-5)


def test_mamba2_computes_the_same() -> None:
    torch = pytest.importorskip("torch")
    pytest.importorskip("transformers")
    from transformers.models.mamba2 import modeling_mamba2 as mamba

    x = made((2, 21, 2, 4, 6, 8), False, False)
    dt = np.random.default_rng(1).uniform(0.1, 1, (2, 21, 4)).astype(np.float32)
    a = np.array([-0.5, -1, -2, -4], np.float32)
    arrays = (torch.from_numpy(each) for each in (x["v"], dt, a, x["k"], x["q"]))
    state = torch.from_numpy(x["state"].swapaxes(2, 3).copy())
    with torch.no_grad():
        want, last = mamba.mamba2_chunk_scan(
            *arrays, chunk_size=8, initial_states=state, return_final_states=True
        )
    given = {**x, "v": dt[..., None] * x["v"], "decay": dt * a}
    close(ours(given, scale=1.0), (want.numpy(), last.numpy().swapaxes(2, 3)), 1e-5)


def for_kernels(sizes: tuple[int, ...], delta: bool, packed: bool) -> tuple[list[Any], Any]:
    """Operands of the composite, those of 16 bits first, and its attributes."""
    x = made(sizes, delta, False)
    x["k"] *= 0.9  # rounded, none is longer than 1
    rest = [x[name] for name in ("decay", "beta") if name in x]
    if packed:
        rest += [(np.random.default_rng(1).uniform(size=sizes[:2]) < 0.03).astype(np.int32)]
    operands = [*(jnp.asarray(x[name], jnp.bfloat16) for name in "qkv"), *rest, x["state"]]
    return operands, {"delta": delta, "segments": packed, "scale": 0.3, "chunk": 32}


@settings(deadline=None, max_examples=4)
@given(
    sizes=st.tuples(*(st.integers(1, n) for n in (2, 2, 2))), length=st.integers(64, 150),
    widths=st.tuples(*[st.sampled_from([16, 32])] * 2), delta=st.booleans(), packed=st.booleans(),
)  # fmt: skip
@example(sizes=(1, 1, 2), length=70, widths=(64, 128), delta=True, packed=True)
def test_kernels_are_the_chunks(
    sizes: Any, length: int, widths: Any, delta: bool, packed: bool
) -> None:
    """Step by step in jax: values and gradients, up to the rounding of what has 16 bits."""
    b, k, groups = sizes
    operands, said = for_kernels((b, length, k, k * groups, *widths), delta, packed)

    def both(operands: Any, kernels: Any, **more: Any) -> Any:
        out, last = kernels.forward(*operands, **said, **more)
        dout, dlast = jnp.sin(out).astype(jnp.bfloat16).astype(out.dtype), jnp.cos(last)
        return out, last, kernels.gradient(*operands, dout, dlast, **said, **more)

    interpreted = functools.partial(both, kernels=linear_attention_triton, interpret=True)
    wide = [x.astype(jnp.float32) if x.dtype == jnp.bfloat16 else x for x in operands]
    want = jax.jit(functools.partial(both, kernels=linear_attention_chunks))(wide)
    comparing.close(jax.jit(interpreted)(operands), want, 0.02)


def test_what_is_not_for_the_kernels() -> None:
    operands, said = for_kernels((1, 64, 1, 1, 16, 16), True, False)
    short = [*(x[:, :63] for x in operands[:-1]), operands[-1]]
    wide = [x.astype(jnp.float32) for x in operands]
    for each in (short, wide):
        assert linear_attention_triton.forward(*each, **said) is NotImplemented


@needs_cuda_plugin
def test_gpus_keep_no_more_than_states() -> None:
    structs = [jax.ShapeDtypeStruct((1, 4096, n, 128), jnp.bfloat16) for n in (2, 2, 4)]
    structs += [jax.ShapeDtypeStruct((1, 4096, 4), jnp.float32)] * 2
    jitted = spmd.jit(lambda *x: linear_attention(*x)[0], mesh=spmd.Mesh(None, (1,), ("x",)))
    compiled = jitted.lower(*structs, topology=spmd.Topology("h200:1")).compile()
    # u, w, what is written, and 128 x 128 numbers for each of 64 positions.
    assert compiled.memory.temporary < 1.1 * (3 + 2) * 4096 * 4 * 128 * 2


def test_bad_shapes_are_named() -> None:
    x = made((1, 4, 2, 2, 3, 3), True, False)
    with pytest.raises(spmd.ArgumentError, match=r"decay \(1, 4, 1\)"):
        ours({**x, "decay": x["decay"][..., :1]})
