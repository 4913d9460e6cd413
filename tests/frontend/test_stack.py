"""Stack: equal work that is done at once computes what it did, and only what is independent is."""

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax
from jax.experimental import io_callback

import spmd
from spmd import compiler
from spmd.frontend.lanes import Block, Stack, described, stacked
from spmd.ir.legality import check_program
from spmd.ir.program import Program
from spmd.planning.plan import Plan
from spmd.planning.stacks import Stacks, independent_groups, stacks_of
from tests.close import close
from tests.greedy import greedy_plans as greedy_plans
from tests.ir.dialect.cases import CASES, Case

LINE = spmd.Mesh(None, (8,), ("data",))
H200 = spmd.Topology("h200:8")
QUIET = spmd.Options(progress=False, check=True)


def everything(program: Program) -> tuple[Stack, ...]:
    """All that can be done at once, whether it pays or not."""
    block, found, taken = Block(program), list[Stack](), set[int]()
    classes: dict[Any, list[int]] = {}
    for place, op in enumerate(block.ops):
        if op.results and block.shape(place) is not None:
            classes.setdefault(block.shape(place), []).append(place)
    for places in classes.values():
        for group in independent_groups(block, places):
            seeds = tuple(place for place in group if place not in taken)
            rows = block.grown(seeds, taken) if len(seeds) > 1 else []
            rows = block.independent(rows, seeds) if rows else []
            stack = tuple(tuple(block.ops[p].results[0] for p in row) for row in rows)
            if rows and block.order([*found, stack]) is not None:
                found.append(stack)
                taken.update(place for row in rows for place in row)
    return tuple(found)


@pytest.fixture
def stacks_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """The compiler takes every stack that can be written."""
    monkeypatch.setattr(
        compiler, "stacks_of", lambda plan, _: Stacks(everything(plan.program), np.inf)
    )
    monkeypatch.setattr(compiler, "STACKED_GAIN", -np.inf)


def ops_of(lowered: Any, name: str) -> int:
    return lowered.as_text("program").count(f"stablehlo.{name} ")


def matrices(count: int, *shape: int) -> list[jax.Array]:
    return [
        jnp.asarray(np.random.RandomState(i).randn(*shape), jnp.float32) / shape[0] ** 0.5
        for i in range(count)
    ]


# Every op.

ALONE = {"conv", "conv_long_kernel", "conv_no_dims", "case", "iota_result", "mark"}
"""Cases of which nothing can be stacked, or all is a constant."""

ELEMENTWISE = {"unary", "integer"}
"""They have one form: those of two operands say as much as all."""

BATCHED = [case for case in CASES if case.name not in ALONE | ELEMENTWISE]
GROUPS = [
    pytest.param(half[i : i + 8], marks=marks)
    for half, marks in ((BATCHED[::2], ()), (BATCHED[1::2], pytest.mark.heavy))
    for i in range(0, len(half), 8)
]


def lane(args: Sequence[Any], number: int) -> list[Any]:
    """The arguments of a lane: other floats, and what is found elsewhere by indices."""
    return [
        (a * (1 - 0.1 * number)).astype(a.dtype)
        if jnp.issubdtype(a.dtype, jnp.inexact)
        else jnp.roll(a, number)
        for a in map(jnp.asarray, args)
    ]


@pytest.mark.usefixtures("stacks_all")
@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize(
    "shared",
    [None, pytest.param(0, marks=pytest.mark.heavy), pytest.param(1, marks=pytest.mark.heavy)],
)
@pytest.mark.filterwarnings("ignore:.*nothing is split over axis")
def test_lanes_compute_what_they_did(group: list[Case], shared: int | None) -> None:
    """Two lanes of each case, in which all arguments differ, or one is the same for both."""
    group = [case for case in group if shared is None or len(case.args) > 1]
    lanes = {
        case.name: [
            tuple(case.args[i] if i == shared else a for i, a in enumerate(lane(case.args, n)))
            for n in range(2)
        ]
        for case in group
    }
    same = {case.name: case.args[shared] for case in group} if shared is not None else {}

    def each(same: Any, lanes: Any) -> Any:
        def args(name: str, given: Any) -> Any:
            return [same[name] if i == shared else a for i, a in enumerate(given)]

        return {c.name: [c.fn(*args(c.name, given)) for given in lanes[c.name]] for c in group}

    options = spmd.Options(progress=False, check=True, unroll=0, cache_dir="none")
    step = spmd.jit(each, mesh=spmd.make_mesh(data=2), options=options)
    close(step(same, lanes), jax.jit(each)(same, lanes))
    assert step.compile(same, lanes).stages.plan.forms or not group


# Random programs.

Edge = tuple[int, int, int]
EDGES = st.tuples(st.integers(0, 2), st.integers(0, 30), st.integers(0, 30))


