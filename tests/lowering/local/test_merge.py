"""Searches, sorts and reductions of any kind along split dims: right, and never gathered whole."""

import dataclasses
import re
from collections.abc import Callable
from functools import cache
from itertools import product
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import spmd
from spmd.ir.dialect import contract as rules_merge
from spmd.ir.dialect.contract import GATHERED_SORT_BYTES
from spmd.ir.dialect.halo import rounds
from spmd.ir.dialect.rule import Rule
from spmd.planning import choices
from spmd.planning.choices import assignments_around, placements

MESHES = {
    "8": spmd.Mesh(None, (8,), ("a",)),
    "4x2": spmd.Mesh(None, (4, 2), ("a", "b")),
    "2x2x2": spmd.Mesh(None, (2, 2, 2), ("a", "b", "c")),
    "2x3": spmd.Mesh(None, (2, 3), ("a", "b")),
}
SPLITS: tuple[tuple[str, Any], ...] = (
    ("8", "a"), ("4x2", ("b", "a")), ("4x2", "a"), ("2x2x2", ("c", "a", "b")), ("2x3", ("b", "a")),
)  # fmt: skip
CHECKED = spmd.Options(check=True)

each_split = pytest.mark.parametrize(
    ("name", "axes"),
    [pytest.param(*s, marks=() if i % 2 else pytest.mark.heavy) for i, s in enumerate(SPLITS)],
    ids=str,
)


def in_turns(*cases: Any) -> list[Any]:
    """Every case in every split; two splits of each are not heavy."""
    found = []
    for i, case in enumerate(cases):
        for j, split in enumerate(SPLITS):
            marks = () if (i + j) % len(SPLITS) in (1, 3) else pytest.mark.heavy
            found.append(pytest.param(*case, *split, id=f"{i}-{split}", marks=marks))
    return found


def same(got: Any, want: Any) -> None:
    """Equal bit for bit, the sign of zeros and NaNs included."""

    def check(a: Any, b: Any) -> None:
        a, b = np.asarray(a), np.asarray(b)
        np.testing.assert_array_equal(a, b)
        np.testing.assert_array_equal(np.signbit(a), np.signbit(b))

    jax.tree.map(check, got, want)


def marked(fn: Callable[..., Any], mesh: spmd.Mesh, spec: Any) -> Callable[..., Any]:
    """The function of operands that are split, whether or not the axes divide them."""
    return lambda *xs: fn(*(spmd.mark_sharding(x, mesh, spec) for x in xs))


def run_marked(name: str, *cases: tuple[Callable[..., Any], tuple[Any, ...], Any]) -> None:
    """Functions, each with its arguments and their spec, as one program on a mesh."""
    mesh = MESHES[name]

    fns = [fn for fn, _, _ in cases]
    split = [marked(fn, mesh, spec) for fn, _, spec in cases]
    given = [args for _, args, _ in cases]

    def all_of(fns: Any) -> Callable[..., Any]:
        return lambda given: [fn(*args) for fn, args in zip(fns, given, strict=True)]

    same(spmd.jit(all_of(split), mesh=mesh, options=CHECKED)(given), jax.jit(all_of(fns))(given))


def floats(*shape: int, seed: int = 0) -> Any:
    """Floats with many ties, zeros of both signs, infinities, and NaNs of both signs."""
    rng = np.random.RandomState(seed)
    x = rng.randint(-4, 5, shape).astype(np.float32)
    special = np.asarray([np.nan, -np.nan, np.inf, -np.inf, -0.0], np.float32)
    return np.where(rng.uniform(size=shape) < 0.15, rng.choice(special, shape), x)


def ints(*shape: int, seed: int = 0) -> Any:
    return np.random.RandomState(seed).randint(-9, 9, shape).astype(np.int32)


def lowest(*shape: int) -> Any:
    """Nothing but the element that padding might be taken for."""
    return np.full(shape, -np.inf, np.float32)


def largest_bytes(compiled: Any) -> int:
    return max(t.bytes for t in compiled.stages.optimized.program.types)


def kinds(compiled: Any) -> set[str]:
    return {c.kind for c in compiled.collectives}


