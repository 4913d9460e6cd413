"""Every check of every stage's table passes on what the compiler makes and fails on a broken copy.

Broken programs are written as text; broken plans and local programs are changed copies of good
ones. `test_every_check_has_a_broken_program` holds the lists complete.
"""

import dataclasses
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import spmd
from spmd.errors import LegalityError
from spmd.ir import legality
from spmd.ir.program import OpKind
from spmd.lowering import legality as local_legality
from spmd.lowering.expand import expand
from spmd.lowering.legality import check_local
from spmd.mesh.mesh import Mesh
from spmd.mesh.sharding import Sharding
from spmd.planning import legality as plan_legality
from spmd.planning.legality import check_plan
from tests.ir.examples import FUNCTIONS, example
from tests.ir.text_parse import parse_program
from tests.mesh.shardings import parse_sharding

MESH = Mesh(None, (4, 2), ("data", "model"))
DATA, MODEL = MESH.atoms_of(["data"]), MESH.atoms_of(["model"])


def failing(stage, check):
    return pytest.raises(LegalityError, match=rf"stage {stage} broke its contract \({check}\)")


# Programs.

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
    # check, old text, new text, and what the message says
    ("reads_visible", "stablehlo.negate %6", "stablehlo.negate %9", "%9 is read but not defined"),
    ("reads_visible", "stablehlo.case %10", "stablehlo.case %5", "outside its region"),
    ("reads_visible", "compare %0, %1", "compare %0, %2", "%2 is read but not defined"),
    ("results_visible", "return %17", "return %8", "outside its region"),
    ("results_visible", "return %8, %7", "return %9, %7", "%9 is read but not defined"),
    ("kind_has_types", "negate %6", "negate %7", "operand 0 is %7: tensor<i32>"),
    ("dialect_known", "stablehlo.add", "arith.addf", "the dialect arith"),
    ("regions_fit", "return %2\n    }\n    region(%6", "return %5\n    }\n    region(%6",
     "results of the condition are (tensor<i32>) instead of (tensor<i1>)"),
    ("regions_fit", "return %8, %7", "return %7, %8", "results of the body"),
    ("regions_fit", "return %8, %7", "return %8", "results of the body"),
    ("regions_fit", "region(%4: tensor<4xf32>", "region(%4: tensor<5xf32>",
     "arguments of the condition"),
    ("regions_fit", "return %3\n    }\n  }", "return %10\n    }\n  }", "results of branch 1"),
    ("regions_fit", "region() {\n      return %11", "region(%18: tensor<f32>) {\n      return %11",
     "arguments of branch 0"),
    ("regions_fit", "stablehlo.if %2 : (tensor<i1>)", "stablehlo.if %1 : (tensor<i32>)",
     "its operands are not (tensor<i1>)"),
    ("regions_fit", "region() {\n      return %9\n    }", "", "1 regions instead of branch 0"),
    ("regions_fit", "stablehlo.while", "stablehlo.scan", "is not control flow"),
    ("regions_fit", "manual {axes = [0]} : ()", "manual %0 {axes = [0]} : (tensor<4xf32>)",
     "its operands are not ()"),
    ("regions_fit", "return %16", "return %15", "results of the body"),
    ("is_global", "{axes = [0], pairs", "{pairs", "a collective without axes"),
    ("is_global", ADD, "stablehlo.partition_id : () -> tensor<4xf32>", "outside any manual"),
    ("is_global", ADD, "spmd.local_slice %0 : (tensor<4xf32>) -> tensor<4xf32>", "one device's"),
    ("is_global", ADD, "stablehlo.all_reduce %0 {axes = [0]} : (tensor<4xf32>) -> tensor<4xf32>",
     "one device's program outside any manual region"),
]  # fmt: skip


def test_the_good_program_is_legal():
    legality.check_program(parse_program(PROGRAM))


