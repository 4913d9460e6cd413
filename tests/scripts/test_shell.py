"""The shell scripts: they parse, explain themselves, and install only when something changed."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.waiting import PATIENCE

ROOT = Path(__file__).parents[2]
WRAPPERS = [path for path in (ROOT / "scripts").iterdir() if path.is_file() and not path.suffix]
SHELL_SCRIPTS = [*(f"scripts/{path.name}" for path in sorted(WRAPPERS)), "benchmarks/run"]
SHELL_SCRIPTS += ["tools/run", ".ci/run", ".ci/wheel"]

# Stands for the environment's Python: writes down what pip was asked, and does the rest for real.
FAKE_PYTHON = f"""#!/bin/sh
if [ "$1 $2" = "-m pip" ]; then
  echo "$@" >> "$PIP_LOG"
  if [ -n "$PIP_FAILS" ] && [ "$3" = install ]; then echo "no such version" >&2; exit 1; fi
  exit 0
fi
exec {sys.executable} "$@"
"""


def bash(command: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", "-euo", "pipefail", "-c", command],
        env={**os.environ, **environment},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
    )


def write_program(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(0o755)
    return path


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A project of nothing but the set-up and an environment whose pip only takes notes."""
    (tmp_path / "scripts").mkdir()
    shutil.copy(ROOT / "scripts/_env.sh", tmp_path / "scripts")
    (tmp_path / "pyproject.toml").write_text("[project]\n")
    (tmp_path / "constraints.txt").write_text("jax==0.10.2\n")
    write_program(tmp_path / ".venv/bin/python", FAKE_PYTHON)
    return tmp_path


def set_up(project: Path, extra: str = "train", **environment: str):
    command = f"source {project}/scripts/_env.sh; setup_env {extra}; echo done"
    return bash(command, PIP_LOG=str(project / "pip.log"), **environment)


def installs(project: Path) -> list[str]:
    log = project / "pip.log"
    lines = log.read_text().splitlines() if log.exists() else []
    return [line for line in lines if " install " in line]


@pytest.mark.parametrize("script", [*SHELL_SCRIPTS, "scripts/_env.sh"])
def test_parses_and_is_executable(script: str):
    assert subprocess.run(["bash", "-n", ROOT / script]).returncode == 0
    assert os.access(ROOT / script, os.X_OK) or script == "scripts/_env.sh"


def test_scripts_are_what_a_person_runs():
    """What they share lies in scripts/flags."""
    assert len([path for path in (ROOT / "scripts").iterdir() if path.is_file()]) <= 21


ASKED = [script for script in SHELL_SCRIPTS if not script.startswith(".ci/")]
ASKED += ["benchmarks/run bytes", "benchmarks/run published"]


@pytest.fixture(scope="module")
def not_set_up(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkout without an environment."""
    folder = tmp_path_factory.mktemp("checkout")
    for name in ("scripts", "benchmarks", "tools"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    return folder


@pytest.mark.parametrize("words", ASKED)
def test_help_installs_nothing(words: str, not_set_up: Path):
    result = bash(f"{not_set_up}/{words} --help")
    assert not (not_set_up / ".venv").exists()
    assert "Traceback" not in result.stderr
    if words == "scripts/check":
        assert "usage: scripts/check [--fix]" in result.stderr
        return
    assert result.returncode == 0
    if words == "scripts/quickstart":
        assert "--mesh data=2,model=4" in result.stdout
    elif words.endswith("/run"):
        assert f"{words} NAME --help lists the flags" in result.stderr
    else:
        first = (ROOT / words.split()[0]).read_text().splitlines()[1].removeprefix("# ")
        assert first in result.stdout


@pytest.mark.thorough
def test_help_of_a_command_behind_a_launcher_is_not_the_launchers(project: Path):
    """What follows `--` is another program's: the environment is set up for it."""
    shutil.copy(ROOT / "scripts/launch", project / "scripts")
    bash(f"{project}/scripts/launch local -- true --help", PIP_LOG=str(project / "pip.log"))
    assert len(installs(project)) == 1


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("", "--mesh=data=4,model=2 --report=quickstart_report.html"),
        ("--mesh data=2,model=4", "--report=quickstart_report.html --mesh data=2,model=4"),
        ("--mesh=data=8 --report=r.html", "--mesh=data=8 --report=r.html"),
        ("--settings run.yaml --mesh data=8", "--settings run.yaml --mesh data=8"),
        ("--steps 3", "--mesh=data=4,model=2 --report=quickstart_report.html --steps 3"),
    ],
)
def test_quickstart_hands_on_its_flags(project: Path, arguments: str, expected: str):
    shutil.copy(ROOT / "scripts/quickstart", project / "scripts")
    (project / "scripts/train_llama.py").write_text(
        "import os, sys\n"
        "print(*sys.argv[1:])\n"
        "print(os.environ['XLA_FLAGS'])\n"
        "print(os.environ['JAX_PLATFORMS'])\n"
    )
    result = bash(
        f"{project}/scripts/quickstart {arguments}",
        PIP_LOG=str(project / "pip.log"),
        XLA_FLAGS="--xla_dump_to=there",
        JAX_PLATFORMS="",
    )
    flags, xla_flags, platforms = result.stdout.splitlines()
    assert flags == expected
    assert xla_flags.startswith("--xla_dump_to=there --xla_force_host_platform_device_count=8")
    assert platforms == "cpu"


