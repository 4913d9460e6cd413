"""Bundles that are damaged, or that somebody wrote to do harm: one clear error, and nothing run."""

import hashlib
import json
import os
import pickle
import shutil

import numpy as np
import pytest

from spmd.frontend import bytecode
from spmd.frontend.artifact import module_artifact
from spmd.frontend.importer.module import parse_module
from spmd.serving.bundle import read as reading
from spmd.serving.bundle.function import BundleError, Function
from spmd.serving.bundle.manifest import MANIFEST
from spmd.serving.bundle.read import load_bundle
from spmd.serving.bundle.write import write_bundle
from tests.serving.conftest import struct

MODULE = "functions/f.mlirbc"
FOREIGN = """
module {
  func.func public @main(%w: tensor<4x4xf32>, %x: tensor<2x4xf32>) -> tensor<2x4xf32> {
    %0 = stablehlo.custom_call @do_harm(%x) : (tensor<2x4xf32>) -> tensor<2x4xf32>
    return %0 : tensor<2x4xf32>
  }
}
"""
NOTHING = """
module {
  func.func public @main() {
    return
  }
}
"""


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    path = tmp_path_factory.mktemp("hostile") / "bundle"
    function = Function(
        "f", lambda w, x: x @ w["k"], ({"k": struct(4, 4)}, struct(2, 4)), ("weights", "x"),
        ("weights", "input"),
    )  # fmt: skip
    write_bundle(path, [function], weights={"k": np.eye(4, dtype=np.float32)})
    return path


@pytest.fixture
def copy(whole, tmp_path):
    return shutil.copytree(whole, tmp_path / "bundle")


@pytest.fixture
def failure(mesh_of, tmp_path):
    """The message of the error that a bundle gives; nothing may be written."""

    def load(folder, kept=()):
        before = sorted(tmp_path.rglob("*"))
        with pytest.raises(BundleError) as caught:
            load_bundle(folder, mesh_of(1), cache_dir=tmp_path / "cache")
        message = str(caught.value)
        assert "\n" not in message
        assert len(message) < 1500
        left = [path for path in tmp_path.rglob("*") if path not in before]
        files = [path.relative_to(tmp_path) for path in left if path.is_file()]
        assert {file.parts[0] for file in files} <= {*kept}
        return message

    return load


