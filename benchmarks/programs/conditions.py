"""What benchmark programs are planned for, and how one is kept from helping the next."""

import dataclasses
import sys

import spmd


def small_machine() -> spmd.Topology:
    """Eight devices as much slower than H200s as a benchmark's programs are smaller than real ones.

    Matrix products of a test's size do some 20 operations for each byte that is sent, real ones
    thousands; memory is 20 times as fast as the links on both; and what bounds small programs on
    real machines, the number of messages, costs next to nothing: this is about bytes. So nothing is
    hidden behind arithmetic, either.
    """
    cpu = spmd.Topology("cpu:8")
    ici = cpu.chip.ici._replace(latency=1e-9)
    chip = dataclasses.replace(cpu.chip, hbm_bandwidth=20 * ici.bandwidth, ici=ici, overlap=0.0)
    return spmd.Topology(cpu.name, chip)


def forget() -> None:
    """Empties what planning remembers of one program for the next."""
    for module in [module for name, module in sys.modules.items() if name.startswith("spmd.")]:
        for value in vars(module).values():
            if hasattr(value, "cache_clear"):
                value.cache_clear()
