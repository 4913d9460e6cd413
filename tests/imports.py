"""Which modules of a repository import which: read from their sources, nothing is imported."""

import ast
from collections.abc import Container, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import NamedTuple

from spmd.installed import USERS_OF_IT


class Import(NamedTuple):
    """One import: the line it is on and the dotted name it reaches for."""

    line: int
    name: str


def module_name(path: Path) -> str:
    """The dotted name of a file, relative to the repository: spmd/ir/__init__.py is spmd.ir.

    What lies in the folders that spmd links to has spmd's name: models/shards.py is
    spmd.models.shards.
    """
    parts = path.with_suffix("").parts
    if parts[0] == "pytorch":
        parts = ("spmd", "torch", *parts[1:])
    within = ("spmd",) if parts[0] in USERS_OF_IT else ()
    return ".".join((*within, *(parts[:-1] if parts[-1] == "__init__" else parts)))


def dotted(node: ast.expr) -> str | None:
    """`a.b.c` of an attribute chain, or None where it starts from anything but a name."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute) and (prefix := dotted(node.value)):
        return f"{prefix}.{node.attr}"
    return None


@cache
def imports_of(source: str, path: Path, attributes: Container[str] = ()) -> tuple[Import, ...]:
    """Every import in a file; `from a import b` counts as `a.b`, whether or not b is a module.

    Args:
      path: of the file, relative to the repository.
      attributes: attribute chains that count as imports, too.
    """
    return tuple(_imports(source, path, attributes))


def _imports(source: str, path: Path, attributes: Container[str]) -> Iterator[Import]:
    # The package that a relative import starts from.
    package = module_name(path.parent / "__init__.py").split(".")
    for node in ast.walk(ast.parse(source, str(path))):
        match node:
            case ast.Import():
                yield from (Import(node.lineno, alias.name) for alias in node.names)
            case ast.ImportFrom():
                base = package[: len(package) - node.level + 1] if node.level else ()
                prefix = ".".join((*base, *filter(None, [node.module])))
                yield from (Import(node.lineno, f"{prefix}.{alias.name}") for alias in node.names)
            case ast.Call(func=function, args=[ast.Constant(value=str(name)), *_]):
                if dotted(function) in ("importlib.import_module", "import_module", "__import__"):
                    yield Import(node.lineno, name)
            case ast.Attribute() if (chain := dotted(node)) and chain in attributes:
                yield Import(node.lineno, chain)


def module_graph(sources: Mapping[Path, str]) -> dict[str, set[str]]:
    """Module -> those of the other modules that it imports, itself or what is in them."""
    modules = {module_name(path) for path in sources}

    def module_of(name: str) -> str:
        while name and name not in modules:
            name = name.rpartition(".")[0]
        return name

    return {
        (module := module_name(path)): {module_of(name) for _, name in imports_of(source, path)}
        - {module, ""}
        for path, source in sources.items()
    }
