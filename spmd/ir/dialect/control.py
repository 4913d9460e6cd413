"""Control flow: ops whose regions run again and again, or one of them."""

from __future__ import annotations

from spmd.ir.description import Description, Role
from spmd.ir.dialect.registry import describe

IF = "stablehlo.if"
"""Chooses between two regions; what programs of ours are written with."""

describe(Description(region="loop", role=Role.REGION), "while")
describe(Description(region="branches", selector="i32", role=Role.REGION), "case")
describe(Description(region="branches", selector="i1", role=Role.REGION), "if")
