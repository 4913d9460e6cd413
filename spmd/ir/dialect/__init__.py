"""The descriptions of all ops, a module for each family; importing it fills `DESCRIPTIONS`."""

from spmd.ir.dialect import (  # noqa: F401
    callbacks,
    collectives,
    contract,
    elementwise,
    linalg,
    manual,
    window,
)
