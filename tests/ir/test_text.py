"""The text form reads back exactly, and looks as it should."""

import string

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from spmd.ir.dialect.reducers import reducer_body
from spmd.ir.legality import check_program
from spmd.ir.program import Body, Op, OpKind, Program, Region
from spmd.ir.text import format_op, format_program
from spmd.ir.types import Dense, DotDims, GatherDims, Opaque, ShardingAttr, TensorType, numpy_dtype
from spmd.mesh.mesh import Mesh
from tests.ir.dialect.cases import CASES
from tests.ir.examples import program_of
from tests.ir.text_parse import parse_program, without_locs

MESH = Mesh(None, (4, 2), ("data", "model"))
F32 = TensorType((), "f32")


def one_op(attrs, name="test.op"):
    kind = OpKind(name, (), (F32,), attrs)
    return Program("p", (F32,), Region((), (Op(kind, (), (0,)),), (0,)), (), ("r",))


def attrs_of(program):
    return program.body.ops[0].kind.attrs


def typed(value):
    """A value with the types of all of its parts, since 1 == True and (1,) == DotDims(1)."""
    parts = [typed(v) for v in value] if isinstance(value, tuple) else value
    return type(value), parts


LOCAL_TEXT = r"""
program @"a \"name\"\n"(
  %0: tensor<4x8xf32> "a\\b"
) {
  %2 = spmd.axis_index {axes = {data:(1)2, model}} : () -> tensor<i32>
  %3 = stablehlo.all_reduce %0 {axes = {data:(2)2, model}, body = add<f32>} : (tensor<4x8xf32>) -> tensor<4x8xf32>
  %5 = stablehlo.collective_permute %3 {axes = {}, pairs = [[0, 1], [1, 0]]} : (tensor<4x8xf32>) -> tensor<4x8xf32>
  return
    %5 "['x']",
    %2 "\u00e9\u2028\u0085"
  unused %1 : !stablehlo.token
  unused %4 : tensor<f32>
}
"""  # noqa: E501 (an op a line)

IMPORTED = {case.name: case for case in CASES if case.name not in ("callback", "inspected")}


@pytest.mark.parametrize("name", IMPORTED)
def test_imported_programs_read_back(name):
    program = program_of(IMPORTED[name].fn, *IMPORTED[name].args)
    check_program(program)
    read = parse_program(format_program(program, annotate=lambda v: f"value {v}"))
    assert read == without_locs(program)
    assert format_program(read) == format_program(program)
    for op, again in zip(program.walk(), read.walk(), strict=True):
        assert op.kind is again.kind
        for attr, value in op.kind.attrs.items():
            assert typed(value) == typed(again.kind.attrs[attr])


@pytest.mark.parametrize("mesh", [None, MESH])
def test_local_programs_read_back(mesh):
    """With collectives, numbers left over, a dead value and a program's odd names."""
    program = parse_program(LOCAL_TEXT, MESH)
    assert [op.kind.attrs["axes"] for op in program.walk()] == [(0, 2), (1, 2), ()]
    assert (program.name, *program.result_names) == ('a "name"\n', "['x']", "é\u2028\x85")
    text = format_program(program, mesh=mesh)
    assert parse_program(text, mesh) == program
    assert (text == LOCAL_TEXT.removeprefix("\n")) == (mesh is not None)


def test_unknown_axes_are_written_as_atoms_and_unknown_types_not_at_all():
    for axes in ((7,), "data"):
        program = one_op({"axes": axes})
        assert attrs_of(parse_program(format_program(program, mesh=MESH), MESH)) == {"axes": axes}
    with pytest.raises(TypeError, match="has no text form"):
        format_program(one_op({"x": object()}))


TEXTS = st.text(st.characters(codec=None), max_size=20)
NAMES = st.text(st.characters(codec=None), min_size=1, max_size=10)


@given(TEXTS, TEXTS, NAMES, NAMES)
def test_any_string_reads_back(string_value, opaque, attr, op_name):
    attrs = {attr: string_value, attr + "2": Opaque(opaque), attr + "3": (string_value, ())}
    program = one_op(attrs, op_name)._replace(name=string_value, result_names=(opaque,))
    text = format_program(program)
    assert parse_program(text) == program
    assert text.splitlines() == text.removesuffix("\n").split("\n")


SCALARS = st.one_of(
    st.booleans(), st.integers(), st.floats(), st.text(string.printable, max_size=5)
)
TUPLES = st.recursive(SCALARS, lambda inner: st.lists(inner, max_size=3).map(tuple), max_leaves=8)


