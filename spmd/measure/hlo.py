"""Parses the text of an optimized HLO module, by the grammar in XLA's `hlo_parser.cc`."""

import math
import re
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np

from spmd.errors import ArgumentError


class Instruction(NamedTuple):
    """Holds an HLO instruction, `name = type opcode(operands), attributes, metadata={...}`."""

    name: str
    type: str
    opcode: str
    rest: str  # all behind `opcode(`, as text: operands, attributes and metadata
    root: bool  # whether it is the result of its computation


class Module(NamedTuple):
    """Holds an HLO module: the instructions of its computations, and the user's stack frames."""

    entry: str  # the name of the computation that is run
    computations: Mapping[str, list[Instruction]]  # by name
    devices: int  # partitions times replicas
    frames: Mapping[int, tuple[str, int]]  # number -> `file:line`, parent (0: none)


COLLECTIVES = {
    "all-gather": "all_gather", "all-reduce": "all_reduce", "reduce-scatter": "reduce_scatter",
    "all-to-all": "all_to_all", "ragged-all-to-all": "all_to_all",
    "collective-permute": "collective_permute", "collective-broadcast": "collective_broadcast",
    "send": "collective_permute",
}  # fmt: skip
"""Maps opcodes that send data between devices to the kind of collective, as spmd names it."""

_COMPUTATION = re.compile(r"^(ENTRY )?%?([^\s(]+) \(.*\{\s*$")
_INSTRUCTION = re.compile(r"^\s+(ROOT )?%?([^\s=]+) = (.*)$")
_END = re.compile(r"^\}(, execution_thread=.*)?$")
_BRACKET_OR_COMMA = re.compile(r"[(){}\[\],]")
_OPCODE = re.compile(r" ([a-z][\w-]*)\(")


def parse_module_text(text: str) -> Module:
    """Parses the text of an HLO module; ArgumentError if it has no ENTRY computation."""
    # Line by line: a computation's head opens a list of instructions, `}` closes it. Tables of
    # source locations stand outside of computations, a heading and then numbered rows.
    computations: dict[str, list[Instruction]] = {}
    tables: dict[str, dict[int, str]] = {}
    entry = ""
    current: list[Instruction] | None = None
    table: dict[int, str] | None = None
    for line in text.splitlines():
        if current is not None:
            if _END.match(line):
                current = None
            elif (instruction := _instruction(line)) is not None:
                current.append(instruction)
            elif current:  # attributes of kernels may hold line breaks
                current[-1] = current[-1]._replace(rest=f"{current[-1].rest}\n{line}")
        elif (match := _COMPUTATION.match(line)) and not line.startswith("HloModule"):
            current = computations.setdefault(match[2], [])
            entry = match[2] if match[1] else entry
        elif line in ("FileNames", "FunctionNames", "FileLocations", "StackFrames"):
            table = tables.setdefault(line, {})
        elif table is not None and (match := re.match(r"(\d+) (.*)", line)):
            table[int(match[1])] = match[2]
    if not entry:
        raise ArgumentError(
            "the text is not an HLO module: it has no ENTRY computation",
            fix='pass compiled.as_text("hlo")',
        )
    counts = re.findall(r"(?:num_partitions|replica_count)=(\d+)", text[: text.find("\n")])
    files = {k: v.strip('"') for k, v in tables.get("FileNames", {}).items()}
    locations, frames = {}, {}
    for number, row in tables.get("FileLocations", {}).items():
        file, line_number = integer(r"\bfile_name_id=(\d+)", row), integer(r"\bline=(\d+)", row)
        locations[number] = f"{files.get(file, '')}:{line_number}"
    for number, row in tables.get("StackFrames", {}).items():
        where = locations.get(integer(r"file_location_id=(\d+)", row), "")
        # XLA counts parents from 1 on top of counting frames from 1, so that 1 means none.
        frames[number] = (where, max(0, integer(r"parent_frame_id=(\d+)", row) - 1))
    return Module(entry, computations, math.prod(map(int, counts)), frames)


