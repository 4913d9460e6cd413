"""Reads XLA's optimized HLO as text: which collectives run how often, and what is large.

The plan says what should be moved; this says what XLA made of it. Backends combine collectives,
make them asynchronous, and promote their dtypes (the CPU's all-reduce of bf16 is one of f32), so
the two are compared by kind and in bytes, not one by one. Grammar: XLA's `hlo_parser.cc`.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from spmd.errors import ArgumentError
from spmd.ir.control_flow import UNKNOWN_TRIPS
from spmd.planning.comm import wire_bytes


class HloCollective(NamedTuple):
    """One collective instruction.

    Attributes:
      kind: `all_gather`, `all_reduce`, `reduce_scatter`, `all_to_all`, `collective_permute` or
        `collective_broadcast`.
      bytes: bytes that one device sends in one execution, by the convention of
        `spmd.planning.comm.wire_bytes`; for a combined collective, of all its operands.
      count: executions in one run (loops multiply).
      group_size: devices that exchange with one another.
      op_name: the path of name scopes that it came from.
      source: `file.py:line (function)`, empty where XLA does not know.
    """

    kind: str
    bytes: int
    count: int  # type: ignore[assignment]  # hides tuple.count
    group_size: int
    op_name: str
    source: str


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


def hlo_collectives(
    text: str, *, guess_trips: bool = True, scatter_slices: bool = False
) -> tuple[HloCollective, ...]:
    """Every collective that the program runs, in the order of the text.

    Of a conditional's branches only the one that moves the most bytes counts.

    Args:
      text: `compiled.as_text("hlo")`, or the text of any optimized module.
      guess_trips: whether a loop whose trip count XLA does not state is read from `i < n` in its
        condition, else taken to run `UNKNOWN_TRIPS` times.
      scatter_slices: whether an all-reduce of which each device uses only its own slice is read
        as the reduce-scatter that the backends for GPU and TPU make of it; the CPU's does not.
        Generous: what the slice's position depends on is not looked at.

    Raises:
      ArgumentError: the text has no ENTRY computation, or, unless trips are guessed, a loop that
        communicates has an unknown trip count.
    """
    module = parse_module_text(text)
    scattered = _scattered(module) if scatter_slices else {}
    own = {
        name: [
            found
            for instruction in computation
            for found in _collectives(instruction, module, scattered)
        ]
        for name, computation in module.computations.items()
    }
    counts = _communication(module, own, guess_trips)
    return tuple(
        found._replace(count=counts[name])
        for name in module.computations
        if counts[name]
        for found in own[name]
    )


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
    counts = executions(module, into_fusions=False)
    found: dict[tuple[str, tuple[int, ...]], HloValue] = {}
    for name, computation in module.computations.items():
        if not counts[name]:
            continue
        for instruction in computation:
            for dtype, shape in _results(instruction):
                old = found.get((dtype, shape))
                if old is not None:
                    found[dtype, shape] = old._replace(instructions=old.instructions + 1)
                    continue
                found[dtype, shape] = HloValue(
                    dtype, shape, _array_bytes(dtype, shape), 1, instruction.opcode,
                    _op_name(instruction), _source(instruction, module),
                )  # fmt: skip
    return tuple(sorted(found.values(), key=lambda value: -value.bytes)[:n])


def matmul_flops(text: str) -> int:
    """Floating-point operations of one device in matrix products and convolutions in one run.

    Padding and dilation of convolutions count as if they were multiplied.

    Args:
      text: `compiled.as_text("hlo")`.

    Raises:
      ArgumentError: the text has no ENTRY computation.
    """
    module = parse_module_text(text)
    counts = executions(module)
    total = 0
    for name, computation in module.computations.items():
        if counts[name]:
            types = {instruction.name: instruction.type for instruction in computation}
            total += counts[name] * sum(_flops(instruction, types) for instruction in computation)
    return total


# ---------------------------------------------------------------------------------------------
# The text as data.


class Instruction(NamedTuple):
    """One line: `name = type opcode(operands), attributes, metadata={...}, ...`."""

    name: str
    type: str
    opcode: str
    rest: str
    root: bool


class Module(NamedTuple):
    """A module: computations by name, and the tables that metadata refers to."""

    entry: str
    computations: Mapping[str, list[Instruction]]
    devices: int
    frames: Mapping[int, tuple[str, int]]


_COMPUTATION = re.compile(r"^(ENTRY )?%?([^\s(]+) \(.*\{\s*$")
_INSTRUCTION = re.compile(r"^\s+(ROOT )?%?([^\s=]+) = (.*)$")
_OPCODE = re.compile(r" ([a-z][\w-]*)\(")


def parse_module_text(text: str) -> Module:
    """The text of a module as data.

    Raises:
      ArgumentError: the text has no ENTRY computation.
    """
    computations: dict[str, list[Instruction]] = {}
    tables: dict[str, dict[int, str]] = {}
    entry = ""
    current: list[Instruction] | None = None
    table: dict[int, str] | None = None
    for line in text.splitlines():
        if current is not None:
            if line.startswith("}"):
                current = None
            elif (instruction := _instruction(line)) is not None:
                current.append(instruction)
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
    return Module(entry, computations, _device_count(text), _frames(tables))


def _instruction(line: str) -> Instruction | None:
    match = _INSTRUCTION.match(line)
    if match is None:
        return None
    body = match[3]
    end = _type_end(body)
    opcode = _OPCODE.match(body, end)
    if opcode is None:
        return None
    return Instruction(match[2], body[:end], opcode[1], body[opcode.end() :], bool(match[1]))


def _type_end(body: str) -> int:
    """Where the type at the start of an instruction ends: tuples nest, layouts hold parentheses."""
    if not body.startswith("("):
        return body.find(" ") if " " in body else len(body)
    depth = 0
    for match in re.finditer(r"[()]", body):
        depth += 1 if match[0] == "(" else -1
        if depth == 0:
            return match.end()
    return len(body)


def _device_count(text: str) -> int:
    header = text[: text.find("\n")]
    counts = re.findall(r"(?:num_partitions|replica_count)=(\d+)", header)
    return math.prod(int(count) for count in counts)


def _frames(tables: Mapping[str, Mapping[int, str]]) -> dict[int, tuple[str, int]]:
    """Stack frame -> its `file:line (function)` and its parent frame (0: none)."""
    files = {k: v.strip('"') for k, v in tables.get("FileNames", {}).items()}
    functions = {k: v.strip('"') for k, v in tables.get("FunctionNames", {}).items()}
    locations = {}
    for number, row in tables.get("FileLocations", {}).items():
        file, function, line = (
            _integer(rf"\b{key}=(\d+)", row) for key in ("file_name_id", "function_name_id", "line")
        )
        name = functions.get(function, "").rsplit("/", 1)[-1]
        locations[number] = f"{files.get(file, '')}:{line}" + (f" ({name})" if name else "")
    frames = {}
    for number, row in tables.get("StackFrames", {}).items():
        where = locations.get(_integer(r"file_location_id=(\d+)", row), "")
        # XLA counts parents from 1 on top of counting frames from 1, so that 1 means none.
        frames[number] = (where, max(0, _integer(r"parent_frame_id=(\d+)", row) - 1))
    return frames


def _integer(pattern: str, text: str) -> int:
    match = re.search(pattern, text)
    return int(match[1]) if match else 0


# ---------------------------------------------------------------------------------------------
# How often each computation runs.


def executions(module: Module, into_fusions: bool = True) -> Counter[str]:
    """Computation -> how often one run of the module runs it, every branch counted."""
    calls = {
        name: [
            (callee, call.times)
            for instruction in computation
            if (call := _call(instruction, module, into_fusions)) is not None
            for callee in call.callees
        ]
        for name, computation in module.computations.items()
    }
    return _count(module.entry, calls)


def _communication(
    module: Module, own: Mapping[str, Sequence[HloCollective]], guess_trips: bool
) -> Counter[str]:
    """Computation -> how often it communicates: of branches, the one that moves the most."""
    moved: dict[str, int] = {}
    calls: dict[str, list[tuple[str, int]]] = {}

    def visit(name: str) -> int:
        if name in moved:
            return moved[name]
        total = sum(found.bytes for found in own.get(name, ()))
        calls[name] = []
        for instruction in module.computations.get(name, ()):
            call = _call(instruction, module, into_fusions=True)
            if call is None:
                continue
            callees = [callee for callee in call.callees if communicates(callee)]
            if callees and not (call.known or guess_trips):
                raise ArgumentError(
                    f"the loop {instruction.name} communicates, and how often it runs is unknown",
                    actual=f"{instruction.opcode}({instruction.rest[:200]}",
                    fix="write it with lax.scan or a lax.fori_loop of constant bounds",
                )
            if instruction.opcode == "conditional" and callees:
                callees = [max(callees, key=visit)]
            calls[name] += [(callee, call.times) for callee in callees]
            total += call.times * sum(map(visit, callees))
        moved[name] = total
        return total

    def communicates(name: str) -> bool:
        visit(name)
        return bool(own.get(name) or calls.get(name))

    visit(module.entry)
    return _count(module.entry, calls)


def _count(entry: str, calls: Mapping[str, Sequence[tuple[str, int]]]) -> Counter[str]:
    """Computation -> executions, given which ones each runs how often."""
    counts: Counter[str] = Counter()

    def visit(name: str, times: int) -> None:
        counts[name] += times
        for callee, factor in calls.get(name, ()):
            visit(callee, times * factor)

    visit(entry, 1)
    return counts


_CALLS = {
    "call": ("to_apply",),
    "fusion": ("calls",),
    "async-start": ("calls",),
    "custom-call": ("called_computations",),
    "conditional": ("branch_computations", "true_computation", "false_computation"),
    "while": ("condition", "body"),
}
"""Opcode -> the attributes that name computations which it runs as a part of the program."""


class _Call(NamedTuple):
    """What an instruction runs: computations, how often, and whether XLA says how often."""

    callees: list[str]
    times: int
    known: bool


def _call(instruction: Instruction, module: Module, into_fusions: bool) -> _Call | None:
    opcode = instruction.opcode
    if opcode not in _CALLS or (opcode == "fusion" and not into_fusions):
        return None
    names = [name for key in _CALLS[opcode] for name in _names(instruction.rest, key)]
    if opcode != "while":
        return _Call(names, 1, True)
    known = _known_trips(instruction)
    return _Call(
        names, _read_trips(instruction, module) if known is None else known, known is not None
    )


def _names(rest: str, key: str) -> list[str]:
    match = re.search(rf"\b{key}=(?:\{{([^}}]*)\}}|([^\s,]+))", rest)
    if match is None:
        return []
    return [name.strip().lstrip("%") for name in (match[1] or match[2] or "").split(",")]


def _known_trips(loop: Instruction) -> int | None:
    """How often a while runs, as XLA says."""
    known = re.search(r'"?known_trip_count"?:\{"?n"?:"?(\d+)', loop.rest)
    return None if known is None else int(known[1])


def _read_trips(loop: Instruction, module: Module) -> int:
    """How often a while runs by `i < n` in its condition, `i` counting from 0, else a guess."""
    lines = [
        line
        for name in _names(loop.rest, "condition")
        for line in _with_fusions(module.computations.get(name, ()), module)
    ]
    ends = {
        int(match[1])
        for line in lines
        if line.opcode == "constant" and (match := re.match(r"(\d+)\)", line.rest))
    }
    directions = {
        match[1]
        for line in lines
        if line.opcode == "compare" and (match := re.search(r"direction=(\w+)", line.rest))
    }
    if len(ends) != 1 or len(directions) != 1 or not directions <= {"LT", "NE", "LE", "GT"}:
        return UNKNOWN_TRIPS
    return ends.pop() + (directions == {"LE"})


def _with_fusions(
    computation: list[Instruction] | tuple[()], module: Module
) -> Iterator[Instruction]:
    for instruction in computation:
        yield instruction
        if instruction.opcode == "fusion":
            for name in _names(instruction.rest, "calls"):
                yield from _with_fusions(module.computations.get(name, ()), module)


# ---------------------------------------------------------------------------------------------
# Collectives.

KINDS = {
    "all-gather": "all_gather",
    "all-reduce": "all_reduce",
    "reduce-scatter": "reduce_scatter",
    "all-to-all": "all_to_all",
    "ragged-all-to-all": "all_to_all",
    "collective-permute": "collective_permute",
    "collective-broadcast": "collective_broadcast",
    "send": "collective_permute",
}
"""Opcode -> kind, of every instruction that moves data between devices."""


def _collectives(
    instruction: Instruction, module: Module, scattered: Mapping[str, int]
) -> Iterator[HloCollective]:
    """What an instruction moves: a combined all-reduce may be scattered in part."""
    opcode = instruction.opcode.removesuffix("-start")
    kind = KINDS.get(opcode)
    if kind is None or (opcode == "send" and "is_host_transfer=true" in instruction.rest):
        return
    group = _group_size(instruction, kind, module)
    received = sum(_array_bytes(dtype, shape) for dtype, shape in _arrays(_payload(instruction)))
    scatter = scattered.get(instruction.name, 0)
    parts = [("reduce_scatter", -(-scatter // group))] if scatter else []
    if scatter < received or not received:
        parts.append((kind, received - scatter))
    op_name, source = _op_name(instruction), _source(instruction, module)
    for part, size in parts:
        yield HloCollective(part, _sent(part, group, size), 1, group, op_name, source)


def _sent(kind: str, group: int, received: int) -> int:
    if group == 1:
        return 0
    if kind == "collective_broadcast":
        return received
    sent = received * group if kind == "reduce_scatter" else received
    return wire_bytes(kind, group, sent, received)


def _payload(instruction: Instruction) -> str:
    """The type of what arrives: starts also carry their operands and some context along.

    `all-reduce-start` has its result's type; the others have (operands, results, context...).
    """
    opcode = instruction.opcode
    if opcode == "send":
        return _elements(instruction.type)[0]
    if not opcode.endswith("-start") or opcode == "all-reduce-start":
        return instruction.type
    return _elements(instruction.type)[1]


def _group_size(instruction: Instruction, kind: str, module: Module) -> int:
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


# ---------------------------------------------------------------------------------------------
# Arithmetic.


def _flops(instruction: Instruction, types: Mapping[str, str]) -> int:
    """Of a dot or a convolution: a product and a sum for each term of each element."""
    if instruction.opcode not in ("dot", "convolution"):
        return 0
    left, right = (_arrays(types[name])[0][1] for name in _operands(instruction)[:2])
    if instruction.opcode == "dot":
        contracted = re.search(r"lhs_contracting_dims=\{([\d,]*)\}", instruction.rest)
        dims = re.findall(r"\d+", contracted[1]) if contracted else []
        terms = math.prod(left[int(dim)] for dim in dims)
    else:
        labels = re.search(r"dim_labels=\w+_(\w+)->", instruction.rest)
        kernel = zip(labels[1] if labels else "", right, strict=True)
        terms = math.prod(size for label, size in kernel if label != "o")
    return 2 * terms * math.prod(_arrays(instruction.type)[0][1])


# ---------------------------------------------------------------------------------------------
# All-reduces that want to be reduce-scatters.

_REARRANGES = {"bitcast", "bitcast-convert", "copy", "reshape", "transpose"}
"""Opcodes that hand all elements of their operand on, in some order."""


class _Uses(NamedTuple):
    """Who reads what in a computation.

    Attributes:
      users: name -> each instruction that reads it and at which operand.
      parameters: number -> name.
      roots: what the computation returns.
    """

    users: Mapping[str, Sequence[tuple[Instruction, int]]]
    parameters: Mapping[int, str]
    roots: frozenset[str]


def _scattered(module: Module) -> dict[str, int]:
    """All-reduce -> bytes of those of its operands of which each device reads just its share."""
    uses = {name: _uses_of(computation) for name, computation in module.computations.items()}
    found: dict[str, int] = {}
    for name, computation in module.computations.items():
        for instruction in computation:
            if instruction.opcode not in ("all-reduce", "all-reduce-start"):
                continue
            group = _group_size(instruction, "all_reduce", module)
            for index, (dtype, shape) in enumerate(_arrays(_payload(instruction))):
                read = _read_elements(instruction.name, name, uses, index)
                if group > 1 and read is not None and read * group == math.prod(shape):
                    size = found.get(instruction.name, 0)
                    found[instruction.name] = size + _array_bytes(dtype, shape)
    return found


def _uses_of(computation: Sequence[Instruction]) -> _Uses:
    users: dict[str, list[tuple[Instruction, int]]] = {}
    for instruction in computation:
        for index, operand in enumerate(_operands(instruction)):
            users.setdefault(operand, []).append((instruction, index))
    parameters = {
        _integer(r"(\d+)", i.rest): i.name for i in computation if i.opcode == "parameter"
    }
    return _Uses(users, parameters, frozenset(i.name for i in computation if i.root))


def _operands(instruction: Instruction) -> list[str]:
    """Names of the operands: what stands before the parenthesis that closes them."""
    depth = 1
    for match in re.finditer(r"[()]", instruction.rest):
        depth += 1 if match[0] == "(" else -1
        if depth == 0:
            return re.findall(r"%([^\s,(){}]+)", instruction.rest[: match.start()])
    return []


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
    here = uses[computation]
    if value in here.roots or not here.users.get(value):
        return None
    most = 0
    for user, index in here.users[value]:
        read: int | None = None
        if user.opcode == "dynamic-slice" and index == 0:
            read = math.prod(_arrays(user.type)[0][1])
        elif user.opcode == "get-tuple-element":
            if _integer(r"\bindex=(\d+)", user.rest) != element:
                continue
            read = _read_elements(user.name, computation, uses)
        elif user.opcode == "all-reduce-done":
            read = _read_elements(user.name, computation, uses, element)
        elif user.opcode in _REARRANGES:
            read = _read_elements(user.name, computation, uses)
        elif user.opcode == "fusion":
            (callee,) = _names(user.rest, "calls")
            read = _read_elements(uses[callee].parameters[index], callee, uses)
        if read is None:
            return None
        most = max(most, read)
    return most or None


# ---------------------------------------------------------------------------------------------
# Types and metadata.

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
    if opcode.removesuffix("-start") in KINDS:
        return _arrays(_payload(instruction))
    if opcode == "async-start":
        return _arrays(_elements(instruction.type)[1])
    if opcode == "parameter" and instruction.type.startswith("("):
        return []
    return _arrays(instruction.type)


def _elements(type_: str) -> list[str]:
    """The top-level elements of a tuple type; an array type counts as its own only elements."""
    if not type_.startswith("("):
        return [type_, type_]
    parts, depth, start = [], 0, 1
    for match in re.finditer(r"[(){}\[\],]", type_[:-1]):
        if match[0] in "({[":
            depth += 1
        elif match[0] in ")}]":
            depth -= 1
        elif depth == 1:
            parts.append(type_[start : match.start()])
            start = match.end()
    parts = [part.strip() for part in [*parts, type_[start:-1]]]
    return parts if len(parts) > 1 else parts * 2


def _arrays(type_: str) -> list[tuple[str, tuple[int, ...]]]:
    """(dtype, shape) of every array in a type."""
    return [
        (dtype, tuple(int(size) for size in re.findall(r"\d+", sizes)))
        for dtype, sizes in re.findall(r"\b([a-z]\w*)\[([^\]]*)\]", type_)
        if dtype not in ("token", "opaque")
    ]


def _array_bytes(dtype: str, shape: tuple[int, ...]) -> int:
    bits = 8 if dtype == "pred" else _integer(r"(\d+)", dtype)
    return -(-math.prod(shape) * bits // 8)


def _op_name(instruction: Instruction) -> str:
    match = re.search(r'op_name="((?:[^"\\]|\\.)*)"', instruction.rest)
    return match[1].replace('\\"', '"') if match else ""


def _source(instruction: Instruction, module: Module) -> str:
    """The innermost frame that is not in an installed library, else the innermost one."""
    rest = instruction.rest
    file = re.search(r'source_file="([^"]*)"', rest)
    if file is not None:
        line = _integer(r"source_line=(\d+)", rest)
        return f"{file[1]}:{line}"
    frame = first = _integer(r"stack_frame_id=(\d+)", rest)
    while frame in module.frames:
        where, parent = module.frames[frame]
        if "site-packages" not in where and not where.startswith("<"):
            return where
        frame = parent if parent < frame else 0
    return module.frames.get(first, ("", 0))[0]
