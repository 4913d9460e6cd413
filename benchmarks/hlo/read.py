"""What is read of an instruction of optimized HLO: operands, the arrays of its type, its line."""

import math
import re

from spmd.measure.hlo import Instruction, Module, integer, items, places_of


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
