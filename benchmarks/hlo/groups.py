"""A collective instruction of optimized HLO: its kind, the type that arrives, who takes part."""

import math
import re

from benchmarks.hlo.read import elements
from spmd.measure.hlo import Instruction, Module


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
