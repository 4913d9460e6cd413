"""How the server starts: what it imports, and which golden prompts pass, are close, or stop it."""

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from spmd.serving import load
from spmd.serving.bundle.function import BundleError
from tests.serving.engine.fake_backend import FakeBackend

GOLDEN = {"prompt": [1, 2], "tokens": [5, 6, 7], "logprobs": [-1.0, -2.0, -0.5]}


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> Any:
    def use(tokens: list[int], logprobs: list[float]) -> None:
        monkeypatch.setattr(load, "generate", lambda *_: (tokens, logprobs))

    return use


def check(tolerance: float = 0.02) -> None:
    load.check_goldens(FakeBackend(), [GOLDEN], tolerance)


def test_the_same_passes_and_a_close_call_ends_that_prompt(computed: Any, caplog: Any) -> None:
    computed([5, 6, 7], [-1.001, -2.001, -0.499])
    with caplog.at_level("INFO", "serving"):
        check()
    assert "1 golden prompts come out as they should" in caplog.text
    computed([5, 9, 1], [-1.0, -2.01, -9.0])
    check()
    assert "golden 0: token 1 is a close call, and differs" in caplog.text


@pytest.mark.parametrize(
    ("tokens", "logprobs"),
    [([5, 6, 7], [-1.0, -2.5, -0.5]), ([5, 9, 7], [-1.0, -1.0, -0.5]),
     ([5, 6, 7], [float("nan"), -2.0, -0.5])],
)  # fmt: skip
def test_what_is_computed_wrongly_stops_the_server(
    tokens: list[int], logprobs: list[float], computed: Any
) -> None:
    computed(tokens, logprobs)
    with pytest.raises(BundleError, match=r"golden prompt 0: token [01] is .* computes the model"):
        check()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"slots": 4, "page": 32}, "small has slots 4, page 32, and big slots 8, page 16"),
        ({"vocab_size": 512}, "small has vocab_size 512, and big vocab_size 256"),
        ({"kind": "other"}, "small is no language model"),
    ],
)
def test_bundles_that_cannot_guess_for_another(
    changes: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = {"slots": 8, "groups": 1, "page": 16, "max_length": 64, "vocab_size": 256, "drafts": 7}
    found = {}
    for name, given in (("big", sizes), ("small", {**sizes, **changes})):
        contract = {"kind": given.get("kind", "language_model"), "shape": given, "model": given}
        found[name] = SimpleNamespace(name=name, contract=contract)
    monkeypatch.setattr(load, "read_manifest", lambda folder: found[str(folder)])
    load.check_draft("big", "big")
    with pytest.raises(BundleError, match=message):
        load.check_draft("big", "small")


ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("module", "strangers"),
    [
        ("spmd.serving.engine.scheduler", {"jax", "starlette", "uvicorn", "asyncio", "threading"}),
        ("spmd.serving.engine.engine", {"jax", "starlette", "uvicorn"}),
        ("spmd.serving.http.server", {"jax", "opentelemetry", "spmd.api", "spmd.compiler"}),
    ],
)
def test_what_is_not_imported(module: str, strangers: set[str]) -> None:
    # numpy itself brings threading along, so what came before is left out. So is what spmd's public
    # names are from, jax among it: the package is one whose __init__ is empty.
    program = (
        "import numpy, sys, types; spmd = sys.modules['spmd'] = types.ModuleType('spmd'); "
        f"spmd.__path__ = ['spmd']; before = set(sys.modules); import {module}; "
        f"print(*(sys.modules.keys() - before))"
    )
    run = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True
    )
    names = [name.split(".") for name in run.stdout.split()]
    imported = {".".join(parts[:length]) for parts in names for length in (1, 2)}
    assert "spmd.serving" in imported
    assert not imported & strangers
