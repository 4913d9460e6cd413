"""Imports point downward only, MLIR's bindings are touched in few files, class names are unique.

The layers are those of docs/design.md, section 1. Every import counts: at the top of a file, inside
a function, under TYPE_CHECKING, and as a constant handed to `importlib.import_module`.
"""

import ast
import functools
from collections import Counter
from collections.abc import Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from spmd.installed import USERS_OF_IT
from tests.imports import imports_of, module_graph, module_name

ROOT = Path(__file__).parents[1]

# From the bottom up. A package may import those below it, and those beside it as long as no circle
# comes of it.
LAYERS = (
    ("spmd.errors", "spmd.installed", "spmd.progress", "spmd.store"),
    ("spmd.ir", "spmd.mesh", "spmd.options"), ("spmd.frontend",), ("spmd.propagation",),
    ("spmd.reshard",), ("spmd.predict",), ("spmd.planning",),
    ("spmd.lowering", "spmd.ops", "spmd.launch"), ("spmd.compiler", "spmd.measure"),
    ("spmd.explain", "spmd.verify"),
    ("spmd.api", "spmd.auto", "spmd.plan", "spmd.transfer", "spmd"),
    ("spmd.cli", "spmd.eqx", "spmd.nnx", "spmd.torch"), ("spmd.models",), ("spmd.serving",),
    ("spmd.scripts",), ("benchmarks", "tools"), ("tests",),
)  # fmt: skip
LEVEL = {package: level for level, packages in enumerate(LAYERS) for package in packages}

MLIR_BINDINGS = (
    "jaxlib.mlir", "jax.interpreters.mlir", "jax.extend.mlir", "jax._src.interpreters.mlir",
    "jax._src.lib.mlir",
)  # fmt: skip
MLIR_FILES = (
    "spmd/frontend/artifact.py",
    "spmd/frontend/bytecode.py",
    "spmd/frontend/importer/contents.py",
    "spmd/frontend/importer/handlers.py",
    "spmd/frontend/importer/module.py",
    "spmd/frontend/importer/ops.py",
    "spmd/frontend/refine.py",
    "spmd/frontend/trace.py",
    "spmd/lowering/emit.py",
    "spmd/lowering/execute.py",
    "spmd/lowering/local/composite.py",
    "benchmarks/shardy.py",  # runs Shardy's own passes, the peer
    "tools/coverage.py",  # lists the ops that bindings have
)

CLOSED = ("spmd.api",)
"""Packages whose modules are their own: others take the names in `__init__`."""

READ_TESTS = (
    "tools/compare_shardy.py", "tools/coverage.py", "tools/fuzz.py", "tools/resume_test.py",
)  # fmt: skip
"""Tools that write down what the tests run, or run more of it."""


def package_of(name: str) -> str | None:
    """The entry of LAYERS that a dotted name belongs to; None for the world outside.

    What is no module of spmd is one of its public names, so it belongs to "spmd".
    """
    top, _, rest = name.partition(".")
    if top == "spmd" and rest:
        inner = f"spmd.{rest.split('.')[0]}"
        return inner if inner in LEVEL or is_module(inner) else "spmd"
    return top if top in LEVEL else None


def is_module(name: str) -> bool:
    path = ROOT.joinpath(*name.split("."))
    return path.is_dir() or path.with_suffix(".py").is_file()


def inner_module(name: str) -> str | None:
    """The module of a package that a dotted name is, or reaches into; None for other names."""
    while name.count(".") >= 2:
        if is_module(name):
            return name
        name = name.rpartition(".")[0]
    return None


@functools.cache
def imports_in(source: str, path: Path) -> tuple[tuple[int, str], ...]:
    return tuple(imports_of(source, path, MLIR_BINDINGS))


def is_mlir(name: str) -> bool:
    return any(name == mlir or name.startswith(f"{mlir}.") for mlir in MLIR_BINDINGS)


def violations(source: str, path: Path) -> list[str]:
    """What one file does against the rules, a line each. `path` is relative to the repository."""
    package = package_of(module_name(path))
    if package not in LEVEL:
        return [f"{path}: {package} has no layer yet; give it one in tests/test_layering.py"]
    found = []
    for line, name in imports_in(source, path):
        if is_mlir(name) and path.as_posix() not in MLIR_FILES and package != "tests":
            found.append(f"{path}:{line}: {name}: MLIR belongs to {', '.join(MLIR_FILES)}")
        if name.partition(".")[0] in USERS_OF_IT:
            found.append(
                f"{path}:{line}: {name}: a user may have one of that name; it is spmd.{name}"
            )
        target = package_of(name)
        if target in CLOSED and package not in (target, "tests") and inner_module(name):
            found.append(f"{path}:{line}: {name}: take it from {target}")
        if target == "tests" and path.as_posix() in READ_TESTS:
            continue
        if target is not None and LEVEL.get(target, -1) > LEVEL[package]:
            found.append(f"{path}:{line}: {package} imports {name}, of the layer {target} above it")
    return sorted(set(found))


