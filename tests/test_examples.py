"""The programs under examples: they run as they stand, and print what their page shows."""

import ast
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from tests.greedy import plan_all_greedily
from tests.markdown import ROOT, blocks_of

PAGES = sorted((ROOT / "docs").glob("examples*.md"))
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))
HEAD = """
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

"""
OTHERS = {"jax", "numpy", "optax", "equinox", "flax", "torch", "transformers", "wandb", "maxtext"}


def sections() -> dict[str, tuple[Path, str]]:
    """The pages' sections, with their page, by the program that their heading names."""
    found = {}
    for page in PAGES:
        for part in re.split(r"(?m)^(?=## )", page.read_text(encoding="utf-8"))[1:]:
            (program,) = re.findall(r"`(\w+\.py)`", part.partition("\n")[0])
            assert program not in found, f"{program} has two sections"
            found[program] = page, part
    return found


def show(program: str, printed: str) -> None:
    page, section = sections()[program]
    changed = re.sub(r"(?s)```text\n.*?```", lambda _: f"```text\n{printed}```", section)
    page.write_text(page.read_text(encoding="utf-8").replace(section, changed), encoding="utf-8")


def shown(program: str, language: str) -> list[str]:
    _, section = sections()[program]
    return [block.text for block in blocks_of(section) if block.language == language]


ELSEWHERE = "serve_module"
"""The example that runs from another folder, in an environment that says nothing about devices."""


# What the heavy ones show, others run as well: docs/performance.md, docs/pipeline.md and
# docs/long_sequences.md, which tests/test_docs.py runs, and tests/test_nnx.py.
HEAVY = ("flax_nnx", "fp8", "hybrid", "long_sequences", "maxtext_step", "moe", "nanochat",
         "pipeline", "train_own_model", "train_nnx")  # fmt: skip
LONG = {"llama_2d": pytest.mark.slow("its plan is what it shows")}
LONG |= dict.fromkeys(HEAVY, pytest.mark.heavy)


@pytest.mark.thorough
@pytest.mark.parametrize(
    "path", [pytest.param(path, marks=LONG.get(path.stem, ()), id=path.stem) for path in EXAMPLES]
)
def test_prints_what_the_page_shows(
    path: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for package in imported(path.read_text(encoding="utf-8")) & OTHERS:
        pytest.importorskip(package)
    if path.stem.startswith("serve_"):
        plan_all_greedily(monkeypatch)  # they show tokens, and no plan
    if path.stem == ELSEWHERE:
        printed = run_elsewhere(path, tmp_path)
    else:
        monkeypatch.setattr(sys, "argv", [str(path)])
        runpy.run_path(str(path), run_name="__main__")
        printed = capsys.readouterr().out
    printed = printed.rstrip() + "\n"
    if request.config.getoption("--update-golden"):
        show(path.name, printed)
    texts = shown(path.name, "text")
    assert texts == [printed], "--update-golden writes what is printed now; read the diff"


def run_elsewhere(path: Path, folder: Path) -> str:
    given = {k: v for k, v in os.environ.items() if k not in ("XLA_FLAGS", "JAX_PLATFORMS")}
    environment = {**given, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-W", "error", str(path)]
    run = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert (run.returncode, run.stderr) == (0, "")
    return run.stdout


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_the_page_shows_lines_of_the_program(path: Path) -> None:
    program = path.read_text(encoding="utf-8")
    blocks = shown(path.name, "python")
    assert blocks
    for block in blocks:
        assert f"\n{block}" in program, block


def test_every_program_has_its_section() -> None:
    assert sorted(sections()) == [path.name for path in EXAMPLES]


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_can_be_copied(path: Path) -> None:
    """A short program that sets its devices up before jax is there; of ours it imports spmd alone,
    unless it is about a server or a whole training run; nanochat is somebody's model as it is."""
    program = path.read_text(encoding="utf-8")
    before, _, after = program.partition(HEAD)
    packages = imported(program)
    serves, trains = "spmd.serving" in program, "train" in path.stem
    assert after and imported(before) <= sys.stdlib_module_names
    most = 290 if path.stem == "nanochat" else 120 if serves or trains else 81
    assert 20 <= len(program.splitlines()) < most
    assert packages <= sys.stdlib_module_names | {"spmd"} | OTHERS


def imported(program: str) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(program)):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add(str(node.module).partition(".")[0])
    return found
