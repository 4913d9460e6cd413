"""Modules with shardings at every stage of Shardy's life, and of GSPMD: the same numbers."""

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.interpreters import mlir
from jax.sharding import Mesh as JaxMesh
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from jaxlib.mlir import ir
from jaxlib.mlir.passmanager import PassManager

import spmd
from spmd.frontend.importer.module import import_module, parse_module
from spmd.ir.types import ShardingAttr
from spmd.options import Options

OPEN = P.UNCONSTRAINED
X = np.random.default_rng(0).standard_normal((16, 16), np.float32)
W = np.random.default_rng(1).standard_normal((16, 16), np.float32)
MESHES = {"a=4,b=2": {"a": 4, "b": 2}, "p=2,q=4": {"p": 2, "q": 4}, "all=8": {"all": 8}}


def jax_mesh(**axes: int) -> JaxMesh:
    return JaxMesh(np.array(jax.devices()[:8]).reshape(*axes.values()), tuple(axes))


def constrain(x: Any, mesh: JaxMesh, *spec: Any) -> Any:
    return lax.with_sharding_constraint(x, NamedSharding(mesh, P(*spec)))


def layer(x: Any, w: Any) -> Any:
    """Several results, a call, a reshape, an op of several results."""
    h = constrain(jnp.tanh(x @ w), jax_mesh(a=4, b=2), "a", OPEN)
    return jnp.sort(h, 0), (h.reshape(-1) * 2).sum(), *lax.top_k(h, 2)


def scanned_gradient(x: Any, w: Any) -> Any:
    def loss(w: Any) -> Any:
        def step(carry: Any, row: Any) -> Any:
            carry = constrain(jnp.tanh(carry @ w + row), jax_mesh(x=2, y=2, z=2), "x", ("y", "z"))
            return carry, carry.sum()

        carry, sums = lax.scan(step, x, w[:3])
        return (carry**2).mean() + sums[-1]

    return jax.grad(loss)(w)


def manual(x: Any, w: Any) -> Any:
    """Regions over two meshes, one of them manual along one axis alone."""
    pair, cube = jax_mesh(a=4, b=2), jax_mesh(x=2, y=2, z=2)
    h = jax.shard_map(
        lambda x, w: lax.psum(x @ w, "a"),
        mesh=pair, axis_names={"a"}, in_specs=(P(None, "a"), P("a")), out_specs=P(),
    )(x, w)  # fmt: skip
    return jax.shard_map(
        lambda h: lax.psum(h * lax.axis_index("y"), ("x", "z")),
        mesh=cube, in_specs=P(("z", "x"), "y"), out_specs=P(None, "y"),
    )(h)  # fmt: skip


PROGRAMS: dict[str, Callable[..., Any]] = {
    "layer": layer, "scanned_gradient": scanned_gradient, "manual": manual,
}  # fmt: skip
PASSES = {
    "as_jax_prints": "",
    "imported": "sdy-import-pipeline",
    "with_edges": "sdy-add-data-flow-edges",
    "resharded": "func.func(sdy-sharding-constraint-to-reshard)",
    "propagated": "sdy-propagation-pipeline",
    "exported": "sdy-propagation-pipeline,sdy-export-pipeline",
    "collectives": "sdy-propagation-pipeline,"
    "func.func(sdy-insert-explicit-reshards,sdy-reshard-to-collectives)",
}


@contextmanager
def without_shardy() -> Iterator[None]:
    jax.config.update("jax_use_shardy_partitioner", False)
    try:
        yield
    finally:
        jax.config.update("jax_use_shardy_partitioner", True)


def lowered(fn: Callable[..., Any]) -> str:
    where = NamedSharding(jax_mesh(a=4, b=2), P("a"))
    return str(jax.jit(fn, in_shardings=(where, None)).lower(X, W).compiler_ir("stablehlo"))


def after(passes: str, text: str) -> str:
    with mlir.make_ir_context():
        module = ir.Module.parse(text)
        if passes:
            PassManager.parse(f"builtin.module({passes})").run(module.operation)
        return str(module)


