"""What optimized HLO says of a run: operands and arrays, how often each computation, FLOPs."""

import functools
import math
import operator
import re
from collections import Counter
from collections.abc import Callable, Mapping
from typing import NamedTuple

import numpy as np

from spmd.errors import ArgumentError
from spmd.ir.control_flow import UNKNOWN_TRIPS
from spmd.measure.hlo import (
    Instruction,
    Module,
    integer,
    items,
    names_of,
    parse_module_text,
    places_of,
    stated_trips,
)


def operands(instruction: Instruction) -> list[str]:
    """Names of the operands: what stands before the parenthesis that closes them."""
    found, _ = items(instruction.rest, 0)
    return re.findall(r"%([^\s,(){}]+)", " ".join(found))


def source_of(instruction: Instruction, module: Module) -> str:
    """The innermost frame that is not in an installed library, else the innermost one."""
    if "source_file=" in instruction.rest:
        return places_of(instruction, module)[0]
    frames = frames_of(instruction, module)
    own = (f for f in frames if "site-packages" not in f and not f.startswith("<"))
    return next(own, frames[0] if frames else "")


def frames_of(instruction: Instruction, module: Module) -> list[str]:
    """Where an instruction is from: `file.py:line (function)`, and as far as known its callers."""
    found = []
    frame = integer(r"stack_frame_id=(\d+)", instruction.rest)
    while frame in module.frames:
        where, parent = module.frames[frame]
        found.append(where)
        frame = parent if parent < frame else 0
    return found


def elements(type_: str) -> list[str]:
    """The top-level elements of a tuple type, at least two: a single one is repeated."""
    parts = items(type_)[0] if type_.startswith("(") else [type_]
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


# How often the loops of an optimized HLO module run.
#
# XLA states it in the text (`known_trip_count`) on CPUs and GPUs. The TPU compiler does not, and it
# writes several iterations of ours as one, so that `i < 8` may count 0, 2, 4, 6. So the counter is
# followed: where it starts, what an iteration makes of it, and whether the condition still holds.


MOST = 1 << 16
"""A counter is followed for so many iterations."""

_SAME = {"bitcast", "convert", "copy", "opt-barrier", "optimization-barrier", "reshape"}
"""Opcodes whose result is their operand, if that is an integer; or a tuple of them."""

_ARITHMETIC: dict[str, Callable[[int, int], int]] = {
    "add": operator.add,
    "subtract": operator.sub,
    "multiply": operator.mul,
    "maximum": max,
    "minimum": min,
    "and": operator.and_,
    "or": operator.or_,
}
_COMPARISONS: dict[str, Callable[[int, int], bool]] = {
    "LT": operator.lt,
    "LE": operator.le,
    "GT": operator.gt,
    "GE": operator.ge,
    "EQ": operator.eq,
    "NE": operator.ne,
}


class _Value(NamedTuple):
    """A value of a computation: an instruction's result, or an element of it if it is a tuple."""

    computation: str
    name: str
    element: int | None = None


