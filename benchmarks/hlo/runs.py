"""What optimized HLO says of a run: operands and arrays, how often each computation, FLOPs."""

import functools
import math
import operator
import re
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

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
    """The innermost `file:line` that is not in an installed library, else the innermost one."""
    places = places_of(instruction, module)
    own = (p for p in places if "site-packages" not in p and not p.startswith("<"))
    return next(own, places[0] if places else "")


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
"""So many iterations are followed."""

_SAME = {"bitcast", "convert", "copy", "opt-barrier", "optimization-barrier", "reshape"}
"""Opcodes whose result is their operand, if that is an integer; or a tuple of them."""

_OF_TWO: dict[str, Callable[[int, int], int]] = {
    "add": operator.add, "subtract": operator.sub, "multiply": operator.mul, "maximum": max,
    "minimum": min, "and": operator.and_, "or": operator.or_, "LT": operator.lt, "LE": operator.le,
    "GT": operator.gt, "GE": operator.ge, "EQ": operator.eq, "NE": operator.ne,
}  # fmt: skip
"""Opcode, or direction of a `compare`, -> what it makes of two integers."""

Given = Callable[[int, int | None], Any]
"""(Number of a parameter, element of it if it is a tuple) -> the integer that it is, or None."""


class Loops:
    """The trip counts of a module's loops."""

    def __init__(self, module: Module) -> None:
        self._tables: dict[str, dict[str, Instruction]] = {}
        self._roots: dict[str, str] = {}
        # Computation -> where it is called, and by what.
        self._callers: dict[str, list[tuple[str, Instruction]]] = {}
        for name, computation in module.computations.items():
            self._tables[name] = {instruction.name: instruction for instruction in computation}
            for instruction in computation:
                if instruction.root:
                    self._roots[name] = instruction.name
                if instruction.opcode in ("while", "fusion", "call"):
                    for callee in _callees(instruction):
                        self._callers.setdefault(callee, []).append((name, instruction))
        self.trips = functools.cache(self._trips)

    def _trips(self, loop: Instruction, computation: str) -> int | None:
        """How often a loop runs; None where that cannot be told.

        Args:
          loop: a `while`.
          computation: the name of the one that it is in.
        """
        if (stated := stated_trips(loop)) is not None:
            return stated
        (condition,), (body,) = names_of(loop.rest, "condition"), names_of(loop.rest, "body")
        (start,) = operands(loop)
        state = functools.cache(
            lambda _, element: self._value(
                computation, start, element, functools.partial(self._called_with, computation)
            )
        )
        for trips in range(MOST):
            goes_on = self._result(condition, None, state)
            if not goes_on:
                return trips if goes_on is not None else None
            state = functools.cache(
                lambda _, element, before=state: self._result(body, element, before)
            )
        return None

    def _result(self, computation: str, element: int | None, given: Given) -> Any:
        return self._value(computation, self._roots.get(computation, ""), element, given)

    def _value(self, computation: str, name: str, element: int | None, given: Given) -> Any:
        """The integer that a value is, or None.

        Args:
          element: which of a tuple is meant; None of what is no tuple.
          given: what the computation is called with.
        """
        made = self._tables.get(computation, {}).get(name)
        if made is None:
            return None
        names = operands(made)

        def of(number: int, element: int | None = None) -> Any:
            return self._value(computation, names[number], element, given)

        opcode = made.opcode
        if opcode == "parameter":
            return given(integer(r"(\d+)", made.rest), element)
        if opcode == "constant":
            text = made.rest.partition(")")[0]
            if text in ("true", "false"):
                return text == "true"
            return int(text) if re.fullmatch(r"-?\d+", text) else None
        if opcode in _SAME:
            return of(0, element)
        if opcode == "get-tuple-element" and element is None:
            return of(0, integer(r"\bindex=(\d+)", made.rest))
        if opcode == "tuple" and element is not None:
            return of(element)
        if opcode == "fusion":
            return self._result(_callees(made)[0], element, of)
        if opcode == "while":
            return of(0, element) if self._is_kept(made, element) else None
        if opcode == "compare":
            opcode = made.rest.partition("direction=")[2][:2]
        if opcode not in _OF_TWO:
            return None
        left, right = of(0), of(1)
        both = isinstance(left, int) and isinstance(right, int)
        return _OF_TWO[opcode](left, right) if both else None

    def _is_kept(self, loop: Instruction, element: int | None) -> bool:
        """Whether an iteration hands on an element of the loop's tuple as it came."""
        (body,), came = names_of(loop.rest, "body"), object()
        return self._result(body, element, lambda _, e: came if e == element else None) is came

    def _called_with(self, computation: str, number: int, element: int | None) -> Any:
        """What a parameter of a computation is; None where it is called with several values."""
        found = set()
        for caller, call in self._callers.get(computation, ()):
            if call.opcode == "while" and not self._is_kept(call, element):
                return None
            outside = functools.partial(self._called_with, caller)
            found.add(self._value(caller, operands(call)[number], element, outside))
        return found.pop() if len(found) == 1 else None


_CALLS = {
    "call": ("to_apply",),
    "fusion": ("calls",),
    "async-start": ("calls",),
    "custom-call": ("called_computations",),
    "conditional": ("branch_computations", "true_computation", "false_computation"),
    "while": ("condition", "body"),
}
"""Opcode -> the attributes that name computations which it runs as a part of the program."""


def _callees(instruction: Instruction) -> list[str]:
    keys = _CALLS[instruction.opcode]
    return [name for key in keys for name in names_of(instruction.rest, key)]


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
            callees, times = _callees(instruction), 1
            if instruction.opcode == "while":
                trips = self._loops.trips(instruction, name)
                is_unknown = trips is None and not self.guess_trips
                if is_unknown and any(self._moved(callee)[1] for callee in callees):
                    raise ArgumentError(
                        f"the loop {instruction.name} communicates an unknown number of times",
                        actual=f"while({instruction.rest[:200]}",
                        fix="write it with lax.scan or a lax.fori_loop of constant bounds",
                    )
                times = UNKNOWN_TRIPS if trips is None else trips
            if instruction.opcode == "conditional" and self.sent is not None:
                callees = [max(callees, key=self._moved)]
            found += [(callee, times) for callee in callees]
        return found

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
