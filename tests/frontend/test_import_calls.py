"""Calls and composites that the importer inlines."""

from functools import partial

import jax
import jax.numpy as jnp

from tests.frontend.imported import X, imported, inner_call


def test_calls_and_composites_are_inlined_once_for_each_call():
    @partial(jax.lax.composite, name="my.op")
    def composite(x):
        return jnp.tanh(x)

    found = imported(lambda x: composite(inner_call(inner_call(x))), X)
    assert [op.name for op in found.program.walk()] == [
        "stablehlo.exponential",
        "stablehlo.exponential",
        "stablehlo.tanh",
    ]
