"""Labels ops of a local program, and events of a profile: the kind of work, and the layer.

Both get the same labels, so that predicted and measured times can be compared. XLA keeps the name
scope and the source line of an op of ours in the metadata of the instructions that it makes of it;
by these the op of an instruction in the optimized module is found.
"""

import os
import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from spmd.ir.pipelines import without_pipelines
from spmd.ir.program import Loc, Op, Program
from spmd.measure import hlo
from spmd.measure.profile import Event
from spmd.mesh.mesh import Mesh
from spmd.mesh.sharding import axes_text

MATRIX, ATTENTION, OTHER = "matrix products", "attention", "other kernels"
COPIES, COLLECTIVES = "copies", "collectives"
KINDS = (MATRIX, ATTENTION, OTHER, COPIES, COLLECTIVES)
"""Kinds of work. Of kinds that run on a device at the same time, the first here gets the time."""


class Label(NamedTuple):
    """Holds the kind of work of an op or event, and its layer of the user's model."""

    kind: str  # one of `KINDS`
    layer: str  # in the user's model, see `layer_of`
    collective: str = ""  # a collective's kind and axes, `all_gather over data`; else empty


def label_of(op: Op, mesh: Mesh) -> Label:
    """Returns the kind of work and the layer of an op of a local program."""
    layer = layer_of(op.loc)
    if op.collective:
        axes = axes_text(sorted(op.kind.attrs.get("axes", ())), mesh)
        return Label(COLLECTIVES, layer, f"{op.collective} over {axes}")
    if "attention" in op.label:
        return Label(ATTENTION, layer)
    return Label(MATRIX if op.kind.about.flops is not None else OTHER, layer)


_STRUCTURE = re.compile(
    r"while|body|cond|closed_call|checkpoint|remat\w*|custom_[jv][vm]p_call\w*|core_call|shard_map"
    r"|spmd_program|branch_\d+_fun|.*->.*|"
)
"""Matches parts of a name scope that the user did not name: jax's own, and einsum's formulas."""


def layer_of(loc: Loc) -> str:
    """Returns the layer of an op: the name of the part of the user's model that it belongs to.

    That is its name scope (`jax.named_scope`, and flax's names of modules), without what jax adds
    to it, with `*` for numbers. Without a scope it is the caller's function and the one that the op
    is written in: `mlp/linear`.

    Example: the scope `jit(step)/transpose(jvp(model))/layer_3/mlp/dot_general` is in
    `model/layer_*/mlp`, forward and backward pass alike.
    """
    text, before = without_pipelines(loc.scope), ""
    while text != before:  # from the inside out: `transpose(jvp(jit(relu)/x))` -> `x`
        before = text
        text = re.sub(r"\bp?jit\([^()]*\)", "", text)
        text = re.sub(r"\b(?:jvp|transpose|vmap)\(([^()]*)\)", r"\1", text)
    parts = [part for part in text.split("/")[:-1] if not _STRUCTURE.fullmatch(part)]
    if parts:
        return re.sub(r"\d+", "*", "/".join(parts))
    names = [frame.function.rpartition(".")[2] for frame in reversed(loc.user_frames[:2])]
    if names == ["<module>"]:
        return os.path.basename(loc.user_frames[0].file)
    return "/".join(name for name in names if name != "<module>")


_CONTROL = {"while", "conditional", "call"}
"""HLO opcodes that only run other instructions. On CPUs the profile has events of both; on GPUs a
call launches a CUDA graph, whose kernels name the call as their op."""

_MATRIX_CALLS = re.compile(r"gemm|matmul|conv|dot", re.IGNORECASE)
_ATTENTION_CALLS = re.compile(r"fmha|attention|flash|sdpa", re.IGNORECASE)

_KERNELS = (
    (COLLECTIVES, re.compile(r"nccl|all_?reduce|all_?gather|reduce_?scatter", re.IGNORECASE)),
    (COPIES, re.compile(r"mem(cpy|set)", re.IGNORECASE)),
    (ATTENTION, _ATTENTION_CALLS),
    (MATRIX, re.compile(r"gemm|nvjet|cutlass|xmma|cublas|wgrad|dgrad|fprop", re.IGNORECASE)),
)
"""(kind of work, pattern of GPU kernels' names), for kernels for which the profile names no op."""


def kernel_kind(name: str) -> str:
    """Returns the kind of work (of `KINDS`) that a GPU kernel's name tells, else `OTHER`."""
    return next((kind for kind, names in _KERNELS if names.search(name)), OTHER)


def kernel_collective(name: str) -> str:
    """Returns the collective that an NCCL kernel's name tells, as `all_gather`; else `nccl`."""
    kinds = ("all_gather", "all_reduce", "reduce_scatter", "all_to_all", "send_recv")
    plain = name.lower().replace("_", "")
    return next((kind for kind in kinds if kind.replace("_", "") in plain), "nccl")


