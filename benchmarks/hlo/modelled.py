"""What a step takes by the TPU compiler's own schedule: its cycles, and what is waited for.

The compiler estimates cycles for its kernels and none for collectives. Those take our prices here,
less the kernels that the schedule has beside them. Nothing of this is measured.
"""

import math
from typing import NamedTuple

from benchmarks.hlo.collectives import HloCollective, read_account
from spmd.measure.hlo import integer
from spmd.mesh.mesh import Mesh
from spmd.mesh.topology import Topology
from spmd.reshard.comm import latency_steps

CLOCKS = {"v4": 1.05e9, "v5e": 1.5e9, "v5p": 1.75e9, "v6e": 1.75e9}
"""Cycles/s of a chip, from its published peak: 4 units of 128 x 128 x 2 (v5e), or 8 of them; of
256 x 256 x 2 on v6e."""

LARGE = 1 << 20
"""Bytes of a collective that counts as large."""


class Modelled(NamedTuple):
    """The parts of a step."""

    kernel_seconds: float  # the compiler's cycles, at the chip's clock
    exposed_seconds: float  # what collectives take beyond the kernels beside them
    sent: int  # bytes that one device sends
    # large, large_hidden: large collectives in one run, and those with kernels beside them
    large: int
    large_hidden: int
    # (collective, seconds of all its runs) of the large others
    synchronous: tuple[tuple[HloCollective, float], ...]

    @property
    def seconds(self) -> float:
        """Of the step."""
        return self.kernel_seconds + self.exposed_seconds


def modelled(text: str, mesh: Mesh, topology: Topology) -> Modelled:
    """Reads a scheduled module.

    Args:
      text: `compiled.as_text("hlo")`.
      topology: the slice, of a chip in `CLOCKS`.
    """
    clock = CLOCKS[topology.chip.name]
    account = read_account(text)
    counts = account.runs.counts()
    kernel_seconds, exposed, alone = 0.0, 0.0, []
    sent = large = large_hidden = 0
    for name, own in account.collectives.items():
        computation = account.module.computations[name] if counts[name] else ()
        # The compiler estimates instructions outside of fusions; of those that it does not, 0.
        kernels = [integer(r'"estimated_cycles":"(\d+)"', x.rest) / clock for x in computation]
        kernel_seconds += counts[name] * sum(kernels)
        left = [*kernels]  # what each kernel can still hide
        for collective in own if counts[name] else ():
            needed = wire_seconds(collective, mesh, topology)
            waited = counts[name] * _hide(needed, collective.flight, left)
            exposed += waited
            sent += counts[name] * collective.bytes
            if collective.bytes > LARGE:
                large += counts[name]
                if any(kernels[place] for place in collective.flight):
                    large_hidden += counts[name]
                else:
                    alone.append((collective._replace(count=counts[name]), waited))
    return Modelled(kernel_seconds, exposed, sent, large, large_hidden, tuple(alone))


def _hide(needed: float, flight: range, left: list[float]) -> float:
    """Seconds of a collective that no kernel hides; takes the others from what kernels have left.

    A moment of a kernel hides one collective, the one that was issued first: they share links.
    """
    for place in flight:
        hidden = min(needed, left[place])
        left[place] -= hidden
        needed -= hidden
    return needed


def wire_seconds(collective: HloCollective, mesh: Mesh, topology: Topology) -> float:
    """What a collective takes that nothing else slows down.

    One over the whole slice has the ports of all torus dims, others have those of the mesh axis
    that is as long, and else one port.
    """
    chip, group = topology.chip, collective.group_size
    if group == 1:
        return 0.0
    axes = [i for i, size in enumerate(mesh.sizes) if size == group]
    bandwidth = chip.ici.bandwidth
    if group == topology.count:
        bandwidth *= sum([2 if size % chip.wrap == 0 else 1 for size in topology.shape if size > 1])
    elif axes:
        pairs = zip(mesh.atoms, topology.atom_links(mesh), strict=True)
        bandwidth = min(link.bandwidth for atom, link in pairs if atom.axis == axes[0])
    steps = latency_steps(collective.kind, [2] * int(math.log2(group)))
    return steps * chip.ici.latency + collective.bytes / bandwidth
