"""A cache in pages, against loops over rows: alone, split, in place, and as kernels."""

import functools
import importlib
import itertools
import re
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import spmd
from spmd.errors import ArgumentError, SpmdError
from spmd.ops import paged_attention, paged_hopper, paged_reference, paged_triton, paged_update
from spmd.ops.paged import attend_on_tpu
from tests.compilers import needs_cuda_plugin, needs_libtpu

CHECKED = spmd.Options(check=True)


class Sizes(NamedTuple):
    """The dims of a case, named as in `spmd.ops.paged`."""

    a: int = 1
    b: int = 4
    r: int = 16
    p: int = 16
    m: int = 4
    k: int = 2
    g: int = 4
    d: int = 16
    quantized: bool = False
    sinks: bool = False

    @property
    def n(self) -> int:
        """More pages than the tables have."""
        return self.b * self.m + 3


class Case(NamedTuple):
    """The operands of `paged_attention`."""

    q: Any
    pool: Any
    table: Any
    slots: Any
    positions: Any
    first: Any
    scales: Any = None
    sinks: Any = None

    @property
    def operands(self) -> list[Any]:
        return [jnp.asarray(x) for x in self if x is not None]


def ragged(sizes: Sizes, seed: int) -> Case:
    """Rows of random slots: none, one or many of each, then padding; NaN where nobody may look."""
    rng = np.random.default_rng(seed)
    a, b, r, p, m, k, g, d, quantized, _ = sizes
    counts = np.zeros((a, b + 1), np.int32)
    for group in range(a):
        for slot in range(b):
            left = min(r - int(counts[group].sum()), m * p)
            wanted = (0, 1, 1, int(rng.integers(0, r + 1)))[rng.integers(4)]
            counts[group, slot + 1] = min(left, wanted)
    first = np.cumsum(counts, axis=1, dtype=np.int32)
    slots, positions = np.full((a, r), b + 5, np.int32), np.full((a, r), -1, np.int32)
    table = np.stack([rng.permutation(sizes.n)[: b * m].reshape(b, m) for _ in range(a)])
    shape = (a, sizes.n, p, k, 2, d)
    is_known = np.zeros(shape[:3], bool)
    for group, slot in np.ndindex(a, b):
        count = counts[group, slot + 1]
        if count == 0:
            table[group, slot] = -7
            continue
        last = rng.integers(count - 1, m * p)
        rows = slice(first[group, slot], first[group, slot + 1])
        slots[group, rows], positions[group, rows] = slot, np.arange(last + 1 - count, last + 1)
        known = np.arange(last + 1)
        is_known[group, table[group, slot, known // p], known % p] = True
        table[group, slot, last // p + 1 :] = rng.integers(-5, sizes.n + 5, m - 1 - last // p)
    q = rng.standard_normal((a, r, k, g, d)).astype(np.float32)
    if quantized:
        scales = np.where(is_known[..., None, None], rng.random(shape[:-1]) * 0.02, np.nan)
        scales = scales.astype(np.float32)
        pool = rng.integers(-127, 128, shape).astype(np.int8)
    else:
        scales = None
        pool = np.where(is_known[..., None, None, None], rng.standard_normal(shape), np.nan)
        pool = pool.astype(np.float32)
    sinks = rng.standard_normal((k, g)).astype(np.float32) if sizes.sinks else None
    return Case(q, pool, table.astype(np.int32), slots, positions, first, scales, sinks)


def attended(case: Case, window: int | None = None) -> Any:
    """By a loop over rows, in float64; zeros in padding."""
    stored = np.asarray(case.pool, np.float64)
    if case.scales is not None:
        stored = stored * case.scales[..., None]
    out, size = np.zeros(case.q.shape), case.pool.shape[2]
    for group in range(len(out)):
        for row in range(case.first[group, -1]):
            seen = np.arange(case.positions[group, row] + 1)[-window if window else None :]
            pages = case.table[group, case.slots[group, row], seen // size]
            keys, values = np.moveaxis(stored[group, pages, seen % size], 2, 0)
            scores = np.einsum("kgd,tkd->kgt", case.q[group, row], keys) / case.q.shape[-1] ** 0.5
            largest = scores.max(-1, keepdims=True)
            weights = np.exp(scores - largest)
            own = 0 if case.sinks is None else np.exp(case.sinks[..., None] - largest)
            weights /= weights.sum(-1, keepdims=True) + own
            out[group, row] = np.einsum("kgt,tkd->kgd", weights, values)
    return out


def check(
    function: Any, sizes: Sizes, seeds: int, window: int | None = None, dtype: Any = None
) -> None:
    """Compiles a function once, and runs it on several batches, of floats of a `dtype`."""
    run = jax.jit(functools.partial(function, window=window))
    for seed in range(seeds):
        case = ragged(sizes, seed)
        if dtype is not None:
            case = case._replace(q=dtype(case.q), pool=dtype(case.pool))
        got = np.asarray(run(*case.operands), np.float32)
        want = attended(case._replace(q=np.float32(case.q)), window)
        np.testing.assert_allclose(got, want, rtol=0, atol=2e-2 if dtype else 1e-5)


# The reference


@pytest.mark.parametrize(
    "sizes", [Sizes(a=2), Sizes(g=1, p=8, quantized=True, sinks=True)], ids=str
)
@pytest.mark.parametrize("at_once", [1 << 24, 5], ids=["whole", "blocks"])
def test_reference(at_once: int, sizes: Sizes, monkeypatch: pytest.MonkeyPatch) -> None:
    row = sizes.m * sizes.p * sizes.k * 2 * sizes.d
    monkeypatch.setattr(paged_reference, "MOST_ELEMENTS", at_once * row)  # 16 rows are 3 * 5 + 1
    check(paged_reference.attend, sizes, 4)
    check(paged_reference.attend, sizes, 2, window=19)


def test_the_reference_holds_the_pages_of_a_few_rows() -> None:
    sizes = Sizes(r=512, b=8, p=64, m=16, k=8, d=64)
    structs = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in ragged(sizes, 0).operands]
    memory = spmd.jit(paged_attention, mesh=spmd.make_mesh(x=1)).compile(*structs).memory
    all_rows = 4 * sizes.r * sizes.m * sizes.p * sizes.k * 2 * sizes.d
    assert memory.temporary < all_rows / 8


@pytest.mark.parametrize("quantized", [False, True])
def test_keys_may_be_the_values(quantized: bool) -> None:
    case = ragged(Sizes(a=2, k=1, quantized=quantized), 3)
    keys = case._replace(pool=case.pool[..., :1, :])
    twice = case._replace(pool=np.repeat(keys.pool, 2, axis=4))
    if quantized:
        keys = keys._replace(scales=case.scales[..., :1])
        twice = twice._replace(scales=np.repeat(keys.scales, 2, axis=4))
    run = jax.jit(functools.partial(paged_attention, scales=keys.scales))
    np.testing.assert_allclose(run(*keys.operands[:6]), attended(twice), rtol=0, atol=1e-5)
    assert paged_triton.attend(*keys.operands, interpret=True) is NotImplemented


def test_rows_without_a_position_are_zero() -> None:
    case = ragged(Sizes(), 1)
    case = case._replace(positions=np.full_like(case.positions, -1))
    np.testing.assert_array_equal(jax.jit(paged_reference.attend)(*case.operands), 0)


# Writing


def written(pool: Any, new: Any, case: Case) -> Any:
    pool, size = np.array(pool), pool.shape[2]
    for group, row in np.argwhere(case.positions >= 0):
        position = case.positions[group, row]
        page = case.table[group, case.slots[group, row], position // size]
        pool[group, page, position % size] = new[group, row]
    return pool


def update_case(sizes: Sizes, seed: int) -> tuple[Any, ...]:
    case = ragged(sizes, seed)
    rng = np.random.default_rng(seed)
    pool = rng.standard_normal(case.pool.shape).astype(np.float32)
    new = rng.standard_normal((*case.q.shape[:3], 2, sizes.d)).astype(np.float32)
    return pool, new, case.table, case.slots, case.positions


def test_update() -> None:
    for seed, rank in itertools.product(range(3), (3, 5, 6)):
        pool, new, *tables = update_case(Sizes(a=2), seed)
        pool, new = (x[(..., *(0,) * (6 - rank))] for x in (pool, new))
        got = jax.jit(paged_update)(pool, new, *tables)
        np.testing.assert_array_equal(got, written(pool, new, ragged(Sizes(a=2), seed)))


def test_nothing_is_written_where_there_is_no_place() -> None:
    pool, new, table, slots, positions = update_case(Sizes(r=4), 0)
    positions = np.asarray([[-1, 64, 3, 3]], np.int32)
    slots = np.asarray([[0, 0, 1, 2]], np.int32)
    table = np.array(table)
    table[0, 1:3] = [-1] * 4, [pool.shape[1]] * 4
    np.testing.assert_array_equal(jax.jit(paged_update)(pool, new, table, slots, positions), pool)


# Split over devices


@pytest.fixture(scope="module")
def mesh(devices8: Any) -> spmd.Mesh:
    return spmd.make_mesh(data=2, model=4, devices=devices8)


def step(
    pool: Any, new: Any, q: Any, table: Any, slots: Any, positions: Any, first: Any,
    window: int | None = None,
) -> Any:  # fmt: skip
    """What a layer does with its cache."""
    pool = paged_update(pool, new, table, slots, positions)
    return pool, paged_attention(q, pool, table, slots, positions, first, window=window)


def step_case(sizes: Sizes, seed: int = 0) -> tuple[Any, ...]:
    case = ragged(sizes, seed)
    new = update_case(sizes, seed)[1]
    return case.pool, new, case.q, case.table, case.slots, case.positions, case.first


@pytest.mark.parametrize(
    ("heads", "groups", "split"),
    [
        (4, 2, ("data", None, None, "model", None, None)),  # the key heads
        (1, 4, ("data", None, None, None, None, None)),  # the query heads of the one there is
        (8, 3, (None, None, None, ("model", "data"), None, None)),  # groups are not split
        (2, 2, (None, None, "model", None, None, "data")),  # positions and widths: made whole
    ],
)
def test_split(heads: int, groups: int, split: Any, mesh: spmd.Mesh) -> None:
    args = step_case(Sizes(a=2, k=heads, g=groups))
    q_spec = (split[0], None, split[3], "model" if groups == 4 else None, None)
    specs = (split, None, q_spec, *(((split[0],),) * 4))
    compiled = spmd.jit(
        step, mesh=mesh, in_specs=specs, out_specs=(split, q_spec), options=CHECKED
    ).compile(*args)
    for got, want in zip(compiled(*args), jax.jit(step)(*args), strict=True):
        np.testing.assert_allclose(got, want, rtol=0, atol=1e-5)


def test_a_window_and_sinks_are_split_like_none(mesh: spmd.Mesh) -> None:
    case = ragged(Sizes(a=2, k=4, sinks=True), 0)
    specs = (
        ("data", None, "model"),
        ("data", None, None, "model"),
        *((("data",),) * 4),
        ("model",),
    )

    def attend(*given: Any) -> Any:
        return paged_attention(*given[:6], sinks_KG=given[6], window=6)

    compiled = spmd.jit(attend, mesh=mesh, in_specs=specs, options=CHECKED).compile(*case.operands)
    assert not compiled.collectives
    np.testing.assert_allclose(compiled(*case.operands), attended(case, 6), rtol=0, atol=1e-5)


def test_in_place_and_without_an_exchange(mesh: spmd.Mesh) -> None:
    pool, *rest = step_case(Sizes(a=2, k=4, b=8, m=16, d=64))
    spec = ("data", None, None, "model", None, None)
    specs = (spec, ("data", None, "model"), ("data", None, "model"), *(("data",),) * 4)
    compiled = spmd.jit(step, mesh=mesh, in_specs=specs, donate_argnums=0).compile(pool, *rest)
    assert not compiled.collectives
    assert compiled.memory.aliased == pool.nbytes // 8
    local = f"f32[1,{pool.shape[1]},16,"
    lines = str(compiled.as_text("hlo")).splitlines()
    assert not [line for line in lines if local in line and re.search(r" copy(-start)?\(", line)]


def test_the_number_of_pages_is_in_types_alone(mesh: spmd.Mesh) -> None:
    """A module that was exported for one number of pages is one for any other."""
    sizes = Sizes(a=2)
    args = step_case(sizes)
    structs = [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in args]
    structs[0] = jax.ShapeDtypeStruct((2, 7919, *args[0].shape[2:]), np.float32)
    text = jax.jit(step).lower(*structs).as_text()
    text = text.replace("x7919x", f"x{sizes.n}x")
    assert "7919" not in text
    compiled = spmd.compile_stablehlo(text, mesh, [("data",)] * 7)
    for got, want in zip(compiled(*args), jax.jit(step)(*args), strict=True):
        np.testing.assert_allclose(got, want, rtol=0, atol=1e-5)


# Costs and errors


@pytest.mark.thorough
def test_costs_are_of_the_pages_that_rows_read() -> None:
    def seconds(pages: int, rows: int, window: int | None = None) -> float:
        structs = structs_of(Sizes(b=64, r=rows, p=64, m=8, k=8, d=128), pages)
        fn = functools.partial(step, window=window)
        jitted = spmd.jit(fn, mesh=spmd.Mesh(None, (1,), ("x",)), donate_argnums=0)
        return float(jitted.lower(*structs, topology=spmd.Topology("h200:1")).timeline.seconds)

    read = 64 * 512 * 8 * 2 * 128 * 2 / spmd.Topology("h200:1").hbm_bandwidth
    assert seconds(1 << 12, 64) == seconds(1 << 16, 64) == pytest.approx(read, rel=0.1)
    assert seconds(1 << 12, 8) == pytest.approx(read / 8, rel=0.1)
    assert seconds(1 << 12, 64, window=128) == pytest.approx(read / 4, rel=0.1)


def test_shapes_are_checked() -> None:
    case = ragged(Sizes(), 0)
    for wrong in (
        case._replace(q=case.q[..., :8]),
        case._replace(table=case.table[0]),
        case._replace(slots=case.slots.astype(np.float32)),
        case._replace(first=case.first[:, 1:]),
        case._replace(scales=case.pool[..., 0]),
        case._replace(sinks=case.q[0, 0, :1]),
        case._replace(pool=case.pool.view(np.int8)[..., :16]),
    ):
        *operands, scales, sinks = wrong
        with pytest.raises(ArgumentError, match="paged_attention cannot be computed"):
            paged_attention(*operands, scales=scales, sinks_KG=sinks)
    with pytest.raises(ArgumentError, match="a window of at least one position, not 0"):
        paged_attention(*case[:6], window=0)
    pool, new, *tables = update_case(Sizes(), 0)
    for pair in ((pool, new[..., :8]), (pool, new.astype(np.int8)), (pool[0], new)):
        with pytest.raises(ArgumentError, match="paged_update cannot be computed"):
            paged_update(*pair, *tables)


# The kernel for GPUs, as far as a CPU can tell. `tests/accelerators/test_paged.py` runs it.

KERNEL_SIZES = [
    Sizes(r=4, b=5, d=64),  # rows of few slots: small tiles alone, of four pages each
    Sizes(a=2, r=24, b=2, g=8, k=1, d=64, quantized=True, sinks=True),  # small tiles and large ones
    Sizes(r=40, b=3, g=3, p=64, m=3, sinks=True),  # query heads that do not fill tiles
    Sizes(r=5, b=2, g=1, k=1, p=128, m=2, d=128, quantized=True),  # two tiles of a page
]


@pytest.mark.parametrize(
    ("sizes", "window"),
    [*((sizes, None) for sizes in KERNEL_SIZES), (KERNEL_SIZES[1], 70), (KERNEL_SIZES[2], 1)],
    ids=str,
)
def test_kernel(sizes: Sizes, window: int | None) -> None:
    check(functools.partial(paged_triton.attend, interpret=True), sizes, 4, window)


def test_kernel_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    attend = functools.partial(paged_triton.attend, interpret=True)
    monkeypatch.setattr(paged_triton, "PROGRAMS", 1 << 10)
    check(attend, Sizes(r=6, b=6, k=1, p=64, m=8), 3)
    check(attend, Sizes(r=24, b=3, g=5, k=1, p=64, m=8), 2, window=150)


@pytest.mark.parametrize("sizes", [Sizes(m=68, quantized=True), KERNEL_SIZES[1]], ids=str)
def test_blocks_of_the_kernel_lie_in_their_arrays(sizes: Sizes) -> None:
    """Interpreted, one that is counted from the end is found; GPUs read what lies before."""
    attend = functools.partial(paged_triton.attend, interpret=True)
    traced = jax.make_jaxpr(attend)(*ragged(sizes, 0).operands)
    calls = [e.params["grid_mapping"] for e in traced.eqns if e.primitive.name == "pallas_call"]
    assert len(calls) > 1
    for call in calls:
        corners = itertools.product(*({0, end - 1} for end in call.grid))
        for corner, block in itertools.product(corners, call.block_mappings):
            index, sizes_of = block.index_map_jaxpr, block.block_shape
            at = jax.core.eval_jaxpr(index.jaxpr, index.consts, *corner)
            begins = [
                int(i) * getattr(n, "block_size", 1) for i, n in zip(at, sizes_of, strict=True)
            ]
            assert all(0 <= i < n for i, n in zip(begins, block.array_aval.shape, strict=True))


@pytest.mark.skipif(jax.__version_info__ < (0, 11), reason="jax 0.10 interprets no such kernel")
@pytest.mark.parametrize(
    ("sizes", "window"),
    [
        (Sizes(a=2, b=2, r=48, p=64, m=5, k=1, g=4, d=64), None),
        (Sizes(b=2, r=150, p=32, m=20, k=1, g=1, d=128), None),
        (Sizes(b=2, r=80, p=128, m=3, k=2, g=16, d=64), 70),
    ],
    ids=str,
)
def test_kernel_for_hopper(
    sizes: Sizes, window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(paged_hopper, "is_here", lambda: True)
    monkeypatch.setattr(paged_hopper, "LEAST", 1)
    check(functools.partial(paged_triton.attend, interpret=True), sizes, 2, window, jnp.bfloat16)


def test_the_kernel_takes_no_other_sizes() -> None:
    assert paged_triton.takes(64, 256, 64, 2)
    for wrong in ((65, 128, 64, 2), (4, 96, 64, 2), (4, 128, 48, 2), (4, 128, 4, 2)):
        assert not paged_triton.takes(*wrong)
    assert not paged_triton.takes(4, 256, 64, 4)
    assert paged_triton.attend(*ragged(Sizes(d=12), 0).operands) is NotImplemented


def structs_of(sizes: Sizes, pages: int, dtype: Any = jnp.bfloat16) -> list[Any]:
    a, b, r, p, m, k, g, d = sizes[:8]
    shapes = ((a, pages, p, k, 2, d), (a, r, k, 2, d), (a, r, k, g, d))
    tables = ((a, b, m), (a, r), (a, r), (a, b + 1))
    floats = [jax.ShapeDtypeStruct(s, dtype) for s in shapes]
    return floats + [jax.ShapeDtypeStruct(s, jnp.int32) for s in tables]


@pytest.mark.parametrize(("rows", "window"), [(8, 200), (64, None)])
def test_gpus_get_the_kernel(rows: int, window: int | None) -> None:
    structs = structs_of(Sizes(b=8, r=rows, k=8, d=128, p=64), 1 << 12)
    fn = functools.partial(step, window=window)
    jitted = spmd.jit(fn, mesh=spmd.Mesh(None, (2,), ("x",)), in_specs=_SPLIT_HEADS)
    text = jitted.lower(*structs, topology=spmd.Topology("h200:2")).as_text("emitted")
    # Of small tiles, and of large ones, in parts that another kernel brings together.
    assert text.count("@__gpu$xla.gpu.triton") == (1 if rows == 8 else 4)


_SPLIT_HEADS = ((None, None, None, "x"), (None, None, "x"), (None, None, "x"), *(((None,),) * 4))


def test_a_pool_that_the_kernel_cannot_count_is_an_error() -> None:
    def lowered(pages: int) -> Any:
        pool, _, q, *tables = structs_of(Sizes(b=8, r=8, k=8, d=128, p=64), pages)
        pool = jax.ShapeDtypeStruct(pool.shape, jnp.int8)
        scales = jax.ShapeDtypeStruct(pool.shape[:-1], jnp.float32)
        jitted = spmd.jit(
            lambda q, pool, scales, *tables: paged_attention(q, pool, *tables, scales=scales),
            mesh=spmd.Mesh(None, (1,), ("x",)),
        )
        return jitted.lower(q, pool, scales, *tables, topology=spmd.Topology("h200:1"))

    most = (1 << 31) // (64 * 8 * 2 * 128)
    lowered(most)
    with pytest.raises(SpmdError, match=f"at most {most} pages, or more than {2 * most}"):
        lowered(most + 1)
    lowered(2 * most + 1)


@needs_cuda_plugin
@pytest.mark.parametrize("rows", [8, 64])
def test_gpus_write_in_place(rows: int) -> None:
    structs = structs_of(Sizes(b=8, r=rows, k=8, d=128, p=64), 1 << 12)
    jitted = spmd.jit(step, mesh=spmd.Mesh(None, (1,), ("x",)), donate_argnums=0)
    compiled = jitted.lower(*structs, topology=spmd.Topology("h200:1")).compile()
    assert compiled.memory.temporary < 1 << 24


# Jax's kernel for TPUs


def plain_kernel(
    q: Any, pages: Any, lengths: Any, table: Any, ends: Any, sequences: Any, *, sm_scale: float,
    sliding_window: int | None, **blocks: int,
) -> Any:  # fmt: skip
    """What jax's kernel computes: sequences of rows that end where their keys do."""
    q, pages, lengths, table, ends = map(np.asarray, (q, pages, lengths, table, ends))
    out = np.full(q.shape, np.nan, np.float32)  # of rows of no sequence nothing is written
    for i in range(int(sequences[0])):
        rows = np.arange(ends[i], ends[i + 1])
        assert len(rows) or sequences[0] == 1
        assert len(rows) <= lengths[i] <= table.shape[1] * pages.shape[1]
        stored = pages[table[i]].reshape(-1, *pages.shape[2:])
        groups = q.shape[1] // (stored.shape[1] // 2)
        keys, values = (np.repeat(stored[:, j::2], groups, axis=1) for j in (0, 1))
        for row, last in zip(rows, np.arange(lengths[i] - len(rows), lengths[i]), strict=True):
            seen = slice(max(0, last + 1 - (sliding_window or last + 1)), last + 1)
            scores = np.einsum("nd,tnd->nt", q[row], keys[seen]) * sm_scale
            weights = np.exp(scores - scores.max(-1, keepdims=True))
            weights /= weights.sum(-1, keepdims=True)
            out[row] = np.einsum("nt,tnd->nd", weights, values[seen])
    return jnp.asarray(out)


def test_tpus_leave_slots_without_rows_out(monkeypatch: pytest.MonkeyPatch) -> None:
    name = "jax.experimental.pallas.ops.tpu.ragged_paged_attention.kernel"
    monkeypatch.setattr(importlib.import_module(name), "ragged_paged_attention", plain_kernel)
    for seed in range(4):
        case = ragged(Sizes(a=2, d=128), seed)
        for window in (None, 5):
            got = attend_on_tpu(*case.operands, window=window)
            np.testing.assert_allclose(got, attended(case, window), rtol=0, atol=1e-5)
    empty = case._replace(first=np.zeros_like(case.first))
    np.testing.assert_array_equal(attend_on_tpu(*empty.operands), 0)


@pytest.mark.thorough
def test_which_programs_get_jaxs_kernel() -> None:
    def calls(sizes: Sizes, dtype: Any = jnp.bfloat16, window: int | None = None) -> int:
        fn = functools.partial(step, window=window)
        jitted = spmd.jit(fn, mesh=spmd.Mesh(None, (1,), ("x",)))
        lowered = jitted.lower(*structs_of(sizes, 64, dtype), topology=spmd.Topology("v5e:1x1"))
        return int(lowered.as_text("emitted").count("@tpu_custom_call"))

    sizes = Sizes(d=128)
    assert calls(sizes) == calls(sizes._replace(g=7, k=8)) == calls(sizes, window=100) == 1
    for other in (sizes._replace(d=64), sizes._replace(k=6), sizes._replace(p=4)):
        assert calls(other) == 0
    assert calls(sizes, jnp.float16) == 0


@pytest.mark.thorough
@needs_libtpu
@pytest.mark.parametrize(("rows", "heads"), [(16, 8), (1, 1)])
def test_tpus_write_in_place(rows: int, heads: int) -> None:
    pool, *rest = structs_of(Sizes(b=8, r=rows, k=heads, d=128, p=16, m=16), 1 << 12)

    def layers(pools: Any, new: Any, q: Any, *tables: Any) -> Any:
        written = []
        for pool in pools:
            pool, q = step(pool, new, q, *tables)
            written.append(pool)
        return written, q

    jitted = spmd.jit(layers, mesh=spmd.Mesh(None, (1,), ("x",)), donate_argnums=0)
    compiled = jitted.lower([pool, pool], *rest, topology=spmd.Topology("v5e:1x1")).compile()
    assert compiled.memory.temporary < 1 << 22
