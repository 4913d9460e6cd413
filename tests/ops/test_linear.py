"""Products with few rows, against plain arithmetic: alone, split in every way, and as kernels."""

import functools
import importlib
import itertools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import spmd
from spmd.errors import ArgumentError
from spmd.models.llama.quantize import dequantize, quantize_weight, weight_types
from spmd.ops import (
    adapters_triton,
    linear,
    linears,
    paged_hopper,
    products_hopper,
    products_triton,
)
from tests.close import partitioned

OPERANDS = ("values", "scales", "zeros")
LINEAR = importlib.import_module("spmd.ops.linear")  # its name is the function's in spmd.ops


@pytest.fixture(scope="module")
def mesh(devices8: Any) -> spmd.Mesh:
    return spmd.make_mesh(x=4, y=2, devices=devices8)


def weights(kind: str, outputs: int = 24, inputs: int = 512) -> tuple[Any, Any]:
    """A weight in one form, and the matrix that it stands for."""
    whole = np.random.default_rng(1).standard_normal((outputs, inputs)).astype(np.float32)
    if kind == "none":
        return jnp.asarray(whole), whole
    packed = quantize_weight(whole + 3 * ("zeros" in kind), kind.split()[0])
    if kind == "fp8 groups":
        scales = np.random.default_rng(0).uniform(0.5, 1, (outputs, inputs // 64))
        packed = {"values": packed["values"].reshape(outputs, -1, 64), "scales": scales / 50}
    if kind == "int4 zeros":
        shape = packed["scales"].shape
        packed["zeros"] = np.random.default_rng(0).integers(2, 6, shape).astype(np.int8)
    return jax.tree.map(jnp.asarray, packed), dequantize(packed)


@pytest.mark.parametrize("kind", ["none", "int8", "int4", "fp8", "int4 zeros", "fp8 groups"])
def test_linear_is_a_product(kind: str) -> None:
    weight, whole = weights(kind)
    for rows in (1, 3):
        x = np.random.default_rng(0).standard_normal((rows, 512)).astype(np.float32)
        np.testing.assert_allclose(linear(x, weight), x @ whole.T, rtol=0, atol=1e-3)


@pytest.mark.parametrize("kind", ["none", "int8", "int4", "int4 zeros", "fp8 groups"])
def test_linears_kernel_of_one_row(kind: str) -> None:
    weight, whole = weights(kind)
    x = jnp.asarray(np.random.default_rng(0).standard_normal((1, 512)), jnp.float32)
    operands = (
        [weight[n] for n in OPERANDS if n in weight] if isinstance(weight, dict) else [weight]
    )
    values = operands[0]
    shaped = x.reshape(1, values.shape[1], -1, values.shape[2]) if values.ndim == 3 else x
    for kernel in (LINEAR._kernel, LINEAR._on_tpu):
        (out,) = kernel(shaped, *operands)
        np.testing.assert_allclose(out, x @ whole.T, rtol=0, atol=1e-3)
        two = kernel(jnp.concatenate([shaped, shaped]), *operands)
        if values.ndim == 3 and kernel == LINEAR._kernel:  # written as whole numbers first
            np.testing.assert_allclose(two[0][1:], out, rtol=0, atol=1e-3)
        else:
            assert two is NotImplemented


def test_tpus_multiply_one_row_as_several() -> None:
    """Of a single one XLA makes a sum of products in the vector units."""
    structs = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((1, 256), (512, 256))]
    jitted = spmd.jit(linear, mesh=spmd.Mesh(None, (1,), ("x",)))
    text = jitted.lower(*structs, topology=spmd.Topology("v5e:1x1")).as_text("emitted")
    (product,) = [line for line in text.splitlines() if "dot_general" in line]
    assert "-> tensor<8x512xbf16>" in product


def test_linears_kernel_of_8_bit_floats() -> None:
    """Many rows of any size are rounded to 8 bits, three of them mantissa."""
    made = [weights("fp8", outputs) for outputs in (24, 8)]
    x = np.random.default_rng(0).standard_normal((128, 512)).astype(np.float32)
    x *= np.logspace(-20, 20, 128, dtype=np.float32)[:, None]
    x[5] = 0
    operands = [part for weight, _ in made for part in (weight["values"], weight["scales"])]
    found = LINEAR._kernel(jnp.asarray(x), *operands)
    for out, (_, whole) in zip(found, made, strict=True):
        want = x @ whole.T
        largest = np.abs(want).max(axis=1)
        # Errors of an entry are 2^-4 at most, and independent: far less of their sum.
        assert np.all(np.abs(out - want).max(axis=1) <= 0.1 * largest)
        assert not np.any(out[5])
    assert LINEAR._kernel(jnp.asarray(x[:127]), *operands) is NotImplemented
    values, scales = operands[:2]
    scaled, plain = LINEAR._kernel(jnp.asarray(x), values, scales, values)
    np.testing.assert_allclose(scaled, plain * scales, rtol=1e-6)


def test_int8_weights_are_written_for_many_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paged_hopper, "is_here", lambda: True)
    weight, whole = weights("int8")
    x = np.random.default_rng(0).standard_normal((LINEAR.WRITTEN_ROWS, 512)).astype(np.float32)
    operands = weight["values"], weight["scales"]
    (found,) = LINEAR._kernel(jnp.asarray(x), *operands)
    np.testing.assert_allclose(found, x @ whole.T, atol=1e-3)
    assert LINEAR._kernel(jnp.asarray(x[1:]), *operands) is NotImplemented


