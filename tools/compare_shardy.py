"""Writes docs/shardy.md: our propagation beside Shardy's, module by module, with the reasons.

With --differences it writes nothing, and prints every difference in one module.

Examples:
    tools/run compare_shardy
    tools/run compare_shardy --differences 'llama'
"""

import sys
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path

from benchmarks import shardy
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
    describe,
    explain,
    relation,
)

PAGE = Path(__file__).resolve().parent.parent / "docs" / "shardy.md"

HEAD = """# Propagation beside Shardy's

Shardy is the system that infers shardings inside XLA. Here both systems propagate the same modules
from the same marks. Where only one answer is possible, they agree. Where a program leaves a choice,
they sometimes choose differently, and this page says why.

`tools/run compare_shardy` wrote it, with jaxlib {jaxlib}: Shardy is the `sdy-propagation-pipeline`
that jaxlib ships. `tests/propagation/test_against_shardy.py` checks that every difference has one
of the reasons below. Values are compared by position: arguments, results, and the results of every
op that both have. (Shardy copies and folds constants. We rewrite some ops when we read them, and
constants that we make anew for each use have no sharding.)

## Where both agree

Some axes have to arrive at a dim: rules lead them there from a mark, and nothing rivals them.

```text
x = mark_sharding(x, mesh, ("data", None))
y = sin(x)                                  # dim 0 of y has to be split over data
```

An axis has a rival in one of two cases:

- The dim is *contested*. Different claims may reach it (`model` and `data`; not `data` and
  `data, model`), or another dim of the same value may get one of its axes.
- An op on the way *disputes* the axis: two of its factors may be split over it.

{must} dims of these modules have an axis without a rival. We find all of them. Shardy finds all but
{lacking}, for the reasons *mark*, *sub-axis*, *rule* and *behind* below. Both keep closed dims as
they are marked, and neither splits a value twice over one axis.

## Where they differ

Every difference is a choice, and has one of these reasons:

| reason | values | what it means |
| --- | --- | --- |
"""

TABLE = """
## Every module

| column | counts the values |
| --- | --- |
| split | that are split by at least one of the two |
| equal | whose shardings are equal |
| ours finer, Shardy finer | whose sharding splits every dim as the other's does, and further |
| contradictory | whose shardings differ otherwise |
| planned | that have Shardy's sharding after our planner, which decides by cost |

| module | values | split | equal | ours finer | Shardy finer | contradictory | planned | why |
| --- | --- | --- | --- | --- | --- | --- | --- | --- |
"""


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


def lines(rows: Iterable[Iterable[str]]) -> str:
    """Rows of a table."""
    return "".join(f"| {' | '.join(cells)} |\n" for cells in rows)


def page(found: Mapping[str, Comparison]) -> str:
    """The whole page."""
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
    head = HEAD.format(jaxlib=version("jaxlib"), must=must, lacking=lacking)
    return head + lines(reasons) + TABLE + lines([*rows, ["**all**", *sums, ""]])


def make_parser() -> Parser:
    """The flags."""
    parser = Parser("tools/run compare_shardy", __doc__)
    parser.add_argument("--differences", help="a module of the page, to print its differences")
    return parser


def main(arguments: Sequence[str] | None = None) -> None:
    """Writes the page, or prints the differences of one module."""
    module = make_parser().parse_args(arguments).differences
    found = comparisons()
    if module is None:
        PAGE.write_text(page(found), encoding="utf-8")
        return
    if module not in found:
        sys.exit(f"error: no module is called {module!r}; there are {', '.join(found)}")
    for pair, reasons in explain(found[module]).items():
        print(describe(found[module], pair, reasons))
