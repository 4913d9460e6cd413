"""Which ops the execution tests run, by the names of rules and of canonicalizations."""

import re

import spmd
from spmd.compiler import Request, problem_for
from spmd.frontend.canonicalize import canonicalize
from spmd.frontend.importer.module import import_module, parse_module
from spmd.ir.description import rule_name
from spmd.ir.program import Program
from spmd.mesh.spec import jax_mesh
from tests.frontend import test_shardy_modules
from tests.ir.dialect.cases import CASES
from tests.ir.dialect.cases_module import MODULES
from tests.lowering import manual_programs

NOT_ON_CPU = {
    "custom_call:in_manual_region", "stablehlo.collective_broadcast", "custom_call:LuDecomposition",
    "custom_call:cu_threefry2x32_ffi", "custom_call:hip_threefry2x32_ffi",
    *(f"custom_call:{gpu}dnn_rnn{way}_ffi" for gpu in ("cu", "hip") for way in ("", "_bwd")),
}  # fmt: skip
"""Rules of ops that no CPU runs as it is; `test_library_calls.py` and `test_manual.py` lower some,
and `test_custom_calls.py` runs a call in a manual region."""


def executed_ops() -> set[str]:
    """Names of ops that some case runs: as the module says them, and as rules do."""
    mesh = spmd.Mesh(None, (4, 2), ("data", "model"))
    names = set[str]()
    for case in CASES:
        names |= _in_request(spmd.jit(case.fn, mesh=mesh).request(*case.args))
    names |= set().union(*(_in_text(case.text) for case in test_shardy_modules.CASES.values()))
    for text in (*(module.text for module in MODULES), *manual_programs.MODULES):
        names |= _in_text(text) | _rules(canonicalize(import_module(parse_module(text)).program))
    manual = spmd.make_mesh(x=4, y=2)
    for example in manual_programs.PROGRAMS:
        step = spmd.jit(example.make(jax_mesh(manual)), mesh=manual)
        names |= _in_request(step.request(manual_programs.X, manual_programs.W))
    return names


def _in_request(request: Request) -> set[str]:
    return _in_text(str(request.module)) | _rules(problem_for(request).program)


def _rules(program: Program) -> set[str]:
    return {rule_name(op.kind) for op in program.walk()}


def _in_text(text: str) -> set[str]:
    ops = re.findall(r"(?<![#.\w])(?:stablehlo|chlo|sdy)\.[\w-]+", text)
    calls = re.findall(r"custom_call @([\w.$]+)", text)
    return {*ops, *(f"custom_call:{target}" for target in calls)}
