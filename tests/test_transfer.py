"""Transfers between random layouts, with what they move and hold beside the least there can be."""

from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import spmd
from benchmarks.transfer import lacking
from spmd.errors import bytes_text
from spmd.models.llama.config import LlamaConfig
from spmd.models.llama.fresh import init
from spmd.models.llama.quantize import quantize


def on(devices: Any, shape: Any, *spec: Any, names: str = "ab") -> NamedSharding:
    found = np.array([jax.devices()[i] for i in devices]).reshape(shape)
    return NamedSharding(jax.sharding.Mesh(found, tuple(names[: len(shape)])), P(*spec))


EIGHT, TENSOR = on(range(8), (8,), "a"), on(range(8), (2, 4), None, "b")
FIRST, LAST = on(range(4), (4,), "a"), on(range(4, 8), (4,), None, "a")


@st.composite
def layouts(draw: st.DrawFn) -> NamedSharding:
    """Some devices in some order along one or two axes, which split dims, or nothing."""
    shape = draw(st.sampled_from([(1,), (2,), (4,), (2, 2), (8,), (4, 2), (2, 4)]))
    devices = draw(st.permutations(range(8)))[: np.prod(shape)]
    names = draw(st.sampled_from(["a", *["b", "ab", "ba"][: 4 * (len(shape) - 1)]]))
    spec = draw(st.permutations([tuple(names), ()] if draw(st.booleans()) else [*names, None]))
    return on(sorted(devices) if draw(st.booleans()) else devices, shape, *spec[:2])


def held(tree: Any) -> Counter[Any]:
    shards = [shard for x in jax.tree.leaves(tree) for shard in x.addressable_shards]
    return sum((Counter({shard.device: shard.data.nbytes}) for shard in shards), Counter())


def cast(dtype: Any) -> Any:
    return lambda tree: jax.tree.map(lambda x: x.astype(dtype), tree)


CASTS = {"none": lambda tree: tree, "half": cast(jnp.bfloat16), "wide": cast(jnp.float32)}


@given(layouts(), layouts(), st.sampled_from(list(CASTS)), st.booleans(), st.booleans())
def test_any_layout_to_any(src: Any, dst: Any, how: str, donate: bool, is_half: bool) -> None:
    random = np.random.default_rng(0)
    dtype = jnp.bfloat16 if is_half else np.float32
    host = {"w": random.standard_normal((16, 8)), "b": [random.standard_normal((8, 16))]}
    tree = jax.device_put(cast(dtype)(host), src)
    wanted = jax.tree.map(np.asarray, CASTS[how](tree))
    before = held(tree)
    move = spmd.TransferPlan(tree, dst, convert=CASTS[how], donate=donate)
    moved = move(tree)
    jax.tree.map(np.testing.assert_array_equal, moved, wanted)
    after = held(moved)
    if not donate:
        for leaf in jax.tree.leaves(tree):  # it shares no memory with the result
            leaf.delete()
        jax.tree.map(np.testing.assert_array_equal, moved, wanted)
    size = min(np.dtype(dtype).itemsize, jax.tree.leaves(moved)[0].dtype.itemsize)
    least = sum((lacking(src, dst, x.shape, size) for x in jax.tree.leaves(moved)), Counter())
    if src.device_set != dst.device_set:
        assert move.received == least
        if how == "none":
            both = before + after
            assert move.peak_bytes <= 1.5 * max(both.values())  # and the buffer of one array
    else:
        assert move.bytes >= max(least.values(), default=0)
    assert all(x.sharding.is_equivalent_to(dst, 2) for x in jax.tree.leaves(moved))


@pytest.mark.parametrize(
    ("src", "dst"), [(EIGHT, TENSOR), (EIGHT, FIRST), (FIRST, EIGHT), (FIRST, LAST)]
)
@pytest.mark.parametrize("kind", ["none", "int8"])
def test_weights_of_a_model(src: Any, dst: Any, kind: str) -> None:
    """Only what devices lack is moved, quantized before, to the numbers that a bundle has."""
    config = LlamaConfig(
        vocab_size=512, hidden_size=512, intermediate_size=512, num_hidden_layers=2, head_dim=64,
        num_attention_heads=8, num_key_value_heads=8, scan_layers=False,
    )  # fmt: skip
    weights = cast(jnp.bfloat16)(init(jax.random.key(0), config))
    wanted = quantize(jax.tree.map(np.asarray, weights), kind)
    whole = NamedSharding(dst.mesh, P())
    where = jax.tree.map(lambda x: dst if x.ndim == 2 else whole, wanted)
    tree = jax.device_put(weights, src)
    move = spmd.TransferPlan(tree, where, convert=lambda tree: quantize(tree, kind), donate=True)
    moved = move(tree)
    jax.tree.map(np.testing.assert_array_equal, moved, wanted)
    leaves = jax.tree.leaves(moved)
    least = sum((lacking(src, x.sharding, x.shape, x.dtype.itemsize) for x in leaves), Counter())
    assert move.bytes == max(least.values())
    assert all(x.is_deleted() for x in jax.tree.leaves(tree))
    assert f"{bytes_text(move.received.total())} in all" in move.summary()


