"""What a GPU used: joules, from NVIDIA's own counter (NVML)."""

from contextlib import suppress

SECONDS = 3.0
"""Run at least so long between two readings: the counter moves every 0.1 s."""


def joules(gpu: int = 0) -> float:
    """What a GPU used since its driver was loaded; nan where nothing counts it.

    Source: NVML's nvmlDeviceGetTotalEnergyConsumption, through the package nvidia-ml-py.
    """
    with suppress(Exception):  # no such package, GPU or counter: each has an error of its own
        import pynvml

        pynvml.nvmlInit()
        handle = pynvml.nvmlDeviceGetHandleByIndex(gpu)
        return float(pynvml.nvmlDeviceGetTotalEnergyConsumption(handle)) / 1e3
    return float("nan")
