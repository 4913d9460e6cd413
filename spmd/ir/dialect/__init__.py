"""The descriptions of all ops, a module for each family; importing it fills `DESCRIPTIONS`."""

from spmd.ir.dialect import callbacks, collectives, contract, elementwise, linalg, manual, window  # noqa: F401
