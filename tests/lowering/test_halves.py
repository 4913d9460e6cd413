"""Programs in halves: the same values, and exchanges that run beside the other half's products."""

# ruff: noqa: E501 (program texts)

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

import spmd
from benchmarks.hlo.schedule import read_schedule
from models.llama import sharding
from models.llama.named import named_config
from models.llama.training import argument_types, train_step
from spmd import trial
from spmd.ir.program import Program
from spmd.ir.text import format_program
from spmd.lowering.halves.cut import Cut
from spmd.lowering.halves.interleave import interleave
from spmd.lowering.halves.seeds import Seed
from spmd.lowering.halves.write import in_halves
from spmd.lowering.rewrites.clock import Clock
from spmd.mesh.mesh import Mesh
from spmd.mesh.topology import Topology
from tests.compilers import needs_libtpu
from tests.fuzz.cases import Case, source
from tests.fuzz.check import FAILED, run
from tests.fuzz.programs import Settings, cases
from tests.lowering.rewrites.local_programs import names, rewritten
from tests.programs import Training, llama
from tests.test_llama_step import assert_trees_close, make_mesh, reference, run_partitioned

MESH = Mesh(None, (4, 2), ("data", "model"))
CPU = Topology("cpu:8")

MLP = """program @mlp(%0: tensor<8x16xf32> "x", %1: tensor<16x32xf32> "up", %2: tensor<32x16xf32> "down") {
  %3 = stablehlo.dot_general %0, %1 {dot_dimension_numbers = dot(lhs_contract = [1], rhs_contract = [0])} : (tensor<8x16xf32>, tensor<16x32xf32>) -> tensor<8x32xf32>
  %4 = stablehlo.sign %3 : (tensor<8x32xf32>) -> tensor<8x32xf32>
  %5 = stablehlo.dot_general %4, %2 {dot_dimension_numbers = dot(lhs_contract = [1], rhs_contract = [0])} : (tensor<8x32xf32>, tensor<32x16xf32>) -> tensor<8x16xf32>
  %6 = stablehlo.all_reduce %5 {axes = {model}, body = add<f32>} : (tensor<8x16xf32>) -> tensor<8x16xf32>
  %7 = stablehlo.sign %6 : (tensor<8x16xf32>) -> tensor<8x16xf32>
  %8 = stablehlo.dot_general %7, %1 {dot_dimension_numbers = dot(lhs_contract = [1], rhs_contract = [0])} : (tensor<8x16xf32>, tensor<16x32xf32>) -> tensor<8x32xf32>
  %9 = stablehlo.dot_general %7, %8 {dot_dimension_numbers = dot(lhs_contract = [0], rhs_contract = [0])} : (tensor<8x16xf32>, tensor<8x32xf32>) -> tensor<16x32xf32>
  return %8 "y", %9 "gradient"
}"""


def halved(text: str, **cuts: Cut) -> Program:
    """A local program with some arguments in halves, which computes what it did."""

    def rewrite(program: Program) -> Program:
        args = dict(zip(program.arg_names, program.body.args, strict=True))
        written, half_of = in_halves(program, {args[n]: c for n, c in cuts.items()})
        return interleave(written, half_of, Clock(written, MESH, CPU))

    return rewritten(rewrite, text, MESH)


def test_a_small_mlp(golden: Callable[[str, str], None]) -> None:
    """Rows in halves: a sum beside a product, terms of what is contracted, results joined."""
    program = halved(MLP, x=Cut(0))
    golden("halves_mlp", format_program(program, None, MESH))
    assert Counter(names(program))["all_reduce"] == 2


BLOCKS = """program @p(%0: tensor<8x16xf32> "x") {
  %1 = stablehlo.reduce_scatter %0 {axes = {data}, body = add<f32>, scatter_dimension = 0} : (tensor<8x16xf32>) -> tensor<2x16xf32>
  %2 = stablehlo.abs %1 : (tensor<2x16xf32>) -> tensor<2x16xf32>
  %3 = stablehlo.all_gather %2 {all_gather_dim = 0, axes = {data}} : (tensor<2x16xf32>) -> tensor<8x16xf32>
  %4 = stablehlo.reshape %3 : (tensor<8x16xf32>) -> tensor<4x2x16xf32>
  %5 = stablehlo.all_to_all %4 {axes = {model}, concat_dimension = 1, split_dimension = 2} : (tensor<4x2x16xf32>) -> tensor<4x4x8xf32>
  return %5 "y"
}"""


@pytest.mark.parametrize(
    ("cut", "exchanges"),
    [
        (Cut(0, 4), 6),  # each device's piece has two halves
        (Cut(0, 1), 3),  # the halves go to different devices: they are joined first
        (Cut(1, 1), 5),  # joined in front of the all-to-all, which takes that dim apart
        (Cut(1, 2), 6),
    ],
)
def test_what_is_scattered_is_cut_in_blocks(cut: Cut, exchanges: int) -> None:
    kinds = Counter(names(halved(BLOCKS, x=cut)))
    assert kinds["reduce_scatter"] + kinds["all_gather"] + kinds["all_to_all"] == exchanges