def assert_same(text: str, wanted: Any, axes: dict[str, int], *args: Any) -> spmd.Compiled:
    compiled = spmd.compile_stablehlo(text, spmd.make_mesh(**axes), options=Options(check=True))
    for got, want in zip(compiled(*args), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-4)
    return compiled


@pytest.mark.parametrize(
    ("program", "stage"),
    [
        pytest.param(program, stage, marks=() if (i + j) % 2 else pytest.mark.heavy)
        for i, program in enumerate(PROGRAMS)
        for j, stage in enumerate(PASSES)
    ],
)
def test_every_stage_of_shardy(program: str, stage: str) -> None:
    fn = PROGRAMS[program]
    text, wanted = after(PASSES[stage], lowered(fn)), jax.jit(fn)(X, W)
    # Another mesh each time; test_two_meshes.py looks at where values lie.
    axes = list(MESHES.values())[(len(program) + len(stage)) % len(MESHES)]
    compiled = assert_same(text, wanted, axes, X, W)
    if stage == "collectives":
        assert compiled.verify(X, W)


@pytest.mark.parametrize(("program", "mesh"), list(zip(PROGRAMS, MESHES, strict=True)))
def test_modules_for_gspmd(program: str, mesh: str) -> None:
    fn = PROGRAMS[program]
    with without_shardy():
        text = lowered(fn)
    assert "sdy." not in text
    if program == "manual":
        with pytest.raises(spmd.UnsupportedOpError, match="jax lowered for GSPMD"):
            import_module(parse_module(text))
    else:
        assert_same(text, jax.jit(fn)(X, W), MESHES[mesh], X, W)


@pytest.mark.parametrize("shardy", [True, False])
def test_explicit_axes(shardy: bool) -> None:
    mesh = jax.make_mesh((4, 2), ("a", "b"))

    def fn(x: Any) -> Any:
        y = jax.sharding.reshard(jnp.sin(x), P("b", "a"))
        z = jnp.einsum("ij,jk->ik", y, x, out_sharding=P(None, "b"))
        return z, jax.sharding.reshard(z, P("a", None))

    x = jax.device_put(X, NamedSharding(mesh, P("a", "b")))
    with jax.set_mesh(mesh):
        wanted = jax.jit(fn)(x)
        if shardy:
            text = jax.jit(fn).lower(x).as_text()
        else:
            with without_shardy():
                text = jax.jit(fn).lower(x).as_text()
    compiled = assert_same(text, wanted, MESHES["a=4,b=2"], X)
    assert [s.spec for s in compiled.in_shardings] == [P("a", "b")]
    assert [s.spec for s in compiled.out_shardings] == [P(None, "b"), P("a", None)]


# Ops and attributes, one by one.

MESH = 'sdy.mesh @m = <["a"=4, "b"=2]>\nsdy.mesh @other = <["x"=2, "y"=4]>'


def module(body: str, results: str = "tensor<16x16xf32>", args: str = "", more: str = "") -> str:
    return f"""module attributes {{mhlo.num_partitions = 8 : i32}} {{
      {MESH}
      sdy.mesh @maximal_mesh_0 = <[], device_ids=[0]>
      sdy.mesh @empty_mesh = <[]>
      func.func @main(%x: tensor<16x16xf32>{args}) -> ({results}) {{
        {body}
      }}
      {more}
    }}"""


class Case(NamedTuple):
    """An op on `%0`, the sine of the argument, that makes `%1` of its type `T`; and its mark."""

    text: str
    mark: ShardingAttr | None


def whole(*dims: tuple[str, ...], opened: tuple[bool, ...] = (False, False)) -> ShardingAttr:
    return ShardingAttr(tuple(tuple((name, 1, 0) for name in dim) for dim in dims), opened)


