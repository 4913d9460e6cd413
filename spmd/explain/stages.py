"""What a report reads: the results of the pipeline's stages."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from spmd.lowering.partition import Partitioned
from spmd.planning.plan import Plan
from spmd.propagation.propagated import Propagated


class Stages(Protocol):
    """What a report reads of the pipeline's results."""

    @property
    def propagated(self) -> Propagated:
        """The program with its proposals."""

    @property
    def plan(self) -> Plan:
        """The plan."""

    @property
    def optimized(self) -> Partitioned:
        """The local program."""

    @property
    def seconds(self) -> Mapping[str, float]:
        """How long each stage took, seconds."""