def force(monkeypatch: pytest.MonkeyPatch, choose: Callable[[list[tuple[int, Cut]]], Any]) -> None:
    """Cuts arguments as `choose` says, of all ways there are, instead of the most promising."""

    def seeds_of(program: Program, *_: object) -> list[Seed]:
        ways = [
            (number, cut)
            for number, value in enumerate(program.body.args)
            for dim in range(program.types[value].rank)
            for cut in (Cut(dim), Cut(dim, 2))
            if cut.fits(program.types[value]) and program.types[value].size
        ]
        chosen = dict(choose(ways)) if ways else {}
        return [Seed(tuple(chosen.items()), 1.0)] if chosen else []

    monkeypatch.setattr(trial, "seeds_of", seeds_of)


@settings(
    max_examples=20,
    phases=[Phase.generate],
    database=None,
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)
@given(cases(Settings(most_lines=10)), st.randoms(use_true_random=False))
def test_random_programs_compute_what_they_did(case: Case, random: Any) -> None:
    with pytest.MonkeyPatch.context() as patch:
        force(patch, lambda ways: random.sample(ways, min(len(ways), random.randint(1, 3))))
        outcome = run(case, halves=True)
    assert outcome.status != FAILED, f"{outcome.message}\n{source(case)}"


def deep(params: Any, x: jax.Array, key: jax.Array) -> jax.Array:
    """Layers in a scan, with dropout, a conditional and a value that is exchanged for two uses."""

    def layer(x: jax.Array, w: Any) -> Any:
        kept = jax.random.bernoulli(jax.random.fold_in(key, w["number"]), 0.75, x.shape)
        h = jnp.where(kept, x, 0) @ w["up"]
        h = jax.lax.cond(w["number"] % 2 == 0, lambda h: jnp.abs(h), lambda h: 2 * h, h)
        return x + h @ w["down"], h.sum(-1)

    y, sums = jax.lax.scan(layer, x, params)
    both = jnp.concatenate([y @ params["up"][0], y @ params["up"][1]], -1)
    return (both**2).mean() + (sums**2).mean()


@pytest.mark.parametrize("rows", [8, 6])
@pytest.mark.parametrize("sizes", [(2, 4), (1, 8)])
@pytest.mark.parametrize("dim", [0, 1])
def test_scans_dropout_and_conditionals(
    monkeypatch: pytest.MonkeyPatch, sizes: tuple[int, int], rows: int, dim: int
) -> None:
    mesh = spmd.make_mesh(data=sizes[0], model=sizes[1])
    rng = np.random.RandomState(0)
    params = {
        "number": np.arange(3),
        "up": rng.randint(-2, 3, (3, 12, 16)).astype(np.float32) / 4,
        "down": rng.randint(-2, 3, (3, 16, 12)).astype(np.float32) / 4,
    }
    x = rng.randint(-3, 4, (2 * rows, 12)).astype(np.float32)
    key = jax.random.key_data(jax.random.key(1))
    specs = {"number": (None,), "up": (None, None, "model"), "down": (None, "model", None)}
    step = jax.value_and_grad(
        lambda p, x, k: deep(p, x, jax.random.wrap_key_data(k)), (0, 1), allow_int=True
    )

    def floats(params: Any, x: Any, k: Any) -> Any:
        loss, (grads, dx) = step(params, x, k)
        return loss, {n: g for n, g in grads.items() if n != "number"}, dx

    force(monkeypatch, lambda ways: [w for w in ways if w[1] == Cut(dim) and w[0] == 3])
    jitted = spmd.jit(
        floats,
        mesh=mesh,
        in_specs=(specs, ("data", None), (None,)),
        options=spmd.Options(halves=True, check=True),
    )
    compiled = jitted.compile(params, x, key)
    (form,) = compiled.stages.plan.forms
    assert form.name.startswith(f"x (dim {dim}) in two halves") and not form.refusal
    got, want = jitted(params, x, key), jax.jit(floats)(params, x, key)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5 * float(np.abs(b).max()))