@pytest.mark.parametrize("count", range(1, 11))
def test_the_network_sorts(count: int) -> None:
    """Knuth's 0-1 principle: what sorts all zeros and ones sorts everything."""
    for word in product((0, 1), repeat=count):
        x = list(word)
        for pairs in rounds(count):
            assert len({i for pair in pairs for i in pair}) == 2 * len(pairs)
            for i, j in pairs:
                x[i], x[j] = sorted((x[i], x[j]))
        assert x == sorted(word)


# Reductions by any body.


def affine(x: Any, y: Any) -> Any:
    """Composition of `t -> x0 t + x1`: associative, not commutative."""
    return x[0] * y[0], x[1] * y[0] + y[1]


@cache
def composed(dims: tuple[int, ...]) -> Callable[..., Any]:
    return lambda x, y: lax.reduce((x, y), (np.int32(1), np.int32(0)), affine, dims)


def log_sum_exp(x: Any) -> Any:
    def body(p: Any, q: Any) -> Any:
        top = jnp.maximum(p[0], q[0])
        return top, p[1] * jnp.exp(p[0] - top) + q[1] * jnp.exp(q[0] - top)

    top, total = lax.reduce(
        (x, jnp.ones_like(x)), (np.float32(-1e30), np.float32(0)), body, (x.ndim - 1,)
    )
    return top + jnp.log(total)


def first_ends(x: Any) -> Any:
    return jnp.argmax(x, 1), jnp.argmin(x, 1)


@pytest.mark.parametrize(
    ("size", "make", "name", "axes"), in_turns((17, lowest), (17, floats), (96, ints))
)
def test_argmax_takes_the_first(size: int, make: Any, name: str, axes: Any) -> None:
    x = make(3, size)
    run_marked(
        name,
        (first_ends, (x,), (None, axes)),
        (first_ends, (x,), (axes, None)),
        (jnp.argmax, (x[0],), (axes,)),
        (lambda x: jnp.nanargmax(x, 1), (x,), (None, axes)),
    )


@each_split
def test_terms_stay_in_order(name: str, axes: Any) -> None:
    args = ints(5, 21), ints(5, 21, seed=1)
    specs = ((None, axes), (axes, None))
    run_marked(name, *((composed(dims), args, spec) for spec in specs for dims in ((0,), (1,))))


@pytest.mark.parametrize(
    ("shape", "spec"),
    [
        ((5, 3, 7), ("a", "b")),
        ((8, 2, 8), ("b", "a")),
        ((5, 3, 7), (None, ("b", "a"))),
        ((5, 3, 7), (("a", "b"), None)),
    ],
)
def test_terms_of_several_dims_stay_in_order(shape: tuple[int, ...], spec: Any) -> None:
    """The reference folds in the order of indices, which XLA's own loop nest need not do."""
    mesh = MESHES["4x2"]
    x, y = ints(*shape), ints(*shape, seed=1)
    fn = marked(composed((0, 2)), mesh, (spec[0], None, spec[1]))
    got = spmd.jit(fn, mesh=mesh, options=CHECKED)(x, y)
    rows = [v.transpose(1, 0, 2).reshape(shape[1], -1) for v in (x, y)]
    with np.errstate(over="ignore"):
        for i in range(shape[1]):
            total = np.int32(1), np.int32(0)
            for term in zip(rows[0][i], rows[1][i], strict=True):
                total = affine(total, term)
            assert (got[0][i], got[1][i]) == total


@each_split
def test_pairs_of_terms(name: str, axes: Any) -> None:
    x = np.random.RandomState(0).normal(size=(3, 50)).astype(np.float32)
    mesh = MESHES[name]
    got = spmd.jit(marked(log_sum_exp, mesh, (None, axes)), mesh=mesh, options=CHECKED)(x)
    np.testing.assert_allclose(got, jax.nn.logsumexp(x, axis=1), rtol=1e-5)


