"""Writes the tables of docs/shardy.md: our propagation beside Shardy's, with the reasons.

Example:
    tools/run compare_shardy
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path

from benchmarks import shardy
from benchmarks.tables import with_rows
from spmd.cli.flags import Parser
from tests.ir.dialect.cases_given import CASES
from tests.propagation.against_shardy import (
    COARSER,
    CONTRADICTORY,
    EQUAL,
    FINER,
    REASONS,
    Comparison,
    compare,
    explain,
    relation,
)

PAGE = Path(__file__).resolve().parent.parent / "docs" / "shardy.md"

COUNTS = ("values", "split", "equal", "ours finer", "Shardy finer", "contradictory", "planned")


def comparisons() -> dict[str, Comparison]:
    """Every module as both propagate it."""
    texts = {case.name: case.text() for case in CASES}
    found = {}
    theirs = shardy.run_all(texts)
    for case in CASES:
        values = theirs[case.name]
        if isinstance(values, shardy.Failure):
            raise RuntimeError(f"Shardy cannot process {case.name}: {values.message}")
        found[case.name] = compare(texts[case.name], case.mesh, values)
    return found


def row(name: str, found: Comparison) -> list[str]:
    """One module's cells."""
    pairs = found.pairs
    relations = Counter(pair.relation for pair in pairs)
    split = sum(any(pair.ours) or any(pair.theirs) for pair in pairs)
    planned = sum(p.planned is not None and relation(p.planned, p.theirs) == EQUAL for p in pairs)
    why = Counter(reason for reasons in explain(found).values() for reason in reasons)
    counts = [relations[r] for r in (EQUAL, FINER, COARSER, CONTRADICTORY)]
    reasons = ", ".join(f"{reason} {count}" for reason, count in why.most_common())
    return [f"`{name}`", *map(str, (len(pairs), split, *counts, planned)), reasons]


def written(page: str, found: Mapping[str, Comparison]) -> str:
    """The page with today's tables."""
    why = Counter(r for c in found.values() for reasons in explain(c).values() for r in reasons)
    reasons = [[name, str(why[name]), meaning] for name, meaning in REASONS.items() if why[name]]
    rows = [row(name, comparison) for name, comparison in found.items()]
    sums = [str(sum(int(cells[k]) for cells in rows)) for k in range(1, 8)]
    must = lacking = 0
    for comparison in found.values():
        for pair in comparison.pairs:
            for dim, theirs in enumerate(pair.theirs):
                axes = comparison.needs.must.get((pair.value, dim), ())
                must += bool(axes)
                lacking += theirs[: len(axes)] != axes
    facts = [[version("jaxlib"), str(must), str(must - lacking)]]
    page = with_rows(page, ("jaxlib", "dims", "Shardy finds"), facts)
    page = with_rows(page, ("reason", "values", "what it means"), reasons)
    return with_rows(page, ("module", *COUNTS, "why"), [*rows, ["**all**", *sums, ""]])


def main(arguments: Sequence[str] | None = None) -> None:
    """Writes the page."""
    Parser("tools/run compare_shardy", __doc__).parse_args(arguments)
    PAGE.write_text(written(PAGE.read_text(encoding="utf-8"), comparisons()), encoding="utf-8")
