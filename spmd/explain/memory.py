"""Memory of a program, per device: as XLA's buffer assignment reports it, or as predicted."""

from __future__ import annotations

from typing import Any, NamedTuple

from spmd.planning.memory import MemoryUse


class Memory(NamedTuple):
    """Bytes per device.

    Attributes:
      arguments, results: what goes in and out.
      aliased: of the results, what reuses donated arguments.
      temporary: the largest set of intermediate values alive at once.
      code: the executable itself.
      is_predicted: whether this is our prediction, and not XLA's report.
    """

    arguments: int
    results: int
    aliased: int
    temporary: int
    code: int
    is_predicted: bool = False

    @property
    def peak_bytes(self) -> int:
        """Upper bound of what the program needs at once."""
        return self.arguments + self.results - self.aliased + self.temporary

    @staticmethod
    def of(analysis: Any) -> Memory:
        """From `Compiled.memory_analysis()`; zeros where a backend reports nothing."""
        if analysis is None:
            return Memory(0, 0, 0, 0, 0)
        return Memory(
            analysis.argument_size_in_bytes,
            analysis.output_size_in_bytes,
            analysis.alias_size_in_bytes,
            analysis.temp_size_in_bytes,
            analysis.generated_code_size_in_bytes,
        )

    @staticmethod
    def predicted(use: MemoryUse) -> Memory:
        """From our own prediction, before XLA has seen the program."""
        return Memory(use.arguments, use.results, use.aliased, use.temporary, 0, True)
