"""Every rule, run: partitioned equals unpartitioned under random shardings of both ends."""

import itertools
import zlib
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
import pytest

import spmd
from spmd.frontend.canonicalize import CANONICAL
from spmd.frontend.importer.ops import LEGALIZED
from spmd.ir.description import DESCRIPTIONS
from spmd.lowering.local import table as local
from tests.ir.dialect.cases import CASES, Case, random_spec
from tests.ir.dialect.cases_module import MODULES, ModuleCase
from tests.ir.dialect.executed import NOT_ON_CPU, executed_ops
from tests.ir.dialect.ragged import expand_for_cpu

MESHES = ({"data": 4, "model": 2}, {"data": 2, "x": 2, "model": 2})


def on_meshes(cases: Sequence[Any]) -> list[Any]:
    """Each case on one mesh, by its name; on the other, too, if heavy."""
    return [
        pytest.param(
            case, number, id=f"{case.name}-{number}",
            marks=() if zlib.crc32(case.name.encode()) % 2 == number else pytest.mark.heavy,
        )
        for case in cases
        for number in range(2)
    ]  # fmt: skip


OTHER_SPECS = {"rfft": 1}
"""Cases that draw other specs: XLA's CPU backend (jaxlib 0.10) cannot run an FFT of what a gather
along a minor dim made, as it leaves the gather's layout to the FFT (fft_thunk.cc, RET_CHECK)."""

TOGETHER = 8
"""Cases that are one program: each has its own specs, and much is done once for all of them."""


def groups() -> list[Any]:
    """The cases on each mesh, those first that are on it if nothing heavy is."""
    found = []
    for number in range(2):
        for is_heavy in (False, True):
            own = [c for c in CASES if (number_of(c) != number) is is_heavy]
            for first in range(0, len(own), TOGETHER):
                group = own[first : first + TOGETHER]
                name = f"{group[0].name}-{group[-1].name}-{number}"
                marks = pytest.mark.heavy if is_heavy else ()
                found.append(pytest.param(group, number, id=name, marks=marks))
    return found


def number_of(case: Case) -> int:
    return 0 if case.name == "mark" else zlib.crc32(case.name.encode()) % 2


@pytest.mark.parametrize(("group", "number"), groups())
def test_partitioned_equals_unpartitioned(group: Sequence[Case], number: int) -> None:
    mesh = spmd.make_mesh(**MESHES[number])
    group = [case for case in group if number == 0 or case.name != "mark"]
    in_specs, out_specs = list[Any](), list[Any]()
    for case in group:
        seed = zlib.crc32(case.name.encode()) + number + OTHER_SPECS.get(case.name, 0)
        rng = np.random.RandomState(seed % 2**32)
        in_specs += [random_spec(rng, a.shape, mesh) for a in case.args]
        shapes = jax.tree.leaves(jax.eval_shape(case.fn, *case.args))
        out_specs += [random_spec(rng, s.shape, mesh) for s in shapes]

    def all_of(*args: Any) -> list[Any]:
        given = iter(args)
        found = (case.fn(*itertools.islice(given, len(case.args))) for case in group)
        return jax.tree.leaves(list(found))

    args = [a for case in group for a in case.args]
    specs: dict[str, Any] = {"in_specs": tuple(in_specs), "out_specs": out_specs}
    got = spmd.jit(all_of, mesh=mesh, options=spmd.Options(check=True), **specs)(*args)
    names = [
        case.name for case in group for _ in jax.tree.leaves(jax.eval_shape(case.fn, *case.args))
    ]
    for name, a, b in zip(names, got, jax.jit(all_of)(*args), strict=True):
        where = f"{name} with {a.sharding}"
        a = np.asarray(a, np.complex64 if np.iscomplexobj(b) else None)
        np.testing.assert_allclose(a, np.asarray(b), rtol=2e-5, atol=1e-5, err_msg=where)


@pytest.mark.parametrize(("case", "number"), on_meshes(MODULES))
def test_modules(case: ModuleCase, number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("spmd.compiler.expand", expand_for_cpu)
    rng = np.random.RandomState((zlib.crc32(case.name.encode()) + number) % 2**32)
    want = case.want(*case.args)
    results = want if isinstance(want, tuple) else (want,)
    mesh = spmd.make_mesh(**MESHES[number])
    arg_specs = [random_spec(rng, a.shape, mesh) for a in case.args]
    result_specs = [random_spec(rng, np.shape(r), mesh) for r in results]
    options = spmd.Options(check=True)
    with jax.enable_x64(True):
        compiled = spmd.compile_stablehlo(case.text, mesh, arg_specs, result_specs, options=options)
        got = compiled(*case.args)
    for a, b in zip(got, results, strict=True):
        where = f"{case.name} on ({mesh}) with specs {arg_specs} -> {result_specs}"
        np.testing.assert_allclose(np.asarray(a), b, rtol=2e-4, atol=1e-5, err_msg=where)


OTHER_TESTS = ("custom_call:test_", "custom_call:rms_norm", "composite:test.", "composite:my.",
               "composite:spmd.linear_attention")  # fmt: skip
"""Ops of other tests: rules they register, and what tests/ops/test_linear_attention.py runs."""

LOCAL = ("composite:spmd.attention_piece", "composite:spmd.attention_piece_grad", "spmd.inspect")
"""Ops that are no module's; tests/ops/test_attention_split.py and tests/api/test_callbacks.py run
them."""


def test_every_rule_has_a_case_and_a_local_lowering() -> None:
    described = {op for op, about in DESCRIPTIONS.items() if about.rule}
    ruled = {op for op in described if not op.startswith(OTHER_TESTS)} - {*LOCAL}
    executed = executed_ops()
    assert described == set(local.registered_ops())
    assert {*CANONICAL, *LEGALIZED} - executed == set(), "canonicalizations that no case runs"
    assert ruled - executed == NOT_ON_CPU, "rules that no case runs"
