"""`spmd explain`: a StableHLO file in, an explanation out, on no device at all."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import spmd
from spmd.api import STAGES
from spmd.cli import explain
from spmd.cli.main import main
from tests.waiting import PATIENCE

ROOT = Path(__file__).parents[2]
FLAGS = ("--mesh=data=4,model=2", "--topology=h200:8")
FORMS = ("text", "bytecode", "portable")


def two_layers(params: Any, x: Any) -> Any:
    return {"y": jax.nn.relu(x @ params["w_in"]) @ params["w_out"]}


def lowered_by_jax() -> Any:
    def struct(*shape: int) -> Any:
        return jax.ShapeDtypeStruct(shape, jnp.float32)

    params = {"w_in": struct(64, 128), "w_out": struct(128, 64)}
    return jax.jit(two_layers).lower(params, struct(32, 64)).compiler_ir("stablehlo")


@pytest.fixture(scope="module")
def modules(tmp_path_factory: Any) -> dict[str, str]:
    """The program as a file, in each of the forms that modules come in; all keep names."""
    from jaxlib.mlir.dialects import stablehlo

    found = lowered_by_jax()
    folder: Path = tmp_path_factory.mktemp("module")
    paths = {form: folder / f"{form}.mlir" for form in FORMS}
    paths["text"].write_text(found.operation.get_asm(enable_debug_info=True))
    with open(paths["bytecode"], "wb") as file:
        found.operation.write_bytecode(file)
    version = stablehlo.get_minimum_version()  # last, for it changes the module
    paths["portable"].write_bytes(stablehlo.serialize_portable_artifact(found, version))
    return {form: str(path) for form, path in paths.items()}


@pytest.fixture
def module(modules: dict[str, str]) -> str:
    return modules["text"]


def explained(capsys: Any, *arguments: str) -> str:
    assert explain.main([*arguments, *FLAGS]) == 0
    return str(capsys.readouterr().out)


def test_specs_by_name_pattern_and_position(module: str, capsys: Any) -> None:
    given = (
        "--arg-spec=params/w_in=None,model",
        "--arg-spec",
        "2=data,None",
        "--arg_spec=*out=-,-",
    )
    text = explained(capsys, module, *given)
    rows = {line.split()[0]: line for line in text.splitlines() if line.strip()}
    assert '(None, "model")' in rows["params/w_in"]
    assert '("data", None)' in rows["x"]
    assert "replicated" in rows["params/w_out"]
    assert "topology     h200:8" in text
    assert "test_explain.py" in text  # the user's lines


def test_one_value_and_a_source_line(module: str, capsys: Any) -> None:
    given = (module, "--arg-spec=2=data,None", "--value=params/w_in", "--value=%2")
    text = explained(capsys, *given)
    assert "argument params/w_in (%0)" in text
    assert "instead (planned again with each):" in text
    line = two_layers.__code__.co_firstlineno + 1
    text = explained(capsys, module, "--arg-spec=2=data,None", f"--value=test_explain.py:{line}")
    assert "dot_general" in text


@pytest.mark.parametrize("stage", STAGES[1:-1])
def test_stages(module: str, capsys: Any, stage: str) -> None:
    assert "dot_general" in explained(capsys, module, "--arg-spec=2=data,None", f"--stage={stage}")


def test_report(module: str, capsys: Any, tmp_path: Path) -> None:
    path = tmp_path / "r.html"
    explained(capsys, module, "--arg-spec=2=data,None", f"--report={path}", "--no-prices")
    assert path.read_text().startswith("<!doctype html>")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--arg-spec=params/win=data",), "'params/win' matches no argument"),
        (("--arg-spec=9=data",), "there is no 9 among 3"),
        (("--arg-spec=data",), "is not of the form"),
        (("--value=nothing",), "no value 'nothing'"),
        (("--topology=abacus:8",), "abacus"),
    ],
)
def test_what_is_wrong_is_said(module: str, capsys: Any, arguments: Any, words: str) -> None:
    assert main(["explain", module, *FLAGS[:1], *arguments]) == 2
    assert words in capsys.readouterr().err


def test_flags_that_cannot_be_read_end_it(module: str, capsys: Any) -> None:
    for flags in (
        ["--mesh=data"], ["--mesh=data=2,data=2"], ["--stage=none"], ["--meshes=data=2"],
        ["--stage=local", "--value=x"],
    ):  # fmt: skip
        with pytest.raises(SystemExit) as stop:
            explain.main([module, *flags])
        assert stop.value.code == 2
        error = capsys.readouterr().err
        assert error.startswith("error: ")
        assert error.endswith("; spmd explain --help lists the flags\n")


@pytest.mark.thorough
def test_it_needs_no_devices(module: str) -> None:
    """A process of its own, with one CPU device, plans for 256 chips."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", "XLA_FLAGS": ""}
    command = [sys.executable, "-m", "spmd.cli.main", "explain", module, "--mesh=data=16,model=16"]
    command += ["--topology=v5e:16x16", "--arg-spec=2=data,None"]
    found = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=PATIENCE
    )
    assert found.returncode == 0, found.stderr
    assert "256 devices" in found.stdout


def test_help_shows_examples(capsys: Any) -> None:
    with pytest.raises(SystemExit) as stop:
        explain.main(["--help"])
    assert stop.value.code == 0
    text = capsys.readouterr().out
    assert "--arg_spec params/w=None,model" in text
    assert "data+model" in text


@pytest.mark.parametrize("form", FORMS)
def test_lower_stablehlo_takes_specs_by_name_and_runs_nothing(form: str, modules: Any) -> None:
    mesh = spmd.Mesh(None, (4, 2), ("data", "model"))
    lowered = spmd.lower_stablehlo(modules[form], mesh, {"x": ("data", None)})
    assert lowered.stages.plan.program.arg_names == ("params/w_in", "params/w_out", "x")
    assert lowered.stages.plan.program.result_names == ("y",)
