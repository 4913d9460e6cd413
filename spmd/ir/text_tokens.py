"""The words of the text form: names, strings, structs."""

from __future__ import annotations

import re
from typing import Any

from spmd.ir.types import ConvDims, DotDims, GatherDims, ScatterDims, ShardingAttr

STRUCTS: dict[str, Any] = {
    "conv": ConvDims,
    "dot": DotDims,
    "gather": GatherDims,
    "scatter": ScatterDims,
    "sharding": ShardingAttr,
}
OP_NAME = re.compile(r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)+", re.ASCII)
ATTR_NAME = re.compile(r"[A-Za-z_][\w.]*", re.ASCII)
SYMBOL = re.compile(r"[A-Za-z_][\w.$-]*", re.ASCII)
ESCAPES = {"\n": "\\n", "\t": "\\t", "\\": "\\\\", '"': '\\"', "`": "\\`"}


def quote(text: str, mark: str = '"') -> str:
    """Text between quotation marks, on one line whatever it contains."""

    def escape(char: str) -> str:
        if char in ("\\", mark) or not char.isprintable():
            return ESCAPES.get(char) or f"\\u{{{ord(char):x}}}"
        return char

    return mark + "".join(map(escape, text)) + mark