@pytest.mark.parametrize(("check", "old", "new", "message"), BROKEN_PROGRAMS)
def test_a_broken_program_is_refused(check, old, new, message):
    assert PROGRAM.count(old) == 1
    program = parse_program(PROGRAM.replace(old, new))
    with failing("program", check) as error:
        legality.check_program(program)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("stage", "op", "check"),
    [
        ("local", "spmd.mark %0", "is_local"),
        ("optimized", "stablehlo.all_gather %0", "is_local"),
        ("expanded", "spmd.local_slice %0 {axes = [0]}", "is_expanded"),
    ],
)
def test_stages_have_ops_of_their_own(stage, op, check):
    program = parse_program(PROGRAM.replace("stablehlo.add %0, %0 : (tensor<4xf32>, ", f"{op} : ("))
    with failing(stage, check):
        legality.check_program(program, stage)


def with_op(program, index, **changed):
    ops = list(program.body.ops)
    ops[index] = ops[index]._replace(**changed)
    return program._replace(body=program.body._replace(ops=tuple(ops)))


def test_what_cannot_be_written_as_text_is_refused_too():
    program = parse_program(PROGRAM)
    with failing("program", "defines_once") as error:
        legality.check_program(with_op(program, 2, results=(3,)))
    assert "%3 is defined twice" in str(error.value)
    with failing("program", "defines_once"):
        legality.check_program(with_op(program, 1, results=(9, 9)))
    with failing("program", "defines_once"):
        legality.check_program(with_op(program, 0, results=(99,)))
    with failing("program", "kind_has_types"):
        legality.check_program(with_op(program, 0, operands=(0,)))
    with failing("program", "names"):
        legality.check_program(program._replace(arg_names=("x",)))
    twice = program.body._replace(args=(0, 1, 1))
    with failing("program", "arguments_defined_once"):
        legality.check_program(program._replace(body=twice))


def test_the_error_names_the_op_and_the_users_line():
    program = example("train_step")
    index, op = next((i, op) for i, op in enumerate(program.body.ops) if op.loc.source)
    with failing("program", "dialect_known") as error:
        kind = OpKind("other.op", op.kind.operands, op.kind.results, op.kind.attrs)
        legality.check_program(with_op(program, index, kind=kind))
    assert error.value.op.startswith(f"%{op.results[0]} = other.op")
    assert error.value.source == op.loc.source


@pytest.mark.parametrize("name", FUNCTIONS)
def test_imported_programs_are_legal(name):
    legality.check_program(example(name))


# What the compiler makes.


def mlp_step(params, x, y):
    def loss(p):
        h = spmd.mark_sharding(jnp.tanh(x @ p["in"]), MESH, ("data", "model"))
        return jnp.mean((h @ p["out"] - y) ** 2)

    value, grads = jax.value_and_grad(loss)(params)
    return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), value


def accumulate(w, xs):
    def body(total, x):
        return total + jax.grad(lambda w: ((x @ w) ** 2).sum())(w), None

    return jax.lax.scan(body, jnp.zeros_like(w), xs)[0]


def region(x):
    around = jax.sharding.AbstractMesh(
        MESH.sizes, MESH.axis_names, axis_types=(jax.sharding.AxisType.Auto,) * 2
    )
    spec = jax.sharding.PartitionSpec("data")

    def body(x):
        return jax.lax.psum(jnp.tanh(x), "data") * x

    return jax.shard_map(body, mesh=around, in_specs=spec, out_specs=spec, axis_names={"data"})(x)


def struct(*shape, spec=None, dtype=jnp.float32):
    plain = jax.ShapeDtypeStruct(shape, dtype)
    return plain if spec is None else spmd.mark_sharding(plain, MESH, spec)


STEPS: dict[str, tuple[Any, ...]] = {
    "mlp": (
        mlp_step,
        {"in": struct(16, 32, spec=(None, "model")), "out": struct(32, 8, spec=("model", "data"))},
        struct(64, 16, spec=("data", None)),
        struct(64, 8),
    ),
    "accumulate": (
        accumulate,
        struct(16, 8, spec=(None, "model")),
        struct(4, 32, 16, spec=(None, "data", None)),
    ),
    "take": (
        jax.grad(lambda t, i: (jnp.take(t, i, axis=0) ** 2).sum()),
        struct(32, 8, spec=("model", None)),
        struct(16, spec=("data",), dtype=jnp.int32),
    ),
    "switch": (
        lambda x, i: jax.lax.switch(i, [jnp.sin, lambda x: x @ jnp.ones((8, 8))], x),
        struct(16, 8, spec=("data", None)),
        struct(dtype=jnp.int32),
    ),
    "region": (
        region,
        struct(16, 8, spec=("data", "model")),
    ),
    "reshape": (
        lambda x: x.reshape(4, 4, 8).transpose(1, 0, 2).reshape(16, 8),
        struct(16, 8, spec=("data", "model")),
    ),
}


