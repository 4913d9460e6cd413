"""Partial values: which ops they may flow through, and which element changes no reduction."""

import itertools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from jax import lax

import spmd
from spmd.ir.description import DESCRIPTIONS
from spmd.ir.dialect.reducers import identity_element, joining
from spmd.ir.dialect.registry import rule_of
from spmd.ir.program import OpKind
from spmd.ir.types import _NUMPY_DTYPES, DotDims, TensorType, is_integer, numpy_dtype

COUNT = 64
DTYPES = [d for d in _NUMPY_DTYPES if d not in ("f4E2M1FN", "i1")]
"""Element types but one that XLA does not compute with on CPUs, and one that jax has no sums of."""

COMBINE: dict[str, Callable[..., Any]] = {
    "add": lax.add, "mul": lax.mul, "max": lax.max, "min": lax.min, "and": lax.bitwise_and,
    "or": lax.bitwise_or, "xor": lax.bitwise_xor,
}  # fmt: skip

LINEAR: dict[str, tuple[int, Callable[..., Any]]] = {
    "add": (2, lax.add), "subtract": (2, lax.sub), "negate": (1, lax.neg),
    "multiply": (2, lax.mul), "divide": (2, lax.div), "maximum": (2, lax.max),
    "minimum": (2, lax.min), "select": (2, lax.select), "real": (1, lax.real),
    "imag": (1, lax.imag),
}  # fmt: skip
"""Ops that are described as linear: how many operands of one type they have, and jax's function."""

OTHERS = ("stablehlo.convert", "stablehlo.dot_general")  # linear by their rules alone


class Case(NamedTuple):
    """An op, and jax's function of its operands."""

    kind: OpKind
    function: Callable[..., Any]


def case(name: str, operands: list[str], result: str, function: Any, **attrs: Any) -> Case:
    types = tuple(TensorType((COUNT,), dtype) for dtype in operands)
    out = TensorType(() if attrs else (COUNT,), result)
    return Case(OpKind(f"stablehlo.{name}", types, (out,), attrs), function)


def cases() -> list[Case]:
    dtypes = [d for d in DTYPES if d != "f8E8M0FNU"]  # all powers of two: it has no sums
    found = []
    for name, (count, function) in LINEAR.items():
        for dtype in dtypes:
            if name in ("real", "imag"):
                if dtype.startswith("complex"):
                    found.append(case(name, [dtype], dtype[len("complex<") : -1], function))
            else:
                chosen_by = ["i1"] if name == "select" else []
                found.append(case(name, [*chosen_by, *[dtype] * count], dtype, function))
    for a, b in itertools.permutations(dtypes, 2):
        to = numpy_dtype(b)
        found.append(case("convert", [a], b, lambda x, to=to: lax.convert_element_type(x, to)))
    dims = DotDims((), (), (0,), (0,))
    for a, b in (("i8", "i8"), ("i8", "i32"), ("bf16", "f32"), ("f32", "f32")):
        to = numpy_dtype(b)
        dot = lambda x, y, to=to: lax.dot(x, y, preferred_element_type=to)  # noqa: E731
        found.append(case("dot_general", [a, a], b, dot, dot_dimension_numbers=dims))
    return found


def elements(dtype: str, rng: np.random.RandomState) -> np.ndarray[Any, Any]:
    """Random elements of a type; integers of all sizes, both ends of the range among them."""
    made = numpy_dtype(dtype)
    if dtype == "i1":
        return rng.randint(0, 2, COUNT).astype(made)
    if not is_integer(dtype):
        sign = 1 if dtype == "f8E8M0FNU" else rng.choice([-1, 1], COUNT)
        return (rng.uniform(0.5, 1.5, COUNT) * sign).astype(made)
    limits: Any = ml_dtypes.iinfo(made)
    drawn = [int(d * 2**limits.bits) + int(limits.min) for d in rng.uniform(0, 1, COUNT - 4)]
    drawn = [limits.min, limits.max, 0, 1, *(min(d, int(limits.max)) for d in drawn)]
    return np.array(rng.permutation(np.array(drawn, object)).tolist(), object).astype(made)