A = '{sdy.sharding = #sdy.sharding_per_value<[<@m, [{"a"}, {}]>]>}'
T = "tensor<16x16xf32>"
CASES = {
    "reshard": Case('%1 = sdy.reshard %0 <@m, [{}, {"b"}]> : T', whole((), ("b",))),
    "all_gather": Case('%1 = sdy.all_gather [{"a"}, {}] %0 out_sharding=<@m, [{}, {}]> : T',
        whole((), ())),
    "all_slice": Case('%1 = sdy.all_slice [{}, {"b"}] %0 out_sharding=<@m, [{"a"}, {"b"}]> : T',
        whole(("a",), ("b",))),
    "all_to_all": Case('%1 = sdy.all_to_all [{"a"}: 0->1] %0 out_sharding=<@m, [{}, {"a"}]> : T',
        whole((), ("a",))),
    "collective_permute": Case(
        '%1 = sdy.collective_permute %0 out_sharding=<@m, [{"b", "a":(1)2}, {}]> : T',
        ShardingAttr(((("b", 1, 0), ("a", 1, 2)), ()), (False, False))),
    "all_reduce": Case('%1 = sdy.all_reduce {"b"} %0 out_sharding=<@m, [{"a"}, {}]> : T',
        whole(("a",), ())),
    "reduce_scatter": Case(
        '%1 = sdy.reduce_scatter [{}, {"b"}] %0 out_sharding=<@m, [{"a"}, {"b"}]> : T',
        whole(("a",), ("b",))),
    "data_flow_edge": Case('%1 = sdy.data_flow_edge %0 sharding=<@m, [{"b"}, {?}]> : T',
        whole(("b",), (), opened=(False, True))),
    "propagation_barrier": Case("%1 = sdy.propagation_barrier %0 allowed_direction=NONE : T", None),
    "sharding_group": Case("sdy.sharding_group %0 group_id=3 : T\n%1 = stablehlo.negate %0 : T",
        None),
    "named_computation": Case(
        """%1 = sdy.named_computation<"f">(%0) out_shardings=[<@m, [{}, {"a"}]>]
          (%arg: T) {
            %n = stablehlo.negate %arg : T
            sdy.return %n : T
          } : (T) -> T""", whole((), ("a",))),
    "any_op": Case(
        "%1 = stablehlo.negate %0 {sdy.sharding = "
        '#sdy.sharding_per_value<[<@m, [{"b"}, {}]>]>} : T', whole(("b",), ())),
    "sharding_rule": Case(
        "%1 = stablehlo.negate %0 {sdy.sharding_rule = #sdy.op_sharding_rule<"
        "([i, j])->([i, j]) {i=16, j=16}>} : T", None),
    "priority": Case('%1 = sdy.sharding_constraint %0 <@m, [{"a", ?}p1, {"b"}p2]> : T',
        whole(("a",), ("b",), opened=(True, False))),
    "replicated": Case('%1 = sdy.sharding_constraint %0 <@m, [{"a"}, {?}], replicated={"b"}> : T',
        whole(("a",), ())),
    "other_mesh": Case('%1 = sdy.sharding_constraint %0 <@other, [{"y"}, {"x"}]> : T',
        ShardingAttr(((("a", 2, 2), ("b", 1, 0)), (("a", 1, 2),)), (False, False))),
    "inlined_mesh": Case('%1 = sdy.sharding_constraint %0 <mesh<["q"=2, "r"=4]>, [{"q"}, {}]> : T',
        ShardingAttr(((("a", 1, 2),), ()), (False, False))),
    "device_ids": Case(
        "%1 = sdy.sharding_constraint %0 "
        '<mesh<["t"=2, "u"=4], device_ids=[0, 2, 4, 6, 1, 3, 5, 7]>, [{"t"}, {"u"}]> : T',
        whole(("b",), ("a",))),
    "maximal_mesh": Case(
        "%1 = stablehlo.negate %0 {sdy.sharding = "
        "#sdy.sharding_per_value<[<@maximal_mesh_0, []>]>} : T", None),
    "empty_mesh": Case("%1 = sdy.sharding_constraint %0 <@empty_mesh, [{}, {}]> : T",
        whole((), ())),
    "unreduced": Case('%1 = sdy.sharding_constraint %0 <@m, [{"a"}, {}], unreduced={"b"}> : T',
        None),
    "gspmd": Case(
        "%1 = stablehlo.custom_call @Sharding(%0) {backend_config = \"unspecified_dims=[1]\", "
        'mhlo.sharding = "{devices=[2,1,4]<=[4,2]T(1,0) last_tile_dim_replicate}"}'
        " : (T) -> T", whole(("b",), (), opened=(False, True))),
    "gspmd_list": Case(
        '%1 = stablehlo.negate %0 {mhlo.sharding = "{devices=[1,2,4]0,2,4,6,1,3,5,7 '
        'last_tile_dims={replicated} metadata={op_name=\\"f\\"}}"} : T', whole((), ("b",))),
    "gspmd_replicated": Case('%1 = stablehlo.negate %0 {mhlo.sharding = "{replicated}"} : T',
        whole((), ())),
    "gspmd_maximal": Case('%1 = stablehlo.negate %0 {mhlo.sharding = "{maximal device=3}"} : T',
        None),
}  # fmt: skip