@cache
def stages(name):
    fn, *args = STEPS[name]
    return spmd.jit(fn, mesh=MESH).lower(*args).stages


@pytest.mark.parametrize("name", STEPS)
def test_every_stage_is_legal(name):
    made = stages(name)
    whole = made.program
    legality.check_program(whole)
    check_plan(made.plan)
    check_local(made.partitioned, "local", whole)
    check_local(made.optimized, "optimized", whole)
    legality.check_program(expand(made.optimized.program, MESH), "expanded")


# Plans.


def plan_of(name="mlp"):
    return stages(name).plan


def op_named(plan, name, number=0):
    return [op for op in plan.program.walk() if op.name == f"stablehlo.{name}"][number]


def with_choice(plan, op, **changed):
    choice = plan.choice(op)._replace(**changed)
    return plan._replace(choices={**plan.choices, op.results[0]: choice})


def with_state(plan, value, state):
    states = list(plan.states)
    states[value] = state
    return plan._replace(states=tuple(states))


def with_marks(plan, marks):
    propagated = dataclasses.replace(plan.propagated, marks=marks)
    return plan._replace(problem=dataclasses.replace(plan.problem, propagated=propagated))


def with_results(plan, op, sharding):
    """The op leaves its result in another sharding, and its value's state agrees."""
    return with_state(with_choice(plan, op, results=(sharding,)), op.results[0], sharding)


def with_argument(plan, sharding):
    return plan._replace(arguments=(sharding, *plan.arguments[1:]))


def with_result(plan, number, sharding):
    results = list(plan.results)
    results[number] = sharding
    return plan._replace(results=tuple(results))


def sharding(text):
    return parse_sharding(text, MESH)


def product_of(sharding):
    return Sharding(sharding.dims, MODEL, "mul")


def marked_value(plan):
    return next(op for op in plan.program.walk() if op.name == "spmd.mark").results[0]


def mark_left_partial(plan):
    value = marked_value(plan)
    mark = plan.propagated.marks[value]._replace(dims=((), ()))
    plan = with_marks(plan, {value: mark})
    return with_state(plan, value, sharding("[{}, {}] partial add {model}"))


def result_mark_ignored(plan):
    value = plan.program.body.results[0]
    mark = plan.propagated.marks[plan.program.body.args[0]]
    marks = {**plan.propagated.marks, value: mark._replace(dims=(DATA, ()))}
    return with_marks(plan, marks)


def partial_forgotten(plan):
    dots = [op for op in plan.program.walk() if op.name == "stablehlo.dot_general"]
    dot = next(dot for dot in dots if plan.choice(dot).results[0].partial)
    return with_results(plan, dot, plan.choice(dot).results[0].full())


def partial_through_a_nonlinear_op(plan):
    dot, tanh = op_named(plan, "dot_general", 0), op_named(plan, "tanh")
    state = Sharding(((), ()), DATA, "add")
    plan = with_state(plan, dot.results[0], state)
    choice = {"assignment": ((), ()), "operands": (state,)}
    return with_results(with_choice(plan, tanh, **choice), tanh, state)


def at_add(one, other, result, **choice):
    """States of what an addition reads and leaves; it reads them as they are, unless said."""

    def broken(plan):
        add = op_named(plan, "add")
        plan = with_state(with_state(plan, add.operands[0], one), add.operands[1], other)
        chosen = {"assignment": ((), ()), "operands": (one, other), **choice}
        return with_results(with_choice(plan, add, **chosen), add, result)

    return broken


SUM_OVER_DATA, SUM_OVER_MODEL, MOST_OVER_DATA = (
    Sharding(((), ()), atoms, how) for atoms, how in ((DATA, "add"), (MODEL, "add"), (DATA, "max"))
)
SPLIT, SPLIT_SUM = Sharding((DATA, ())), Sharding((DATA, ()), MODEL, "add")


