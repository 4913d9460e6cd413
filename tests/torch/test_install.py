"""`import spmd` loads no torch, and what is missing or of another version is said with the fix."""

import importlib.util
from importlib import metadata

import pytest

import spmd
from tests.forked import run_text

HAS_TORCH = all(importlib.util.find_spec(name) for name in ("torch", "torchax"))
needs_torch = pytest.mark.skipif(not HAS_TORCH, reason="needs torch and torchax: .[torch]")


def test_spmd_alone_loads_no_torch(tmp_path):
    text = "import spmd, sys\nprint('torch' in sys.modules, 'torchax' in sys.modules)"
    assert run_text(text, [], tmp_path) == (0, "False False\n")


@pytest.mark.skipif(HAS_TORCH, reason="torch and torchax are here")
def test_without_torch_the_import_says_what_to_install():
    with pytest.raises(ImportError, match=r'pip install "spmd\[torch\]"'):
        importlib.import_module("spmd.torch")


@needs_torch
@pytest.mark.parametrize(
    ("versions", "message"),
    [
        ({}, "torch, which is not installed"),
        ({"torch": "2.13.0"}, "torchax, which is not installed"),
        ({"torch": "2.12.1", "torchax": "0.0.13"}, "does not know torch 2.12.1"),
        ({"torch": "2.130.0", "torchax": "0.0.13"}, "does not know torch 2.130.0"),
        ({"torch": "2.13.0", "torchax": "0.0.12"}, "does not know torchax 0.0.12"),
    ],
)
def test_what_is_missing_or_another(versions, message):
    with pytest.raises(spmd.InstallError, match=message) as caught:
        check(versions)
    assert isinstance(caught.value, ImportError)
    assert 'pip install "spmd[torch]"' in str(caught.value)


@needs_torch
def test_what_is_known():
    for torch in ("2.13.0", "2.13.1", "2.13.0+cpu"):
        check({"torch": torch, "torchax": "0.0.13"})


@needs_torch
def test_loading_leaves_torch_as_it_was():
    import torch

    importlib.import_module("spmd.torch")
    with pytest.raises(AttributeError):
        torch.ops.aten.prod.no_such_dimname  # noqa: B018
    with pytest.raises(RuntimeError, match="duplicate"):
        torch._decomp.register_decomposition(torch.ops.aten.native_dropout)(lambda: None)


def check(versions):
    def version_of(name):
        if name not in versions:
            raise metadata.PackageNotFoundError(name)
        return versions[name]

    importlib.import_module("spmd.torch.install").check_installed(version_of)
