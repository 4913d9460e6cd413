"""Rules of ops that belong to no family: placements and layouts."""

from __future__ import annotations

from spmd.ir.dialect.elementwise import elementwise_rule
from spmd.ir.dialect.registry import rule

PLACEMENT_CALLS = ("LayoutConstraint", "annotate_device_placement")
"""Targets that say where or how an array lies in memory, and leave its elements alone."""

rule(*(f"custom_call:{target}" for target in PLACEMENT_CALLS))(elementwise_rule)