def carry_that_changes(plan):
    loop = op_named(plan, "while")
    choice = plan.choice(loop)
    number = next(i for i, s in enumerate(choice.operands) if any(s.dims))
    operands = list(choice.operands)
    operands[number] = Sharding(((),) * operands[number].rank)
    return with_choice(plan, loop, operands=tuple(operands))


def argument_of_a_loop_unlike_its_carry(plan):
    loop = op_named(plan, "while")
    number = next(i for i, s in enumerate(plan.choice(loop).operands) if any(s.dims))
    value = loop.regions[1].args[number]
    return with_state(plan, value, Sharding(((),) * plan.program.types[value].rank))


def at_dot(change):
    """Another choice for a product."""

    def broken(plan):
        dot = op_named(plan, "dot_general")
        return with_choice(plan, dot, **change(plan.choice(dot)))

    return broken


def at_result(name, state):
    """A value in another state; of the first op of that name."""
    return lambda plan: with_state(plan, op_named(plan, name).results[0], sharding(state))


BROKEN_PLANS = [
    ("has_choice", lambda plan: plan._replace(choices={})),
    ("states_are_legal", lambda plan: plan._replace(states=plan.states[:-1])),
    ("states_are_legal", at_result("dot_general", "[{data}, {data}]")),
    ("arguments_fit", lambda plan: with_argument(plan, Sharding(((DATA[0],), ())))),  # a sub-axis
    ("arguments_fit", lambda plan: with_argument(plan, sharding("[{data}, {}]"))),
    ("results_fit", lambda plan: with_result(plan, -1, Sharding((), DATA, "add"))),
    ("results_fit", lambda plan: with_result(plan, 0, Sharding(((), DATA + DATA)))),
    ("results_fit", lambda plan: plan._replace(results=plan.results[:-1])),
    ("marks_hold", lambda plan: with_state(plan, marked_value(plan), sharding("[{data}, {}]"))),
    ("marks_hold", mark_left_partial),
    ("marks_hold", result_mark_ignored),
    ("choice_has_arity", at_dot(lambda c: {"operands": c.operands[:1]})),
    ("shardings_fit_types", at_dot(lambda c: {"operands": (sharding("[{}]"), c.operands[1])})),
    ("results_are_states", at_result("dot_general", "[{}, {}]")),
    ("partials_exist", at_dot(lambda c: {"operands": (product_of(c.operands[0]), c.operands[1])})),
    ("assignment_is_legal", at_dot(lambda c: {"assignment": c.assignment[:1]})),
    ("assignment_is_legal", at_dot(lambda c: {"assignment": (DATA,) * len(c.assignment)})),
    ("shardings_follow", at_dot(lambda c: {"operands": (c.operands[0], sharding("[{}, {}]"))})),
    ("partials_follow", partial_forgotten),
    ("partials_follow", partial_through_a_nonlinear_op),
    ("partials_follow", at_add(SUM_OVER_DATA, SUM_OVER_MODEL, SUM_OVER_DATA)),
    ("partials_follow", at_add(MOST_OVER_DATA, MOST_OVER_DATA, MOST_OVER_DATA)),
    (
        "partials_follow",
        at_add(
            SUM_OVER_DATA, SUM_OVER_DATA, SPLIT_SUM, assignment=(DATA, ()), operands=(SPLIT, SPLIT)
        ),
    ),
]
BROKEN_REGIONS = [
    (
        "held_atoms_are_left_alone",
        lambda plan: with_results(plan, op_named(plan, "tanh"), Sharding((DATA, MODEL))),
    )
]
BROKEN_LOOPS = [
    ("carries_agree", carry_that_changes),
    ("carries_agree", argument_of_a_loop_unlike_its_carry),
]


def isolated(monkeypatch, check):
    """Leaves only one check in the plan's tables: a broken plan often breaks several."""
    for table in ("PLAN_CHECKS", "OP_CHECKS", "REGION_OP_CHECKS"):
        kept = tuple(c for c in getattr(plan_legality, table) if c.__name__ == check)
        monkeypatch.setattr(plan_legality, table, kept)