def test_ops_and_attributes() -> None:
    """All of them in one module, each on a sine of its own."""
    ops = [
        f"%s{i} = stablehlo.sine %x {A} : {T}\n"
        + re.sub(r"\bT\b(?!\()", T, case.text).replace("%0", f"%s{i}").replace("%1", f"%r{i}")
        for i, case in enumerate(CASES.values())
    ]
    values, types = ", ".join(f"%r{i}" for i in range(len(ops))), ", ".join([T] * len(ops))
    text = module("\n".join([*ops, f"return {values} : {types}"]), types)
    program = import_module(parse_module(text), mesh=spmd.make_mesh(a=4, b=2)).program
    marks = [op.kind.attrs["sharding"] for op in program.walk() if op.name == "spmd.mark"]
    wanted = [mark for case in CASES.values() for mark in (whole(("a",), ()), case.mark) if mark]
    assert marks == wanted
    assert not any("sdy" in attr for op in program.walk() for attr in op.kind.attrs)
    results = [-np.sin(X) if "negate" in op else np.sin(X) for op in ops]
    assert assert_same(text, results, {"a": 4, "b": 2}, X).verify(X)


def test_a_constraint_that_nobody_reads_marks_its_operand() -> None:
    text = module(f"""%0 = stablehlo.sine %x : {T}
        %unread = sdy.sharding_constraint %0 <@m, [{{}}, {{"a", "b"}}]> : {T}
        return %0 : {T}""")
    compiled = assert_same(text, np.sin(X), {"a": 4, "b": 2}, X)
    assert compiled.out_shardings[0].spec == P(None, ("a", "b"))


def test_the_signature_of_an_inner_function_marks_its_values() -> None:
    text = module(
        f"%0 = call @f(%x) : ({T}) -> {T}\nreturn %0 : {T}",
        more=f"""func.func private @f(%y: {T} {{sdy.sharding = #sdy.sharding<@m, [{{"a"}}, {{}}]>}})
          -> ({T} {{sdy.sharding = #sdy.sharding<@m, [{{}}, {{"b"}}]>}}) {{
            %0 = stablehlo.sine %y : {T}
            return %0 : {T}
          }}""",
    )
    program = import_module(parse_module(text)).program
    assert [op.name for op in program.walk()] == ["spmd.mark", "stablehlo.sine", "spmd.mark"]
    assert_same(text, np.sin(X), {"a": 4, "b": 2}, X)


def test_reductions_have_neutral_constants_that_are_marked() -> None:
    text = module(
        """%zero = sdy.constant {sdy.sharding = #sdy.sharding_per_value<[<@m, []>]>}
          dense<0.0> : tensor<f32>
        %0 = stablehlo.reduce(%x init: %zero) applies stablehlo.add across dimensions = [0]
          {sdy.sharding = #sdy.sharding_per_value<[<@m, [{"b"}]>]>}
          : (tensor<16x16xf32>, tensor<f32>) -> tensor<16xf32>
        return %0 : tensor<16xf32>""",
        "tensor<16xf32>",
    )
    (reduction,) = [
        op for op in import_module(parse_module(text)).program.walk() if "reduce" in op.name
    ]
    assert reduction.kind.attrs["spmd.neutral"] is True
    assert_same(text, X.sum(0), {"a": 4, "b": 2}, X)


