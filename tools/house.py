"""Prints how many lines of Python checkouts have, one column each, as a markdown table.

A checkout is a folder, or a git revision of this repository.

Example:
    tools/run house main~20 .
"""

import io
import subprocess
import tarfile
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.tables import print_table
from spmd.cli.flags import Parser

HERE = Path(__file__).resolve().parent.parent

REST = ("scripts", "benchmarks", "tools", "examples")
GROUPS = (("spmd",), ("models",), ("serving",), ("pytorch",), REST, ("tests",))
"""Folders that are counted together."""


def facts(checkout: str) -> dict[str, str]:
    """All that is said of a folder or a revision: what -> how much.

    Raises:
      ValueError: it is neither.
    """
    read = files_of if Path(checkout).is_dir() else revision_files
    lines: Counter[str] = Counter()
    for path, text in read(checkout):
        lines[path.split("/")[0]] += len(text.splitlines())
    counts = {" + ".join(group): sum(lines[top] for top in group) for group in GROUPS}
    counts["all but tests"] = sum(counts.values()) - counts["tests"]
    return {what: f"{count:,}" for what, count in counts.items()}


def files_of(folder: str) -> Iterator[tuple[str, str]]:
    """Path and text of every Python file of the groups' folders."""
    for path in (p for g in GROUPS for top in g for p in Path(folder, top).rglob("*.py")):
        yield path.relative_to(folder).as_posix(), path.read_text(encoding="utf-8")


def revision_files(revision: str) -> Iterator[tuple[str, str]]:
    """The same of a revision, and of other folders.

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


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints a column for each checkout, a row for each fact."""
    parser = Parser("tools/run house", __doc__)
    about = "folders or revisions (default: this repository)"
    parser.add_argument("checkouts", nargs="*", default=[str(HERE)], help=about)
    given = parser.parse_args(arguments)
    columns = [facts(name) for name in given.checkouts]
    print_table(
        ("lines", *given.checkouts),
        ([fact, *(column[fact] for column in columns)] for fact in columns[0]),
    )
