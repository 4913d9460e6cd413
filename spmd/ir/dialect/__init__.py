"""The descriptions of all ops, a module for each family; importing it fills `DESCRIPTIONS`."""

# `reducers`, which some of these import, brings those of `elementwise`.
from spmd.ir.dialect import callbacks, collectives, contract, host, linalg, manual, window  # noqa: F401