class Loops:
    """The trip counts of a module's loops."""

    def __init__(self, module: Module) -> None:
        self._tables = {
            name: {instruction.name: instruction for instruction in computation}
            for name, computation in module.computations.items()
        }
        self._roots = {
            name: instruction.name
            for name, computation in module.computations.items()
            for instruction in computation
            if instruction.root
        }
        self._operands: dict[tuple[str, str], list[str]] = {}
        # Computation -> where it is called, and by what.
        self._callers: dict[str, list[tuple[str, Instruction]]] = {}
        for name, computation in module.computations.items():
            for instruction in computation:
                if instruction.opcode in ("while", "fusion", "call"):
                    for callee in _callees(instruction):
                        self._callers.setdefault(callee, []).append((name, instruction))
        self._known: dict[tuple[str, str], int | None] = {}

    def trips(self, loop: Instruction, computation: str) -> int | None:
        """How often a loop runs; None where that cannot be told.

        Args:
          loop: a `while`.
          computation: the name of the one that it is in.
        """
        key = (computation, loop.name)
        if key not in self._known:
            stated = stated_trips(loop)
            self._known[key] = self._followed(loop, computation) if stated is None else stated
        return self._known[key]

    def _followed(self, loop: Instruction, computation: str) -> int | None:
        """The number of iterations, by the one counter that the condition looks at."""
        (condition,), (body,) = names_of(loop.rest, "condition"), names_of(loop.rest, "body")
        if condition not in self._roots or body not in self._roots:
            return None
        varying = {
            value.element
            for value in self._read(_Value(condition, self._roots[condition]))
            if not self._is_kept(body, value.element)
        }
        if len(varying) != 1:
            return None
        (counter,) = varying
        following = _Value(body, self._roots[body], counter)
        at = self._number(_Value(computation, self._of(loop, computation)[0], counter), {})
        for trips in range(MOST):
            if at is None:
                return None
            bound = {(condition, counter): at, (body, counter): at}
            goes_on = self._number(_Value(condition, self._roots[condition]), bound)
            if not goes_on:
                return trips if goes_on is not None else None
            at = self._number(following, bound)
        return None

    def _of(self, instruction: Instruction, computation: str) -> list[str]:
        key = (computation, instruction.name)
        if key not in self._operands:
            self._operands[key] = operands(instruction)
        return self._operands[key]

    def _is_kept(self, body: str, element: int | None) -> bool:
        """Whether an iteration hands on an element of the loop's tuple as it came."""
        value = self._origin(_Value(body, self._roots[body], element))
        made = self._tables[body].get(value.name)
        return made is not None and made.opcode == "parameter" and value.element == element

    def _origin(self, value: _Value) -> _Value:
        """The value of which this one is a copy within its computation."""
        while (made := self._tables[value.computation].get(value.name)) is not None:
            names = self._of(made, value.computation)
            if made.opcode in _SAME:
                value = value._replace(name=names[0])
            elif made.opcode == "get-tuple-element" and value.element is None:
                match = re.search(r"\bindex=(\d+)", made.rest)
                value = value._replace(name=names[0], element=(int(match[1]) if match else 0))
            elif made.opcode == "tuple" and value.element is not None:
                value = _Value(value.computation, names[value.element])
            else:
                break
        return value

    def _read(self, value: _Value) -> set[_Value]:
        """The elements of its computation's parameters that a value is computed from."""
        found, waiting = set(), [value]
        seen = set[_Value]()
        while waiting:
            if (value := self._origin(waiting.pop())) in seen:
                continue
            seen.add(value)
            made = self._tables[value.computation][value.name]
            if made.opcode == "parameter":
                found.add(value)
            else:
                names = self._of(made, value.computation)
                waiting += [_Value(value.computation, name) for name in names]
        return found

    def _number(self, value: _Value, bound: Mapping[tuple[str, int | None], int]) -> int | None:
        """The integer that a value is, or None.

        Args:
          bound: (computation, element of its parameter) -> what that is in this iteration.
        """
        value = self._origin(value)
        computation, name, element = value
        made = self._tables[computation].get(name)
        if made is None:
            return None
        if made.opcode == "parameter":
            return self._given(value, made, bound)
        names = self._of(made, computation)
        if made.opcode == "constant":
            text = made.rest.partition(")")[0]
            if text in ("true", "false"):
                return text == "true"
            return int(text) if re.fullmatch(r"-?\d+", text) else None
        if made.opcode == "fusion":
            (callee,) = _callees(made)
            return self._number(_Value(callee, self._roots[callee], element), bound)
        if made.opcode == "while":
            (body,) = names_of(made.rest, "body")
            kept = body in self._roots and self._is_kept(body, element)
            return self._number(value._replace(name=names[0]), bound) if kept else None
        numbers = [self._number(_Value(computation, operand), bound) for operand in names]
        known = [number for number in numbers if number is not None]
        if len(known) != 2 or len(names) != 2:
            return None
        if made.opcode == "compare":
            direction = re.search(r"direction=(\w+)", made.rest)
            return _COMPARISONS[direction[1]](*known) if direction else None
        if made.opcode in _ARITHMETIC:
            return _ARITHMETIC[made.opcode](*known)
        return None

    def _given(
        self, value: _Value, parameter: Instruction, bound: Mapping[tuple[str, int | None], int]
    ) -> int | None:
        """What a computation is called with; None where it is called with several values."""
        computation, _, element = value
        if (computation, element) in bound:
            return bound[computation, element]
        found = set()
        for caller, call in self._callers.get(computation, ()):
            names = self._of(call, caller)
            number = 0 if call.opcode == "while" else int(parameter.rest.partition(")")[0])
            if call.opcode == "while":
                (body,) = names_of(call.rest, "body")
                if body not in self._roots or not self._is_kept(body, element):
                    return None
            found.add(self._number(_Value(caller, names[number], element), bound))
        return found.pop() if len(found) == 1 else None


def _callees(instruction: Instruction) -> list[str]:
    keys = ("calls", "to_apply", "condition", "body")
    return [name for key in keys for name in names_of(instruction.rest, key)]


_CALLS = {
    "call": ("to_apply",),
    "fusion": ("calls",),
    "async-start": ("calls",),
    "custom-call": ("called_computations",),
    "conditional": ("branch_computations", "true_computation", "false_computation"),
    "while": ("condition", "body"),
}
"""Opcode -> the attributes that name computations which it runs as a part of the program."""


_WRAPPERS = {"fusion", "async-start"}
"""Opcodes of one kernel, or of one transfer, that is written as a computation."""


