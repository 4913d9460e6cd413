"""Every StableHLO and CHLO op ends in a rule, in other ops, or in an error with its name."""

from benchmarks.corpus.programs import PROGRAMS
from spmd.frontend.importer.ops import dialect_ops
from tools.coverage import OPS_PAGE, PROGRAMS_PAGE, how


def test_something_becomes_of_every_op_and_the_page_says_so() -> None:
    assert {name for name in dialect_ops() if not how(name)} == set()
    page = OPS_PAGE.read_text(encoding="utf-8")
    for name in dialect_ops():
        assert f"| `{name}` | {how(name) or '**missing**'} |" in page, (
            f"{name}: run tools/run coverage"
        )


def test_the_page_lists_every_program() -> None:
    page = PROGRAMS_PAGE.read_text(encoding="utf-8")
    for program in PROGRAMS:
        assert f"| `{program.name}` |" in page, f"{program.name}: run tools/run coverage"
