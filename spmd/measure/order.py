"""Which op of the optimized module a kernel belongs to, where the profile does not say.

Kernels in CUDA graphs carry the name of their graph, and those of NCCL a name that is not in the
module's text. But a GPU's kernels are launched in the order of the module's schedule, and of most
it shows what they are; so the first product launched is the first product of the schedule:

    schedule   loop_add_fusion.4   gemm.3             all-gather-start.2   gemm.7
    launched   loop_add_fusion_1   nvjet_tst_256x128  ncclAllGather        nvjet_tst_64x8

Each sort of work is counted on its own: all products, or all fusions called `loop_add_fusion.N`.
Where the numbers differ, or a kernel that names its op contradicts, nothing is said.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from spmd.measure.hlo import Instruction, Module, names_of, stated_trips
from spmd.measure.labels import COLLECTIVES, Labels, kernel_collective, kernel_kind
from spmd.measure.profile import Event


class Order:
    """The order in which a module's work is launched."""

    def __init__(self, labels: Labels) -> None:
        self.labels = labels
        # Sort of work -> names of its ops in the order of the schedule.
        self.sorts: dict[str, list[str]] = {}
        unknown = set()
        for instruction, often in _scheduled(labels.module, labels.module.entry):
            if sort := self._sort(instruction):
                self.sorts.setdefault(sort, []).append(instruction.name)
                if not often:
                    unknown.add(sort)
        for sort in unknown:
            del self.sorts[sort]

    def name(self, events: Sequence[Event]) -> list[Event]:
        """A device's events in a step, with ops for those without; unchanged if counts differ."""
        found: dict[str, list[Event]] = {}
        for event in events:
            if (sort := self._sort_of_kernel(event.name)) in self.sorts:
                found.setdefault(sort, []).append(event)
        ops: dict[Event, str] = {}
        for sort, like in found.items():
            # In a loop within a graph kernels of all iterations are launched at once.
            if len({event.launch for event in like}) == len(like):
                like.sort(key=lambda event: event.launch)
                ops |= _align(like, self.sorts[sort])
        return [event._replace(op=ops.get(event, event.op)) for event in events]

    def _sort(self, instruction: Instruction) -> str:
        """The sort of work that an instruction launches; empty where that does not show."""
        if instruction.opcode.endswith("-done"):
            return ""
        if instruction.opcode == "fusion":
            return _stem(instruction.name)
        if instruction.opcode == "fusion-start":
            # XLA's own kernel for a collective, named as the fusion was before it became a start.
            made = "".join(names_of(instruction.rest, "calls"))
            return _stem(made.removeprefix("fused_")) + "_fusion"
        if kind := self.labels.collective(instruction):
            return _EXCHANGES.get(kind, kind)
        return self.labels.kind(instruction)

    def _sort_of_kernel(self, name: str) -> str:
        if (stem := _stem(name)) in self.sorts:  # XLA's own, named as the fusion
            return stem
        kind = kernel_kind(name)
        if kind == COLLECTIVES:
            collective = kernel_collective(name)
            return _EXCHANGES.get(collective, collective)
        return kind


_EXCHANGES = dict.fromkeys(("all_to_all", "collective_permute"), "send_recv")
"""Kinds of collectives that are sends and receives to NCCL."""


def _stem(name: str) -> str:
    """A name without its numbers, which differ where fusions share a kernel."""
    return re.sub(r"_(\d+|clone|remat\d*)(?=_|$)", "", re.sub(r"\W", "_", name))


def _scheduled(module: Module, computation: str) -> Iterator[tuple[Instruction, bool]]:
    """What a computation runs, loops written out, and whether it is known how often it runs."""
    for instruction in module.computations.get(computation, ()):
        rest = instruction.rest
        if instruction.opcode == "call":
            for name in names_of(rest, "to_apply"):
                yield from _scheduled(module, name)
        elif instruction.opcode == "while":
            count = stated_trips(instruction)
            for name in names_of(rest, "body") * (1 if count is None else count):
                inside = _scheduled(module, name)
                yield from ((i, often and count is not None) for i, often in inside)
            for name in names_of(rest, "condition"):  # not run where the count is known
                yield from ((i, False) for i, _ in _scheduled(module, name))
        elif instruction.opcode == "conditional":
            for key in ("branch_computations", "true_computation", "false_computation"):
                for name in names_of(rest, key):
                    yield from ((i, False) for i, _ in _scheduled(module, name))
        else:
            yield instruction, True


def _align(events: Sequence[Event], ops: Sequence[str]) -> dict[Event, str]:
    """The ops of events of one sort, between those that name theirs; none where these disagree."""
    found: dict[Event, str] = {}
    at, between = 0, list[Event]()
    for event in events:
        if event.op not in ops:
            between.append(event)
        elif event.op in ops[at:]:
            end = ops.index(event.op, at)
            found |= _pair(between, ops[at:end])
            at, between = end + 1, []
        elif event.op != ops[at - 1] or between:  # an op may launch several kernels
            return {}
    return found | _pair(between, ops[at:])


def _pair(events: Sequence[Event], ops: Sequence[str]) -> dict[Event, str]:
    return dict(zip(events, ops, strict=True)) if len(events) == len(ops) else {}