@pytest.mark.parametrize("kind", ["none", "int8", "int4"])
@pytest.mark.parametrize("outputs", [(8, 24), (24, 16)])
def test_linears_are_linear_of_each(outputs: tuple[int, ...], kind: str) -> None:
    many = [weights(kind, n)[0] for n in outputs]
    x = np.random.default_rng(0).standard_normal((3, 512)).astype(np.float32)
    got, want = linears(x, many), [linear(x, weight) for weight in many]
    assert [x.shape for x in got] == [(3, n) for n in outputs]
    jax.tree.map(np.testing.assert_array_equal, list(got), want)


def multiplied(products: Any, x: Any, kind: str, outputs: tuple[int, ...]) -> list[Any]:
    """What a kernel makes of rows and some weights, and what it should."""
    many: list[Any] = [weights(kind, n, x.shape[1]) for n in outputs]
    if kind == "none":
        rounded = [jnp.asarray(w, x.dtype) for w, _ in many]
        many = [((w,), np.asarray(w, np.float32)) for w in rounded]
    else:
        many = [((w["values"], w["scales"]), whole) for w, whole in many]
    found = products(x, [parts for parts, _ in many], interpret=True)
    wanted = [np.asarray(x, np.float32) @ whole.T for _, whole in many]
    return list(zip((np.asarray(got, np.float32) for got in found), wanted, strict=True))


@pytest.mark.parametrize(
    ("kind", "rows", "inputs", "outputs"),
    [
        ("none", 2, 64, (64,)),
        ("none", 5, 256, (64, 128)),
        ("none", 16, 128, (192,)),
        ("none", 100, 64, (64, 64, 64)),
        ("int8", 3, 3328, (64, 128)),  # 13 steps of three programs
        ("int8", 40, 448, (64,)),
        ("int8", 150, 256, (128, 256)),
        ("int4", 1, 3328, (32, 64)),
        ("int4", 33, 384, (64,)),
        ("int4", 150, 256, (128, 256)),
    ],
)
def test_linears_kernel(kind: str, rows: int, inputs: int, outputs: tuple[int, ...]) -> None:
    drawn = np.random.default_rng(0).standard_normal((rows, inputs))
    drawn[:, 7] *= 8
    x = jnp.asarray(drawn, jnp.bfloat16)
    for got, want in multiplied(products_triton.products, x, kind, outputs):
        # Results are rounded to 8 bits, and nothing else.
        assert np.linalg.norm(got - want) < 2.5e-3 * np.linalg.norm(want)