def test_without_sums_along_the_dim_results_are_the_same_to_the_bit(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    mesh = spmd.make_mesh(data=2, model=4)
    rng = np.random.RandomState(0)
    shapes = ((8, 16), (16, 32), (32, 16))
    x, up, down = (jnp.asarray(rng.randint(-9, 10, s), jnp.float32) for s in shapes)
    force(monkeypatch, lambda ways: ways[:1])

    def f(x: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
        return jnp.tanh(jnp.abs(x @ up) @ down) @ up

    specs = (("data", None), (None, "model"), ("model", None))
    whole, halves = (
        spmd.jit(f, mesh=mesh, in_specs=specs, options=spmd.Options(halves=h, check=True))
        for h in (False, True)
    )
    np.testing.assert_array_equal(halves(x, up, down), whole(x, up, down))
    lowered = halves.lower(x, up, down)
    for text in (lowered.explain(), lowered.summary()):
        assert "x (dim 0) in two halves, one computed while the other is exchanged" in text


@pytest.mark.parametrize(
    ("shape", "scan"), [((2, 4), True), pytest.param((1, 8), False, marks=pytest.mark.heavy)]
)
def test_a_llama_step(monkeypatch: pytest.MonkeyPatch, shape: tuple[int, int], scan: bool) -> None:
    plain = Training.jit
    monkeypatch.setattr(Training, "jit", lambda self, **o: plain(self, halves=True, **o))
    force(monkeypatch, lambda ways: ways[-4:][::2])  # of the tokens that come last
    params, state, losses = run_partitioned(llama(make_mesh(shape), "adamw", scan))
    want_params, want_state, want_losses = reference("adamw", scan)
    np.testing.assert_allclose(losses, want_losses, rtol=1e-6)
    assert_trees_close(params, want_params)
    assert_trees_close(state, want_state)


# ---------------------------------------------------------------------------------------------
# The choice.


def lower(topology: str, sizes: tuple[int, int], scan: bool, **options: Any) -> spmd.Lowered:
    """Eight layers of Llama-2 7B's width, 4 sequences of 4096 tokens for each part of the batch."""
    mesh = spmd.Mesh(None, sizes, ("data", "model"))
    config = dataclasses.replace(
        named_config("llama2-7b"), num_hidden_layers=8, dtype="bfloat16", scan_layers=scan
    )
    optimizer = optax.adamw(1e-4)
    step = train_step(config, optimizer, sharding.activation_marks(mesh, config))
    types = argument_types(config, optimizer, mesh, (4 * sizes[0], 4096))
    jitted = spmd.jit(step, mesh=mesh, donate_argnums=(0, 1), options=spmd.Options(**options))
    return jitted.lower(*types, topology=Topology(topology))


def waits(lowered: spmd.Lowered) -> float:
    """Seconds for which arithmetic waits, where running side by side costs nothing."""
    return lowered.timeline.scheduled_seconds - lowered.timeline.compute_seconds


@pytest.mark.parametrize("scan", [True, pytest.param(False, marks=pytest.mark.heavy)])
def test_less_is_waited_for(scan: bool) -> None:
    whole, halves = (lower("h200:2", (1, 2), scan, halves=h, unroll=0) for h in (False, True))
    assert waits(halves) < 0.5 * waits(whole)
    assert halves.predicted_memory.peak < 1.05 * whole.predicted_memory.peak


def test_the_prediction_decides() -> None:
    """TPUs hide what runs side by side; on two H200s less would be won than halves cost."""
    tpu = lower("v6e:4x4", (4, 4), True, halves=None, unroll=0)
    gpu = lower("h200:2", (1, 2), True, halves=None, unroll=0)
    form = next(form for form in tpu.stages.plan.forms if "halves" in form.name)
    assert form.name.startswith("batch/inputs (dim 0), batch/targets (dim 0)") and not form.refusal
    assert form.seconds and tpu.timeline.seconds == form.seconds < 0.98 * form.before
    assert all(form.refusal for form in gpu.stages.plan.forms if "halves" in form.name)


def test_cpus_hide_nothing() -> None:
    training = llama(make_mesh((1, 8)), "adamw", True)
    assert not training.lower().stages.plan.forms


def test_it_says_when_nothing_can_be_halved() -> None:
    mesh = spmd.make_mesh(data=8)
    options = spmd.Options(halves=True)
    lowered = spmd.jit(jnp.tanh, mesh=mesh, in_specs=(("data",),), options=options).lower(
        jnp.ones(8)
    )
    assert not lowered.stages.plan.forms
    assert "not run in halves" in lowered.explain()


@needs_libtpu
def test_gathers_run_beside_the_other_half() -> None:
    """Each gather stands between two products; only the other half's can run meanwhile."""
    mesh = spmd.Mesh(None, (2, 4), ("data", "model"))

    def mlp(x: jax.Array, layers: Any) -> jax.Array:
        for up, down in layers:
            x = x + spmd.mark_sharding(jax.nn.gelu(x @ up) @ down, mesh, ("data", None, "model"))
        return x

    def struct(shape: Any, *spec: Any) -> Any:
        return spmd.mark_sharding(jax.ShapeDtypeStruct(shape, jnp.bfloat16), mesh, spec)

    x = struct((8, 1024, 2048), "data", None, "model")
    layer = struct((2048, 8192), None, "model"), struct((8192, 2048), "model", None)
    hidden = []
    for halves in (False, True):
        options = spmd.Options(halves=halves)
        lowered = spmd.jit(mlp, mesh=mesh, options=options).lower(
            x, [layer] * 2, topology=Topology("v5e:2x4")
        )
        schedule = read_schedule(lowered.compile().as_text("hlo"))
        pairs = zip(schedule.collectives, schedule.hidden, strict=True)
        hidden.append(sum(c.count for c, beside in pairs if beside and c.kind == "all_gather"))
    assert hidden[0] == 0
    assert hidden[1] >= 2