@pytest.mark.usefixtures("stacks_all")
@pytest.mark.filterwarnings("ignore:.*nothing is split over axis")
@settings(max_examples=8, deadline=None, derandomize=True, database=None)
@given(st.lists(EDGES, min_size=6, max_size=24))
def test_random_graphs(edges: list[Edge]) -> None:
    """Ops of three kinds that read any values before them: many groups, few of them lanes."""

    def graph(*args: Any) -> Any:
        values = list(args)
        for kind, i, j in edges:
            x, y = values[i % len(values)], values[j % len(values)]
            values.append(jnp.sin(x) if kind == 0 else x - y if kind == 1 else x @ y)
        return values[len(args) :]

    args = matrices(3, 4, 4)
    step = spmd.jit(graph, mesh=spmd.make_mesh(data=2), options=QUIET)
    close(step(*args), jax.jit(graph)(*args), 1e-4)


def program_of(fn: Any, *args: Any) -> Program:
    greedy = spmd.Options(progress=False, planner="greedy", unroll=0)
    return spmd.jit(fn, mesh=LINE, options=greedy).lower(*args).stages.program


# What is written.


def gram(x: Any) -> Any:
    return jnp.tanh(x @ x.T)


def test_a_row_is_written_once() -> None:
    program = program_of(lambda xs: [gram(x) * 2 for x in xs], matrices(3, 4, 6))
    (stack,) = everything(program)
    assert len(stack[0]) == 3
    assert described(program, stack[:2]).startswith("3 times transpose and 1 more op (")
    after = stacked(program, [stack])
    check_program(after)
    names = [op.label for op in after.body.ops]
    assert names.count("dot_general") == names.count("tanh") == names.count("concatenate") == 1
    assert names.count("slice") == 3  # the results
    (product,) = [op for op in after.body.ops if op.label == "dot_general"]
    assert product.kind.results[0].shape == (3, 4, 4)


def test_layers_found_from_their_gradients_stay_apart() -> None:
    """Weights' gradients are independent, what they are made of is not."""

    def loss(ws: Any, x: Any) -> Any:
        for w in ws:
            x = jnp.tanh(x @ w)
        return (x**2).sum()

    program = program_of(jax.grad(loss), matrices(4, 4, 4), matrices(1, 8, 4)[0])
    after = stacked(program, everything(program))
    check_program(after)

    def products(program: Program) -> list[tuple[int, ...]]:
        ops = (op for op in program.body.ops if op.label == "dot_general")
        return sorted(op.kind.results[0].shape for op in ops)

    # Four forward, three for what they read, four for the weights: those are one.
    assert len(products(program)) == 11
    assert products(after) == [(4, 4, 4), *[(8, 4)] * 7]


@pytest.mark.usefixtures("stacks_all")
def test_effects_stay_in_their_order() -> None:
    seen: list[int] = []

    def step(xs: Any) -> Any:
        out = []
        for number, x in enumerate(xs):
            y = gram(x)
            io_callback(lambda n, _: seen.append(int(n)), None, number, y[0, 0], ordered=True)
            out.append(y @ y)
        return out

    xs = matrices(3, 8, 8)
    jitted = spmd.jit(step, mesh=spmd.make_mesh(data=2), options=QUIET)
    compiled = jitted.compile(xs)
    assert ops_of(compiled, "dot_general") == 2
    assert compiled.as_text("program").count("spmd.callback") == 3
    got = jitted(xs)
    jax.effects_barrier()
    assert seen == [0, 1, 2]
    close(got, [gram(x) @ gram(x) for x in xs])


# What pays.


def struct(shape: Sequence[int], spec: Any = None) -> Any:
    made = jax.ShapeDtypeStruct(tuple(shape), jnp.float32)
    return made if spec is None else spmd.mark_sharding(made, LINE, spec)


def lower(fn: Any, *args: Any, **options: Any) -> spmd.Lowered:
    return spmd.jit(fn, mesh=LINE, options=QUIET, **options).lower(*args, topology=H200)


def cost_without(monkeypatch: pytest.MonkeyPatch, fn: Any, *args: Any, **options: Any) -> float:
    with monkeypatch.context() as patch:
        patch.setattr(compiler, "stacks_of", lambda plan, price: Stacks((), 0.0))
        return lower(fn, *args, **options).cost


def newton_schulz(x: Any) -> Any:
    x = x / (jnp.linalg.norm(x) + 1e-7)
    for _ in range(3):
        square = x @ x.T
        x = 3.4445 * x + (-4.775 * square + 2.0315 * square @ square) @ x
    return x


def updates(xs: Any) -> Any:
    return [x - 0.1 * newton_schulz(x) for x in xs]


def shampoo(gradients: Any) -> Any:
    out = []
    for g in gradients:
        left = g @ g.T + 0.1 * jnp.eye(g.shape[0])
        right = g.T @ g + 0.1 * jnp.eye(g.shape[1])
        values, vectors = jnp.linalg.eigh(left)
        root = (vectors * values**-0.25) @ vectors.T
        factor = jnp.linalg.cholesky(right)
        out.append(jax.scipy.linalg.cho_solve((factor, True), (root @ g).T).T)
    return out


