"""The descriptions of all ops, a module for each family; importing it fills `DESCRIPTIONS`."""
# ruff: noqa: F401

from spmd.ir.dialect import (
    callbacks,
    collectives,
    contract,
    elementwise,
    host,
    linalg,
    manual,
    window,
)