def circle_of(graph: Mapping[str, set[str]]) -> str:
    """Names that lead back to the first of them; empty where none do."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return " <- ".join(error.args[1])
    return ""


def python_files() -> list[Path]:
    """Every Python file of the project, relative to the repository."""
    tops = sorted({package.split(".")[0] for package in LEVEL} | {*USERS_OF_IT, "pytorch"})
    return [path.relative_to(ROOT) for top in tops for path in sorted((ROOT / top).rglob("*.py"))]


def read(path: Path) -> str:
    return (ROOT / path).read_text(encoding="utf-8")


def test_imports_point_downward():
    found = [line for path in python_files() for line in violations(read(path), path)]
    assert not found, "\n" + "\n".join(found)


def test_neither_packages_of_a_layer_nor_modules_make_a_circle():
    beside: dict[str, set[str]] = {package: set() for package in LEVEL}
    for path in python_files():
        package = package_of(module_name(path))
        for _, name in imports_in(read(path), path):
            target = package_of(name)
            if package in LEVEL and target in LEVEL and target != package:
                beside[package] |= {target} if LEVEL[target] == LEVEL[package] else set()
    assert not (circle := circle_of(beside)), f"packages import each other: {circle}"
    sources = {path: read(path) for path in python_files() if path.parts[0] == "spmd"}
    beside = module_graph(sources)
    assert len(beside) > 100
    assert beside["spmd.lowering.local.table"] >= {"spmd.lowering.local.dims"}
    assert not (circle := circle_of(beside)), f"modules import each other: {circle}"


@pytest.mark.parametrize("package", ["spmd.api", "spmd.frontend.importer"])
def test_modules_of_a_package_import_from_modules_alone(package: str):
    folder = Path(*package.split("."))
    files = [path for path in python_files() if path.parent == folder]
    assert len(files) > 4
    found = [
        f"{path}:{line}: {name}: no module of {package}"
        for path in files
        for line, name in imports_of(read(path), path)
        if package_of(name) == package and inner_module(name) is None
    ]
    assert not found, "\n" + "\n".join(found)


@pytest.mark.parametrize("inside", ["", "def f():\n    ", "if TYPE_CHECKING:\n    "])
def test_a_circle_is_found_wherever_it_is_closed(inside: str):
    sources = {
        Path("spmd/mesh/mesh.py"): "from spmd.mesh import sharding",
        Path("spmd/mesh/sharding.py"): "from spmd.ir.types import TensorType",
        Path("spmd/ir/types.py"): f"{inside}from ..mesh.mesh import Mesh",
    }
    assert "spmd.mesh.mesh" in circle_of(module_graph(sources))
    del sources[Path("spmd/ir/types.py")]
    assert not circle_of(module_graph(sources))


@pytest.mark.parametrize(
    ("path", "source"),
    [
        ("spmd/ir/program.py", "import spmd.planning.solve"),
        ("spmd/ir/program.py", "from ..planning import solve"),
        ("spmd/ir/program.py", "def f():\n    from spmd.lowering.emit import emit"),
        ("spmd/ir/program.py", "import importlib\nimportlib.import_module('spmd.lowering')"),
        ("spmd/compiler.py", "import spmd"),
        ("spmd/compiler.py", "from spmd import mark_sharding"),
        ("spmd/auto.py", "from spmd.api.jitted import jit"),
        ("serving/http/app.py", "import spmd.api.marks"),
        ("serving/http/app.py", "from tests.helpers import small_model"),
        ("spmd/ir/text.py", "from jaxlib.mlir import ir"),
        ("spmd/ir/text.py", "from jax.interpreters import mlir"),
        ("spmd/ir/text.py", "import jax\nx = jax.extend.mlir.ir"),
        ("spmd/ir/__init__.py", "from ..planning import solve"),
        ("serving/http/app.py", "from models.training import errors"),
        ("tests/serving/test_load_model.py", "import serving.load"),
    ],
)
def test_what_is_forbidden(path: str, source: str):
    assert len(violations(source, Path(path))) == 1


def test_a_class_name_means_one_thing():
    """Public ones of spmd, models, serving and pytorch."""
    names = Counter(
        node.name
        for path in python_files()
        if path.parts[0] in ("spmd", "models", "serving", "pytorch")
        for node in ast.walk(ast.parse(read(path)))
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    )
    assert [name for name, count in names.items() if count > 1] == []
