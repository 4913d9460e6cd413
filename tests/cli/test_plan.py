"""`spmd plan`: programs and machines by name, a table, a page, and settings that trainers read."""

import json
from pathlib import Path

import jax
import numpy as np
import pytest
import yaml

from spmd.cli.main import main
from spmd.explain.data import from_json
from spmd.scripts import export_llama, train_llama
from spmd.scripts.flags.train import make_parser

BUILD = """
import jax, numpy as np, spmd

def build(mesh, rows=(256, 512), width: int = 64):
    def step(x, w):
        return spmd.mark_sharding(x, mesh, ("data", None)) @ w
    return step, [jax.ShapeDtypeStruct(s, np.float32) for s in ((rows, width), (width, width))]
"""


def test_a_users_own_function(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    (tmp_path / "program.py").write_text(BUILD)
    out = tmp_path / "specs.py"
    program = f"{tmp_path}/program.py:build"
    assert main(["plan", program, "v5e-8", "--width", "128", "--out", str(out)]) == 0
    text = capsys.readouterr().out
    assert text.startswith("build on v5e:2x4: ") and "rows" in text.splitlines()[1]
    assert "x = spmd.mark_sharding(x, mesh, ('data', None))" in out.read_text()


def test_a_named_model_and_its_settings(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    """What `--out` writes, train_llama takes."""
    out, page = tmp_path / "best.yaml", tmp_path / "page.html"
    flags = ["--batch", "16", "--seq_len", "64", "--remat", "full", "--sharding", "2d"]
    flags += ["--mesh", "data=2,model=2"]
    kept = tmp_path / "best.json"
    files = ["--out", str(out), "--report", str(page), "--json", str(kept)]
    assert main(["plan", "tiny", "h200:4", *flags, *files]) == 0
    assert "MFU" in capsys.readouterr().out and page.read_text().startswith("<!doctype html>")
    given = make_parser(None).parse_args(["--settings", str(out)])
    assert given.mesh == yaml.safe_load(out.read_text())["mesh"] and given.model == "tiny"
    assert (given.global_batch, given.seq_len, given.remat) == (16, 64, "full")
    data = json.loads(kept.read_text())
    assert data["settings"] == yaml.safe_load(out.read_text()) and data["choices"]["batch"] == 16
    assert from_json(data).timeline.seconds > 0


def test_a_run_and_a_bundle_plan_themselves(capsys: pytest.CaptureFixture[str]):
    """`--plan` of train_llama and export_llama: adapters and all, in one line to go on with."""
    run = "--model tiny --lora rank=2 --seq_len 64 --global_batch 16 --remat full --sharding 2d"
    with pytest.raises(SystemExit) as ended:
        train_llama.main([*run.split(), "--plan", "h200:1", "--mesh", "data=1"])
    said = capsys.readouterr().out
    assert ended.value.code == 0 and said.startswith("tiny on h200:1: ")
    flags = said.partition("train so: ")[2].split()
    assert make_parser(None).parse_args([*run.split(), *flags]).mesh == {"data": 1, "model": 1}
    made = "--model tiny --slots 4 --traffic prompt=64,answer=8,at_once=4 --plan h200:1"
    with pytest.raises(SystemExit) as ended:
        export_llama.main(made.split())
    said = capsys.readouterr().out
    assert ended.value.code == 0 and "best: export_llama --slots 4" in said


def test_a_stablehlo_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    structs = [jax.ShapeDtypeStruct(s, np.float32) for s in ((512, 64), (64, 64))]
    file = tmp_path / "model.mlir"
    file.write_text(jax.jit(lambda x, w: x @ w).lower(*structs).as_text())
    meshes = ["--mesh", "data=8", "--mesh", "data=4,model=2"]
    assert main(["plan", str(file), "v5e-8", *meshes]) == 0
    assert "data=4, model=2" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["tiny", "h200:4"], "no value for 'batch'"),
        (["tiny", "h900:4", "--batch", "8"], "unknown chip 'h900'"),
        (["llama9", "h200:4", "--batch", "8"], "llama9"),
        (["tiny", "h200:4", "--batch"], "'--batch' is no flag with a value"),
        (["nowhere.py:build", "h200:4"], "no file nowhere.py"),
        (["nowhere:build", "h200:4"], "No module named 'nowhere'"),
        (["tests.cli.test_plan:nothing", "h200:4"], "has no function 'nothing'"),
    ],
)
def test_what_cannot_be_used(words: list[str], says: str, capsys: pytest.CaptureFixture[str]):
    assert main(["plan", *words]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ") and says in error, error


def test_commands(capsys: pytest.CaptureFixture[str]):
    for words, says in (([], "plan"), (["plot"], "invalid choice"), (["--help"], "spmd plan ")):
        with pytest.raises(SystemExit):
            main(words)
        assert says in "".join(capsys.readouterr())
