"""The engine knows neither jax nor HTTP, the server no jax: so they start, and are tested, fast."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("module", "strangers"),
    [
        ("serving.engine.scheduler", {"jax", "starlette", "uvicorn", "asyncio", "threading"}),
        ("serving.engine.engine", {"jax", "starlette", "uvicorn"}),
        ("serving.http.server", {"jax", "spmd"}),
    ],
)
def test_what_is_not_imported(module: str, strangers: set[str]) -> None:
    # numpy itself brings threading along, so what came before is left out.
    program = (
        f"import numpy, sys; before = set(sys.modules); import {module}; "
        f"print(*(sys.modules.keys() - before))"
    )
    run = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True
    )
    imported = {name.partition(".")[0] for name in run.stdout.split()}
    assert "serving" in imported
    assert not imported & strangers