@pytest.mark.parametrize(
    ("step", "check", "broken"),
    [("mlp", *case) for case in BROKEN_PLANS]
    + [("accumulate", *case) for case in BROKEN_LOOPS]
    + [("region", *case) for case in BROKEN_REGIONS],
)
def test_a_broken_plan_is_refused(monkeypatch, step, check, broken):
    plan = plan_of(step)
    isolated(monkeypatch, check)
    check_plan(plan)
    with failing("planned", check):
        check_plan(broken(plan))


# Local programs.

LOCAL = """
program @p(%0: tensor<4x8xf32> "x") {
  %1 = spmd.axis_index {axes = {model}} : () -> tensor<i32>
  %2 = stablehlo.all_gather %0 {all_gather_dim = 0, axes = {data}}
    : (tensor<4x8xf32>) -> tensor<16x8xf32>
  %3 = stablehlo.reduce_scatter %2 {axes = {model}, body = add<f32>, scatter_dimension = 1}
    : (tensor<16x8xf32>) -> tensor<16x4xf32>
  %4 = stablehlo.all_to_all %3 {axes = {data:(1)2}, concat_dimension = 1, split_dimension = 0}
    : (tensor<16x4xf32>) -> tensor<8x8xf32>
  %5 = stablehlo.all_reduce %4 {axes = {data}, body = max<f32>}
    : (tensor<8x8xf32>) -> tensor<8x8xf32>
  %6 = spmd.local_slice %5 {axes = {data}, dim = 0} : (tensor<8x8xf32>) -> tensor<2x8xf32>
  %7 = stablehlo.collective_permute %6 {axes = {data}, pairs =
    [[0, 1], [1, 0], [2, 2], [3, 3], [4, 4], [5, 5], [6, 6], [7, 7]]}
    : (tensor<2x8xf32>) -> tensor<2x8xf32>
  %8 = stablehlo.all_to_all %7 {axes = {model}, concat_dimension = 1, split_dimension = 1}
    : (tensor<2x8xf32>) -> tensor<2x8xf32>
  return %8 "y", %1 "i"
}
"""
BROKEN_LOCALS = [
    ("axes_are_valid", "{axes = {model}} : ()", "{axes = 2} : ()", "is not a tuple of atoms"),
    ("axes_are_valid", "{axes = {model}} : ()", "{axes = [1.5]} : ()", "is not a tuple of atoms"),
    ("axes_are_valid", "{axes = {model}} : ()", "{axes = [7]} : ()", "lacks"),
    ("axes_are_valid", "{axes = {model}} : ()", "{axes = [1, 1]} : ()", "repeats an atom"),
    ("axes_are_valid", "axes = {data}, body = max<f32>", "axes = {}, body = max<f32>", "empty"),
    ("indexes", "() -> tensor<i32>", "() -> tensor<ui32>", "it is not () -> tensor<i32>"),
    ("groups_are_equal", "axes = {data}, body = max<f32>", "axes = {data}, body = max<f32>, "
     "groups = [[0, 1], [2]]", "differ in size or overlap"),
    ("groups_are_equal", "axes = {data}, body = max<f32>", "axes = {data}, body = max<f32>, "
     "groups = [[0, 1], [1, 2]]", "differ in size or overlap"),
    ("groups_are_equal", "axes = {data}, body = max<f32>", "axes = {data}, body = max<f32>, "
     "groups = [[0, 1], [2, 9]]", "leave the mesh"),
    ("sizes_follow", "axes = {data}}", "axes = {model}}", "instead of 8x8"),
    ("sizes_follow", "all_gather_dim = 0", "all_gather_dim = 2", "has no dim 2"),
    ("sizes_follow", "all_gather_dim = 0, ", "", "has no dim None"),
    ("sizes_follow", "scatter_dimension = 1", "scatter_dimension = 0", "instead of 8x8"),
    ("sizes_follow", "concat_dimension = 1, split_dimension = 0", "concat_dimension = 0, "
     "split_dimension = 1", "instead of 32x2"),
    ("sizes_follow", "body = max<f32>}\n    : (tensor<8x8xf32>) -> tensor<8x8xf32>",
     "body = max<f32>}\n    : (tensor<8x8xf32>) -> tensor<8x8xbf16>", "becomes tensor<8x8xbf16>"),
    ("reduces_pairs", "body = max<f32>", "body = max<i32>", "two tensor<f32>"),
    ("reduces_pairs", ", body = max<f32>", "", "no body"),
    ("sizes_follow", "dim = 0}", "dim = 1}", "instead of 8x2"),
    ("sizes_follow", "tensor<2x8xf32>\n  %7", "tensor<2x8xi32>\n  %7", "becomes tensor<2x8xi32>"),
    ("pairs_permute", "[1, 0]", "[1, 1]", "its targets are not among the 8 devices"),
    ("pairs_permute", "[1, 0]", "[0, 0]", "its sources are not among the 8 devices"),
    ("pairs_permute", ", [7, 7]", ", [7, 8]", "its targets are not among the 8 devices"),
]  # fmt: skip


