"""The mesh of these tests."""

from __future__ import annotations

import pytest

import spmd


@pytest.fixture
def mesh() -> spmd.Mesh:
    return spmd.make_mesh(data=4, model=2)
