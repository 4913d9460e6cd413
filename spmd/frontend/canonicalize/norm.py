"""Batch normalization as sums and elementwise ops (StableHLO specification, `batch_norm_*`).

Written out, its statistics are sums like any other: over a split batch they are partial sums.

before: `%y, %mean, %var = stablehlo.batch_norm_training %x, %scale, %offset`
after:  `%mean = sum(%x) / n; %var = sum((%x - %mean)^2) / n; %y = (%x - %mean) * ...`
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from jax import lax

from spmd.frontend.canonicalize.site import Site, canonical
from spmd.ir.program import Value


class _Norm:
    """Steps along the feature dim of one batch normalization."""

    def __init__(self, site: Site) -> None:
        x = site.op.kind.operands[0]
        self.shape = x.shape
        self.feature: int = site.attrs["feature_index"]
        self.others = [d for d in range(x.rank) if d != self.feature]
        self.count = x.size // max(x.shape[self.feature], 1)
        self.epsilon = float(getattr(site.attrs["epsilon"], "text", "0").partition(":")[0])

    def spread(self, x: Any) -> Any:
        """One number a feature, repeated over the whole tensor."""
        return lax.broadcast_in_dim(x, self.shape, (self.feature,))

    def sum(self, x: Any) -> Any:
        """Sum over everything but the features."""
        return lax.reduce_sum(x, self.others)

    def normalize(self, x: Any, scale: Any, offset: Any, mean: Any, variance: Any) -> Any:
        factor = lax.rsqrt(variance + self.epsilon) * scale
        return (x - self.spread(mean)) * self.spread(factor) + self.spread(offset)

    def training(self, x: Any, scale: Any, offset: Any) -> Any:
        mean = self.sum(x) / self.count
        variance = self.sum(lax.square(x - self.spread(mean))) / self.count
        return self.normalize(x, scale, offset, mean, variance), mean, variance

    def gradient(self, x: Any, scale: Any, mean: Any, variance: Any, dy: Any) -> Any:
        """The gradients of `x`, `scale` and `offset`; `var` is the variance with epsilon.

        `dx = scale / sqrt(var) / n * (n * dy - sum(dy) - (x - mean) * sum(dy * (x - mean)) / var)`,
        `dscale = sum(dy * (x - mean)) / sqrt(var)` and `doffset = sum(dy)`.
        """
        inverse = lax.rsqrt(variance + self.epsilon)
        centered = x - self.spread(mean)
        dy_sum, weighted = self.sum(dy), self.sum(dy * centered)
        tilt = centered * self.spread(weighted * inverse * inverse / self.count)
        dx = self.spread(scale * inverse) * (dy - self.spread(dy_sum / self.count) - tilt)
        return dx, weighted * inverse, dy_sum


@canonical("stablehlo.batch_norm_inference")
def _inference(site: Site) -> Sequence[Value]:
    return site.computed(_Norm(site).normalize)


@canonical("stablehlo.batch_norm_training")
def _training(site: Site) -> Sequence[Value]:
    return site.computed(_Norm(site).training)


@canonical("stablehlo.batch_norm_grad")
def _grad(site: Site) -> Sequence[Value]:
    return site.computed(_Norm(site).gradient)