def partitioned(text=LOCAL):
    program = parse_program(text, MESH)
    arguments = (sharding("[{data}, {}]"),)
    return stages("mlp").partitioned._replace(
        program=program, arguments=arguments, results=(sharding("[{model}, {}]"), Sharding(()))
    )


def test_the_good_local_program_is_legal():
    check_local(partitioned(), "local")


@pytest.mark.parametrize(("check", "old", "new", "message"), BROKEN_LOCALS)
def test_a_broken_local_program_is_refused(monkeypatch, check, old, new, message):
    assert LOCAL.count(old) == 1
    broken = partitioned(LOCAL.replace(old, new))
    monkeypatch.setattr(local_legality, "check_program", lambda *_: None)
    with failing("local", check) as error:
        check_local(broken, "local")
    assert message in str(error.value)


def test_slices_are_equal_pieces():
    odd = parse_program(LOCAL.replace("8x8xf32", "9x8xf32"), MESH)
    op = next(op for op in odd.walk() if op.name == "spmd.local_slice")
    problem = local_legality.sizes_follow(MESH, op)
    assert problem == "tensor<9x8xf32> can't be cut into equal pieces"


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"arguments": ()}, "0 shardings for 1 arguments"),
        ({"arguments": (Sharding(()),)}, "has another rank"),
        ({"arguments": (Sharding(((), ()), DATA, "add"),)}, "partial"),
        ({"arguments": (Sharding(((), DATA[:1])),)}, "is not the piece of tensor<16x8xf32>"),
        ({"arguments": (Sharding(((), MODEL)),)}, "is not the piece of tensor<16x8xf32>"),
        ({"results": (Sharding((DATA, ())), Sharding(()))}, "is not the piece of tensor<4x8xf32>"),
    ],
)
def test_the_boundary_is_held(changed, message):
    whole = parse_program("""
        program @p(%0: tensor<16x8xf32> "x") {
          %1 = stablehlo.constant : () -> tensor<4x8xf32>
          %2 = stablehlo.constant : () -> tensor<i32>
          return %1 "y", %2 "i"
        }
    """)
    check_local(partitioned(), "local", whole)
    with pytest.raises(LegalityError) as error:
        check_local(partitioned()._replace(**changed), "local", whole)
    assert message in str(error.value)


def test_every_check_has_a_broken_program():
    by_text = {"defines_once", "is_local", "is_expanded"}
    tested = by_text | {check for check, *_ in BROKEN_PROGRAMS}
    checks = {check.__name__ for table in legality.STAGES.values() for check in table}
    assert checks | {"regions_fit", "results_visible"} == tested

    tested = {check for check, _ in BROKEN_PLANS + BROKEN_LOOPS + BROKEN_REGIONS}
    tables = plan_legality.PLAN_CHECKS, plan_legality.OP_CHECKS, plan_legality.REGION_OP_CHECKS
    checks = {check.__name__ for table in tables for check in table}
    assert checks | {"has_choice"} == tested

    tested = {check for check, *_ in BROKEN_LOCALS}
    checks = {check.__name__ for table in local_legality.OP_CHECKS.values() for check in table}
    assert checks == tested
