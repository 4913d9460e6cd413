"""Arguments in the host's memory: which come together, and what each turn waits for."""

# ruff: noqa: E501 (program texts)

from spmd.ir.dialect.host import hosted, moves_to, with_moves
from spmd.ir.program import Program
from spmd.lowering.rewrites.arrivals import in_turn
from spmd.mesh.mesh import Mesh
from tests.ir.text_parse import parse_program
from tests.lowering.rewrites.local_programs import arguments, names, run

MESH = Mesh(None, (8,), ("x",))
T = "tensor<4x4xf32>"
DOT = f"{{dot_dimension_numbers = dot(lhs_contract = [1], rhs_contract = [0])}} : ({T}, {T}) -> {T}"
SAME = f": ({T}, {T}) -> {T}"

# Of the gradients %7, %8 and %9, each has two moments.
STEP = f"""program @p(%0: {T} "x", %1: {T} "m1", %2: {T} "m2", %3: {T} "m3", %4: {T} "v1", %5: {T} "v2", %6: {T} "v3") {{
  %7 = stablehlo.dot_general %0, %0 {DOT}
  %8 = stablehlo.dot_general %7, %0 {DOT}
  %9 = stablehlo.dot_general %8, %0 {DOT}
  %10 = stablehlo.negate %1 : ({T}) -> {T}
  %11 = stablehlo.add %10, %7 {SAME}
  %12 = stablehlo.add %2, %8 {SAME}
  %13 = stablehlo.add %3, %9 {SAME}
  %14 = stablehlo.multiply %7, %7 {SAME}
  %15 = stablehlo.add %4, %14 {SAME}
  %16 = stablehlo.multiply %8, %8 {SAME}
  %17 = stablehlo.add %5, %16 {SAME}
  %18 = stablehlo.multiply %9, %9 {SAME}
  %19 = stablehlo.add %6, %18 {SAME}
  %20 = stablehlo.multiply %13, %19 {SAME}
  return %20 "p", %11 "m1", %12 "m2", %13 "m3", %15 "v1", %17 "v2", %19 "v3"
}}"""


def turned(text: str) -> tuple[Program, list[tuple[str | int, ...]]]:
    """The program, checked by its values, and what its barriers hold: arguments by their names."""
    program = parse_program(text, MESH)
    hosts = range(1, len(program.body.args))
    before = with_moves(program, hosts, range(1, len(program.body.results)))
    after, args = in_turn(before), arguments(program, MESH)
    assert hosted(after).arguments == hosted(before).arguments == set(before.body.args[1:])
    for want, *got in zip(*(run(p, MESH, args) for p in (program, before, after)), strict=True):
        for values in got:
            assert (values == want).all()
    called = dict(zip(before.body.args, program.arg_names, strict=True))
    barriers = [op for op in after.body.ops if op.label == "optimization_barrier"]
    return after, [tuple(called.get(v, v) for v in op.operands) for op in barriers]


def test_both_moments_of_a_gradient_come_while_those_before_are_computed() -> None:
    program, held = turned(STEP)
    assert held == [
        ("m1", "v1", 7),  # the first turn waits for its own gradient,
        ("m2", "v2", 7),  # the next ones for the one before,
        ("m3", "v3", 8, 11, 15),  # and until those before that are through
    ]
    kinds = [moves_to(op) or op.label for op in program.body.ops]
    assert kinds.index("device") > kinds.index("optimization_barrier")  # nothing comes earlier


def test_what_meets_nothing_computed_comes_at_once() -> None:
    text = f"""program @p(%0: {T} "x", %1: {T} "m") {{
      %2 = stablehlo.add %0, %1 {SAME}
      %3 = stablehlo.negate %2 : ({T}) -> {T}
      return %2 "y", %3 "m"
    }}"""
    program, held = turned(text)
    assert not held and names(program).count("add") == 1


def test_nothing_waits_for_what_comes_of_it() -> None:
    """A gradient of another one's moment."""
    text = f"""program @p(%0: {T} "x", %1: {T} "m1", %2: {T} "m2", %3: {T} "m3") {{
      %4 = stablehlo.dot_general %0, %0 {DOT}
      %5 = stablehlo.dot_general %3, %4 {DOT}
      %6 = stablehlo.add %1, %5 {SAME}
      %7 = stablehlo.dot_general %6, %2 {DOT}
      %8 = stablehlo.add %7, %3 {SAME}
      return %8 "y", %6 "m1", %7 "m2", %8 "m3"
    }}"""
    _, held = turned(text)
    assert held == [("m1", 4), ("m3", 4), ("m2", 5)]
