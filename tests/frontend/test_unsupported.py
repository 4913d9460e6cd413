"""Every op that the importer refuses: one clear error that says why and what to do instead."""

import pytest
from jaxlib.mlir import ir

import spmd
from spmd.frontend.canonicalize import canonicalize
from spmd.frontend.importer.module import import_module, parse_module
from spmd.frontend.importer.ops import REFUSED
from tests.frontend.test_hostile import BODY, function

_SUM = """({
  ^bb0(%a: tensor<f32>, %b: tensor<f32>):
    %c = "stablehlo.add"(%a, %b) : (tensor<f32>, tensor<f32>) -> tensor<f32>
    "stablehlo.return"(%c) : (tensor<f32>) -> ()
})"""
_SAME = "(tensor<8x4xf32>) -> tensor<8x4xf32>"
_QUANTIZED = "tensor<8x4x!quant.uniform<i8:f32, 0.5>>"


def collectives(groups: str, count: int) -> dict[str, str]:
    """All collectives in groups of so many devices."""
    grouped = f"replica_groups = dense<{groups}> : tensor<1x{count}xi64>"
    pairs = f"source_target_pairs = dense<{groups}> : tensor<1x2xi64>"
    gathered, scattered = (
        f"(tensor<8x4xf32>) -> tensor<{n}x4xf32>" for n in (8 * count, 8 // count)
    )
    about = {
        "all_gather": f"{{all_gather_dim = 0 : i64, {grouped}}} : {gathered}",
        "all_reduce": f"{_SUM} {{{grouped}}} : {_SAME}",
        "all_to_all": f"{{split_dimension = 0 : i64, concat_dimension = 0 : i64, "
        f"split_count = {count} : i64, {grouped}}} : {_SAME}",
        "collective_broadcast": f"{{{grouped}}} : {_SAME}",
        "collective_permute": f"{{{pairs}}} : {_SAME}",
        "reduce_scatter": f"{_SUM} {{scatter_dimension = 0 : i64, {grouped}}} : {scattered}",
    }
    return {f"stablehlo.{name}": f'"stablehlo.{name}"(%x) {rest}' for name, rest in about.items()}


def module(line: str) -> str:
    return function(f"%y = {line}\n{BODY}")


TEXTS = collectives("[[0, 1]]", 2)


@pytest.mark.parametrize("name", dict.fromkeys([*REFUSED, *TEXTS]))
def test_refused_by_name_and_reason(name: str) -> None:
    """Collectives as they are written; of other ops the name is enough, or a call's target."""
    parsed = parse_module(module(TEXTS.get(name, f'"stablehlo.negate"(%x) : {_SAME}')))
    if name not in TEXTS:
        op, _, target = name.partition(":")
        with parsed.context, ir.Location.unknown():
            called = ir.StringAttr.get(target)
            attributes: dict[str, ir.Attribute] = {"call_target_name": called} if target else {}
            ir.Operation.create(
                "stablehlo.custom_call" if target else op,
                attributes=attributes,
                ip=ir.InsertionPoint(parsed.body.operations[0].regions[0].blocks[0].operations[0]),
            )
    with pytest.raises(spmd.UnsupportedOpError) as caught:
        import_module(parsed)
    text = str(caught.value)
    assert f"{name} cannot be partitioned: {REFUSED[name].reason}" in text
    assert f"fix: {REFUSED[name].fix}" in text
    assert name not in TEXTS or "place the collectives; or put it into jax.shard_map" in text


_ALONE = collectives("0", 1)
"""Collectives as a process with one device writes them."""


@pytest.mark.parametrize("name", sorted(_ALONE))
def test_collectives_of_one_device_do_nothing(name: str) -> None:
    text = module(_ALONE[name]).replace("return %x", "return %y")
    program = import_module(parse_module(text)).program
    assert program.body.results == program.body.args
    assert all(op.name == "stablehlo.constant" for op in program.walk())


def test_quantized_types_and_calls_without_results() -> None:
    line = f'"stablehlo.uniform_quantize"(%x) : (tensor<8x4xf32>) -> {_QUANTIZED}'
    with pytest.raises(spmd.FrontendError, match="without quantized types"):
        parse_module(module(line))
    call = "stablehlo.custom_call @no_results(%x) {has_side_effect = true}"
    text = f"""func.func @main(%x: tensor<8xf32>) -> tensor<8xf32> {{
      {call} : (tensor<8xf32>) -> ()
      return %x : tensor<8xf32>
    }}"""
    with pytest.raises(spmd.UnsupportedOpError, match="no_results") as caught:
        spmd.lower_stablehlo(text, spmd.Mesh(None, (2,), ("x",)), [("x",)])
    assert "let it return a value" in str(caught.value)


REWRITES = {
    "stablehlo.dynamic_pad cannot be partitioned: its sizes, amounts or strides are computed": (
        """%y = "stablehlo.dynamic_pad"(%x, %z, %i, %i, %i) : (tensor<8x4xf32>, tensor<f32>,
        tensor<2xi32>, tensor<2xi32>, tensor<2xi32>) -> tensor<8x4xf32>"""
    ),
    "stablehlo.real_dynamic_slice cannot be partitioned: its sizes, amounts or strides": (
        """%y = "stablehlo.real_dynamic_slice"(%x, %i, %i, %i) : (tensor<8x4xf32>, tensor<2xi32>,
        tensor<2xi32>, tensor<2xi32>) -> tensor<4x4xf32>"""
    ),
    "its body is not elementwise": (
        """%y = "stablehlo.map"(%x) ({
          ^bb0(%a: tensor<f32>):
            %n = "stablehlo.rng"(%a, %a, %e) {
              rng_distribution = #stablehlo<rng_distribution UNIFORM>}
              : (tensor<f32>, tensor<f32>, tensor<0xi64>) -> tensor<f32>
            "stablehlo.return"(%n) : (tensor<f32>) -> ()
        }) {dimensions = array<i64: 0, 1>} : (tensor<8x4xf32>) -> tensor<8x4xf32>"""
    ),
    "stablehlo.unary_einsum cannot be partitioned": (
        """%y = "stablehlo.unary_einsum"(%x) {einsum_config = "ijk->i"}
        : (tensor<8x4xf32>) -> tensor<8xf32>"""
    ),
    "only a scan of one tensor": (
        """%y:2 = "chlo.scan"(%x, %r) ({
          ^bb0(%a: tensor<8xf32>, %b: tensor<8xf32>):
            %m = "stablehlo.subtract"(%a, %b) : (tensor<8xf32>, tensor<8xf32>) -> tensor<8xf32>
            "stablehlo.return"(%m, %m) : (tensor<8xf32>, tensor<8xf32>) -> ()
        }) {dimension = 1 : i64, is_associative = false, is_reverse = false,
            operandSegmentSizes = array<i32: 1, 1>, resultSegmentSizes = array<i32: 1, 1>}
        : (tensor<8x4xf32>, tensor<8xf32>) -> (tensor<8x4xf32>, tensor<8xf32>)"""
    ),
    "it asks for the smallest": (
        """%y:2 = "stablehlo.custom_call"(%x) {call_target_name = "mhlo.topk",
        mhlo.attributes = {k = 2 : i64, largest = false}}
        : (tensor<8x4xf32>) -> (tensor<8x2xf32>, tensor<8x2xi32>)"""
    ),
}


@pytest.mark.parametrize("why", sorted(REWRITES))
def test_forms_that_no_other_op_says(why: str) -> None:
    text = f"""
    func.func @main(%x: tensor<8x4xf32>, %i: tensor<2xi32>, %z: tensor<f32>, %r: tensor<8xf32>)
        -> tensor<8x4xf32> {{
      {REWRITES[why]}
      return %x : tensor<8x4xf32>
    }}"""
    if "%e)" in text:  # a body may read nothing from outside, so the shape is made inside
        text = text.replace(
            '%n = "stablehlo.rng"',
            """%e = "stablehlo.constant"() {value = dense<> : tensor<0xi64>} : () -> tensor<0xi64>
            %n = "stablehlo.rng\"""",
        )
    with pytest.raises(spmd.UnsupportedOpError) as caught:
        canonicalize(import_module(parse_module(text)).program)
    assert why in str(caught.value) or "stablehlo.rng" in str(caught.value)
    assert "\n  fix: " in str(caught.value)
