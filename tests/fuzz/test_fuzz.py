"""A short fuzz that repeats itself exactly; `tools/run fuzz` is the long one."""

from hypothesis import HealthCheck, Phase, given, settings

from tools.fuzzing.cases import Arg, Case, Line, Type, execute, source
from tools.fuzzing.check import FAILED, INVALID, PASSED, run
from tools.fuzzing.programs import Settings, cases

CASES = 16


@settings(
    max_examples=CASES,
    phases=[Phase.generate, Phase.shrink],
    database=None,
    deadline=None,
    derandomize=True,
    suppress_health_check=list(HealthCheck),
)
@given(cases(Settings(most_lines=12)))
def test_partitioned_equals_unpartitioned(case: Case) -> None:
    outcome = run(case)
    assert outcome.status != INVALID, f"{outcome.message}\n{source(case)}"
    assert outcome.status != FAILED, f"{outcome.message}\n{source(case)}"


F32 = Type((4, 4), "float32")
CASE = Case(
    mesh=(("a", 4), ("b", 2)),
    args=(Arg("x1", F32, ("a", None)), Arg("x2", F32, (None, "b"))),
    lines=(
        Line("v1", "v1 = x1 @ x2", ("x1", "x2"), F32),
        Line("v2", "v2 = jnp.tanh(v1)", ("v1",), F32),
        Line("v3", "v3 = mark(v2, ('b', None))", ("v2",), F32),
        Line("v4", "v4 = v3 - x1", ("v3", "x1"), F32),
    ),
    results=("v4", "v2"),
    out_specs=(("a", "b"), None),
    gradient=True,
)


def test_a_case_is_a_file_that_runs() -> None:
    assert run(CASE).status == PASSED
    scope = execute(source(CASE))
    assert scope["MESH"] == {"a": 4, "b": 2}
    assert len(scope["arguments"]()) == 2
