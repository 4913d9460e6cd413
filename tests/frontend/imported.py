"""Functions and texts through the importer."""

import inspect

import jax
import jax.numpy as jnp
from jax.interpreters import mlir
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec
from jaxlib.mlir import ir

from spmd.frontend.importer.module import import_module

X = jnp.ones((4, 4))


def stablehlo(fn, *args, **options):
    traced = jax.jit(fn, keep_unused=True, **options).trace(*args)
    return traced.lower(lowering_platforms=("cpu",)).compiler_ir("stablehlo")


def imported(fn, *args, **options):
    return import_module(stablehlo(fn, *args, **options))


def parsed(text):
    with mlir.make_ir_context():
        return import_module(ir.Module.parse(text))


def ops(imported, name):
    return [op for op in imported.program.walk() if op.name == f"stablehlo.{name}"]


@jax.jit
def inner_call(x):
    return jnp.exp(x)


def line_of(fn, text):
    """The line of its file on which a function's source has some text."""
    lines, start = inspect.getsourcelines(fn)
    return start + next(i for i, line in enumerate(lines) if text in line)


def assert_source(op, fn, text, function):
    expected = f"{inspect.getsourcefile(fn)}:{line_of(fn, text)} ({function})"
    assert op.loc.source == expected


MESH = AbstractMesh((4, 2), ("data", "model"), axis_types=(AxisType.Auto,) * 2)


OPEN = PartitionSpec.UNCONSTRAINED


def sharded(*spec):
    return NamedSharding(MESH, PartitionSpec(*spec))
