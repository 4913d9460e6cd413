"""The Dockerfile, line by line: what it copies is there, and what it runs installs once.

There is no daemon to build it with; its COPY and RUN lines are followed in a folder instead.
"""

import fnmatch
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from tests.scripts.test_shell import FAKE_PYTHON, write_program

ROOT = Path(__file__).parents[1]


def instructions() -> list[tuple[str, str]]:
    """(instruction, the rest) of each line, comments left out and continued lines joined."""
    text = (ROOT / "Dockerfile").read_text(encoding="utf-8")
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
    joined = re.sub(r"\\\n\s*", "", "\n".join(lines)).splitlines()
    return [(line.split(maxsplit=1)[0], line.split(maxsplit=1)[1]) for line in joined]


def of_kind(kind: str) -> list[str]:
    return [rest for name, rest in instructions() if name == kind]


def sent_to_docker() -> list[str]:
    """The top of the build's context: what .dockerignore lets through."""
    lines = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    assert "*" in lines
    return [line[1:] for line in lines if line.startswith("!")]


def copy(sources: str, folder: Path) -> None:
    """What `COPY` does with files and with the whole context."""
    *names, target = sources.split()
    for name in sent_to_docker() if names == ["."] else names:
        assert any(fnmatch.fnmatch(name, f"{top}*") for top in sent_to_docker()), name
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, folder / target / name, dirs_exist_ok=True)
        else:
            (folder / target).mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / target)


def bash(command: str, folder: Path, accelerator: str) -> subprocess.CompletedProcess[str]:
    """As the Dockerfile's SHELL runs it, with a pip that takes notes."""
    shell = ["/bin/bash", "-euo", "pipefail", "-c", command]
    env = {**os.environ, "ACCELERATOR": accelerator, "PIP_LOG": str(folder / "pip.log")}
    return subprocess.run(shell, cwd=folder, env=env, capture_output=True, text=True, timeout=60)


def install(folder: Path, accelerator: str) -> subprocess.CompletedProcess[str]:
    """Everything up to the first RUN."""
    write_program(folder / ".venv/bin/python", FAKE_PYTHON)
    for kind, rest in instructions():
        if kind == "COPY":
            copy(rest, folder)
        if kind == "RUN":
            return bash(rest, folder, accelerator)
    raise AssertionError("nothing is installed")


@pytest.mark.parametrize(
    ("accelerator", "extras"), [("cpu", []), ("cuda", ["cuda"]), ("tpu", ["tpu"])]
)
def test_the_environment_is_that_of_scripts(accelerator: str, extras: list[str], tmp_path: Path):
    done = install(tmp_path, accelerator)
    assert done.returncode == 0, done.stderr
    log = (tmp_path / "pip.log").read_text()
    extras = ["train", "serve", "otlp", *extras]
    assert re.findall(r"--editable \.\[(\w+)\] --constraint constraints\.txt", log) == extras
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert set(extras) <= set(project["optional-dependencies"])

    copy(of_kind("COPY")[-1], tmp_path)  # the sources: nothing has to be installed anew
    again = "source scripts/_env.sh; setup_env train; setup_env serve"
    assert bash(again, tmp_path, accelerator).returncode == 0
    assert (tmp_path / "pip.log").read_text() == log


def test_an_unknown_accelerator_ends_the_build(tmp_path: Path):
    done = install(tmp_path, "abacus")
    assert done.returncode == 1
    assert "ACCELERATOR is abacus, not one of cpu, cuda, tpu" in done.stderr


@pytest.mark.thorough
def test_the_first_files_suffice_to_install(tmp_path: Path):
    """What is copied before the environment is made: the version and what metadata names."""
    for sources in of_kind("COPY")[:-1]:
        copy(sources, tmp_path)
    build = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation"]
    subprocess.run([*build, "--wheel-dir", tmp_path / "made", tmp_path], check=True)
    assert len(list((tmp_path / "made").glob("spmd-*.whl"))) == 1


def test_the_context_is_what_runs():
    """Neither tests nor history nor anything that may lie in a working copy is sent."""
    top = sent_to_docker()
    assert all((ROOT / name).exists() for name in top)
    assert not {"tests", "docs", ".git", ".venv"} & set(top)


def test_it_does_not_run_as_root_and_programs_that_it_names_are_there():
    assert of_kind("USER") == ["1000"]
    assert "useradd --uid 1000 " in of_kind("RUN")[-1]
    named = re.findall(r"scripts/[a-z_.]+\b", "\n".join(rest for _, rest in instructions()))
    assert len(named) >= 3
    assert all((ROOT / name).is_file() for name in named)
