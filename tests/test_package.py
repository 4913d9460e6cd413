"""What an installation is to its users: a package called spmd, its programs, and its types.

Environments here borrow the packages of the one that runs the tests, so nothing is downloaded.
"""

import functools
import importlib
import os
import re
import shutil
import subprocess
import sys
import tomllib
import venv
import zipfile
from email.parser import BytesParser
from pathlib import Path

import pytest
import yaml

import spmd
from spmd.scripts import commands

ROOT = Path(__file__).parents[1]
SOURCES = (
    "pyproject.toml", "README.md", "LICENSE", "spmd", "models", "serving", "pytorch", "scripts",
)  # fmt: skip
"""What building needs."""

COMPILED = shutil.ignore_patterns("__pycache__")

PROGRAM = """
import jax, jax.numpy as jnp, numpy as np
import spmd

def double(x, w):
    return jnp.tanh(x @ w) * 2

mesh = spmd.make_mesh(data=4, model=2)
x, w = np.ones((8, 16), np.float32), np.ones((16, 4), np.float32) / 16
result = spmd.jit(double, mesh=mesh)(spmd.mark_sharding(x, mesh, ("data", "model")), w)
np.testing.assert_allclose(result, jax.jit(double)(x, w), rtol=1e-6)
"""

IMPORTS = """
import models.theirs, serving, scripts.theirs
from spmd.models.training.trainer import Trainer
from spmd.serving.bundle.read import load_bundle
assert models.theirs.THEIRS and serving.THEIRS and scripts.theirs.THEIRS
print(spmd)
"""
"""What a user has beside what we have: both are found."""

HELP = """
import sys
from importlib.metadata import distribution
for program in distribution("spmd").entry_points:
    sys.argv = [program.name, "--help"]
    try:
        program.load()()
    except SystemExit as end:
        print("==", program.name, end.code)
"""
"""Asks all of our commands for help, in one process."""


