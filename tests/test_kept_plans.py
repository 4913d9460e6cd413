"""Plans that an earlier start made: what is read is what would be planned, and only then."""

import functools
import hashlib
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import spmd
from spmd import compiler
from spmd.planning.plan import Plan
from tests.programs import mlp

MESH = spmd.Mesh(None, (4, 2), ("data", "model"))


class Planned(AssertionError):
    """A plan was made where one should have been read."""


@pytest.fixture
def no_planner(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """Forbids planning from when it is called."""

    def refuse(*_: Any, **__: Any) -> Any:
        raise Planned

    def forbid() -> None:
        for planner in ("plan_exactly", "plan_greedily"):
            monkeypatch.setattr(compiler, planner, refuse)

    return forbid


def struct(shape: Any, *spec: Any, mesh: spmd.Mesh = MESH) -> Any:
    made = jax.ShapeDtypeStruct(shape, jnp.float32)
    return spmd.mark_sharding(made, mesh, spec) if spec else made


def layers(ws: Any, x: Any) -> Any:
    def layer(x: Any, w: Any) -> Any:
        return x + jax.nn.gelu(x @ w["in"] / 8) @ w["out"] / 16, None

    return jnp.mean(lax.scan(layer, x, ws)[0] ** 2)


def lower_layers(
    limit: int | None = None, topology: str = "h200:8", width: int = 512, **options: Any
) -> spmd.Lowered:
    ws = {
        "in": struct((8, width, 4 * width), None, "data", "model"),
        "out": struct((8, 4 * width, width), None, "model", "data"),
    }
    chosen = spmd.Options(memory_limit=limit, **options)
    jitted = spmd.jit(jax.value_and_grad(layers), mesh=MESH, options=chosen)
    return jitted.lower(ws, struct((4096, width), "data", None), topology=spmd.Topology(topology))


def lower_uneven(**options: Any) -> spmd.Lowered:
    def f(x: Any, w: Any) -> Any:
        jax.debug.print("{}", x.sum())
        x = spmd.mark_sharding(x, MESH, ("data", None))
        return jnp.tanh(x @ w), lax.fori_loop(0, 3, lambda _, x: x @ w, x)

    jitted = spmd.jit(f, mesh=MESH, options=spmd.Options(**options))
    return jitted.lower(struct((10, 6)), struct((6, 6), "model", None))


def lower_stacked(**options: Any) -> spmd.Lowered:
    def f(xs: Any) -> Any:
        return [lax.fori_loop(0, 9, lambda _, x: x - x @ (x.T @ x), x) for x in xs]

    mesh = spmd.Mesh(None, (8,), ("data",))
    jitted = spmd.jit(f, mesh=mesh, options=spmd.Options(**options))
    xs = [struct((1024, 2048), "data", None, mesh=mesh) for _ in range(8)]
    return jitted.lower(xs, topology=spmd.Topology("h200:8"))


@functools.cache
def peak() -> int:
    return lower_layers(unroll=0).predicted_memory.peak


CASES: dict[str, Callable[..., spmd.Lowered]] = {
    "loops stay": lambda **o: lower_layers(unroll=0, **o),
    "form": lambda **o: lower_layers(width=2048, **o),
    "limit": lambda **o: lower_layers(limit=int(0.8 * peak()), unroll=0, **o),
    "greedy": lambda **o: lower_layers(topology="cpu:8", planner="greedy", **o),
    "uneven": lower_uneven,
    "stacked": lower_stacked,
    "training": lambda **o: mlp(spmd.make_mesh(data=4, model=2)).lower(**o),
}


def decided(plan: Plan) -> dict[str, Any]:
    return {name: value for name, value in plan._asdict().items() if name != "problem"}


def without_times(text: str) -> str:
    return re.sub(r"^ *(solver|planned in) .*\n", "", text, flags=re.M)


First = Callable[[str], tuple[Path, spmd.Lowered]]


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> First:
    """The folder and the first start of a case, which is planned but once."""

    @functools.cache
    def start(name: str) -> tuple[Path, spmd.Lowered]:
        folder = tmp_path_factory.mktemp("kept")
        return folder, CASES[name](cache_dir=folder)

    return start


@pytest.mark.parametrize("name", CASES)
def test_what_is_read_is_what_was_planned(
    name: str, first: First, no_planner: Callable[[], None]
) -> None:
    folder, planned = first(name)
    if name in ("uneven", "training"):
        plain = CASES[name](cache_dir="none")
        assert not plain.stages.is_read
        assert planned.stages.emitted.module == plain.stages.emitted.module
    if name != "uneven":  # a warning says what its mark costs, and plans without it for that
        no_planner()
    read = CASES[name](cache_dir=folder)
    assert not planned.stages.is_read and read.stages.is_read
    assert "plan" in planned.stages.seconds and "plan" not in read.stages.seconds
    assert read.stages.emitted.module == planned.stages.emitted.module
    assert read.stages.emitted.arguments == planned.stages.emitted.arguments
    assert read.stages.emitted.results == planned.stages.emitted.results
    assert decided(read.stages.plan) == decided(planned.stages.plan)
    assert read.stages.timeline.seconds == planned.stages.timeline.seconds
    assert read.predicted_memory == planned.predicted_memory


def test_the_cases_cover_what_a_plan_can_be(first: First) -> None:
    plans = {name: first(name)[1].stages.plan for name in CASES}
    assert plans["limit"].byte_price and plans["limit"].recomputed
    assert any("written out" in f.name and not f.refusal for f in plans["form"].forms)
    assert any("does not divide" in note for note in plans["uneven"].notes)
    assert plans["loops stay"].copies or plans["training"].moves


@pytest.mark.thorough
def test_everything_can_be_asked_of_a_plan_that_was_read(
    tmp_path: Path, no_planner: Callable[[], None], capfd: pytest.CaptureFixture[str]
) -> None:
    training = mlp(spmd.make_mesh(data=4, model=2))
    planned = training.compile(cache_dir=tmp_path)
    explained = planned.explain()
    capfd.readouterr()
    compiled = training.compile(cache_dir=tmp_path, verbose=True)
    assert compiled.stages.is_read
    assert without_times(compiled.explain()) == without_times(explained)
    assert "; in an earlier start" in compiled.explain()
    assert "an earlier start" in compiled.summary() and "an earlier start" not in planned.summary()
    printed = capfd.readouterr().err
    assert "spmd: read " in printed and "spmd: plan " not in printed
    compiled.report(tmp_path / "page.html")
    assert (tmp_path / "page.html").stat().st_size > 10_000
    state = training.optimizer.init(training.params)
    assert compiled.verify(training.params, state, training.batch)


def test_anything_that_decides_plans_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept = tmp_path / "planned"

    def lower(
        mesh: spmd.Mesh = MESH,
        shape: tuple[int, int] = (64, 64),
        spec: Any = ("data", None),
        topology: str = "cpu:8",
        donate: tuple[int, ...] = (),
        f: Callable[..., Any] = lambda x: x @ x,
        **options: Any,
    ) -> bool:
        options = {"cache_dir": tmp_path, **options}
        jitted = spmd.jit(f, mesh=mesh, donate_argnums=donate, options=spmd.Options(**options))
        x = struct(shape, *spec, mesh=mesh)
        return jitted.lower(x, topology=spmd.Topology(topology)).stages.is_read

    assert not lower() and lower()
    changes: list[dict[str, Any]] = [
        {"mesh": spmd.Mesh(None, (2, 4), ("data", "model"))},
        {"mesh": spmd.Mesh(None, (4, 2), ("data", "tensor"))},
        {"mesh": spmd.Mesh([1, 0, 2, 3, 4, 5, 6, 7], (4, 2), ("data", "model"))},
        {"shape": (128, 128)}, {"spec": ("model", None)}, {"topology": "h200:8"}, {"donate": (0,)},
        {"f": lambda x: x @ x.T}, {"recompute": False}, {"memory_limit": 1 << 30},
        {"planner": "greedy"},
    ]  # fmt: skip
    for change in changes:
        assert not lower(**change), change
        assert lower(**change), change
    assert len(list(kept.iterdir())) == 1 + len(changes)
    same: list[dict[str, Any]] = [
        {"check": True},
        {"progress": False},
        {"compiler_options": {"xla_cpu_enable_fast_math": True}},
    ]
    for change in same:
        assert lower(**change), change
    assert not lower(cache_dir="none")
    for entry in kept.iterdir():
        entry.write_bytes(entry.read_bytes()[:-7])
    assert not lower() and lower()
    lower_uneven(cache_dir=tmp_path)
    monkeypatch.setattr("spmd.store._environment", lambda: "another")
    assert not lower_uneven(cache_dir=tmp_path).stages.is_read


def test_reports_name_the_lines_of_now(tmp_path: Path, no_planner: Callable[[], None]) -> None:
    text = "def f(x):\n    return x @ x\n"

    def lower(text: str) -> spmd.Lowered:
        space: dict[str, Any] = {}
        exec(compile(text, "/somewhere/model.py", "exec"), space)
        return spmd.jit(space["f"], mesh=MESH, options=spmd.Options(cache_dir=tmp_path)).lower(
            struct((64, 64), "data", "model")
        )

    assert "model.py:2" in lower(text).explain(prices=False)
    no_planner()
    moved = lower("\n" * 5 + text)
    assert moved.stages.is_read
    explained = moved.explain(prices=False)
    assert "model.py:7" in explained and "model.py:2 " not in explained


def test_what_users_teach_is_planned_anew(tmp_path: Path) -> None:
    name = "test.kept"
    spmd.register_composite(name, "a -> a", decomposition=jnp.tanh)

    def lower(called: str) -> spmd.Lowered:
        f = jax.lax.composite(jnp.tanh, name=called)
        options = spmd.Options(cache_dir=tmp_path)
        return spmd.jit(f, mesh=MESH, options=options).lower(struct((8,), "data"))

    for _ in range(2):
        assert not lower(name).stages.is_read
    assert not lower("not.taught").stages.is_read
    assert lower("not.taught").stages.is_read


def read_or_planned(folder: str) -> dict[str, Any]:
    """Whether a plan was read, and a digest of what was emitted."""
    options = spmd.Options(cache_dir=folder)
    jitted = spmd.jit(lambda w: jnp.tanh(w @ w).sum(), mesh=MESH, options=options)
    stages = jitted.lower(struct((64, 64), "data", "model")).stages
    digest = hashlib.sha256(stages.emitted.module.encode()).hexdigest()
    return {"is_read": stages.is_read, "digest": digest}


@pytest.mark.thorough
def test_processes_share_what_they_find(tmp_path: Path) -> None:
    environment = {**os.environ, "PYTHONHASHSEED": "random"}
    program = f"""import json
from tests.test_kept_plans import read_or_planned
print(json.dumps(read_or_planned({str(tmp_path)!r})))"""

    def start() -> subprocess.Popen[str]:
        command, root = [sys.executable, "-c", program], Path(__file__).parents[1]
        pipe = subprocess.PIPE
        return subprocess.Popen(command, env=environment, cwd=root, stdout=pipe, text=True)

    def end(process: subprocess.Popen[str]) -> dict[str, Any]:
        said, _ = process.communicate(timeout=240)
        assert process.returncode == 0
        found: dict[str, Any] = json.loads(said.splitlines()[-1])
        return found

    found = [end(process) for process in [start(), start()]]
    # What is read here was written where strings have other hashes.
    later = read_or_planned(str(tmp_path))
    assert len(list((tmp_path / "planned").iterdir())) == 1
    assert later["is_read"]
    assert {each["digest"] for each in found} == {later["digest"]}
    assert np.sum([each["is_read"] for each in found]) < 2
