"""An op is described once, in `spmd.ir.dialect`: no algorithm names one."""

import ast
import re
from pathlib import Path

import pytest

import spmd  # noqa: F401 (describes all ops)
from spmd.errors import SpmdError
from spmd.ir.description import DESCRIPTIONS, UNKNOWN, UNKNOWN_CALL, Description, Role
from spmd.ir.dialect.elementwise import elementwise_rule
from spmd.ir.dialect.registry import describe, op, rule_of
from spmd.ir.program import OpKind
from spmd.ir.types import ScatterDims, TensorType

ROOT = Path(__file__).parents[3]
OP_NAME = re.compile(r"(stablehlo|chlo|sdy|mhlo|func)\.\w+|custom_call:\w+")
OUR_OPS = {name for name in DESCRIPTIONS if name.startswith("spmd.")}

AT_HOME = (
    "spmd/ir/description.py",  # the two ops that call what has a name of its own
    "spmd/ir/dialect/",  # the descriptions
    "spmd/frontend/",  # the importer, and what it writes with other ops
    "spmd/lowering/local/",  # what becomes of an op on one device
    "spmd/lowering/emit.py",
    "spmd/lowering/execute.py",  # the emitted module joins jax's
    "spmd/ops/",  # composites of ours: they register themselves
)


def named_ops(path: Path) -> list[str]:
    """Whole strings of a file that are names of ops, with their lines."""
    found = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            if OP_NAME.fullmatch(node.value) or node.value in OUR_OPS:
                found.append(f"{path.relative_to(ROOT)}:{node.lineno}: {node.value}")
        elif isinstance(node, ast.JoinedStr) and _begins_with_a_dialect(node):
            found.append(f"{path.relative_to(ROOT)}:{node.lineno}: an f-string")
    return found


def _begins_with_a_dialect(text: ast.JoinedStr) -> bool:
    first = text.values[0]
    return isinstance(first, ast.Constant) and str(first.value).startswith(("stablehlo.", "chlo."))


def test_no_algorithm_names_an_op():
    files = [
        path
        for path in sorted((ROOT / "spmd").rglob("*.py"))
        if not path.relative_to(ROOT).as_posix().startswith(AT_HOME)
    ]
    assert len(files) > 100
    found = [line for path in files for line in named_ops(path)]
    assert not found, "ask for a trait of `spmd.ir.description` instead:\n" + "\n".join(found)
    assert len(named_ops(ROOT / "spmd/ir/dialect/window.py")) > 8


def test_every_op_with_a_rule_says_what_becomes_of_it_and_others_are_unknown():
    for name, about in DESCRIPTIONS.items():
        assert about.rule or about.region or about.is_local, name
        assert not (about.is_same_locally and about.vanishes), name
        assert bool(about.selector) == (about.region == "branches"), name
        if about.linear:
            assert about.is_elementwise, name
    call = OpKind("stablehlo.custom_call", (), (), {"call_target_name": "test.nobody_knows"})
    assert OpKind("stablehlo.nobody_knows", (), (), {}).about == UNKNOWN
    assert call.about == UNKNOWN_CALL
    assert call.about.has_effect and call.about.role == Role.CALL


def test_an_op_described_late_is_known_from_then_on():
    kind = OpKind("test.late", (), (), {})
    assert kind.about == UNKNOWN
    describe(Description(is_source=True), "late", dialect="test")
    try:
        assert kind.about.is_source
        with pytest.raises(SpmdError, match=r"test\.late already has a rule"):
            op("test.late")(elementwise_rule)
    finally:
        del DESCRIPTIONS["test.late"]


def test_every_factor_of_a_scatter_along_a_batch_is_in_some_dim():
    types = (
        TensorType((4, 64, 8), "f32"),
        TensorType((4, 32, 1), "i32"),
        TensorType((4, 32, 8), "f32"),
    )
    numbers = ScatterDims((2,), (1,), (0,), (0,), (1,), 2)
    attrs = {"scatter_dimension_numbers": numbers, "reducer": "add"}
    rule = rule_of(OpKind("stablehlo.scatter", types, types[:1], attrs))
    assert str(rule) == "i l m, i j k, i j m -> i l m {j: reduce add, k: replicate}"