def edit(folder, change):
    """Change the manifest as JSON."""
    path = folder / MANIFEST
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def replace_file(folder, name, data):
    """Change a file, and have the manifest say so."""
    (folder / name).write_bytes(data)
    entry = {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    edit(folder, lambda m: m["files"].update({name: entry}))


# Files


def test_no_bundle(tmp_path, failure):
    assert "is no folder" in failure(tmp_path / "nothing")
    assert "has no manifest.json" in failure(tmp_path)


@pytest.mark.parametrize("name", [MODULE, "weights/model.safetensors"])
def test_files_that_were_damaged(name, copy, failure):
    data = (copy / name).read_bytes()
    (copy / name).write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    # Weights are checked while they are read, when what was made of the modules is in the cache.
    kept = ["cache"] if name != MODULE else []
    assert "does not hold what was written" in failure(copy, kept)
    (copy / name).write_bytes(data[:-3])
    assert f"has {len(data) - 3:,} bytes instead of {len(data):,}" in failure(copy)
    (copy / name).unlink()
    assert "is missing; copy the whole bundle again" in failure(copy)


def test_a_damaged_file_passes_unless_hashes_are_compared(copy, mesh_of):
    """So the test above tests the hashes."""
    path = copy / "weights/model.safetensors"
    data = path.read_bytes()
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    load_bundle(copy, mesh_of(1), verify=False)


def test_files_that_do_not_belong(copy, failure):
    (copy / "functions" / "extra.so").write_bytes(b"")
    assert "extra.so does not belong to the bundle" in failure(copy)
    (copy / MODULE).unlink()
    os.mkfifo(copy / MODULE)
    assert "is a link or no file" in failure(copy)
    (copy / "/".join("a" * 20)).mkdir(parents=True)
    assert "no folders that deep" in failure(copy)


@pytest.mark.parametrize("name", [MODULE, MANIFEST, "weights"])
def test_links(name, copy, failure):
    target = copy.parent / "elsewhere"
    shutil.move(copy / name, target)
    (copy / name).symlink_to(target)
    assert "is a link or no file" in failure(copy)


@pytest.mark.parametrize(
    "path", ["../secret", "/etc/passwd", "functions/../../secret", "", ".", "a//b", "a\\b", "~/x"]
)
def test_paths_that_lead_elsewhere(path, copy, failure):
    edit(copy, lambda m: m["functions"]["f"]["modules"].update(cpu=path))
    assert "which is no path in the folder" in failure(copy)
    edit(copy, lambda m: m["functions"]["f"]["modules"].update(cpu=MODULE))
    edit(copy, lambda m: m["files"].update({path: m["files"][MODULE]}))
    assert "which is no path in the folder" in failure(copy)


# The manifest


def nested(m):
    m["functions"]["f"]["tree"] = [m["functions"]["f"]["tree"], 0]


def deep(m):
    for _ in range(300):
        m["functions"]["f"]["tree"] = [m["functions"]["f"]["tree"]]


def argument(**fields):
    return lambda m: m["functions"]["f"]["arguments"][1]["leaves"][0].update(fields)


def state(**fields):
    return lambda m: m.update(state=[{"path": "state", "shape": [], **fields}])


CHANGES = [
    (lambda m: m.update(format="zip"), "its format is not spmd-bundle"),
    (lambda m: m.update(schema=2), "has schema 2 and this program knows 1"),
    (lambda m: m.update(schema="1"), "has schema '1'"),
    (lambda m: m.pop("functions"), "has no 'functions'"),
    (lambda m: m.update(hook="import os"), "has the unknown member 'hook'"),
    (lambda m: m.update(functions=[]), "functions is [], not an object"),
    (lambda m: m.update(weights={}), "weights is {}, not a list"),
    (lambda m: m.update(name=3), "name is 3, not a string"),
    (lambda m: m.update(primary="g"), "there is no function 'g' (primary)"),
    (lambda m: m["functions"]["f"].update(name="g"), "calls itself 'g'"),
    (lambda m: m["functions"]["f"]["modules"].update(wasm=MODULE), "'wasm', not one of cpu"),
    (lambda m: m["functions"]["f"].update(modules={}), "was exported for nothing, not for cpu"),
    (lambda m: m["functions"]["f"]["tags"].update(n=1.5), "n is 1.5, not a whole number"),
    (lambda m: m["functions"]["f"]["tags"].update(n=True), "n is True, not a whole number"),
    (deep, "tree nests more than 100 containers"),
    (nested, "tree does not hold each of 1 outputs once"),
    (lambda m: m["functions"]["f"].update(tree="x"), "tree has 'x'"),
    (argument(shape=[2, -4]), "is -4, not a number from 0"),
    (argument(shape=[2, 1 << 60]), "not a number from 0 to 2**48"),
    (argument(dtype="object"), "dtype is 'object', not one of bool"),
    (argument(shape=[2, 5]), "takes tensor<2x4xf32> where the manifest says x float32[2, 5]"),
    (lambda m: m["functions"]["f"]["outputs"].clear(), "tree does not hold"),
    (lambda m: m["weights"][0].update(shape=[4, 5]), "disagree|float32[4, 5]"),
    (lambda m: m["weights"].append(dict(m["weights"][0])), "lists a leaf twice"),
    (lambda m: m["weights"].append({**m["weights"][0], "path": "weights/q"}), "disagree about"),
    (lambda m: m.update(weights=[]), "the bundle has no such leaf"),
    (lambda m: m["files"][MODULE].update(sha256="0"), "is no SHA-256"),
    (lambda m: m.update({"x" * 5000: 1}), "has the unknown member"),
    (lambda m: m["functions"]["f"].update({"a\nb": 1}), "has the unknown member 'a\\nb'"),
    (state(dtype="int8", fill=300), "is int8 and cannot be filled with 300"),
    (state(dtype="bool", fill=2), "is bool and cannot be filled with 2"),
    (state(dtype="int32", fill=0.5), "is int32 and cannot be filled with 0.5"),
    (state(dtype="int32", fill="nan"), "is int32 and cannot be filled with nan"),
    (lambda m: m["files"].pop(MODULE), "is not among the files"),
    (lambda m: m["specs"].update({"weights/k": [None] * 3}), "has 3 entries"),
    (lambda m: m["specs"].update({"weights/k": [{}]}), "is {}, not a string"),
    (lambda m: m.update(tokenizer=["tokenizer/x"]), "is not among the files"),
    (state(dtype="int32", fill=1e400), "fill is inf, which is out of range"),
]


@pytest.mark.parametrize(("change", "message"), CHANGES)
def test_manifests_that_make_no_sense(change, message, copy, failure):
    edit(copy, change)
    found = failure(copy)
    assert any(part in found for part in message.split("|")), found


@pytest.mark.parametrize(
    "text", [b"", b"{", b"\xff\xfe", b"[" * 100_000, b"3", b"null", b'{"format": NaN}']
)
def test_manifests_that_are_no_json(text, copy, failure):
    (copy / MANIFEST).write_bytes(text)
    assert "manifest.json" in failure(copy)


# What files hold


class Harm:
    def __reduce__(self):
        return os.mkdir, (os.environ["HARM"],)


@pytest.mark.parametrize("name", [MODULE, "weights/model.safetensors", MANIFEST])
def test_pickles_are_not_read(name, copy, failure, tmp_path, monkeypatch):
    monkeypatch.setenv("HARM", str(tmp_path / "harm"))
    data = pickle.dumps(Harm())
    if name == MANIFEST:
        (copy / name).write_bytes(data)
    else:
        replace_file(copy, name, data)
    failure(copy)
    assert not (tmp_path / "harm").exists()


def artifact(text):
    return module_artifact(parse_module(text))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: b"", "it is no portable artifact"),
        (lambda: b"/etc/passwd", "it is no portable artifact"),
        (lambda: artifact(FOREIGN), "calls do_harm, which is unknown here"),
        (lambda: artifact(FOREIGN.replace("4x4xf32", "4x4xf64")), "takes tensor<4x4xf64>"),
        (lambda: artifact(NOTHING), "takes 0 arrays and the manifest says 2"),
    ],
)
def test_modules_that_are_none(make, message, copy, failure):
    replace_file(copy, MODULE, make())
    assert message in failure(copy)


def test_a_module_that_cannot_be_read(copy, failure, monkeypatch):
    """The process that tries to may end with it."""
    monkeypatch.setattr(reading, "bytecodes_to_texts", bytecode.bytecodes_to_texts)
    monkeypatch.setattr(reading, "bytecode_to_text", bytecode.bytecode_to_text)
    replace_file(copy, MODULE, b"ML\xefR\rStableHLO_v1.0.0\x00\xff\xff")
    assert "cannot be used: " in failure(copy)


def test_weights_that_do_not_fit(copy, failure):
    header = json.dumps(
        {"weights/k": {"dtype": "F32", "shape": [4, 4], "data_offsets": [0, 1 << 40]}}
    ).encode()
    replace_file(copy, "weights/model.safetensors", len(header).to_bytes(8, "little") + header)
    assert "truncated or no safetensors file" in failure(copy)
    index = {"weight_map": {"weights/k": "../../etc/passwd"}}
    replace_file(copy, "weights/model.safetensors.index.json", json.dumps(index).encode())
    assert "which is no file of the folder itself" in failure(copy)