@pytest.mark.parametrize(
    ("fn", "count", "op"),
    [(lambda x: jnp.argmax(x, 1), 1, "reduce"), (lambda x: lax.top_k(x, 5), 5, "top_k")],
)
def test_what_each_piece_found_is_gathered(fn: Any, count: int, op: str) -> None:
    x = jax.ShapeDtypeStruct((3, 1 << 16), jnp.float32)
    compiled = spmd.jit(fn, mesh=MESHES["8"], in_specs=((None, "a"),)).compile(x)
    assert largest_bytes(compiled) == 3 * (1 << 16) * 4 // 8
    wanted = ("all_gather", 3 * count * 7 * 4)
    assert [(c.kind, c.bytes) for c in compiled.collectives] == [wanted] * 2
    for c in compiled.collectives:
        assert re.fullmatch(rf"what each piece of dim 1 found, for \w+\.{op}", c.reason)


# The largest elements.


@cache
def top(k: int) -> Callable[..., Any]:
    return lambda x: lax.top_k(x, k)


@pytest.mark.parametrize(
    ("size", "k", "make", "name", "axes"),
    in_turns((17, 1, lowest), (96, 3, ints), (21, 11, floats), (21, 21, floats), (1, 1, ints)),
)
def test_top_k(size: int, k: int, make: Any, name: str, axes: Any) -> None:
    run_marked(name, (top(k), (make(3, size),), (None, axes)))


def test_top_k_of_other_types() -> None:
    x = jnp.asarray(np.abs(ints(2, 21)))
    types = (jnp.bfloat16, np.uint8, np.bool_)
    spec = (None, ("c", "a", "b"))
    run_marked("2x2x2", *((top(4), (np.asarray(x.astype(dtype)),), spec) for dtype in types))


def test_padding_never_wins_over_the_least_number() -> None:
    x = np.full((13,), 0xFFFFFFFF, np.uint32).view(np.float32)
    run_marked("2x2x2", (lambda x: lax.top_k(x, 13)[1], (x,), (("c", "a", "b"),)))


def about_top(x: Any) -> Any:
    return lax.approx_max_k(x, 4), lax.approx_min_k(x, 4)


@each_split
def test_approximate_top_k(name: str, axes: Any) -> None:
    x = np.random.RandomState(0).permutation(90).reshape(3, 30).astype(np.float32)
    run_marked(name, (about_top, (x,), (None, axes)))


# Axes of a dim that must be whole move to another.


def sorted_rows(x: Any) -> Any:
    return jnp.sort(x, 1), jnp.argsort(x, 1), jnp.argsort(x, 1, descending=True)


def rows_by_two_keys(x: Any, y: Any) -> Any:
    return lax.sort((y, x), dimension=1, num_keys=2)


def sorted_both_ways(x: Any) -> Any:
    return jnp.sort(x), jnp.argsort(x)


@pytest.mark.parametrize(("shape", "name", "axes"), in_turns(((7, 17),), ((3, 24),)))
def test_sort_rows(shape: tuple[int, int], name: str, axes: Any) -> None:
    x, y = floats(*shape), ints(*shape)
    spec = (None, axes)
    run_marked(name, (sorted_rows, (x,), spec), (rows_by_two_keys, (x, y), spec))


WHOLE_DIMS: dict[str, tuple[Callable[..., Any], tuple[int, ...], Any]] = {
    "sort": (lambda x: jnp.sort(x, 1), (64, 512), (None, "a")),
    "sort_first": (lambda x: jnp.sort(x, 0), (512, 64), ("a", None)),
    "fft": (lambda x: jnp.fft.fft(x, axis=1), (64, 512), (None, "a")),
    "cholesky": (lambda x: lax.linalg.cholesky(x + 16 * jnp.eye(16), symmetrize_input=False),
        (16, 16, 16), (None, "a", None)),
    "solve": (lambda x: lax.linalg.triangular_solve(jnp.eye(16) * 3 + x, x, lower=True),
        (16, 16, 16), (None, None, "a")),
}  # fmt: skip


