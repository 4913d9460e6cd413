"""Prints how large and how tidy checkouts are, one column each, as a markdown table.

A checkout is a folder, or a git revision of this repository. Only Python files count, and a folder
is one that holds such a file itself. Functions count with their docstrings, inner ones on their own
as well.

Example:
    tools/run house main~20 .
"""

import ast
import io
import math
import subprocess
import tarfile
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from statistics import median

from benchmarks.tables import print_table
from spmd.cli.flags import Parser

HERE = Path(__file__).resolve().parent.parent

GROUPS = (
    ("spmd",),
    ("models",),
    ("serving",),
    ("pytorch",),
    ("scripts", "benchmarks", "tools", "examples"),
    ("tests",),
)
"""Folders that are counted together."""

PRODUCT = ("spmd", "models", "serving", "pytorch")
"""Folders in which a class name should have one meaning."""

Sources = Mapping[str, str]
"""Path of a Python file, relative to the checkout and with slashes -> what is in it."""


def facts(sources: Sources) -> dict[str, str]:
    """All that is said of a checkout: what -> how much."""
    spmd = within(sources, "spmd")
    files = [len(text.splitlines()) for text in spmd.values()]
    return {
        **{f"{' + '.join(group)}: lines, files, folders": size(sources, group) for group in GROUPS},
        "all but tests: lines": f"{total_lines(sources) - total_lines(within(sources, 'tests')):,}",
        "spmd: lines of a file, median and 90%": spread(files),
        "spmd: lines of a function, median and 90%": spread(function_lines(spmd.values())),
        "class names that mean several things": shared_names(within(sources, *PRODUCT)),
    }


def within(sources: Sources, *folders: str) -> Sources:
    """The files in any of these folders, at any depth."""
    return {path: text for path, text in sources.items() if path.split("/")[0] in folders}


def size(sources: Sources, group: Sequence[str]) -> str:
    """Lines, files and folders of a group."""
    found = within(sources, *group)
    folders = {path.rpartition("/")[0] for path in found}
    return f"{total_lines(found):,}, {len(found):,}, {len(folders)}"


def total_lines(sources: Sources) -> int:
    """The lines of all files."""
    return sum(len(text.splitlines()) for text in sources.values())


def shared_names(sources: Sources) -> str:
    """How many names belong to several public classes, and which, the most common first."""
    names = Counter(
        node.name
        for text in sources.values()
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    )
    shared = [f"{name} {count}" for name, count in names.most_common() if count > 1]
    return f"{len(shared)}: {', '.join(shared)}" if shared else "0"


def spread(values: Iterable[int]) -> str:
    """Median and 90th percentile, the smallest value that 90% do not exceed.

    >>> spread(range(1, 11))
    '5.5, 9'
    """
    ordered = sorted(values)
    if not ordered:
        return "none"
    return f"{median(ordered):g}, {ordered[math.ceil(0.9 * len(ordered)) - 1]}"


def function_lines(texts: Iterable[str]) -> Iterator[int]:
    """How long every function is, from its `def` on."""
    for node in (node for text in texts for node in ast.walk(ast.parse(text))):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield (node.end_lineno or node.lineno) - node.lineno + 1


def read(checkout: str) -> Sources:
    """The Python files of a folder or of a git revision.

    Raises:
      ValueError: it is neither.
    """
    found = files_of(Path(checkout)) if Path(checkout).is_dir() else revision_files(checkout)
    tops = {folder for group in GROUPS for folder in group}
    return {path: text for path, text in sorted(found) if path.split("/")[0] in tops}


def files_of(folder: Path) -> Iterator[tuple[str, str]]:
    """Every Python file of the groups' folders."""
    for path in (
        path for group in GROUPS for top in group for path in (folder / top).rglob("*.py")
    ):
        yield path.relative_to(folder).as_posix(), path.read_text(encoding="utf-8")


def revision_files(revision: str) -> Iterator[tuple[str, str]]:
    """Every Python file of a revision of this repository.

    Raises:
      ValueError: there is no such revision.
    """
    git = ["git", "-C", str(HERE), "archive", "--format=tar", "--end-of-options", revision]
    done = subprocess.run(git, capture_output=True, check=False)
    if done.returncode:
        raise ValueError(f"{revision!r} is no folder and no revision: {done.stderr.decode()}")
    with tarfile.open(fileobj=io.BytesIO(done.stdout)) as archive:
        for member in archive:
            if member.name.endswith(".py") and (file := archive.extractfile(member)):
                yield member.name, file.read().decode()


def make_parser() -> Parser:
    """The flags."""
    parser = Parser("tools/run house", __doc__)
    about = "folders or revisions (default: this repository)"
    parser.add_argument("checkouts", nargs="*", default=[str(HERE)], help=about)
    return parser


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints a column for each checkout, a row for each fact."""
    given = make_parser().parse_args(arguments)
    columns = [facts(read(name)) for name in given.checkouts]
    print_table(
        ("", *given.checkouts),
        ([fact, *(column[fact] for column in columns)] for fact in columns[0]),
    )