def test_installs_once_and_again_after_a_change(project: Path):
    assert set_up(project).stdout == "done\n"
    assert len(installs(project)) == 1
    assert ".[train] --constraint constraints.txt" in installs(project)[0]

    assert set_up(project).stderr == ""
    assert len(installs(project)) == 1

    (project / "constraints.txt").write_text("jax==0.11.2\n")
    set_up(project)
    assert len(installs(project)) == 2


def test_another_folder_and_a_wheel(project: Path, tmp_path: Path):
    venv = tmp_path / "venv of its own"
    write_program(venv / "bin/python", FAKE_PYTHON)
    made = set_up(project, SPMD_VENV=str(venv), SPMD_WHEEL="/w/spmd.whl")
    assert made.returncode == 0, made.stderr
    assert installs(project)[0].endswith(" /w/spmd.whl[train] --constraint constraints.txt")
    assert (venv / ".stamp-train").exists() and not (project / ".venv/.stamp-train").exists()


def test_two_at_once_install_once(project: Path):
    if shutil.which("flock") is None:
        pytest.skip("flock is not on this machine")
    command = f"source {project}/scripts/_env.sh; setup_env train & setup_env train & wait"
    bash(command, PIP_LOG=str(project / "pip.log"))
    assert len(installs(project)) == 1


def test_a_failing_pip_is_shown_and_tried_again_and_a_broken_environment_is_named(project: Path):
    result = set_up(project, PIP_FAILS="yes")
    assert result.returncode == 1
    assert "no such version" in result.stderr
    assert "error: pip could not install spmd[train]" in result.stderr
    assert set_up(project).returncode == 0
    write_program(project / ".venv/bin/python", "#!/bin/sh\nexit 127\n")
    result = set_up(project)
    assert result.returncode == 1
    assert "does not run: delete that folder and run again" in result.stderr


def test_passes_over_interpreters_that_fail(project: Path, tmp_path: Path):
    shims = tmp_path / "shims"
    write_program(shims / "python3.12", "#!/bin/sh\necho 'command not found' >&2\nexit 127\n")
    write_program(shims / "python3.11", "#!/bin/sh\necho 'old 3.8.1'\n")
    write_program(shims / "python3.13", f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    result = bash(
        f"source {project}/scripts/_env.sh; find_python",
        PYTHON="",
        PATH=f"{shims}:{os.environ['PATH']}",
    )
    assert result.stdout == "python3.13\n"


def test_a_chosen_interpreter_is_used_or_refused(project: Path, tmp_path: Path):
    find = f"source {project}/scripts/_env.sh; find_python"
    assert bash(find, PYTHON=sys.executable).stdout == f"{sys.executable}\n"
    old = write_program(tmp_path / "with space/python", "#!/bin/sh\necho 'old 3.8.1'\n")
    result = bash(find, PYTHON=str(old))
    assert result.returncode == 1
    assert f"{old} is Python 3.8.1: 3.11 or newer is needed" in result.stderr


def test_the_interpreter_of_a_version(project: Path, tmp_path: Path):
    """One that pyenv has and did not switch on is found behind its shim, which fails."""
    write_program(tmp_path / "shims/python3.98", "#!/bin/sh\nexit 127\n")
    write_program(tmp_path / "shims/pyenv", f"#!/bin/sh\necho {tmp_path}\n")
    here = write_program(
        tmp_path / "versions/3.98.1/bin/python", f'#!/bin/sh\nexec {sys.executable} "$@"\n'
    )
    path = f"{tmp_path}/shims:{os.environ['PATH']}"
    assert (
        bash(f"source {project}/scripts/_env.sh; python_of 3.98", PATH=path).stdout == f"{here}\n"
    )
    none = bash(f"source {project}/scripts/_env.sh; python_of 3.99", PATH=path)
    assert none.returncode == 1 and "found no Python 3.99" in none.stderr