class Labels:
    """Labels a profile's events, by the optimized HLO's text and the local program behind it."""

    def __init__(self, text: str, program: Program, mesh: Mesh) -> None:
        self.module = hlo.parse_module_text(text)
        self.instructions = {
            instruction.name: instruction
            for computation in self.module.computations.values()
            for instruction in computation
        }
        # XLA names its own kernels as their ops, with `_` for dots and dashes.
        self.by_kernel = {re.sub(r"\W", "_", name): name for name in self.instructions}
        # (scope, source line and its caller's) -> what we made there; also by less than that.
        self.ours: dict[tuple[str, tuple[str, ...]], list[Label]] = {}
        self.axes: dict[frozenset[frozenset[int]], str] = {}  # groups of devices -> their axes
        for op in program.walk():
            if axes := op.kind.attrs.get("axes") if op.collective else None:
                groups = frozenset(map(frozenset, mesh.groups(axes)))
                self.axes[groups] = axes_text(sorted(axes), mesh)
            label = label_of(op, mesh)
            places = tuple(f"{frame.file}:{frame.line}" for frame in op.loc.user_frames[:2])
            for known in range(len(places) + 1):
                self.ours.setdefault((op.loc.scope, places[:known]), []).append(label)
        self._known: dict[tuple[str, str], Label | None] = {}

    def of(self, event: Event) -> Label | None:
        """Returns an event's label; None if it only encloses other events, as a loop's does."""
        key = name, op = event.name, event.op
        if key in self._known:
            return self._known[key]
        found = self.instructions.get(op)
        is_control = found is not None and found.opcode in _CONTROL
        label = None
        if not is_control or name != op:
            if found is None or is_control:
                found = self.instructions.get(self.by_kernel.get(name, ""))
            kind = kernel_kind(name)
            label = Label(kind, "") if found is None else self._label(found, kind)
            if label.kind == COLLECTIVES and not label.collective:
                label = label._replace(collective=kernel_collective(name))
        self._known[key] = label
        return label

    def _label(self, instruction: hlo.Instruction, kernel: str) -> Label:
        scope, places = self._origin(instruction)
        keys = [(scope, places[:known]) for known in (2, 1, 0)]
        ours = next((self.ours[key] for key in keys if key in self.ours), [])
        layer = ours[0].layer if ours else layer_of(Loc(scope))
        if kind := self.collective(instruction):
            like = [label.collective for label in ours if label.collective.startswith(f"{kind} ")]
            groups = (hlo.groups_of(part, self.module) for part in self._parts(instruction))
            axes = next((self.axes[group] for group in groups if group in self.axes), "")
            name = f"{kind} over {axes}" if axes else (like or [kind])[0]
            return Label(COLLECTIVES, layer, name)
        if instruction.opcode.startswith("copy"):
            return Label(COPIES, layer)
        if any(label.kind == ATTENTION for label in ours):
            return Label(ATTENTION, layer)
        return Label(self.kind(instruction) or kernel, layer)

    def _origin(self, instruction: hlo.Instruction) -> tuple[str, tuple[str, ...]]:
        # What a fusion has no name for, its results do: they stand last.
        parts = [instruction, *reversed(hlo.called(instruction, self.module))]
        named = [(name, part) for part in parts if (name := hlo.op_name_of(part))]
        named.sort(key=lambda item: "spmd_program/" not in item[0])
        if not named:
            return "", ()
        name, part = named[0]
        scope = name.rpartition("spmd_program/")[2] if "spmd_program/" in name else ""
        # Of ops that XLA made one it joins the names: `a;b`, `f/(a:b)`.
        scope = re.sub(r"/\(([^:]*):.*\)$", r"/\1", scope.partition(";")[0])
        return scope, tuple(hlo.places_of(part, self.module))

    def _parts(self, instruction: hlo.Instruction) -> list[hlo.Instruction]:
        return [instruction, *hlo.called(instruction, self.module)]

    def collective(self, instruction: hlo.Instruction) -> str:
        """Returns an instruction's kind of collective; "" if none, or with product or attention."""
        if self.kind(instruction):
            return ""
        return next(filter(None, map(hlo.kind_of, self._parts(instruction))), "")

    def kind(self, instruction: hlo.Instruction) -> str:
        """Returns `MATRIX` or `ATTENTION` if an instruction is or contains such work, else ""."""
        for part in self._parts(instruction):
            if part.opcode in ("dot", "convolution"):
                return MATRIX
            target = re.search(r'custom_call_target="([^"]*)"', part.rest)
            if target and _ATTENTION_CALLS.search(target[1]):
                return ATTENTION
            if target and _MATRIX_CALLS.search(target[1]):
                return MATRIX
        return ""


