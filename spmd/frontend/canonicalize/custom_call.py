"""Custom calls that stand for ops: CHLO ops of exported modules, and `ApproxTopK`."""

from __future__ import annotations

import re
from collections.abc import Sequence

from spmd.frontend.canonicalize.site import Site, canonical
from spmd.ir.program import Value

_UNARY = ("acos", "acosh", "asin", "asinh", "atan", "atanh", "cosh", "erf", "sinh", "tan")


@canonical(*(f"custom_call:mhlo.{name}" for name in _UNARY))
def _unary(site: Site) -> Sequence[Value]:
    name = str(site.attrs["call_target_name"]).replace("mhlo.", "chlo.")
    return site.b.op(name, site.operands, site.op.kind.results)


@canonical("custom_call:TopK", "custom_call:mhlo.topk")
def _top_k(site: Site) -> Sequence[Value]:
    """`mhlo.topk` and XLA's `TopK` are `chlo.top_k` where they ask for the largest."""
    text = " ".join(str(getattr(site.attrs.get(name), "text", "")) for name in _TOP_K_ATTRS)
    if re.search(r"largest = false", text):
        site.fail("it asks for the smallest elements", "negate the operand and the values")
    attrs = {"k": site.result.shape[-1]}
    return site.b.op("chlo.top_k", site.operands[:1], site.op.kind.results, attrs)


_TOP_K_ATTRS = ("mhlo.attributes", "mhlo.backend_config")


@canonical("custom_call:ApproxTopK")
def _approx_top_k(site: Site) -> Sequence[Value]:
    """A sort by the call's own comparator, then its first elements: recall 1, whatever was asked.

    The operands are the tensors to reorder, then an initial value for each, which a sort ignores.
    """
    if "body" not in site.attrs:
        site.fail("the module lacks its comparator", "use jax.lax.top_k")
    config = getattr(site.attrs.get("mhlo.backend_config"), "text", "")
    found = re.search(r"reduction_dim = (\d+)", config)
    if found is None:
        site.fail("its configuration has no reduction_dim", "use jax.lax.top_k")
    b, dim = site.b, int(found[1])
    tensors = site.operands[: len(site.operands) // 2]
    attrs = {"dimension": dim, "is_stable": True, "body": site.attrs["body"]}
    ordered = b.op("stablehlo.sort", tensors, [b.types[v] for v in tensors], attrs)
    starts = (0,) * site.result.rank
    return [
        b.slice(v, starts, type_.shape)
        for v, type_ in zip(ordered, site.op.kind.results, strict=True)
    ]