def test_from_one_program_to_another() -> None:
    """Planned from what compiled programs say of themselves, before there are arrays."""

    def step(params: Any, x: Any) -> Any:
        grads = jax.grad(lambda params: jnp.sum((x @ params["qkv"] - 1) ** 2))(params)
        return jax.tree.map(lambda p, g: p - 0.01 * g, params, grads)

    def serve(params: Any, x: Any) -> Any:
        return [x @ w for w in params]

    def taken_apart(params: Any) -> Any:
        return jnp.split(params["qkv"].astype(jnp.bfloat16), 3, axis=1)

    train = spmd.make_mesh(data=8)
    params = {"qkv": spmd.mark_sharding(np.ones((16, 24), np.float32), train, ("data",))}
    trained = spmd.jit(step, mesh=train).compile(params, np.ones((8, 16), np.float32))
    mesh = spmd.Mesh([3, 2, 1, 0], (4,), ("model",))
    where = jax.ShapeDtypeStruct((16, 8), jnp.bfloat16)
    served = spmd.jit(serve, mesh=mesh).compile(
        [spmd.mark_sharding(where, mesh, (None, "model"))] * 3, np.ones((2, 16), jnp.bfloat16)
    )
    move = spmd.TransferPlan(trained.out_info, served.in_info[0], convert=taken_apart)
    for _ in range(2):
        params = trained(params, np.ones((8, 16), np.float32))
        results = served(moved := move(params), np.ones((2, 16), jnp.bfloat16))
        wanted = serve(taken_apart(jax.device_get(params)), np.ones((2, 16), jnp.bfloat16))
        jax.tree.map(np.testing.assert_array_equal, results, wanted)
    assert [x.sharding for x in moved] == [x.sharding for x in served.in_info[0]]
    with pytest.raises(spmd.ArgumentError, match="not as the transfer was planned"):
        move({"qkv": jax.device_put(params["qkv"], EIGHT.mesh.devices.flat[0])})


def test_what_is_donated_is_there_once() -> None:
    array = jax.device_put(np.ones((8, 8), np.float32), EIGHT)
    move = spmd.TransferPlan([array, array], FIRST, donate=True)
    with pytest.raises(spmd.ArgumentError, match="deleted, or donated and there twice"):
        move([array, array])
    move(moved := [array, array.copy()])
    with pytest.raises(spmd.ArgumentError, match="deleted, or donated and there twice"):
        move(moved)


def test_leaves_of_all_kinds() -> None:
    zeros, mask = np.zeros((0, 4), np.float32), np.arange(64).reshape(8, 8) % 3 == 0
    tree = jax.device_put({"none": zeros, "unused": zeros, "mask": mask}, EIGHT)
    tree |= {"step": jnp.int32(3), "key": jax.random.key(7)}

    def convert(tree: Any) -> Any:
        kept = {name: x for name, x in tree.items() if name != "unused"}
        return kept | {"again": tree["mask"], "new": jnp.arange(4.0)}

    moved = spmd.transfer(tree, NamedSharding(LAST.mesh, P()), convert=convert)
    wanted = convert(tree)
    assert (jax.random.bits(moved.pop("key")) == jax.random.bits(wanted.pop("key"))).all()
    jax.tree.map(np.testing.assert_array_equal, moved, wanted)


def struct(shape: Any, dtype: Any) -> Any:
    return jax.ShapeDtypeStruct(shape, dtype, sharding=FIRST)


W = struct((8, 8), jnp.float32)


@pytest.mark.parametrize(
    ("tree", "to", "parts"),
    [
        ({"a": {"w": W}}, {"a": {"v": W}}, ("a/w cannot", "nothing says on which devices")),
        ({"w": W}, {"w": W, "v": W}, ("v cannot", "is not there", "convert=")),
        ({"w": W}, {"w": struct((8, 4), jnp.float32)}, ("w cannot", "(8, 4)")),
        ({"w": W}, {"w": struct((8, 8), jnp.bfloat16)}, ("w cannot", "bfloat16")),
        ({"w": W}, {"w": on(range(3), (3,), "a")}, ("w cannot", "divide")),
        ({"w": np.zeros(3)}, {"w": W}, ("w cannot", "nothing says on which devices")),
    ],
)
def test_trees_that_do_not_fit(tree: Any, to: Any, parts: tuple[str, ...]) -> None:
    with pytest.raises(spmd.ArgumentError) as caught:
        spmd.TransferPlan(tree, to)
    for part in (*parts, "fix"):
        assert part in str(caught.value)