def _instruction(line: str) -> Instruction | None:
    match = _INSTRUCTION.match(line)
    if match is None:
        return None
    body = match[3]
    # The type of a tuple holds spaces and layouts.
    end = items(body)[1] + 1 if body.startswith("(") else body.find(" ")
    opcode = _OPCODE.match(body, end)
    if opcode is None:
        return None
    return Instruction(match[2], body[:end], opcode[1], body[opcode.end() :], bool(match[1]))


def items(text: str, start: int = 1) -> tuple[list[str], int]:
    """Splits a list that begins at `start`: `(a, {b}) c` -> (["a", "{b}"], 7), the index of `)`."""
    items, depth = [], 0
    for match in _BRACKET_OR_COMMA.finditer(text, start):
        if match[0] in "({[":
            depth += 1
        elif depth and match[0] in ")}]":
            depth -= 1
        elif depth == 0:
            items.append(text[start : match.start()].strip())
            start = match.end()
            if match[0] == ")":
                return items, match.start()
    return items, len(text)


def integer(pattern: str, text: str) -> int:
    """Returns the integer that group 1 of a regular expression matches; 0 if it is not found."""
    match = re.search(pattern, text)
    return int(match[1]) if match else 0


def names_of(rest: str, key: str) -> list[str]:
    """Returns `key`'s names, [] without it: `calls=%a` -> ["a"], `calls={%a, %b}` -> ["a", "b"]."""
    match = re.search(rf"\b{key}=(?:\{{([^}}]*)\}}|([^\s,]+))", rest)
    if match is None:
        return []
    return [name.strip().lstrip("%") for name in (match[1] or match[2] or "").split(",")]


def op_name_of(instruction: Instruction) -> str:
    """Returns an instruction's `op_name`, as `jit(f)/mlp/dot_general`; empty if it has none."""
    match = re.search(r'op_name="((?:[^"\\]|\\.)*)"', instruction.rest)
    return match[1].replace('\\"', '"') if match else ""


def kind_of(instruction: Instruction) -> str | None:
    """Returns the kind of collective that an instruction is or starts; None for any other one."""
    return COLLECTIVES.get(instruction.opcode.removesuffix("-start"))


def called(instruction: Instruction, module: Module) -> list[Instruction]:
    """Returns the instructions in computations that an instruction calls, as a fusion's body."""
    names = [*names_of(instruction.rest, "calls"), *names_of(instruction.rest, "to_apply")]
    return [inner for name in names for inner in module.computations.get(name, ())]


def groups_of(instruction: Instruction, module: Module) -> frozenset[frozenset[int]]:
    """Returns the sets of device numbers that exchange in a collective; empty if not listed."""
    #   {{0,1},{2,3}}        each group
    #   {}                   one group of all devices
    #   [4,2]<=[2,4]T(1,0)   numbers in the shape 2x4, transposed, in four groups of two
    found = re.search(
        r"replica_groups=(\{(?:\{[\d,]*\},?)*\}|\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?)",
        instruction.rest,
    )
    if found is None:
        return frozenset()
    if found[2]:
        shape, dims = _numbers(found[2]), _numbers(found[3])
        order = _numbers(found[4] or ",".join(map(str, range(len(dims)))))
        rows = np.arange(math.prod(dims)).reshape(dims).transpose(order).reshape(shape).tolist()
    else:
        rows = [_numbers(group) for group in re.findall(r"\{([\d,]+)\}", found[1])]
    return frozenset(map(frozenset, rows or [range(module.devices)]))


def stated_trips(loop: Instruction) -> int | None:
    """Returns the trip count that XLA states for a `while` loop; None if it states none."""
    stated = re.search(r'"?known_trip_count"?:\{"?n"?:"?(\d+)', loop.rest)
    return int(stated[1]) if stated else None


def _numbers(text: str) -> list[int]:
    return [int(number) for number in text.split(",")]


def places_of(instruction: Instruction, module: Module) -> list[str]:
    """Returns `file:line` of each frame of an instruction's stack, the innermost first."""
    if file := re.search(r'source_file="([^"]*)"', instruction.rest):
        return [f"{file[1]}:{integer('source_line=([0-9]+)', instruction.rest)}"]
    found, frame = [], integer(r"stack_frame_id=(\d+)", instruction.rest)
    while frame in module.frames:
        where, parent = module.frames[frame]
        found.append(where)
        frame = parent if parent < frame else 0
    return found
