"""Batch normalization as sums and elementwise ops (StableHLO specification, `batch_norm_*`).

Written out, its statistics are sums like any other: over a split batch they are partial sums.

before: `%y, %mean, %var = stablehlo.batch_norm_training %x, %scale, %offset`
after:  `%mean = sum(%x) / n; %var = sum((%x - %mean)^2) / n; %y = (%x - %mean) * ...`
"""

from __future__ import annotations

from collections.abc import Sequence

from spmd.frontend.canonicalize.site import Site, canonical, reduce_add
from spmd.ir.dialect.builder import Builder
from spmd.ir.program import Value
from spmd.ir.types import TensorType


class _Norm:
    """Steps along the feature dim of one batch normalization."""

    def __init__(self, site: Site) -> None:
        self.b: Builder = site.b
        self.type: TensorType = site.op.kind.operands[0]
        self.feature: int = site.attrs["feature_index"]
        self.others = [d for d in range(self.type.rank) if d != self.feature]
        self.count = self.type.size // max(self.type.shape[self.feature], 1)
        self.epsilon = float(getattr(site.attrs["epsilon"], "text", "0").partition(":")[0])

    def spread(self, x: Value) -> Value:
        """One number a feature, repeated over the whole tensor."""
        return self.b.broadcast(x, self.type.shape, (self.feature,))

    def sum(self, x: Value) -> Value:
        """Sum over everything but the features."""
        return reduce_add(self.b, x, self.others)

    def mean(self, x: Value) -> Value:
        """Mean over everything but the features."""
        total = self.sum(x)
        count = self.b.splat(self.count, self.b.types[total])
        return self.b.binary("divide", total, count)

    def inverse_deviation(self, variance: Value) -> Value:
        """`1 / sqrt(variance + epsilon)`."""
        epsilon = self.b.splat(self.epsilon, self.b.types[variance])
        return self.b.unary("rsqrt", self.b.binary("add", variance, epsilon))

    def normalize(
        self, x: Value, scale: Value, offset: Value, mean: Value, variance: Value
    ) -> Value:
        b = self.b
        factor = b.binary("multiply", self.inverse_deviation(variance), scale)
        centered = b.binary("subtract", x, self.spread(mean))
        scaled = b.binary("multiply", centered, self.spread(factor))
        return b.binary("add", scaled, self.spread(offset))


@canonical("stablehlo.batch_norm_inference")
def _inference(site: Site) -> Sequence[Value]:
    x, scale, offset, mean, variance = site.operands
    return (_Norm(site).normalize(x, scale, offset, mean, variance),)


@canonical("stablehlo.batch_norm_training")
def _training(site: Site) -> Sequence[Value]:
    x, scale, offset = site.operands
    norm = _Norm(site)
    mean = norm.mean(x)
    centered = site.b.binary("subtract", x, norm.spread(mean))
    variance = norm.mean(site.b.binary("multiply", centered, centered))
    return norm.normalize(x, scale, offset, mean, variance), mean, variance


@canonical("stablehlo.batch_norm_grad")
def _grad(site: Site) -> Sequence[Value]:
    """`dx = scale / deviation / n * (n * dy - sum(dy) - (x - mean) * sum(dy * (x - mean)) / var)`.

    `var` there includes epsilon; `dscale = sum(dy * (x - mean)) / deviation`.
    """
    b, norm = site.b, _Norm(site)
    x, scale, mean, variance, dy = site.operands
    inverse = norm.inverse_deviation(variance)
    centered = b.binary("subtract", x, norm.spread(mean))
    dy_sum = norm.sum(dy)
    weighted = norm.sum(b.binary("multiply", dy, centered))
    count = b.splat(norm.count, b.types[dy_sum])
    slope = b.binary("multiply", weighted, b.binary("multiply", inverse, inverse))
    shift = norm.spread(b.binary("divide", dy_sum, count))
    tilt = b.binary("multiply", centered, norm.spread(b.binary("divide", slope, count)))
    flat = b.binary("subtract", b.binary("subtract", dy, shift), tilt)
    dx = b.binary("multiply", norm.spread(b.binary("multiply", scale, inverse)), flat)
    return dx, b.binary("multiply", weighted, inverse), dy_sum
