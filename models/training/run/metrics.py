"""What a training step uses: tokens per second, model FLOPs utilization (MFU), memory."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType

import jax

PEAK_BF16_FLOPS: Mapping[str, float] = MappingProxyType(
    {
        "H200": 989e12,
        "H100": 989e12,
        "A100": 312e12,
        "TPU v6": 918e12,
        "TPU v5 lite": 197e12,
        "TPU v5": 459e12,
        "TPU v4": 275e12,
    }
)
"""Part of a device's name -> its dense bf16 FLOP/s; the first that matches counts."""


def peak_flops(device_kind: str, dtype: str) -> float | None:
    """Peak FLOP/s of one device, or None where it is not known.

    Args:
        device_kind: `jax.Device.device_kind`.
        dtype: what matrix products are computed in; peaks are known for 16 bits only.
    """
    if dtype not in ("bfloat16", "float16"):
        return None
    return next((peak for name, peak in PEAK_BF16_FLOPS.items() if name in device_kind), None)


@dataclasses.dataclass(frozen=True)
class StepCost:
    """What a training step processes, to turn seconds into rates.

    Args:
        tokens: tokens of a global batch.
        devices: how many devices share the step.
        flops_per_token: convention -> FLOPs credited to a token, forward and backward.
        peak_flops: of one device, where known.
    """

    tokens: int
    devices: int
    flops_per_token: Mapping[str, float] = dataclasses.field(default_factory=dict)
    peak_flops: float | None = None

    def rates(self, seconds: float) -> dict[str, float]:
        """`tokens_per_s` of all devices and, with a known peak, `mfu_<convention>` of each."""
        tokens_per_s = self.tokens / seconds
        rates = {"tokens_per_s": tokens_per_s}
        if self.peak_flops is not None:
            for convention, flops in self.flops_per_token.items():
                rates[f"mfu_{convention}"] = tokens_per_s * flops / self.devices / self.peak_flops
        return rates


def memory_in_use() -> dict[str, float]:
    """`memory_bytes` and `memory_peak_bytes` of this process's fullest device, where known.

    CPU devices do not tell.
    """
    stats = [device.memory_stats() for device in jax.local_devices()]
    if not stats or any(s is None or "peak_bytes_in_use" not in s for s in stats):
        return {}
    return {
        "memory_bytes": max(s["bytes_in_use"] for s in stats),
        "memory_peak_bytes": max(s["peak_bytes_in_use"] for s in stats),
    }