@pytest.mark.parametrize("case", WHOLE_DIMS)
def test_nothing_is_gathered_where_another_dim_takes_the_axes(case: str) -> None:
    fn, shape, spec = WHOLE_DIMS[case]
    mesh = MESHES["8"]
    x = np.random.RandomState(0).uniform(size=shape).astype(np.float32)
    step = spmd.jit(fn, mesh=mesh, in_specs=(spec,), out_specs=spec, options=CHECKED)
    np.testing.assert_allclose(step(x), jax.jit(fn)(x), rtol=1e-4, atol=1e-4)
    compiled = step.compile(x)
    assert "all_gather" not in kinds(compiled), [str(c) for c in compiled.collectives]
    assert largest_bytes(compiled) < x.nbytes


def test_axes_move_there_and_back() -> None:
    x = jax.ShapeDtypeStruct((256, 2048), jnp.float32)
    spec = ("b", "a")
    step = spmd.jit(lambda x: jnp.sort(x, 1), mesh=MESHES["4x2"], in_specs=(spec,), out_specs=spec)
    compiled = step.compile(x)
    piece = 256 * 2048 * 4 // 8
    assert [(c.kind, c.axes, c.bytes) for c in compiled.collectives] == [
        ("all_to_all", ("a",), piece * 3 // 4)
    ] * 2
    assert largest_bytes(compiled) == piece


# Sorting in a network.

LONG = GATHERED_SORT_BYTES // 4 + 1000


def swapped(x: Any, y: Any) -> Any:
    """Two keys, the second one descending, and a passenger."""
    return lax.sort((x, -y, jnp.arange(x.shape[0])), num_keys=2, is_stable=True)


@each_split
def test_sort_a_vector(name: str, axes: Any) -> None:
    size = LONG // 48 * 48 + (0 if axes == "a" else 5)
    x, y = floats(size), ints(size)
    run_marked(name, (sorted_both_ways, (x,), (axes,)), (swapped, (x, y), (axes,)))


@pytest.mark.parametrize(
    ("size", "name", "axes"), [(1, *SPLITS[0]), (3, *SPLITS[3]), (8, *SPLITS[4]), (13, *SPLITS[0])]
)
def test_pieces_of_nothing_but_padding(
    size: int, name: str, axes: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rules_merge, "GATHERED_SORT_BYTES", 0)
    x = ints(size).astype(np.int16)  # a type that no other test sorts: rules are kept
    mesh = MESHES[name]
    fn = lambda x: lax.sort((x, jnp.arange(size)), num_keys=1)  # noqa: E731

    def split(rule: Rule, *given: Any) -> Any:
        """What is weighed, without gathering: a planner would gather what is this small."""
        found = assignments_around(rule, *given)
        return tuple(a for a in found if all(a[m.factor] for m in rule.merges)) or found

    monkeypatch.setattr(choices, assignments_around.__name__, split)
    monkeypatch.setattr(choices, placements.__name__, lambda *given: [])
    step = spmd.jit(marked(fn, mesh, (axes,)), mesh=mesh, options=CHECKED)
    same(step(x), jax.jit(fn)(x))
    assert size == 1 or "collective_permute" in kinds(step.compile(x))


def test_few_rows_are_sorted_in_a_network() -> None:
    """Where there is no room for all of them on each device."""
    x = floats(2, LONG)
    fn = lambda x: jnp.argsort(x, 1)  # noqa: E731
    spec = (None, "a")
    options = dataclasses.replace(CHECKED, memory_limit=3 * x.nbytes // 2)
    step = spmd.jit(fn, mesh=MESHES["8"], in_specs=(spec,), out_specs=spec, options=options)
    same(step(x), jax.jit(fn)(x))
    assert kinds(step.compile(x)) == {"collective_permute"}


def test_a_long_vector_is_not_gathered_where_there_is_no_room() -> None:
    x = jax.ShapeDtypeStruct((1 << 20,), jnp.float32)
    options = spmd.Options(memory_limit=8 << 20)
    jitted = spmd.jit(
        jnp.argsort, mesh=MESHES["8"], in_specs=("a",), out_specs="a", options=options
    )
    compiled = jitted.compile(x)
    assert kinds(compiled) == {"collective_permute"}
    assert largest_bytes(compiled) == (1 << 20) * 4 // 8
    assert compiled.out_shardings.spec == jax.sharding.PartitionSpec("a")