class Order:
    """Finds the op of the optimized module that each kernel belongs to, by the order of launches.

    In a profile, kernels in CUDA graphs name their graph as op, and NCCL's a name that is not in
    the module's text. But kernels are launched in the order of the module's schedule, and most
    names tell the sort of work: the first product launched is the first product of the schedule:

        schedule   loop_add_fusion.4   gemm.3             all-gather-start.2   gemm.7
        launched   loop_add_fusion_1   nvjet_tst_256x128  ncclAllGather        nvjet_tst_64x8

    Each sort of work is paired on its own: all products, or all fusions `loop_add_fusion.N`.
    Kernels that name no op and ops that no kernel names are paired if there are equally many.
    """

    def __init__(self, labels: Labels) -> None:
        self.labels = labels
        # Sort of work -> names of its ops in the order of the schedule.
        self.sorts: dict[str, list[str]] = {}
        unknown = {""}
        for instruction, often in _scheduled(labels.module, labels.module.entry):
            sort = self._sort(instruction)
            self.sorts.setdefault(sort, []).append(instruction.name)
            if not often:
                unknown.add(sort)
        self.sorts = {sort: ops for sort, ops in self.sorts.items() if sort not in unknown}

    def name(self, events: Sequence[Event]) -> list[Event]:
        """Returns one device's events of a step, with `op` set where the launch order tells it."""
        found: dict[str, list[Event]] = {}
        for event in events:
            sort, kind = _stem(event.name), kernel_kind(event.name)
            if sort not in self.sorts:  # XLA's own kernels are named as the fusion
                sort = kernel_collective(event.name) if kind == COLLECTIVES else kind
                sort = _EXCHANGES.get(sort, sort)
            if sort in self.sorts:
                found.setdefault(sort, []).append(event)
        ops: dict[Event, str] = {}
        for sort, like in found.items():
            # In a loop within a graph kernels of all iterations are launched at once.
            if len({event.launch for event in like}) == len(like):
                like.sort(key=lambda event: event.launch)
                every, named = self.sorts[sort], {event.op for event in like}
                unnamed = [event for event in like if event.op not in every]
                left = [op for op in every if op not in named]
                if len(unnamed) == len(left):
                    ops |= zip(unnamed, left, strict=True)
        return [event._replace(op=ops.get(event, event.op)) for event in events]

    def _sort(self, instruction: hlo.Instruction) -> str:
        """Returns the sort of work of an instruction, as `self.sorts` has it; empty if unknown."""
        if instruction.opcode.endswith("-done"):
            return ""
        if instruction.opcode == "fusion":
            return _stem(instruction.name)
        if instruction.opcode == "fusion-start":
            # XLA's own kernel for a collective, named as the fusion was before it became a start.
            made = "".join(hlo.names_of(instruction.rest, "calls"))
            return _stem(made.removeprefix("fused_")) + "_fusion"
        if kind := self.labels.collective(instruction):
            return _EXCHANGES.get(kind, kind)
        return self.labels.kind(instruction)


_EXCHANGES = dict.fromkeys(("all_to_all", "collective_permute"), "send_recv")
"""Maps kinds of collectives that NCCL runs as sends and receives to their kernels' sort of work."""


def _stem(name: str) -> str:
    """Returns a name without numbers: `loop_add_fusion.4` and `loop_add_fusion_1` are one sort."""
    return re.sub(r"_(\d+|clone|remat\d*)(?=_|$)", "", re.sub(r"\W", "_", name))


def _scheduled(module: hlo.Module, computation: str) -> Iterator[tuple[hlo.Instruction, bool]]:
    """Yields (instruction, whether it surely runs) in order, each iteration of loops on its own."""
    for instruction in module.computations.get(computation, ()):
        rest, inside = instruction.rest, list[tuple[str, bool]]()
        if instruction.opcode == "call":
            inside = [(name, True) for name in hlo.names_of(rest, "to_apply")]
        elif instruction.opcode == "while":
            count = hlo.stated_trips(instruction)
            body = [(name, count is not None) for name in hlo.names_of(rest, "body")]
            inside = body * (1 if count is None else count)
            # Not run where the count is known.
            inside += [(name, False) for name in hlo.names_of(rest, "condition")]
        elif instruction.opcode == "conditional":
            for key in ("branch_computations", "true_computation", "false_computation"):
                inside += [(name, False) for name in hlo.names_of(rest, key)]
        else:
            yield instruction, True
        for name, surely in inside:
            yield from ((i, often and surely) for i, often in _scheduled(module, name))
