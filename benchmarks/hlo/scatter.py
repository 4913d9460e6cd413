"""All-reduces of optimized HLO that could be reduce-scatters: each device reads just its share.

The backend for GPUs makes reduce-scatters of them, the CPU's does not. The TPU compiler makes them
of some, and of a reduce-scatter over all chips of a slice it makes an all-reduce: what its text
says is what runs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from benchmarks.hlo.groups import group_size, payload
from benchmarks.hlo.read import array_bytes, arrays, operands
from spmd.measure.hlo import Instruction, Module, integer, names_of


def scattered_bytes(module: Module) -> dict[str, int]:
    """Name of an all-reduce -> bytes of its operands of which each device reads only a share.

    None of the TPU compiler's.
    """
    uses = {name: _uses_of(computation) for name, computation in module.computations.items()}
    found: dict[str, int] = {}
    for name, computation in module.computations.items():
        for instruction in computation:
            if instruction.opcode not in ("all-reduce", "all-reduce-start"):
                continue
            if _TILED in instruction.type:
                continue
            group = group_size(instruction, "all_reduce", module)
            for index, (dtype, shape) in enumerate(arrays(payload(instruction))):
                read = _read_elements(instruction.name, name, uses, index)
                if group > 1 and read is not None and read * group == math.prod(shape):
                    size = found.get(instruction.name, 0)
                    found[instruction.name] = size + array_bytes(dtype, shape)
    return found


_TILED = ":T("
"""A layout with tiles, which only the TPU compiler writes."""

_REARRANGES = {"bitcast", "bitcast-convert", "copy", "reshape", "transpose"}
"""Opcodes whose result has all elements of their operand, in some order."""


class _Uses(NamedTuple):
    """Who reads what in a computation."""

    # name -> each instruction that reads it and at which operand
    users: Mapping[str, Sequence[tuple[Instruction, int]]]
    parameters: Mapping[int, str]  # number -> name
    roots: frozenset[str]  # what the computation returns


def _uses_of(computation: Sequence[Instruction]) -> _Uses:
    users: dict[str, list[tuple[Instruction, int]]] = {}
    for instruction in computation:
        for index, operand in enumerate(operands(instruction)):
            users.setdefault(operand, []).append((instruction, index))
    parameters = {integer(r"(\d+)", i.rest): i.name for i in computation if i.opcode == "parameter"}
    return _Uses(users, parameters, frozenset(i.name for i in computation if i.root))


def _read_elements(
    value: str, computation: str, uses: Mapping[str, _Uses], element: int = 0
) -> int | None:
    """The most elements of a value that any user slices from it, None where one reads it whole.

    Args:
      value: name of an array, or of a tuple.
      computation: where it is.
      uses: of every computation.
      element: which element of a tuple is meant.
    """
    # Follows a value through rearrangements, tuples and fusions to the slices at the end:
    #   %ar = all-reduce; %b = bitcast %ar; %f = fusion(%b), with dynamic-slice(param 0) of 2 in it
    # reads 2 elements. Of 8 in a group of 4 that is a share, and a backend may scatter it.
    here = uses[computation]
    if value in here.roots or not here.users.get(value):
        return None
    most = 0
    for user, index in here.users[value]:
        read: int | None = None
        if user.opcode == "dynamic-slice" and index == 0:
            read = math.prod(arrays(user.type)[0][1])
        elif user.opcode == "get-tuple-element":
            if integer(r"\bindex=(\d+)", user.rest) != element:
                continue
            read = _read_elements(user.name, computation, uses)
        elif user.opcode == "all-reduce-done":
            read = _read_elements(user.name, computation, uses, element)
        elif user.opcode in _REARRANGES:
            read = _read_elements(user.name, computation, uses)
        elif user.opcode == "fusion":
            (callee,) = names_of(user.rest, "calls")
            read = _read_elements(uses[callee].parameters[index], callee, uses)
        if read is None:
            return None
        most = max(most, read)
    return most or None