def test_partial_values_flow_only_through_what_is_linear_in_them() -> None:
    rng = np.random.RandomState(0)
    runs, args = [], []
    for kind, function in cases():
        rule = rule_of(kind)
        for group, how in itertools.product(rule.linear, COMBINE):
            if rule.lets_through(how):
                whole, one, two = ([elements(t.dtype, rng) for t in kind.operands] for _ in "abc")
                runs.append((kind, function, group, how))
                args.append((whole, one, two))

    def both(args: Any) -> Any:
        """Of each op the combined results of two terms, and the result of the combined terms."""
        found = []
        for (_, function, group, how), (whole, one, two) in zip(runs, args, strict=True):
            combine = COMBINE[how]
            first, second, joined = list(whole), list(whole), list(whole)
            for i in group:
                first[i], second[i], joined[i] = one[i], two[i], combine(one[i], two[i])
            found.append((combine(function(*first), function(*second)), function(*joined)))
        return found

    with jax.enable_x64(True):
        found = jax.device_get(jax.jit(both)(args))
    described = {name for name, about in DESCRIPTIONS.items() if about.linear}
    assert described == {f"stablehlo.{name}" for name in LINEAR}
    assert {kind.name for kind, *_ in runs} == {*described, *OTHERS}
    for (kind, _, group, how), (apart, together) in zip(runs, found, strict=True):
        name = f"{how} of terms through operands {group} of {kind.name} {kind.operands}"
        types = [t.dtype for t in (*kind.operands, *kind.results) if not is_integer(t.dtype)]
        if not types:
            np.testing.assert_array_equal(apart, together, err_msg=name)
            continue
        near = max(float(ml_dtypes.finfo(numpy_dtype(dtype)).eps) for dtype in types) * 4
        near *= COUNT ** (0.5 * (together.size == 1))  # a sum of so many products
        wide = np.result_type(np.float64, np.complex64 if np.iscomplexobj(apart) else np.float32)
        apart, together = apart.astype(wide), together.astype(wide)
        np.testing.assert_allclose(apart, together, near, near, err_msg=name)


def test_an_identity_changes_nothing() -> None:
    rng = np.random.RandomState(0)
    pairs = [
        (how, dtype)
        for how, dtype in itertools.product(COMBINE, DTYPES)
        if how not in ("and", "or", "xor") or is_integer(dtype)
        if (how, dtype) != ("add", "f8E8M0FNU")  # it has no zero: 2**-127 stands for it
    ]
    values = []
    for _, dtype in pairs:
        drawn = elements(dtype, rng)
        drawn[:2] = identity_element("max", dtype), identity_element("min", dtype)
        values.append(drawn)

    def combined(values: Any) -> Any:
        return [
            COMBINE[how](x, np.broadcast_to(identity_element(how, dtype), x.shape))
            for (how, dtype), x in zip(pairs, values, strict=True)
        ]

    with jax.enable_x64(True):
        found = jax.device_get(jax.jit(combined)(values))
    for (how, dtype), got, want in zip(pairs, found, values, strict=True):
        np.testing.assert_array_equal(got, want, err_msg=f"{how} of {dtype}")


def test_elements_are_joined_by_a_reduction_whose_identity_is_zero() -> None:
    for dtype in _NUMPY_DTYPES:
        element = identity_element(joining(dtype), dtype)
        assert not any(element.tobytes()), dtype
        assert (joining(dtype), dtype) != ("add", "f8E8M0FNU")


@pytest.mark.usefixtures("exact_plans")
def test_sums_and_elements_that_devices_add_for_each_other() -> None:
    def program(x: Any, y: Any, narrow: Any, small: Any, eights: Any, scales: Any) -> Any:
        halves = lax.div(jnp.sum(x, 0), 2) + lax.div(jnp.sum(y, 0), 2)
        sums = [jnp.sum(z, 0, dtype=jnp.int8).astype(jnp.int32) for z in (narrow, small)]
        bits = lax.bitcast_convert_type(scales[1], jnp.uint8)
        return halves, sums[0] + sums[1], jnp.max(eights, 0), bits

    args = [
        *[np.ones((2, 1024), np.int32)] * 2,
        *[np.full((2, 1024), 100, np.int8)] * 2,
        np.arange(32).reshape(8, 4).astype(ml_dtypes.float8_e4m3fn),
        np.array([[1, 2], [2**-126, 8]] * 4).astype(ml_dtypes.float8_e8m0fnu),
    ]
    step = spmd.jit(program, mesh=spmd.make_mesh(m=2), in_specs=(("m", None),) * 6)
    jax.tree.map(np.testing.assert_array_equal, step(*args), jax.jit(program)(*args))