@pytest.mark.skipif(jax.__version_info__ < (0, 11), reason="jax 0.10 interprets no such kernel")
@pytest.mark.parametrize(
    ("kind", "rows", "inputs", "outputs"),
    [
        ("none", 40, 256, (64, 128)),
        ("none", 100, 2048, (72,)),  # of two programs each
        ("none", 200, 256, (64, 128)),
        ("fp8", 40, 256, (64, 128)),
        ("fp8", 100, 2048, (72,)),
        ("int8", 64, 256, (64, 128)),
    ],
)
def test_linears_kernel_for_hopper(
    kind: str, rows: int, inputs: int, outputs: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(products_hopper, "MULTIPROCESSORS", 6)
    monkeypatch.setattr(products_hopper, "is_here", lambda: True)
    drawn = np.random.default_rng(0).standard_normal((rows, inputs))
    drawn *= 2.0 ** -np.arange(rows)[:, None]  # of any size
    drawn[3], drawn[:, 7] = 0, 8 * drawn[:, 7]
    x = jnp.asarray(drawn, jnp.bfloat16)
    for got, want in multiplied(products_hopper.products, x, kind, outputs):
        error = np.linalg.norm(got - want, axis=1)
        assert np.all(error <= 4e-3 * np.linalg.norm(want, axis=1))


@given(
    st.lists(st.integers(1, 3000).map(lambda n: 8 * n), min_size=1, max_size=4),
    st.sampled_from([512, 1024, 4096, 11008]),
    st.integers(1, 300),
    st.sampled_from(["none", "fp8", "int8"]),
)
def test_blocks_of_the_kernel_for_hopper(
    outputs: list[int], inputs: int, rows: int, kind: str
) -> None:
    x = jax.ShapeDtypeStruct((rows, inputs), jnp.bfloat16)
    plain = [(jax.ShapeDtypeStruct((n, inputs), jnp.bfloat16),) for n in outputs]
    parts = [tuple(weight_types((n, inputs), kind).values()) for n in outputs if kind != "none"]
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(products_hopper, "is_here", lambda: True)
        blocks = products_hopper.blocks_for(x, parts or plain)
    if blocks is None:
        assert (
            rows not in products_hopper.KINDS[str((parts or plain)[0][0].dtype)].rows or rows > 128
        )
        return
    size, splits, groups, own = blocks
    assert size % 8 == 0 and 8 <= size <= 256 and groups % own == 0
    assert (groups - own) * 64 < rows <= groups * 64
    # As many registers hold sums as a thread has to spare, and a wave of programs is nearly full.
    kept = size * own * (1 if kind == "none" else 2) // 2
    assert kept <= 176 and groups // own <= 3
    programs = splits * sum(-(-n // size) for n in outputs)
    waves = -(-programs // products_triton.MULTIPROCESSORS)
    smaller = splits * sum(-(-n // (size - 16)) for n in outputs) if size > 16 else math.inf
    assert smaller > waves * products_triton.MULTIPROCESSORS


PLACES = (0, 7, -1, 3)  # of rows, in turns


def adapters(
    rows: int, outputs: tuple[int, ...], inputs: int, dtype: Any, ids: Any = PLACES
) -> Any:
    """(A, B) for each weight, the place of each row, and what they add to products of `x`."""
    rng = np.random.default_rng(3)
    pairs = [
        tuple(jnp.asarray(rng.standard_normal((8, 16, n)) / 8, dtype) for n in (inputs, outer))
        for outer in outputs
    ]
    place = np.resize(ids, rows).astype(np.int32)
    one_hot = np.asarray(place[:, None] == np.arange(8), np.float32)

    def added(x: Any) -> list[Any]:
        return [
            np.einsum("bi,bn,nri,nro->bo", x, one_hot, *(np.asarray(y, np.float32) for y in pair))
            for pair in pairs
        ]

    return pairs, jnp.asarray(place), added


@pytest.mark.parametrize("kind", ["none", "int8", "int4"])
@pytest.mark.parametrize(
    ("rows", "ids"), [(1, (7,)), (1, (-1,)), (5, PLACES), (100, (2,)), (150, [4] * 70 + [-1, 5])]
)
def test_adapters_kernel(rows: int, ids: Any, kind: str) -> None:
    """Of rows that are alone, mixed, all of one adapter as a prompt's are, and of none."""
    outputs, inputs = (64, 192), 256
    x = jnp.asarray(np.random.default_rng(0).standard_normal((rows, inputs)), jnp.bfloat16)
    made = [weights(kind, n, inputs) for n in outputs]
    parts: list[Any] = [
        (jnp.asarray(w, x.dtype),) if kind == "none" else (w["values"], w["scales"])
        for w, _ in made
    ]
    pairs, place, added = adapters(rows, outputs, inputs, x.dtype, ids)
    wide = np.asarray(x, np.float32)
    whole = [
        np.asarray(jnp.asarray(w, x.dtype) if kind == "none" else w, np.float32) for _, w in made
    ]

    def product() -> Any:
        return [jnp.asarray(wide @ w.T, x.dtype) for w in whole]

    found = adapters_triton.adapted(x, parts, pairs, place, product, interpret=True)
    for got, w, more in zip(found, whole, added(wide), strict=True):
        want = wide @ w.T + more
        assert np.linalg.norm(np.asarray(got, np.float32) - want) / np.linalg.norm(want) < 5e-3


@pytest.mark.skipif(jax.__version_info__ < (0, 11), reason="jax 0.10 interprets no such kernel")
@pytest.mark.parametrize(("rows", "ids"), [(40, PLACES), (100, (2,))])
def test_adapters_kernel_for_hopper(rows: int, ids: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A is among the weights."""
    monkeypatch.setattr(products_hopper, "is_here", lambda: True)
    monkeypatch.setattr(adapters_triton, "partial_products", pytest.fail)
    test_adapters_kernel(rows, ids, "none")


@pytest.mark.parametrize("kind", ["none", "int8", "int4"])
def test_adapters_split(kind: str, mesh: spmd.Mesh) -> None:
    """Over outputs, inputs and rows; adapters are split as their weights, ranks are whole."""
    outputs = (24, 72, 24)
    many = [weights(kind, n)[0] for n in outputs]
    x = np.random.default_rng(0).standard_normal((4, 512)).astype(np.float32)
    pairs, place, added = adapters(4, outputs, 512, np.float32)
    for got, want, more in zip(
        linears(x, many, pairs, place), linears(x, many), added(x), strict=True
    ):
        np.testing.assert_allclose(got, want + more, rtol=0, atol=1e-3)
    for b, i, o in ((None, None, "x"), (None, "y", None), ("y", None, None)):
        spec: Any = (o, i)
        if kind != "none":
            spec = {"values": (o, i), "scales": (o, i)[: 1 + (kind == "int4")]}
        specs = ((b, i), [spec] * 3, [((None, None, i), (None, None, o))] * 3, (b,))
        given = x, many, pairs, place
        partitioned(linears, *given, mesh=mesh, in_specs=specs, tolerance=1e-5)


def test_zeros_are_taken_off_the_kernels_product(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is larger by far, so only the difference is rounded to 8 bits."""
    in_jax = functools.partial(products_triton.products, interpret=True)
    monkeypatch.setattr(products_triton, "products", in_jax)
    weight, whole = weights("int4 zeros", 64)
    x = jnp.asarray(np.random.default_rng(0).standard_normal((5, 512)) + 8, jnp.bfloat16)
    (got,) = LINEAR._kernel(x.reshape(5, -1, 2, 64), *(weight[n] for n in OPERANDS))
    want = np.asarray(x, np.float32) @ whole.T
    assert np.linalg.norm(np.asarray(got, np.float32) - want) / np.linalg.norm(want) < 2.5e-3


def test_tiles_of_the_kernel() -> None:
    def tiles(rows: int, inputs: int, *outputs: int, kind: str = "none") -> Any:
        x = jax.ShapeDtypeStruct((rows, inputs), jnp.bfloat16)
        plain = [(jax.ShapeDtypeStruct((n, inputs), jnp.bfloat16),) for n in outputs]
        parts = [tuple(weight_types((n, inputs), kind).values()) for n in outputs if kind != "none"]
        found = products_triton.tiles_for(x, parts or plain)
        return found and found[:5]

    assert tiles(64, 4096, 4096) == (64, 64, 128, 2, 4)  # 64 blocks: two programs each
    assert tiles(64, 4096, 4096, 4096, 4096) == (64, 64, 64, 1, 5)
    assert tiles(64, 4096, 11008, 11008) == (64, 128, 64, 1, 5)  # 344 blocks: fewer, larger ones
    assert tiles(3, 11008, 4096) == (16, 64, 128, 2, 5)
    assert tiles(1, 4096, 4096) is tiles(129, 4096, 4096) is None
    assert tiles(64, 100, 4096) is tiles(64, 4096, 100) is None
    assert tiles(1, 4096, 4096, kind="int4") == (16, 32, 256, 4, 4)  # for 528 programs
    assert tiles(700, 2752, 4096, kind="int8") == (128, 128, 64, 1, 3)
    assert tiles(705, 4096, 4096, kind="int8") is tiles(257, 4096, 4096, kind="int4") is None
    assert tiles(3, 4096, 4096, kind="fp8") is tiles(3, 4096, 48, kind="int8") is None


def test_gpus_get_two_kernels_for_adapters() -> None:
    outputs = (256, 128)
    structs = [jax.ShapeDtypeStruct((n, 1024), jnp.bfloat16) for n in outputs]
    pairs, place, _ = adapters(40, outputs, 1024, jnp.bfloat16)
    x = jax.ShapeDtypeStruct((40, 1024), jnp.bfloat16)
    jitted = spmd.jit(linears, mesh=spmd.Mesh(None, (1,), ("x",)))
    lowered = jitted.lower(x, structs, pairs, place, topology=spmd.Topology("h200:1"))
    assert lowered.as_text("emitted").count("@__gpu$xla.gpu.triton") == 2


@pytest.mark.parametrize("kind", ["int8", "int4", "int4 zeros"])
@pytest.mark.parametrize("is_inner", [False, True], ids=["outputs", "inputs"])
def test_gpus_get_the_kernel(kind: str, is_inner: bool) -> None:
    """One for all weights, whichever dim is split."""
    made = [weight_types((n, 1024), kind.removesuffix(" zeros")) for n in (256, 128, 128)]
    if kind == "int4 zeros":
        made = [w | {"zeros": jax.ShapeDtypeStruct(w["scales"].shape, jnp.int8)} for w in made]
    spec = [{k: (None, "x")[: x.ndim] if is_inner else ("x",) for k, x in made[0].items()}] * 3
    x = jax.ShapeDtypeStruct((40, 1024), jnp.bfloat16)
    jitted = spmd.jit(linears, mesh=spmd.Mesh(None, (2,), ("x",)), in_specs=(None, spec))
    text = jitted.lower(x, made, topology=spmd.Topology("h200:2")).as_text("emitted")
    assert text.count("@__gpu$xla.gpu.triton") == 1


SPLITS = {
    "outputs": ((None, None), ("x", None), ("x",)),
    "inputs": ((None, "y"), (None, "y"), (None,)),
    "both": (("y", None), ("x", None), ("x",)),
}


ALIKE = (("none", "inputs"), ("none", "both"), ("int8", "inputs"))
"""Splits of which others have every part."""


@pytest.mark.parametrize(
    ("kind", "split"),
    [
        pytest.param(*case, marks=pytest.mark.heavy if case in ALIKE else ())
        for case in itertools.product(("none", "int8", "int4", "int4 zeros", "fp8 groups"), SPLITS)
    ],
)
def test_linear_split(kind: str, split: str, mesh: spmd.Mesh) -> None:
    weight, _ = weights(kind)
    x_spec, values, scales = SPLITS[split]
    spec: Any = values
    if isinstance(weight, dict):
        groups = values[1:] if weight["values"].ndim == 3 else ()
        spec = dict.fromkeys(weight, (*scales, *groups))
        spec["values"] = *values, *(None,) * len(groups)
    x = np.random.default_rng(0).standard_normal((2, 512)).astype(np.float32)
    many = [weight, weights(kind, 72)[0], weight]

    def both(x: Any, many: Any) -> Any:
        return linear(x, many[0]), *linears(x, many)

    partitioned(both, x, many, mesh=mesh, in_specs=(x_spec, [spec] * 3), tolerance=1e-5)


def test_linears_shapes_are_checked() -> None:
    x = jnp.zeros((2, 8))
    for wrong in (
        jnp.zeros((4, 7)),
        {"values": jnp.zeros((4, 8), jnp.int8), "scales": jnp.zeros(8)},
        {"values": jnp.zeros((4, 3, 2), jnp.uint8), "scales": jnp.zeros((4, 3))},
    ):
        with pytest.raises(ArgumentError, match="linear cannot be computed"):
            linear(x, wrong)
    pairs, place, _ = adapters(2, (4,), 9, jnp.float32)
    with pytest.raises(ArgumentError, match="linears cannot add adapters"):
        linears(x, [jnp.zeros((4, 8))], pairs, place)


def test_linears_of_no_weights() -> None:
    assert linears(jnp.ones((2, 8)), []) == ()
