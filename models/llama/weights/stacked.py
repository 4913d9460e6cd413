"""gpt-oss' files have all experts of a layer in one tensor; here they are taken apart, and joined.

Shapes are in the names: E experts, I and O in and out, and two outputs, of gate and up, in turns.

    ours                               in the files
    experts.3.gate_proj.weight (O, I)  experts.gate_up_proj (E, I, 2 O)    [3, :, 0::2] transposed
    experts.3.up_proj.bias (O,)        experts.gate_up_proj_bias (E, 2 O)  [3, 1::2]
    experts.3.down_proj.weight (O, I)  experts.down_proj (E, I, O)         [3] transposed

Of MXFP4 there are, in the place of a weight, `_blocks` (E, O, I / 32, 16), bytes of two numbers,
the first in the lower bits, and `_scales` (E, O, I / 32), exponents of 2 plus 127 (Open Compute
Project 2023, *OCP Microscaling Formats*, section 5.3).
"""

import functools
import itertools
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from spmd.models.llama.weights.files import (
    Array,
    Folder,
    HeldTensor,
    Index,
    StoredTensor,
    WeightsError,
)

FAMILIES = ("gpt_oss",)
"""The `model_type`s of such files."""

HALVES: Mapping[str, Sequence[str]] = {
    "gate_up_proj": ("gate_proj", "up_proj"),
    "down_proj": ("down_proj",),
}
"""A tensor of all experts -> the projections whose outputs are in it, in turns."""

_MXFP4 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
_FP4 = np.concatenate([_MXFP4, -_MXFP4])
_OURS = re.compile(r"(.*\.experts)\.(\d+)\.(\w+_proj)\.(weight|bias)")
_THEIRS = re.compile(r"(.*\.experts)\.(gate_up_proj|down_proj)(_bias|_blocks|_scales)?")

Tensors = Mapping[str, tuple[tuple[int, ...], Callable[..., Array]]]
"""Name -> the shape, and what reads it."""


def is_stacked(name: str) -> bool:
    """Whether a tensor of this name is one of all experts."""
    return _THEIRS.fullmatch(name) is not None


def apart(stored: Folder) -> dict[str, HeldTensor]:
    """The tensors of single experts that those of all experts hold.

    Raises:
        WeightsError: one lacks its scales, or has too few dims.
    """
    found: dict[str, HeldTensor] = {}
    for name, tensor in stored.tensors.items():
        match = _THEIRS.fullmatch(name)
        if match is None or match[3] == "_scales":
            continue
        module, joined, kind = match.groups()
        halves, (count, *shape) = HALVES[joined], tensor.shape
        scales = stored.tensors.get(f"{module}.{joined}_scales")
        if kind == "_blocks" and (scales is None or (*scales.shape, 16) != tensor.shape):
            raise WeightsError(
                f"{stored.path}: {module}.{joined} has no {joined}_scales of {tensor.shape[:-1]}; "
                "download the whole checkpoint"
            )
        if len(shape) != {None: 2, "_bias": 1, "_blocks": 3}[kind]:
            raise WeightsError(f"{stored.path}: {name} {tensor.shape} cannot be read")
        if kind is None:
            outputs, inputs = shape[1], shape[:1]
        else:
            outputs, inputs = shape[0], [] if kind == "_bias" else [32 * shape[1]]
        read = {None: _plain, "_bias": _bias, "_blocks": _mxfp4}[kind]
        last, dtype = "bias" if kind == "_bias" else "weight", tensor.dtype
        one = StoredTensor(
            tensor.file, (outputs // len(halves), *inputs), "F32" if kind == "_blocks" else dtype
        )
        for expert, (i, half) in itertools.product(range(count), enumerate(halves)):
            part = functools.partial(read, stored, name, expert, len(halves), i)
            found[f"{module}.{expert}.{half}.{last}"] = HeldTensor(one, part)
    return found


def _rows(each: int, first: int, part: slice) -> slice:
    """Where some of one projection's outputs are among those of `each` in turns."""
    return slice(part.start * each + first, (part.stop - 1) * each + first + 1)


def _plain(stored: Folder, name: str, expert: int, each: int, first: int, index: Index) -> Array:
    where = (slice(expert, expert + 1), index[1], _rows(each, first, index[0]))
    return stored.read(name, where)[0, :, ::each].T


def _bias(stored: Folder, name: str, expert: int, each: int, first: int, index: Index) -> Array:
    where = (slice(expert, expert + 1), _rows(each, first, index[0]))
    return stored.read(name, where)[0, ::each]


def _mxfp4(stored: Folder, name: str, expert: int, each: int, first: int, index: Index) -> Array:
    groups = slice(index[1].start // 32, -(-index[1].stop // 32))
    where = (slice(expert, expert + 1), _rows(each, first, index[0]), groups)
    bytes_OQB = stored.read(name, (*where, slice(0, 16)))[0, ::each]
    exponents_OQ = stored.read(name.replace("_blocks", "_scales"), where)[0, ::each]
    numbers_OQBN = _FP4[np.stack([bytes_OQB & 15, bytes_OQB >> 4], axis=-1)]
    scaled = np.ldexp(numbers_OQBN, exponents_OQ.astype(np.int32)[..., None, None] - 127)
    begin = index[1].start - 32 * groups.start
    whole: Array = scaled.reshape(len(scaled), -1)
    return whole[:, begin : begin + index[1].stop - index[1].start]


def joined(tensors: Tensors) -> Tensors:
    """Tensors of all experts in the place of those of single ones; others stay as they are."""
    found: dict[str, Any] = {}
    parts: dict[str, list[Any]] = {}
    for name, (shape, read) in tensors.items():
        match = _OURS.fullmatch(name)
        if match is None:
            found[name] = shape, read
            continue
        module, expert, half, kind = match.groups()
        into, halves = next(x for x in HALVES.items() if half in x[1])
        into = f"{module}.{into}{'_bias' * (kind == 'bias')}"
        found[into] = None  # in the place of the first
        parts.setdefault(into, []).append((int(expert), halves.index(half), shape, read))
    for into, of in parts.items():
        of.sort(key=lambda part: part[:2])
        last, turn, (outputs, *inputs), _ = of[-1]
        shape = (last + 1, *inputs, outputs * (turn + 1))
        found[into] = shape, functools.partial(_join, [read for *_, read in of], turn + 1)
    return found


def _join(reads: Sequence[Callable[..., Array]], each: int, *given: Any) -> Array:
    arrays = np.stack([read(*given) for read in reads])
    turns = np.moveaxis(arrays.reshape(-1, each, *arrays.shape[1:]), 1, 2)  # (E, O, each, ...)
    whole: Array = turns.reshape(len(turns), -1, *arrays.shape[2:])
    return whole if whole.ndim == 2 else whole.swapaxes(1, 2)
