"""Kernels, and the order in which XLA's CPU backend runs them.

before: [a: x], [b: a], [c: x], [d: b c]         in the order of the program
after:  [a: x], [c: x], [b: a], [d: b c]         breadth first: c waits for x alone, as a does
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from spmd.ir.program import Op, Value


class Kernel(NamedTuple):
    """A unit that a backend launches: one op, or several that are fused into it.

    Attributes:
      op: the op whose results it makes; for a copy, the op that the copy is for.
      reads: the stored values that it reads, directly or through what is computed inside.
      makes: the values that it stores.
      writes_over: whether it may write over an operand of the same size that nobody reads again.
      is_copy: whether it makes a transposed copy.
      handed: for a loop, the operands in whose memory its carries lie.
      regions: for control flow, each region's kernels.
    """

    op: Op
    reads: tuple[Value, ...]
    makes: tuple[Value, ...]
    writes_over: bool = False
    is_copy: bool = False
    handed: tuple[Value, ...] = ()
    regions: tuple[tuple[Kernel, ...], ...] = ()


class Dependence:
    """Which kernels of a region wait for which.

    Attributes:
      makers: value -> the number of the kernel that makes it.
    """

    def __init__(self, kernels: Sequence[Kernel]) -> None:
        self.kernels = list(kernels)
        self.makers: dict[Value, int] = {}
        self.readers: dict[Value, list[int]] = {}
        for i, kernel in enumerate(kernels):
            self.makers.update(dict.fromkeys(kernel.makes, i))
            for value in dict.fromkeys((*kernel.reads, *kernel.handed)):
                self.readers.setdefault(value, []).append(i)

    def is_last(self, number: int, value: Value) -> bool:
        """Whether a kernel waits for all others that read a value, and so may write over it."""
        # Not by the order of the program: a backend that runs kernels breadth first may still have
        # another reader ahead of it. So the search follows what the kernel waits for, backwards,
        # until it has met all other readers.
        missing = set(self.readers[value]) - {number}
        if value in self.kernels[number].handed and value in self.kernels[number].reads:
            return False
        if not missing or max(missing) > number:
            return not missing
        first, waiting, seen = min(missing), [number], {number}
        while waiting and missing:
            kernel = self.kernels[waiting.pop()]
            for read in (*kernel.reads, *kernel.handed):
                maker = self.makers.get(read, -1)
                if maker >= first and maker not in seen:
                    seen.add(maker)
                    missing.discard(maker)
                    waiting.append(maker)
        return not missing


def combined(kernels: Sequence[Kernel]) -> list[Kernel]:
    """All-reduces over the same axes that do not wait for each other, as one kernel."""
    # Their depth, the number of all-reduces on the way to them, tells which those are:
    #   %2 = all_reduce %0   depth 0        before: [%2: %0] [%3: %2] [%4: %1]
    #   %3 = all_reduce %2   depth 1        after:  [%2 %4: %0 %1] [%3: %2]
    #   %4 = all_reduce %1   depth 0
    depth: dict[Value, int] = {}
    groups: dict[tuple[object, ...], list[int]] = {}
    for i, kernel in enumerate(kernels):
        here = max((depth.get(v, 0) for v in (*kernel.reads, *kernel.handed)), default=0)
        if kernel.op.collective == "all_reduce" and not kernel.is_copy:
            attrs = kernel.op.kind.attrs
            groups.setdefault((attrs.get("axes"), attrs.get("body"), here), []).append(i)
            here += 1
        depth.update(dict.fromkeys(kernel.makes, here))
    found: list[Kernel | None] = list(kernels)
    for numbers in groups.values():
        members = [kernels[i] for i in numbers]
        reads = dict.fromkeys(v for kernel in members for v in kernel.reads)
        makes = tuple(v for kernel in members for v in kernel.makes)
        for i in numbers:
            found[i] = None
        found[numbers[-1]] = members[-1]._replace(reads=tuple(reads), makes=makes)
    return [kernel for kernel in found if kernel is not None]


def breadth_first(kernels: Sequence[Kernel], arguments: Sequence[Value]) -> tuple[Kernel, ...]:
    """Kernels in the order in which their operands get ready.

    XLA's scheduler for CPUs uses this order, so that independent kernels can run at the same time.

    Args:
      kernels: of one region, in the order of the program.
      arguments: the region's.
    """
    made = {value for kernel in kernels for value in kernel.makes}
    captured = [v for k in kernels for v in (*k.handed, *k.reads) if v not in made]
    readers: dict[Value, list[int]] = {}
    missing: list[int] = []
    for i, kernel in enumerate(kernels):
        reads = dict.fromkeys((*kernel.handed, *kernel.reads))
        missing.append(len(reads))
        for value in reads:
            readers.setdefault(value, []).append(i)
    ready = deque(i for i, count in enumerate(missing) if not count)
    order: list[Kernel] = []

    def release(values: Iterable[Value]) -> None:
        for value in values:
            for i in readers.get(value, ()):
                missing[i] -= 1
                if not missing[i]:
                    ready.append(i)

    # Kernels without operands come first, as they stand; then those that need the region's
    # arguments alone, in the order in which their last argument is released.
    first, ready = ready, deque()
    release(dict.fromkeys((*arguments, *captured)))
    ready.extendleft(reversed(first))
    while ready:
        kernel = kernels[ready.popleft()]
        order.append(kernel)
        release(kernel.makes)
    return tuple(order)
