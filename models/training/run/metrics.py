"""Rates of a training step: tokens per second, model FLOPs utilization (MFU), memory."""

import dataclasses
from collections.abc import Mapping

import jax

PEAK_BF16_FLOPS = {
    "H200": 989e12,
    "H100": 989e12,
    "A100": 312e12,
    "TPU v6": 918e12,
    "TPU v5 lite": 197e12,
    "TPU v5": 459e12,
    "TPU v4": 275e12,
}
"""A part of the device's name -> its dense bf16 FLOP/s. The first part that matches counts, so
"TPU v5 lite" is before "TPU v5"."""


def peak_flops(device_kind: str, dtype: str) -> float | None:
    """The peak FLOP/s of one device.

    Args:
        device_kind: `jax.Device.device_kind`.
        dtype: what matrix products are computed in.

    Returns:
        None if it is not known; peaks are known for 16-bit floats only.
    """
    if dtype not in ("bfloat16", "float16"):
        return None
    return next((peak for name, peak in PEAK_BF16_FLOPS.items() if name in device_kind), None)


@dataclasses.dataclass(frozen=True)
class StepCost:
    """What a training step processes; turns seconds into rates."""

    tokens: int  # tokens of a global batch
    devices: int  # number of devices that share the step
    # convention -> FLOPs credited to a token, forward and backward
    flops_per_token: Mapping[str, float] = dataclasses.field(default_factory=dict)
    peak_flops: float | None = None  # of one device; None if it is not known
    unit: str = "tokens"  # what is counted, where it is no tokens
    rows: int = 0  # of that batch; other batches have tokens in proportion. 0: all are alike

    def rates(self, seconds: float, rows: int = 0) -> dict[str, float]:
        """Rates of a step that took `seconds`.

        Args:
            rows: of its batch; 0 is as many as `self.rows`.

        Returns:
            `tokens_per_s` of all devices (or another unit) and, if the peak is known,
            `mfu_CONVENTION` for each convention.
        """
        share = rows / self.rows if rows and self.rows else 1.0
        tokens_per_s = share * self.tokens / seconds
        rates = {f"{self.unit}_per_s": tokens_per_s}
        if self.peak_flops is not None:
            for convention, flops in self.flops_per_token.items():
                rates[f"mfu_{convention}"] = tokens_per_s * flops / self.devices / self.peak_flops
        return rates


def memory_in_use() -> dict[str, float]:
    """Memory of this process's fullest device.

    Returns:
        `memory_bytes` and `memory_peak_bytes`; empty on devices that do not tell, such as CPUs.
    """
    stats = [device.memory_stats() for device in jax.local_devices()]
    if not stats or any(s is None or "peak_bytes_in_use" not in s for s in stats):
        return {}
    return {
        "memory_bytes": max(s["bytes_in_use"] for s in stats),
        "memory_peak_bytes": max(s["peak_bytes_in_use"] for s in stats),
    }
