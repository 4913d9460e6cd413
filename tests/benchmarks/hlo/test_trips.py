"""Trip counts of loops in optimized HLO, followed from what the counter starts with."""

import pytest

from benchmarks.hlo.runs import Loops
from spmd.measure.hlo import parse_module_text

TYPE = "(s32[], s32[], f32[8])"

LESS = """%less (a: s32[], b: s32[]) -> pred[] {
  %a = s32[] parameter(0)
  %b = s32[] parameter(1)
  ROOT %l = pred[] compare(%a, %b), direction=LT
}

%fused_next (a: s32[]) -> s32[] {
  %a = s32[] parameter(0)
  %three = s32[] constant(3)
  ROOT %b = s32[] add(%a, %three)
}

"""


def trips(first: str, following: str, test: str, end: str = "constant(10)") -> int | None:
    """Of a loop that is called with (`first`, `end`, ...)."""
    text = f"""HloModule m

{LESS}%body (t: {TYPE}) -> {TYPE} {{
  %t = {TYPE} parameter(0)
  %i = s32[] get-tuple-element(%t), index=0
  %n = s32[] get-tuple-element(%t), index=1
  %x = f32[8] get-tuple-element(%t), index=2
  %one = s32[] constant(1)
  %two = s32[] constant(2)
  %next = s32[] {following}
  ROOT %r = {TYPE} tuple(%next, %n, %x)
}}

%cond (t: {TYPE}) -> pred[] {{
  %t = {TYPE} parameter(0)
  %i = s32[] get-tuple-element(%t), index=0
  %n = s32[] get-tuple-element(%t), index=1
  %x = f32[8] get-tuple-element(%t), index=2
  %five = s32[] constant(5)
  ROOT %c = pred[] {test}
}}

ENTRY %main (p: s32[], x: f32[8]) -> {TYPE} {{
  %p = s32[] parameter(0)
  %x = f32[8] parameter(1)
  %first = s32[] {first}
  %copied = s32[] copy(%first)
  %end = s32[] {end}
  %t = {TYPE} tuple(%copied, %end, %x)
  ROOT %w = {TYPE} while(%t), condition=%cond, body=%body
}}
"""
    module = parse_module_text(text)
    return Loops(module).trips(module.computations["main"][-1], "main")


UP = "add(%i, %one)"


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("first", "following", "test", "expected"),
    [
        ("constant(0)", UP, "compare(%i, %five), direction=LT", 5),
        ("constant(0)", UP, "compare(%i, %n), direction=LT", 10),  # n is 10 all the while
        ("constant(0)", UP, "compare(%n, %i), direction=GT", 10),
        ("constant(0)", UP, "fusion(%i, %n), kind=kLoop, calls=%less", 10),
        ("constant(0)", UP, "compare(%i, %n), direction=LE", 11),
        ("constant(4)", UP, "compare(%i, %n), direction=NE", 6),
        ("constant(-4)", UP, "compare(%i, %n), direction=LT", 14),
        # 0, 2, 4, 6, 8: iterations that were written as one.
        ("constant(0)", "add(%i, %two)", "compare(%i, %n), direction=LT", 5),
        ("constant(0)", "add(%two, %i)", "compare(%i, %five), direction=LT", 3),
        # 0, 3, 6, 9
        ("constant(0)", "fusion(%i), calls=%fused_next", "compare(%i, %n), direction=LT", 4),
        # 9, 8, ..., 5
        ("constant(9)", "subtract(%i, %one)", "compare(%i, %five), direction=GE", 5),
        # 1, 2, 4, 8
        ("constant(1)", "multiply(%i, %two)", "compare(%i, %n), direction=LT", 4),
        ("constant(12)", UP, "compare(%i, %n), direction=LT", 0),
        # What nobody knows before it runs.
        ("copy(%p)", UP, "compare(%i, %n), direction=LT", None),
        ("constant(0)", "add(%i, %i)", "compare(%i, %n), direction=LT", None),  # stays 0
        ("constant(0)", "custom-call(%x)", "compare(%i, %n), direction=LT", None),
        ("constant(0)", UP, "custom-call(%x, %i)", None),
    ],
)  # fmt: skip
def test_counters(first: str, following: str, test: str, expected: int | None) -> None:
    assert trips(first, following, test) == expected


def test_an_end_that_the_caller_does_not_know() -> None:
    assert trips("constant(0)", UP, "compare(%i, %n), direction=LT", "copy(%p)") is None
