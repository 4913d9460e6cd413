"""The exact planner: its network says what its plan costs, and no plan it knows is cheaper."""

from functools import cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import pytest

import spmd
from spmd import compiler
from spmd.compiler import plan_problem, timed
from spmd.errors import PlanError
from spmd.ir.program import Op
from spmd.lowering.rewrites.schedule import schedule
from spmd.planning import exact
from spmd.planning.choices import Choices
from spmd.planning.exact import _try_nearby, weighed
from spmd.planning.greedy import _Greedy, plan_greedily
from spmd.planning.network import CostNetwork
from spmd.planning.plan import Choice, Plan
from spmd.planning.search import Search
from spmd.planning.solver import solve
from spmd.planning.units import domains_of, units_of
from tests import programs

pytestmark = pytest.mark.usefixtures("devices8")


def accumulated(how: str, micro: int = 8) -> Any:
    """A step that sums the gradients of several microbatches: in a scan, a loop, or unrolled."""

    def step(w: Any, batch: Any) -> Any:
        grad = jax.grad(lambda w, x: jnp.mean(jnp.tanh(jnp.tanh(x @ w["a"]) @ w["b"]) ** 2))
        zeros = jax.tree.map(jnp.zeros_like, w)
        if how == "scan":

            def body(total: Any, x: Any) -> Any:
                return jax.tree.map(jnp.add, total, grad(w, x)), None

            total, _ = jax.lax.scan(body, zeros, batch)
        elif how == "fori":

            def turn(i: Any, total: Any) -> Any:
                return jax.tree.map(jnp.add, total, grad(w, batch[i]))

            total = jax.lax.fori_loop(0, micro, turn, zeros)
        else:
            total = zeros
            for i in range(micro):
                total = jax.tree.map(jnp.add, total, grad(w, batch[i]))
        return jax.tree.map(lambda p, g: p - 0.1 * g / micro, w, total)

    return step


WAYS = ("scan", "fori", "unrolled")


def test_one_device_is_not_searched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its one plan is scheduled once: at a price of memory at which nothing is made again, too."""
    monkeypatch.setattr(exact, "weighed", None)
    scheduled: list[Any] = []

    def noting(*given: Any) -> Any:
        scheduled.append(given)
        return schedule(*given)

    monkeypatch.setattr(compiler, "schedule", noting)

    def twice(x: Any) -> Any:
        return jax.lax.fori_loop(0, 9, jnp.add, jax.lax.fori_loop(0, 9, jnp.add, x))

    lowered = spmd.jit(twice, mesh=spmd.Mesh(None, (1,), ("data",))).lower(jnp.ones(8))
    assert len(scheduled) == 1
    assert not lowered.stages.plan.recomputed


def weights(mesh: spmd.Mesh, spec: Any, size: int = 512) -> Any:
    marks = {"a": spec, "b": tuple(reversed(spec))}
    return {
        name: spmd.mark_sharding(jax.ShapeDtypeStruct((size, size), jnp.float32), mesh, marks[name])
        for name in "ab"
    }


@cache
def lowered_steps(how: str, spec: Any, **options: Any) -> spmd.Lowered:
    mesh = spmd.make_mesh(data=8)
    batch = spmd.mark_sharding(
        jax.ShapeDtypeStruct((8, 8192, 512), jnp.float32), mesh, (None, "data", None)
    )
    step = spmd.jit(
        accumulated(how), mesh=mesh, donate_argnums=0, options=spmd.Options(check=True, **options)
    )
    return step.lower(weights(mesh, spec), batch, topology=spmd.Topology("h200:8"))


@pytest.mark.parametrize(
    ("how", "spec"), [("scan", (None, None)), *((how, ("data", None)) for how in WAYS)], ids=str
)
def test_accumulated_gradients_are_reduced_once(how: str, spec: Any) -> None:
    collectives = lowered_steps(how, spec).collectives
    reductions = [c for c in collectives if c.kind in ("all_reduce", "reduce_scatter")]
    assert reductions
    gradient = 512 * 512 * 4
    assert sum(c.bytes * (c.count or 16) for c in reductions) <= 2 * 2 * gradient
    assert all(c.count == 1 for c in collectives), "gathers of weights move out of the loop as well"


def training(name: str) -> spmd.Lowered:
    mesh = spmd.make_mesh(data=4, model=2)
    if name == "mlp":
        return programs.mlp(mesh).lower()
    return programs.llama(mesh, "adamw", scan=name == "scanned").lower()


@pytest.mark.parametrize(
    "name", ["mlp", *(pytest.param(n, marks=pytest.mark.heavy) for n in ("scanned", "unrolled"))]
)
def test_the_network_costs_what_the_plan_costs(name: str) -> None:
    problem = training(name).stages.plan.problem
    units = units_of(problem)
    choices = Choices(problem)
    axes = [atoms for atoms in problem.mesh.axis_atoms.values() if atoms]
    network = CostNetwork(problem, units, choices, domains_of(problem, units, choices, axes))
    solution = solve(network.network)
    trial = plan_problem(problem, spmd.Options())
    programs.assert_marks_hold(trial.plan)
    assert solution.exact
    assert solution.cost <= trial.plan.seconds * (1 + 1e-6)
    assert trial.seconds <= timed(plan_greedily(problem), spmd.Options()).run_seconds


def test_a_memory_limit_is_kept_or_refused() -> None:
    free = lowered_steps("scan", ("data", None))
    limit = int(free.predicted_memory.peak * 0.95)
    tight = lowered_steps("scan", ("data", None), memory_limit=limit)
    assert tight.predicted_memory.peak <= limit
    assert tight.cost > free.cost
    assert "times as long" in tight.stages.plan.notes[-1]
    with pytest.raises(PlanError, match=r"no plan (was found that )?keeps to"):
        lowered_steps("scan", ("data", None), memory_limit=1 << 20)


def test_equal_ops_of_which_one_is_fused_take_their_own_time() -> None:
    class Checked(_Greedy):
        def choose(self, op: Op) -> tuple[Choice, float]:
            found = super().choose(op)
            assert found[1] == self.options.own_seconds(op, found[0].assignment), op
            return found

    def program(x: Any, y: Any) -> Any:
        return jnp.exp(x) + 1, jnp.exp(y)

    struct = jax.ShapeDtypeStruct((1024, 1024), jnp.float32)
    mesh = spmd.Mesh(None, (4, 2), ("data", "model"))
    step = spmd.jit(program, mesh=mesh, in_specs=(("data", None),) * 2)
    problem = step.lower(struct, struct).stages.plan.problem
    Checked(problem, Choices(problem)).run()


def test_a_nearby_plan_that_fits_is_kept_where_the_fastest_does_not() -> None:
    class Made(NamedTuple):
        plan: Plan
        seconds: float
        bytes: int

    greedy, costs = weighed(training("mlp").stages.plan.problem)
    search = Search[Any](5, [Made(greedy, 1.0, 9)])
    _try_nearby(costs, costs.solution, search, lambda plan: Made(plan, 2.0, 4), [])
    assert search.best.bytes == 4
    assert len(search.tried) == 2
