"""Importing this module fills the registry with every rule of `spmd`."""

from spmd.propagation import (  # noqa: F401
    rules_contract,
    rules_elementwise,
    rules_index,
    rules_linalg,
    rules_manual,
    rules_merge,
    rules_misc,
    rules_ragged,
    rules_random,
    rules_shape,
    rules_window,
)