def ensemble(members: Any, x: Any, y: Any) -> Any:
    def loss(layers: Any) -> Any:
        out = x
        for w, b in layers:
            out = jnp.tanh(out @ w + b)
        return ((out - y) ** 2).mean()

    made = []
    for layers in members:
        value, gradient = jax.value_and_grad(loss)(layers)
        made.append((value, jax.tree.map(lambda w, g: w - 0.1 * g, layers, gradient)))
    return made


def iterated(ms: Any, vs: Any) -> Any:
    def trip(m: Any) -> Any:
        return lambda _, v: m @ v / jnp.linalg.norm(m @ v)

    return [lax.fori_loop(0, 100, trip(m), v) for m, v in zip(ms, vs, strict=True)]


ROWS = ("data", None)

PAYS: dict[str, tuple[Any, tuple[Any, ...], float]] = {
    "products": (updates, ([struct((1024, 4096), ROWS)] * 16,), 0.5),
    "decompositions": (shampoo, ([struct((512, 1024), ROWS)] * 16,), 0.2),
    "loops": (iterated, ([struct((2048, 2048), ROWS)] * 8, [struct((2048, 8))] * 8), 0.3),
    "ensemble": (
        ensemble,
        ([[(struct((1024, 1024), (None, "data")), struct((1024,)))] * 3] * 8,
         *[struct((1024, 1024), ROWS)] * 2),
        0.75,
    ),
}  # fmt: skip
"""Program, arguments, and the share of its time that is left at most."""


@pytest.mark.usefixtures("exact_plans")
@pytest.mark.parametrize("name", ["decompositions", "loops", *(
    pytest.param(name, marks=pytest.mark.heavy) for name in ("products", "ensemble"))
])  # fmt: skip
def test_devices_share_equal_work(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fn, args, share = PAYS[name]
    lowered = lower(fn, *args)
    before = cost_without(monkeypatch, fn, *args)
    assert lowered.cost < share * before
    (form,) = [f for f in lowered.stages.plan.forms if f.name.startswith("stacked")]
    assert not form.refusal
    assert form.before == pytest.approx(before)
    assert form.text in lowered.summary()
    assert form.text in lowered.explain(prices=False)


VALUES: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "products": (updates, (matrices(5, 16, 24),)),
    "decompositions": (shampoo, (matrices(4, 12, 16),)),
    "loops": (iterated, (matrices(3, 16, 16), matrices(3, 16, 4))),
    "ensemble": (
        ensemble,
        ([[(w, w[0]) for w in matrices(2, 16, 16)] for _ in range(3)], *matrices(2, 8, 16)),
    ),
}


@pytest.mark.usefixtures("stacks_all")
@pytest.mark.parametrize(
    ("name", "with_gradient"), [("products", False), *((name, True) for name in VALUES)]
)
def test_values_and_gradients(name: str, with_gradient: bool) -> None:
    fn, args = VALUES[name]

    def total(*args: Any) -> Any:
        return sum((x * jnp.cos(jnp.arange(x.size).reshape(x.shape))).sum()
                   for x in jax.tree.leaves(fn(*args)))  # fmt: skip

    step = jax.grad(total) if with_gradient else fn
    found = spmd.jit(step, mesh=spmd.make_mesh(data=8), options=QUIET)
    assert found.compile(*args).stages.plan.forms
    close(found(*args), jax.jit(step)(*args), 1e-3)


def adamw_like(ws: Any, moments: Any, x: Any) -> Any:
    def loss(ws: Any) -> Any:
        out = x
        for w in ws:
            out = out + jnp.tanh(out @ w)
        return (out**2).mean()

    moments = [0.9 * m + 0.1 * g for m, g in zip(moments, jax.grad(loss)(ws), strict=True)]
    return [w - 1e-3 * m / (jnp.abs(m) + 1e-8) for w, m in zip(ws, moments, strict=True)], moments


@pytest.mark.usefixtures("exact_plans")
def test_what_devices_share_already_is_not_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[Stacks] = []

    def spied(plan: Plan, price: float) -> Stacks:
        found.append(stacks_of(plan, price))
        return found[-1]

    monkeypatch.setattr(compiler, "stacks_of", spied)
    ws = [struct((2048, 2048), ROWS)] * 6
    lowered = lower(adamw_like, ws, ws, struct((65_536, 2048), ROWS), donate_argnums=(0, 1))
    one = spmd.Mesh(None, (1,), ("data",))
    x = jax.ShapeDtypeStruct((512, 1024), jnp.float32)
    alone = spmd.jit(updates, mesh=one, options=QUIET).lower(
        [x] * 8, topology=spmd.Topology("h200:1")
    )
    assert found == [Stacks((), 0.0)] * 2
    assert lowered.stages.plan.forms == alone.stages.plan.forms == ()
