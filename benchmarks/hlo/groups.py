"""Instructions of optimized HLO: operands, types and sources; who takes part in a collective."""

from __future__ import annotations

import math
import re

from spmd.measure.hlo import Instruction, Module, integer, items_of, places_of


def payload(instruction: Instruction) -> str:
    """The type of what arrives: the type of a start also has its operands and some context.

    `all-reduce-start` has its result's type; the others have (operands, results, context...).
    """
    opcode = instruction.opcode
    if opcode == "send":
        return elements(instruction.type)[0]
    if not opcode.endswith("-start") or opcode == "all-reduce-start":
        return instruction.type
    return elements(instruction.type)[1]


def group_size(instruction: Instruction, kind: str, module: Module) -> int:
    """Devices that exchange with one another in a collective of this kind."""
    # XLA writes groups in four ways:
    #   {{0,1},{2,3}}             each group
    #   {}                        one group of all devices
    #   [2,4]<=[8]                two groups of four, the iota form
    #   mesh['a'=4,'b'=2] {'a'}   by axes of a mesh
    rest = instruction.rest
    if kind == "collective_permute":
        return _largest_cycle(re.search(r"source_target_pairs=\{(\{.*?\})?\}", rest))
    if (named := re.search(r"replica_groups=mesh\[(.*?)\]\s*\{(.*?)\}", rest)) is not None:
        return _named_extent(named[1], named[2])
    groups = re.search(r"replica_groups=(\{\{.*?\}\}|\{\}|\[[\d,]+\]<=)", rest)
    if groups is None or groups[1] == "{}":
        return module.devices
    if groups[1].startswith("["):
        return int(groups[1].partition("]")[0].rpartition(",")[2].lstrip("["))
    return max(len(group.split(",")) for group in re.findall(r"\{([\d,\s]+)\}", groups[1]))


def _named_extent(mesh: str, axes: str) -> int:
    """Product of the axes of `mesh['a'=4,'b'=2] {'b','a':(1)2}`, sub-axes by their own size."""
    sizes = {name: int(size) for name, size in re.findall(r"'(\w+)'=(\d+)", mesh)}
    refs = re.findall(r"'(\w+)'(?::\(\d+\)(\d+))?", axes)
    return math.prod(int(part) if part else sizes[name] for name, part in refs)


def _largest_cycle(pairs: re.Match[str] | None) -> int:
    """Devices in the largest set that source-target pairs connect."""
    neighbours: dict[int, set[int]] = {}
    found = re.findall(r"\{(\d+),\s*(\d+)\}", (pairs and pairs[1]) or "")
    for source, target in ((int(a), int(b)) for a, b in found):
        neighbours.setdefault(source, set()).add(target)
        neighbours.setdefault(target, set()).add(source)
    largest = 1
    while neighbours:
        waiting, size = [next(iter(neighbours))], 0
        while waiting:
            if (near := neighbours.pop(waiting.pop(), None)) is not None:
                size += 1
                waiting += near
        largest = max(largest, size)
    return largest


def elements(type_: str) -> list[str]:
    """The top-level elements of a tuple type, at least two: a single one is repeated."""
    parts = items_of(type_)[0] if type_.startswith("(") else [type_]
    return parts if len(parts) > 1 else parts * 2


def arrays(type_: str) -> list[tuple[str, tuple[int, ...]]]:
    """(dtype, shape) of every array in a type."""
    return [
        (dtype, tuple(int(size) for size in re.findall(r"\d+", sizes)))
        for dtype, sizes in re.findall(r"\b([a-z]\w*)\[([^\]]*)\]", type_)
        if dtype not in ("token", "opaque")
    ]


def array_bytes(dtype: str, shape: tuple[int, ...]) -> int:
    """Bytes of an array, without padding by layout tiles."""
    bits = 8 if dtype == "pred" else integer(r"(\d+)", dtype)
    return -(-math.prod(shape) * bits // 8)


def source_of(instruction: Instruction, module: Module) -> str:
    """The innermost frame that is not in an installed library, else the innermost one."""
    if "source_file=" in instruction.rest:
        return places_of(instruction, module)[0]
    frame = first = integer(r"stack_frame_id=(\d+)", instruction.rest)
    while frame in module.frames:
        where, parent = module.frames[frame]
        if "site-packages" not in where and not where.startswith("<"):
            return where
        frame = parent if parent < frame else 0
    return module.frames.get(first, ("", 0))[0]


def operands(instruction: Instruction) -> list[str]:
    """Names of the operands: what stands before the parenthesis that closes them."""
    items, _ = items_of(instruction.rest, 0)
    return re.findall(r"%([^\s,(){}]+)", " ".join(items))