class Environment:
    """A virtual environment that has what this one has, but for spmd."""

    def __init__(self, folder: Path) -> None:
        venv.create(folder, symlinks=True)
        self.bin = folder / "bin"
        (packages,) = folder.glob("lib/python*/site-packages")
        # As lines of a .pth file: such folders lie behind, and their own .pth files are not read.
        borrowed = [path for path in sys.path if Path(path).name == "site-packages"]
        (packages / "borrowed.pth").write_text("\n".join(borrowed))

    def run(self, program: str, *arguments: str, cwd: Path) -> str:
        """What a program of the environment prints; it has to end well."""
        flags = "--xla_force_host_platform_device_count=8"
        given = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags}
        given.pop("PYTHONPATH", None)
        done = subprocess.run(
            [self.bin / program, *arguments], cwd=cwd, env=given, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def install(self, *what: str) -> None:
        offline = ("--no-index", "--no-deps", "--no-build-isolation", "--ignore-installed")
        self.run("python", "-m", "pip", "install", "-q", *offline, *what, cwd=self.bin)


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("work") / "spmd"
    folder.mkdir()
    for name in SOURCES:
        if (ROOT / name).is_dir():
            shutil.copytree(ROOT / name, folder / name, symlinks=True, ignore=COMPILED)
        else:
            shutil.copy(ROOT / name, folder / name)
    return folder


@pytest.fixture(scope="module")
def wheel(checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    build = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation"]
    subprocess.run([*build, "--wheel-dir", folder, checkout], check=True)
    (found,) = folder.glob("*.whl")
    return found


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Environment:
    made = Environment(tmp_path_factory.mktemp("installed"))
    made.install(str(wheel))
    return made


def write_user_program(folder: Path) -> None:
    """A user's script, with packages beside it whose names are those of folders of ours."""
    for name in ("models/theirs.py", "serving/__init__.py", "scripts/theirs.py"):
        (folder / name).parent.mkdir()
        (folder / name).write_text("THEIRS = True\n")
    (folder / "program.py").write_text(f"{PROGRAM}{IMPORTS}")


# The wheel


@pytest.mark.thorough
def test_the_wheel_holds_all_that_is_run(wheel: Path):
    names = zipfile.ZipFile(wheel).namelist()
    ours = [name for name in names if ".dist-info/" not in name]
    walked = os.walk(ROOT / "spmd", followlinks=True)
    files = {str(Path(top, name).relative_to(ROOT)) for top, _, names in walked for name in names}
    shell = {f"spmd/scripts/{path.name}" for path in (ROOT / "scripts").iterdir() if is_shell(path)}
    assert sorted(ours) == sorted(name for name in files - shell if Path(name).suffix != ".pyc")
    assert {Path(name).suffix for name in ours} == {".py", ".css", ".html", ".js", ".typed"}
    assert {
        "spmd/py.typed", "spmd/explain/page/report.css", "spmd/models/training/trainer.py",
        "spmd/serving/http/static/chat.html", "spmd/scripts/flags/run.py",
    } <= {*ours}  # fmt: skip


def is_shell(path: Path) -> bool:
    return path.is_file() and path.suffix in ("", ".sh")


def test_metadata(wheel: Path):
    archive = zipfile.ZipFile(wheel)
    (name,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
    about = BytesParser().parsebytes(archive.read(name))
    assert about["Version"] == spmd.__version__
    assert about["Author"] == "The spmd developers"
    assert about["License-Expression"] == "Apache-2.0"
    needed = [line for line in about.get_all("Requires-Dist", []) if "extra ==" not in line]
    assert {line.split("<")[0].split(">")[0] for line in needed} == {
        "jax", "jaxlib", "ml-dtypes", "numpy", "scipy"
    }  # fmt: skip


@pytest.mark.thorough
def test_installed_it_runs_a_program(installed: Environment, tmp_path: Path):
    write_user_program(tmp_path)
    assert str(installed.bin.parent) in installed.run("python", "program.py", cwd=tmp_path)
    names = "models", "serving", "scripts"
    absent = f"import importlib.util as u; print([u.find_spec(name) for name in {names}])"
    assert installed.run("python", "-c", absent, cwd=installed.bin) == "[None, None, None]\n"


@pytest.mark.thorough
def test_commands_help(installed: Environment, tmp_path: Path):
    printed = installed.run("python", "-c", HELP, cwd=tmp_path)
    commands = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    shown = dict(re.findall(r"(?ms)^(usage: .*?)^== (\S+) 0$", printed))
    assert sorted(shown.values()) == sorted(commands)
    for text, command in shown.items():
        assert text.startswith(f"usage: {command} [flags]"), text
        assert "Examples:" in text and f"\n    {command} " in text
        assert "scripts/" not in text  # which only a checkout has


def test_each_program_has_its_command():
    """`scripts/serve` and `spmd-serve` run the same module."""
    for path in filter(is_shell, (ROOT / "scripts").iterdir()):
        if modules := re.findall(r"(?m)^exec_module \w+ spmd\.scripts\.(\w+) ", path.read_text()):
            assert getattr(commands, path.name).args[0] == modules[0]
    made = {
        f"spmd-{name.replace('_', '-')}": f"{commands.__name__}:{name}"
        for name, value in vars(commands).items()
        if isinstance(value, functools.partial)
    }
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
    assert made.items() <= listed.items() and len(made) == 8


def test_a_command_without_its_extra_says_which(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "rich.console", None)
    monkeypatch.delitem(sys.modules, "spmd.scripts.generate_text", raising=False)
    with pytest.raises(SystemExit, match=r'^error: .*rich.*; pip install "spmd\[serve\]"'):
        commands.generate()


@pytest.mark.parametrize(("module", "package"), [("nnx", "flax"), ("eqx", "equinox")])
def test_modules_for_missing_packages(module: str, package: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, package, None)
    monkeypatch.delitem(sys.modules, f"spmd.{module}", raising=False)
    with pytest.raises(spmd.InstallError, match=f"spmd.{module} needs {package}") as caught:
        importlib.import_module(f"spmd.{module}")
    assert f"fix: pip install -U {package}" in str(caught.value)


# An editable install


@pytest.mark.thorough
def test_editable_beside_a_folder_called_spmd(checkout: Path, tmp_path: Path):
    """The clone lies beside the user's script: it is no package, and hides none."""
    made = Environment(tmp_path / "environment")
    made.install("--editable", str(checkout))
    write_user_program(checkout.parent)
    printed = made.run("python", "program.py", cwd=checkout.parent)
    assert str(checkout / "spmd" / "__init__.py") in printed
    ours = made.run("python", "-c", "from spmd.models import shards; print(shards)", cwd=tmp_path)
    assert str(checkout / "spmd" / "models" / "shards.py") in ours


# Files that others read


def test_citation():
    cited = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert {"cff-version", "message", "title", "authors"} <= set(cited)  # CFF requires these
    assert cited["cff-version"] == "1.2.0"
    assert cited["version"] == spmd.__version__
    assert cited["authors"] == [{"name": "The spmd developers"}]


def test_ci_runs_what_contributors_run():
    jobs = yaml.safe_load((ROOT / ".github/workflows/ci.yml").read_text(encoding="utf-8"))["jobs"]
    (job,) = jobs.values()
    assert ".ci/run" in [step.get("run") for step in job["steps"]]
    classifiers = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["classifiers"]
    for version in job["strategy"]["matrix"]["python"]:
        assert f"Programming Language :: Python :: {version}" in classifiers
    run = re.findall(r"(?m)^run (\S+)(.*)", (ROOT / ".ci/run").read_text(encoding="utf-8"))
    assert [words[0] for words in run] == [
        "scripts/check",
        "scripts/test",
        ".ci/wheel",
        "scripts/test",
    ]
    assert all((ROOT / folder).is_dir() for folder in run[-1][1].split())
    assert run[-1][1] in (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