class Runs:
    """What one run of a module runs.

    Args:
      sent: computation -> bytes that each collective of its own sends in one execution. Of a
        conditional's branches only the one that moves the most is followed, so that bytes are those
        of one run, at worst. None: every branch counts.
      guess_trips: whether loops whose trip count nobody knows may communicate. They are taken to
        run `UNKNOWN_TRIPS` times.
      into_wrappers: whether the computations of fusions and of asynchronous starts are run, too.
    """

    def __init__(
        self,
        module: Module,
        sent: Mapping[str, list[int]] | None = None,
        *,
        guess_trips: bool = True,
        into_wrappers: bool = False,
    ) -> None:
        self.module, self.sent, self.guess_trips = module, sent, guess_trips
        self.opcodes = set(_CALLS) if into_wrappers else set(_CALLS) - _WRAPPERS
        self._loops = Loops(module)
        self.calls = functools.cache(self._calls)
        self._moved = functools.cache(self._moves)

    def counts(self) -> Counter[str]:
        """Computation -> executions.

        Raises:
          ArgumentError: unless trips are guessed, a loop of unknown trips communicates.
        """
        counts: Counter[str] = Counter()

        def visit(name: str, times: int) -> None:
            counts[name] += times
            for callee, each in self.calls(name):
                visit(callee, times * each)

        visit(self.module.entry, 1)
        return counts

    def _calls(self, name: str) -> list[tuple[str, int]]:
        """The computations that one runs in one execution, and how often: once for each call."""
        found: list[tuple[str, int]] = []
        for instruction in self.module.computations.get(name, ()):
            if instruction.opcode not in self.opcodes:
                continue
            keys = _CALLS[instruction.opcode]
            callees = [callee for key in keys for callee in names_of(instruction.rest, key)]
            times: int | None = 1
            if instruction.opcode == "while":
                times = self._loops.trips(instruction, name)
            if times is None:
                self._check(instruction, callees)
            if instruction.opcode == "conditional" and self.sent is not None:
                callees = [max(callees, key=self._moved)]
            found += [(callee, UNKNOWN_TRIPS if times is None else times) for callee in callees]
        return found

    def _check(self, loop: Instruction, callees: list[str]) -> None:
        if not self.guess_trips and any(self._moved(callee)[1] for callee in callees):
            raise ArgumentError(
                f"the loop {loop.name} communicates, and how often it runs is unknown",
                actual=f"{loop.opcode}({loop.rest[:200]}",
                fix="write it with lax.scan or a lax.fori_loop of constant bounds",
            )

    def _moves(self, name: str) -> tuple[int, int]:
        """Bytes and collectives of one execution: its own and those that it calls, times trips."""
        own = (self.sent or {}).get(name, [])
        size, number = sum(own), len(own)
        for callee, times in self.calls(name):
            size += times * self._moved(callee)[0]
            number += self._moved(callee)[1]
        return size, number


def matmul_flops(text: str) -> int:
    """Floating-point operations of one device in matrix products and convolutions in one run.

    What a convolution's window finds in padding and between dilated elements does not count. The
    TPU compiler writes the products of a windowed einsum as convolutions of two halves, padded.

    Args:
      text: `compiled.as_text("hlo")`.

    Raises:
      ArgumentError: the text has no ENTRY computation.
    """
    module = parse_module_text(text)
    total = 0
    counts = Runs(module, into_wrappers=True).counts()
    for name, computation in module.computations.items():
        types = {instruction.name: instruction.type for instruction in computation}
        total += counts[name] * sum(_flops(instruction, types) for instruction in computation)
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
        return 2 * terms * math.prod(arrays(instruction.type)[0][1])
    labels = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", instruction.rest)
    if labels is None:
        return 0
    result = arrays(instruction.type)[0][1]
    total = 2 * right[labels[2].index("i")]
    total *= result[labels[3].index("b")] * result[labels[3].index("f")]
    window = re.search(r"window=\{([^}]*)\}", instruction.rest)
    given = dict(pair.split("=") for pair in window[1].split()) if window else {}
    for dim in range(len(result) - 2):
        of = {key: text.split("x")[dim] for key, text in given.items()}
        sizes = (
            shape[text.index(str(dim))]
            for shape, text in zip((left, right, result), labels.groups(), strict=True)
        )
        total *= _taps(of, *sizes)
    return total


def _taps(window: Mapping[str, str], data: int, kernel: int, result: int) -> int:
    """Pairs of a place in the result and one in the kernel that meet an element of the data.

    Args:
      window: what HLO says of one dim: `stride`, `pad` (`low_high`), and the dilations.
      data, kernel, result: their sizes in that dim.
    """
    stride, dilated = int(window.get("stride", 1)), int(window.get("lhs_dilate", 1))
    low = int(window.get("pad", "0_0").split("_")[0])
    steps = np.arange(kernel) * int(window.get("rhs_dilate", 1))
    places = np.arange(result)[:, None] * stride + steps - low
    met = (places >= 0) & (places <= (data - 1) * dilated) & (places % dilated == 0)
    return int(met.sum())
