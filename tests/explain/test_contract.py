"""A plan that is kept: what became worse is named, what did not matter is not."""

import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import spmd
from spmd.cli.main import main
from spmd.explain import Budget, assert_plan, from_json
from spmd.explain.contract import WRITE, breaches
from spmd.explain.data import PlanReport

PROGRAM = """
import jax, jax.numpy as jnp, numpy as np, spmd

def build(mesh, rows: int = 512, dtype: str = "float32"):
    def step(w, x):
        h = jnp.tanh(x @ w)
        h = spmd.mark_sharding(h, mesh, ("data", None))
        return (h ** 2).mean()
    structs = [jax.ShapeDtypeStruct(shape, dtype) for shape in ((1024, 1024), (rows, 1024))]
    return jax.grad(step), structs
"""


def plan(topology: str = "v5e:2x4", **changes: Any) -> PlanReport:
    mesh = spmd.make_mesh(data=8, topology=topology)
    mark, dtype, twice = (changes.get(k) for k in ("mark", "dtype", "twice"))

    def step(w: Any, x: Any) -> Any:
        h = spmd.mark_sharding(jnp.tanh(x @ w), mesh, mark or ("data", None))
        if twice:  # somebody looks at all of it
            h = h * spmd.mark_sharding(h, mesh, (None, None)).max()
        return (h**2).mean()

    structs = [jax.ShapeDtypeStruct(s, dtype or "bfloat16") for s in ((1024, 1024), (4096, 1024))]
    lowered = spmd.jit(jax.grad(step), mesh=mesh).lower(*structs)
    return from_json(json.loads(json.dumps(lowered.to_json())))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"dtype": "float32"}, "the peak memory of a device grew from"),
        ({"twice": True}, "all_gather over data: 1 run"),
        ({"mark": (None, None)}, "the peak memory of a device grew"),
    ],
)
def test_what_became_worse_is_named(changes: Any, says: str) -> None:
    kept = plan()
    assert not breaches(kept, plan())
    found = breaches(kept, plan(**changes))
    assert any(line.startswith(says) for line in found), found
    if "runs" in says or "run" in says:
        assert any("test_contract.py" in line for line in found), found
    assert not breaches(kept, plan(**changes), Budget(99.0, 99.0, 99.0)) or "twice" in changes


def test_the_file_of_a_test(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mesh, file = spmd.make_mesh(data=8, topology="h200:8"), tmp_path / "plans" / "step.json"

    def step(wide: Any) -> spmd.Lowered:
        x = jax.ShapeDtypeStruct((4096, wide), jnp.float32)
        return spmd.jit(lambda x: x.sum(0), mesh=mesh, in_specs=(("data", None),)).lower(x)

    with pytest.raises(AssertionError, match=f"{WRITE}=1 writes it"):
        assert_plan(step(64), file)
    monkeypatch.setenv(WRITE, "1")
    assert_plan(step(64), file)
    monkeypatch.delenv(WRITE)
    assert_plan(step(64), file)
    with pytest.raises(AssertionError, match="the plan became worse") as caught:
        assert_plan(step(4096), file)
    assert "over data: 1 run" in str(caught.value) and "test_contract.py" in str(caught.value)


def test_commands(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    program, kept, new = (tmp_path / name for name in ("program.py", "kept.json", "new.json"))
    program.write_text(PROGRAM)
    build = f"{program}:build"
    flags = ["v5e-8", "--mesh", "data=8", "--json"]
    assert main(["plan", build, *flags, str(kept)]) == 0
    assert main(["check", str(kept), build]) == 0
    assert f"{build} keeps to {kept}" in capsys.readouterr().out
    program.write_text(PROGRAM.replace("512", "4096"))
    assert main(["check", str(kept), build]) == 1
    assert "the peak memory of a device grew" in capsys.readouterr().out
    assert main(["plan", build, *flags, str(new)]) == 0
    assert main(["diff", str(kept), str(kept)]) == 0
    assert "nothing changed" in capsys.readouterr().out
    assert main(["diff", str(kept), str(new), "--report", str(tmp_path / "page.html")]) == 1
    assert "predicted time" in (tmp_path / "page.html").read_text()
    assert main(["check", str(kept), build, "--write"]) == 0 == main(["check", str(kept), build])
    capsys.readouterr()
    for words in (["diff", str(program), str(kept)], ["check", str(tmp_path / "no"), build]):
        assert main(words) == 2 and capsys.readouterr().err.startswith("error: ")
