"""What the check of programs refuses: copies of good ones, broken in one place."""

import re

import jax.numpy as jnp
import pytest

from spmd.errors import LegalityError
from spmd.ir.legality import check_program
from spmd.ir.program import OpKind
from tests.ir.examples import program_of
from tests.ir.text_parse import parse_program

PROGRAM = """
program @p(%0: tensor<4xf32> "x", %1: tensor<i32> "i", %2: tensor<i1> "b") {
  %3 = stablehlo.add %0, %0 : (tensor<4xf32>, tensor<4xf32>) -> tensor<4xf32>
  %9, %10 = stablehlo.while %3, %1 : (tensor<4xf32>, tensor<i32>) -> (tensor<4xf32>, tensor<i32>) {
    region(%4: tensor<4xf32>, %5: tensor<i32>) {
      return %2
    }
    region(%6: tensor<4xf32>, %7: tensor<i32>) {
      %8 = stablehlo.negate %6 : (tensor<4xf32>) -> tensor<4xf32>
      return %8, %7
    }
  }
  %11 = stablehlo.if %2 : (tensor<i1>) -> tensor<4xf32> {
    region() {
      return %9
    }
    region() {
      return %3
    }
  }
  %12 = stablehlo.case %10 : (tensor<i32>) -> tensor<4xf32> {
    region() {
      return %11
    }
  }
  %13 = stablehlo.sort %12 {body = (%0: tensor<f32>, %1: tensor<f32>) {
    %2 = stablehlo.compare %0, %1 : (tensor<f32>, tensor<f32>) -> tensor<i1>
    return %2
  }} : (tensor<4xf32>) -> tensor<4xf32>
  %17 = spmd.manual {axes = [0]} : () -> tensor<4xf32> {
    region() {
      %14 = spmd.to_manual %13 {axes = [0], dims = [[0]]} : (tensor<4xf32>) -> tensor<2xf32>
      %15 = stablehlo.collective_permute %14 {axes = [0], pairs = [[0, 1], [1, 0]]}
        : (tensor<2xf32>) -> tensor<2xf32>
      %16 = spmd.from_manual %15 {axes = [0], dims = [[0]]} : (tensor<2xf32>) -> tensor<4xf32>
      return %16
    }
  }
  return %17 "y"
}
"""
ADD = "stablehlo.add %0, %0 : (tensor<4xf32>, tensor<4xf32>) -> tensor<4xf32>"
GATHER = "spmd.mark %0 {axes = [0]} : (tensor<4xf32>) -> tensor<4xf32>"

BROKEN_PROGRAMS = [
    # old text, new text, and what the message says
    ("stablehlo.negate %6", "stablehlo.negate %9", "%9 is read but not defined"),
    ("stablehlo.case %10", "stablehlo.case %5", "outside its region"),
    ("compare %0, %1", "compare %0, %2", "%2 is read but not defined"),
    ("return %17", "return %8", "outside its region"),
    ("return %8, %7", "return %9, %7", "%9 is read but not defined"),
    ("negate %6", "negate %7", "are (tensor<i32>), in its kind (tensor<4xf32>)"),
    ("stablehlo.add", "arith.addf", "its dialect is none of"),
    ("return %2\n    }\n    region(%6", "return %5\n    }\n    region(%6", "its regions take"),
    ("return %8, %7", "return %7, %8", "its regions take and give"),
    ("return %8, %7", "return %8", "its regions take and give"),
    ("region(%4: tensor<4xf32>", "region(%4: tensor<5xf32>", "its regions take and give"),
    ("return %3\n    }\n  }", "return %10\n    }\n  }",
     "give () (tensor<4xf32>) () (tensor<i32>) instead of () (tensor<4xf32>) () (tensor<4xf32>)"),
    ("region() {\n      return %11", "region(%18: tensor<f32>) {\n      return %11",
     "give (tensor<f32>) (tensor<4xf32>) instead of () (tensor<4xf32>)"),
    ("stablehlo.if %2 : (tensor<i1>)", "stablehlo.if %1 : (tensor<i32>)",
     "instead of (tensor<i1>)"),
    ("region() {\n      return %9\n    }", "", "its regions take and give"),
    ("stablehlo.while", "stablehlo.scan", "its regions take and give"),
    ("manual {axes = [0]} : ()", "manual %0 {axes = [0]} : (tensor<4xf32>)", "instead of ()"),
    ("return %16", "return %15", "its regions take and give"),
    ("{axes = [0], pairs", "{pairs", "a collective without axes"),
    (ADD, "stablehlo.partition_id : () -> tensor<4xf32>", "outside any manual"),
    (ADD, "spmd.local_slice %0 : (tensor<4xf32>) -> tensor<4xf32>", "one device's"),
    (ADD, "stablehlo.all_reduce %0 {axes = [0]} : (tensor<4xf32>) -> tensor<4xf32>",
     "one device's program outside any manual region"),
]  # fmt: skip


@pytest.mark.parametrize(("old", "new", "message"), BROKEN_PROGRAMS)
def test_a_broken_program_is_refused(old, new, message):
    check_program(parse_program(PROGRAM))
    assert PROGRAM.count(old) == 1
    with pytest.raises(LegalityError, match=re.escape(message)):
        check_program(parse_program(PROGRAM.replace(old, new)))


def test_stages_have_ops_of_their_own():
    for op, message in (
        ("spmd.mark %0", "of the whole program in one"),
        ("stablehlo.all_gather %0", "without axes"),
    ):
        text = PROGRAM.replace("stablehlo.add %0, %0 : (tensor<4xf32>, ", f"{op} : (")
        with pytest.raises(LegalityError, match=message):
            check_program(parse_program(text), "local")


def with_op(program, index, **changed):
    ops = list(program.body.ops)
    ops[index] = ops[index]._replace(**changed)
    return program._replace(body=program.body._replace(ops=tuple(ops)))


def test_what_cannot_be_written_as_text_is_refused_too():
    program = parse_program(PROGRAM)
    types = program.types
    for broken, message in (
        (with_op(program, 2, results=(3,)), "%3 is defined twice"),
        (with_op(program, 1, results=(9, 9)), "%9 is defined twice"),
        (with_op(program, 0, operands=(0,)), "operands or results"),
        (program._replace(body=program.body._replace(args=(0, 1, 1))), "%1 is defined twice"),
    ):
        with pytest.raises(LegalityError, match=message):
            check_program(broken)
    check_program(program, ends=(types[:3], types[:1]))
    with pytest.raises(LegalityError, match=r"its results are \(tensor<4xf32>\) instead of"):
        check_program(program, ends=(types[:3], types[1:2]))


def test_the_error_names_the_op_and_the_users_line():
    program = program_of(lambda x: jnp.sin(x) * 2, jnp.ones(4))
    index, op = next((i, op) for i, op in enumerate(program.body.ops) if op.loc.source)
    kind = OpKind("other.op", op.kind.operands, op.kind.results, op.kind.attrs)
    with pytest.raises(LegalityError, match="its dialect is none of") as error:
        check_program(with_op(program, index, kind=kind))
    assert str(error.value.op).startswith(f"%{op.results[0]} = other.op")
    assert error.value.source == op.loc.source
