"""Shardings, sizes, times, prices and source lines as a report writes them."""

from __future__ import annotations

import re
from collections.abc import Sequence

from spmd.errors import bytes_text as bytes_text
from spmd.ir.program import Program, Value
from spmd.ir.types import TensorType
from spmd.mesh.mesh import Mesh
from spmd.mesh.sharding import Axes, Sharding, axis_refs


def spec_text(sharding: Sharding, mesh: Mesh) -> str:
    """A sharding as `mark_sharding` takes it: `("data", None)`; or `replicated`, or `scalar`."""
    if not any(sharding.dims):
        text = "replicated" if sharding.dims else "scalar"
    else:
        names = [[f'"{ref}"' for ref in axis_refs(axes, mesh)] for axes in sharding.dims]
        joined = [n[0] if len(n) == 1 else f"({', '.join(n)})" if n else "None" for n in names]
        text = f"({', '.join(joined)}{',' * (len(joined) == 1)})"
    if sharding.partial:
        text += f" partial {sharding.kind} over {axes_text(sharding.partial, mesh)}"
    return text


def axes_text(axes: Axes, mesh: Mesh) -> str:
    """`data, model`."""
    return ", ".join(str(ref) for ref in axis_refs(axes, mesh))


def seconds_text(seconds: float) -> str:
    """`1.25 ms`: three digits, in s, ms or us."""
    for unit, scale in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= scale:
            return f"{seconds / scale:.3g} {unit}"
    return f"{seconds * 1e6:.3g} us"


def share_text(part: float, whole: float) -> str:
    """`12.5%`."""
    return f"{100 * part / whole:.1f}%" if whole else "-"


def plural(count: int, what: str) -> str:
    """`1 op`, `2 ops`."""
    return f"{count} {what}{'' if count == 1 else 's'}"


def type_text(type_: TensorType) -> str:
    """`f32[8,128]`."""
    return f"{type_.dtype}[{','.join(map(str, type_.shape))}]"


def source_text(text: str) -> str:
    """Shortens every source line in a text: `llama/model.py:12 (forward)`.

    Of a path its last two parts stay, of a function's qualified name what is behind `<locals>`.
    """
    text = re.sub(r"[^\s(]*/([^/\s(]+/[^/\s(]+:\d+)", r"\1", text)
    return re.sub(r"\([^\s()]*<locals>\.([^\s()]+)\)", r"(\1)", text)


def value_name(program: Program, value: Value) -> str:
    """An argument's name, else the value's number as the printed program has it: `%12`."""
    if value in program.body.args:
        return program.arg_names[program.body.args.index(value)]
    return f"%{value}"


def idle_text(axes: Sequence[str]) -> str:
    """What to say of axes of a mesh over which nothing is split."""
    which = f"{'axis' if len(axes) == 1 else 'axes'} {', '.join(axes)}"
    return f"nothing is split over {which} of the mesh: the devices along it repeat the same work"
