"""Older and dynamic ops written with newer ones: `einsum`, `torch_index_select`, `map`, ...

Dynamic ops that need more than their result's type are written anew when they are imported
(`importer/legalize.py`).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import partial

import jax
import jax.numpy as jnp

from spmd.frontend.canonicalize.site import Site, canonical
from spmd.ir.dialect.bodies import inline_elementwise, is_elementwise
from spmd.ir.program import Body, Value
from spmd.ir.types import numpy_dtype


@canonical("stablehlo.einsum", "stablehlo.unary_einsum")
def _einsum(site: Site) -> Sequence[Value]:
    """Jax's einsum: a letter of one side alone is summed first, then `dot_general`, `transpose`.

    before: `%2 = stablehlo.einsum %0, %1 "ijl,jk->ki"`
    after:  `%2 = reduce_add %0 [2]; %3 = dot_general %2, %1; %4 = transpose %3`
    """
    stated = getattr(site.attrs.get("precision_config"), "text", "")
    precision = tuple(jax.lax.Precision[name] for name in re.findall(r"precision (\w+)", stated))
    einsum = partial(
        jnp.einsum,
        site.attrs["einsum_config"],
        precision=precision or jax.lax.Precision.DEFAULT,
        preferred_element_type=numpy_dtype(site.result.dtype),
    )
    return site.computed(einsum)


@canonical("stablehlo.torch_index_select")
def _torch_index_select(site: Site) -> Sequence[Value]:
    """One `gather` along `dim`, with the leading dims of both sides as batch."""
    batch = site.attrs["batch_dims"]
    select = partial(jnp.take, axis=site.attrs["dim"] - batch, mode="clip")
    for _ in range(batch):
        select = jax.vmap(select)
    return site.computed(select)


@canonical("stablehlo.map")
def _map(site: Site) -> Sequence[Value]:
    """`map` runs its body on every element, so it is its body on whole tensors.

    before: `%2 = stablehlo.map %0, %1 ({ (a, b): a * b + 1 }) : tensor<4x6xf32>`
    after:  `%2 = %0 * %1; %3 = splat 1; %4 = %2 + %3`
    """
    body: Body = site.attrs["body"]
    if not is_elementwise(body):
        site.fail("its body is not elementwise", "use elementwise ops in the body")
    return inline_elementwise(site.b, body, site.operands, site.result.shape)


@canonical("stablehlo.dynamic_reshape")
def _reshape(site: Site) -> Sequence[Value]:
    """The result's type says the shape, wherever the shape operand comes from."""
    return (site.b.reshape(site.operands[0], site.result.shape),)


@canonical("stablehlo.dynamic_broadcast_in_dim")
def _broadcast_in_dim(site: Site) -> Sequence[Value]:
    dims = site.attrs["broadcast_dimensions"]
    return (site.b.broadcast(site.operands[0], site.result.shape, dims),)


@canonical("stablehlo.dynamic_iota")
def _iota(site: Site) -> Sequence[Value]:
    return (site.b.iota(site.result, site.attrs["iota_dimension"]),)