@given(TUPLES)
def test_any_tuple_reads_back_with_its_types(value):
    # Kinds that are equal are one object, so each type of attribute has a name of its own here.
    program = one_op({repr(typed(value)): value})
    ((_, read),) = attrs_of(parse_program(format_program(program))).items()
    assert repr(read) == repr(value)  # 1 == True, -0.0 == 0.0, and nan != nan


def test_structured_attributes_read_back():
    attrs = {
        "dot": DotDims((), (), (1,), (0,)),
        "gather": GatherDims((1,), (0,), (), (), (0,), 1),
        "mark": ShardingAttr(((("data", 1, 0),), (), (("model", 1, 2),)), (False, True, False)),
        "scalar_mark": ShardingAttr((), ()),
        "body": reducer_body("xor", "complex<f32>"),
    }
    read = attrs_of(parse_program(format_program(one_op(attrs))))
    assert {n: typed(v) for n, v in read.items()} == {n: typed(v) for n, v in attrs.items()}
    assert "dot = dot(lhs_contract = [1], rhs_contract = [0])" in format_program(one_op(attrs))


def test_a_body_is_numbered_on_its_own():
    scalar = TensorType((), "i32")
    inner = OpKind("stablehlo.subtract", (scalar, scalar), (scalar,), {})
    body = Body((scalar,) * 4, Region((0, 1), (Op(inner, (0, 1), (3,)),), (3,)))
    program = one_op({"body": body, "last": True})
    text = format_program(program)
    assert parse_program(text) == program
    assert "    %3 = stablehlo.subtract %0, %1" in text
    assert "    unused %2 : tensor<i32>" in text
    assert format_op(program.body.ops[0]).count("\n") == 0


DTYPES = ["i1", "i4", "ui2", "i8", "ui64", "i64", "f16", "bf16", "f32", "f64", "f4E2M1FN",
          "f8E4M3FN", "f8E8M0FNU", "complex<f32>", "complex<f64>"]  # fmt: skip
SHAPES = st.lists(st.integers(0, 4), max_size=3).map(tuple)


@given(st.sampled_from(DTYPES), SHAPES, st.booleans(), st.data())
def test_any_bits_of_a_constant_read_back(dtype, shape, splat, data):
    type_ = TensorType(shape, dtype)
    size = (1 if splat else type_.size) * numpy_dtype(dtype).itemsize
    dense = Dense(type_, data.draw(st.binary(min_size=size, max_size=size)), splat)
    read = attrs_of(parse_program(format_program(one_op({"value": dense}))))["value"]
    assert typed(read) == typed(dense)


@pytest.mark.parametrize(
    ("array", "dtype", "text"),
    [
        (np.full((2, 3), 0.1), "f32", "dense<0.1 : tensor<2x3xf32>>"),
        ([[1, -2], [3, 4]], "i32", "dense<[[1, -2], [3, 4]] : tensor<2x2xi32>>"),
        ([True, False], "i1", "dense<[true, false] : tensor<2xi1>>"),
        (np.zeros((2, 0)), "bf16", "dense<[] : tensor<2x0xbf16>>"),
        ([1 + 2j, 0], "complex<f32>", "dense<[(1+2j), 0j] : tensor<2xcomplex<f32>>>"),
        (np.arange(17), "ui8", "dense<hex 000102030405060708090a0b0c0d0e0f10 : tensor<17xui8>>"),
        ([np.inf, np.nan], "f32", "dense<[inf, nan] : tensor<2xf32>>"),
    ],
)
def test_constants_are_readable(array, dtype, text):
    assert f"value = {text}}}" in format_program(one_op({"value": Dense.of(array, dtype)}))


def test_large_constants_are_digests():
    one, other = (np.arange(1 << 18) + i for i in range(2))
    texts = [format_program(one_op({"value": Dense.of(x, "i32")})) for x in (one, one, other)]
    assert texts[0] == texts[1] != texts[2]
    assert "sha256" in texts[0] and len(texts[0]) < 1000


def test_quantized_types_read_back():
    type_ = TensorType((2, 3), "!quant.uniform<i8:f32:1, {0.1:-3,0.2,<1>}>")
    kind = OpKind("stablehlo.uniform_quantize", (), (type_,), {"value": Dense(type_, b"ab", True)})
    program = Program("q", (type_,), Region((), (Op(kind, (), (0,)),), (0,)), (), ("",))
    assert parse_program(format_program(program)) == program


def test_annotations_stand_behind_every_definition():
    program = program_of(IMPORTED["case"].fn, *IMPORTED["case"].args)
    text = format_program(program, annotate=lambda v: f"<{v}>")
    for value in range(len(program.types)):
        assert f"<{value}>" in text