def test_strings_that_stand_for_shardings() -> None:
    text = """module attributes {mhlo.frontend_attributes =
        {xla.sdy.meshes = "{m = #sdy.mesh<[\\\\22a\\\\22=4, \\\\22b\\\\22=2]>}"}} {
      func.func @main(%x: tensor<16x16xf32> {mhlo.frontend_attributes =
          {xla.sdy.sharding = "#sdy.sharding<@m, [{\\\\22b\\\\22}, {}]>"}}) -> tensor<16x16xf32> {
        %0 = stablehlo.sine %x : tensor<16x16xf32>
        return %0 : tensor<16x16xf32>
      }
    }""".replace("\\\\22", "\\22")
    assert assert_same(text, np.sin(X), {"a": 4, "b": 2}, X).in_shardings[0].spec == P("b", None)


@pytest.mark.parametrize("mesh", ["@empty_mesh", 'mesh<["z"=1]>'])
def test_the_arguments_of_a_module_for_one_device_are_open(mesh: str) -> None:
    text = f"""module attributes {{mhlo.num_partitions = 1 : i32}} {{
      sdy.mesh @empty_mesh = <[]>
      func.func @main(%x: {T} {{sdy.sharding = #sdy.sharding<{mesh}, [{{}}, {{}}]>}}) -> {T} {{
        %0 = stablehlo.sine %x : {T}
        return %0 : {T}
      }}
    }}"""
    assert not assert_same(text, np.sin(X), {"a": 4, "b": 2}, X).in_shardings[0].is_fully_replicated


@pytest.mark.parametrize("where", ["argument", "result", "region"])
def test_terms_that_are_not_added_up_stay_inside(where: str) -> None:
    unreduced = '{sdy.sharding = #sdy.sharding<@m, [{}, {}], unreduced={"a"}>}'
    texts = {
        "argument": module("return %x : " + T, args=f", %y: {T} {unreduced}"),
        "result": module("return %x : " + T, f"{T} {unreduced}"),
        "region": module(f"""%0 = sdy.manual_computation(%x) in_shardings=[<@m, [{{"a"}}, {{}}]>]
            out_shardings=[<@m, [{{}}, {{}}], unreduced={{"a"}}>] manual_axes={{"a", "b"}}
            (%y: tensor<4x16xf32>) {{
              %c = stablehlo.concatenate %y, %y, %y, %y, dim = 0 : (tensor<4x16xf32>,
                tensor<4x16xf32>, tensor<4x16xf32>, tensor<4x16xf32>) -> {T}
              sdy.return %c : {T}
            }} : ({T}) -> {T}
            return %0 : {T}"""),
    }
    with pytest.raises(spmd.SpmdError, match="unreduced over a"):
        spmd.lower_stablehlo(texts[where], spmd.make_mesh(a=4, b=2))


@pytest.mark.parametrize(
    "sharding", ["{devices=[2,4]<=[8] of}", "{tiles}", "{devices=[2,2,2]<=[8]}", "{devices=[2,4]}"]
)
def test_text_that_is_no_sharding_of_gspmd(sharding: str) -> None:
    text = module(f'%0 = stablehlo.sine %x {{mhlo.sharding = "{sharding}"}} : {T}\nreturn %0 : {T}')
    with pytest.raises(spmd.FrontendError):
        spmd.lower_stablehlo(text, spmd.make_mesh(a=4, b=2))


def test_a_mark_inside_a_region_leaves_manual_axes_alone() -> None:
    text = module(f"""%0 = sdy.manual_computation(%x) in_shardings=[<@m, [{{"a"}}, {{}}]>]
        out_shardings=[<@m, [{{"a"}}, {{}}]>] manual_axes={{"a"}} (%y: tensor<4x16xf32>) {{
          %c = sdy.sharding_constraint %y <@other, [{{}}, {{"x"}}]> : tensor<4x16xf32>
          sdy.return %c : tensor<4x16xf32>
        }} : ({T}) -> {T}
        return %0 : {T}""")
    with pytest.raises(spmd.SpecError, match="an axis that is manual there"):
        spmd.lower_stablehlo(text, spmd.make_mesh(a=4, b=2))
