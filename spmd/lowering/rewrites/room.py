"""How much memory the rewrites may take."""

from __future__ import annotations

from typing import NamedTuple

from spmd.ir.program import Program
from spmd.predict.memory import peak_memory


class Room(NamedTuple):
    """The memory of one device.

    Attributes:
      bytes: how much it has.
      donated: positions of the arguments whose memory may be overwritten.
    """

    bytes: int
    donated: tuple[int, ...] = ()

    def left(self, program: Program) -> int:
        """Predicted bytes that a program leaves free at its peak; negative if it is too large."""
        return self.bytes - peak_memory(program, self.donated).peak
