"""Canonicalization: what the rewritten programs look like. That they compute the same is tested
by `tests/ir/dialect/test_rules_execute.py`."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export

import spmd
from spmd.frontend.canonicalize import canonicalize
from spmd.frontend.importer.module import import_module, parse_module
from spmd.ir.legality import check_program
from tests.close import close
from tests.ir.dialect.cases_module import MODULES

BY_NAME = {case.name: case for case in MODULES}


@pytest.mark.parametrize(
    ("case", "ops"),
    [
        ("stablehlo.dot", ["dot_general"]),
        ("stablehlo.einsum", ["constant", "reduce", "dot_general"]),
        ("einsum_batch", ["dot_general"]),
        ("stablehlo.unary_einsum", ["constant", "reduce", "transpose"]),
        ("stablehlo.broadcast", ["broadcast_in_dim"]),
        ("stablehlo.torch_index_select", ["broadcast_in_dim", "gather"]),
        ("stablehlo.map", ["constant", "multiply", "add"]),
        ("stablehlo.dynamic_reshape", ["constant", "reshape"]),
        ("stablehlo.dynamic_iota", ["constant", "iota", "add"]),
        ("stablehlo.real_dynamic_slice", ["constant", "constant", "constant", "slice"]),
        ("stablehlo.tuple", ["subtract"]),
        ("stablehlo.composite", ["constant", "multiply"]),
        ("custom_call:Sharding", ["spmd.mark"]),
        ("custom_call:mhlo.topk", ["chlo.top_k"]),
        ("chlo.constant", ["constant", "broadcast_in_dim", "add"]),
        ("chlo.constant_like", ["constant", "multiply"]),
    ],
)
def test_rewritten_ops(case: str, ops: list[str]) -> None:
    after = canonicalize(import_module(parse_module(BY_NAME[case].text)).program)
    check_program(after)
    wanted = [name if "." in name else f"stablehlo.{name}" for name in ops]
    assert [op.name for op in after.walk()] == wanted


def test_a_program_without_such_ops_is_not_rebuilt() -> None:
    program = import_module(parse_module(BY_NAME["stablehlo.cholesky"].text)).program
    assert canonicalize(program) is program


def test_batch_statistics_over_a_split_batch_are_partial_sums(mesh: spmd.Mesh) -> None:
    text = BY_NAME["stablehlo.batch_norm_training"].text.replace("8x4x4x8x", "64x128x128x8x")
    specs = [("data", None, None, "model"), ("model",), ("model",)]
    compiled = spmd.compile_stablehlo(text, mesh, specs, None)
    assert {c.kind for c in compiled.collectives} == {"all_reduce"}
    assert all(c.axes == ("data",) for c in compiled.collectives)


def test_a_portable_artifact_keeps_its_chlo_ops(mesh: spmd.Mesh) -> None:
    def fn(x: Any) -> tuple[jax.Array, jax.Array]:
        return jax.lax.erf(x), jax.lax.top_k(x, 2)[0]

    artifact = export.export(jax.jit(fn))(jnp.ones((8, 4))).mlir_module_serialized
    program = import_module(parse_module(artifact)).program
    assert [op.name for op in program.walk()] == ["chlo.erf", "chlo.top_k"]
    compiled = spmd.compile_stablehlo(parse_module(artifact), mesh, [("data", "model")])
    x = np.linspace(-1, 1, 32, dtype=np.float32).reshape(8, 4)
    close(compiled(x), fn(x))
