"""The largest values of optimized HLO, and the amount of its arithmetic."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import NamedTuple

from benchmarks.hlo.groups import payload
from benchmarks.hlo.runs import computations_run
from spmd.measure.hlo import (
    Instruction,
    array_bytes,
    arrays,
    elements,
    kind_of,
    op_name_of,
    operands,
    parse_module_text,
    source_of,
)


class HloValue(NamedTuple):
    """All instructions outside fusions whose results have one and the same array shape.

    Attributes:
      dtype: XLA's element type (`f32`, `bf16`, `pred`).
      shape: sizes on one device.
      bytes: bytes on one device, without padding by layout tiles.
      instructions: how many instructions have such a result.
      opcode, op_name, source: of the first of them.
    """

    dtype: str
    shape: tuple[int, ...]
    bytes: int
    instructions: int
    opcode: str
    op_name: str
    source: str


def largest_values(text: str, n: int = 10) -> tuple[HloValue, ...]:
    """The `n` largest array shapes among the results of instructions outside fusions.

    Args:
      text: `compiled.as_text("hlo")`.
      n: how many.

    Returns:
      Largest first; shapes of equal bytes in the order of the text.

    Raises:
      ArgumentError: the text has no ENTRY computation.
    """
    module = parse_module_text(text)
    made: dict[tuple[str, tuple[int, ...]], list[Instruction]] = {}
    for computation, _ in computations_run(module, into_fusions=False):
        for instruction in computation:
            for array in _results(instruction):
                made.setdefault(array, []).append(instruction)
    values = [
        HloValue(*array, array_bytes(*array), len(found), found[0].opcode, op_name_of(found[0]),
                 source_of(found[0], module))
        for array, found in made.items()
    ]  # fmt: skip
    return tuple(sorted(values, key=lambda value: -value.bytes)[:n])


def matmul_flops(text: str) -> int:
    """Floating-point operations of one device in matrix products and convolutions in one run.

    Padding and dilation of convolutions count as if they were multiplied.

    Args:
      text: `compiled.as_text("hlo")`.

    Raises:
      ArgumentError: the text has no ENTRY computation.
    """
    module = parse_module_text(text)
    total = 0
    for computation, runs in computations_run(module):
        types = {instruction.name: instruction.type for instruction in computation}
        total += runs * sum(_flops(instruction, types) for instruction in computation)
    return total


def _flops(instruction: Instruction, types: Mapping[str, str]) -> int:
    """Operations of a dot or a convolution: two for each term of each element; else 0."""
    if instruction.opcode not in ("dot", "convolution"):
        return 0
    left, right = (arrays(types[name])[0][1] for name in operands(instruction)[:2])
    if instruction.opcode == "dot":
        contracted = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", instruction.rest)
        dims = re.findall(r"\d+", contracted[1]) if contracted else []
        terms = math.prod(left[int(dim)] for dim in dims)
    else:
        labels = re.search(r"dim_labels=\w+_(\w+)->", instruction.rest)
        kernel = zip(labels[1] if labels else "", right, strict=True)
        terms = math.prod(size for label, size in kernel if label != "o")
    return 2 * terms * math.prod(arrays(instruction.type)[0][1])


_ALIASES = {
    "after-all", "bitcast", "call", "conditional", "get-tuple-element", "opt-barrier",
    "optimization-barrier", "tuple", "while",
}  # fmt: skip
"""Opcodes whose results are other instructions' results under another name."""


def _results(instruction: Instruction) -> list[tuple[str, tuple[int, ...]]]:
    """(dtype, shape) of every array that an instruction makes."""
    opcode = instruction.opcode
    if opcode in _ALIASES or opcode.endswith(("-done", "-update")):
        return []
    if kind_of(instruction) is not None:
        return arrays(payload(instruction))
    if opcode == "async-start":
        return arrays(elements(instruction.type)[1])
    if opcode == "parameter" and instruction.type.startswith("("):
        return []
    return arrays(instruction.type)
