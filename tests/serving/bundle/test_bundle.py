"""A bundle gives on any mesh what jax.jit gives on one device."""

import dataclasses
import errno
import functools
import json
import os
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import spmd
from spmd.lowering.emit import Emitted
from spmd.lowering.execute import compile_emitted
from spmd.serving.bundle.cache import Cache
from spmd.serving.bundle.folder import new_folder
from spmd.serving.bundle.function import BundleError, Function, StateLeaf
from spmd.serving.bundle.read import load_bundle
from spmd.serving.bundle.write import write_bundle
from spmd.serving.tensor_backend import BundleInfer
from tests.serving.conftest import (
    STATE,
    attend,
    make_functions,
    make_weights,
    order,
    recurrent,
    struct,
    write,
)
from tests.two_processes import record_reads

X = np.random.default_rng(1).normal(size=(4, 8)).astype(np.float32)
MESHES = [*(pytest.param(sizes, marks=pytest.mark.heavy) for sizes in ((1,), (2,))), (8,), (2, 4)]


@pytest.fixture(scope="module")
def cache_dir(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def bundle_on(folder, mesh_of, cache_dir):
    loaded = {}

    def bundle(*sizes):
        if sizes not in loaded:
            loaded[sizes] = load_bundle(folder, mesh_of(*sizes), cache_dir=cache_dir)
        loaded[sizes].reset_state()
        return loaded[sizes]

    return bundle


def close(ours, theirs):
    np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("sizes", MESHES)
def test_same_as_jit(sizes, bundle_on):
    bundle, weights = bundle_on(*sizes), make_weights()
    state = {"h": jnp.full((4, 16), 0.5), "steps": jnp.int32(0)}
    for number in range(3):
        ours = bundle.run("step", X * number)
        state, theirs = jax.jit(recurrent)(weights, state, X * number)
        close(ours["y"], theirs["y"])
        first, count = ours["parts"]
        close(first, theirs["parts"].first)
        assert int(count) == int(ours["parts"].steps) == number
    assert int(bundle.state["state/steps"]) == 3
    close(bundle.run("peek", 2), state["h"][2])
    close(bundle.state["state/h"], state["h"])  # looking changes nothing
    held = {path: np.asarray(x) for path, x in bundle.state.items()}
    bundle.reset_state()
    bundle.put_state(held)
    close(bundle.run("peek", 2), state["h"][2])
    x = np.random.default_rng(2).normal(size=(2, 8, 16)).astype(np.float32)
    close(bundle.run("attend", x), attend(weights, x))
    jax.tree.map(close, bundle.run("order", X[0, :6]), order(X[0, :6]))


def test_nothing_is_compiled_later(bundle_on, caplog):
    bundle = bundle_on(2, 4)
    assert bundle.compile_total == 5  # four functions and the state
    with jax.log_compiles():
        bundle.run("step", X)
        bundle.reset_state()
    assert not [record for record in caplog.records if "Compiling" in record.message]
    assert int(bundle.state["state/steps"]) == 0


def shard_shapes(bundle):
    arrays = {**bundle.weights, **bundle.state}
    return {path: x.sharding.shard_shape(x.shape) for path, x in arrays.items()}


def test_arrays_lie_as_the_specs_say(bundle_on):
    bundle = bundle_on(2, 4)
    shapes = shard_shapes(bundle)
    assert shapes["weights/w"] == (16, 4)
    assert shapes["state/h"] == (2, 4)
    assert shapes["weights/heads"] == (3, 1, 16, 8)
    assert bundle.run("step", X)["y"].sharding.is_fully_replicated
    spec = {path: x.sharding.spec for path, x in {**bundle.weights, **bundle.state}.items()}
    for entry in bundle.functions.values():
        program = bundle.programs[entry.name]
        leaves = [leaf for argument in entry.arguments for leaf in argument.leaves]
        for leaf, sharding in zip(leaves, program.arguments, strict=True):
            if leaf.path in spec:
                assert sharding.spec == spec[leaf.path]


def test_a_mesh_that_the_specs_do_not_fit(bundle_on):
    """Axes that are not there count as one; dims that are not divided are left open, and named."""
    bundle = bundle_on(8)
    shapes = shard_shapes(bundle)
    assert shapes["state/h"] == (4, 2)
    assert bundle.notes == (
        "weights/heads: model=8 does not divide 4 (dim 1), which is left to the compiler",
    )


def test_64_bits_inside_that_jax_would_narrow(tmp_path, mesh_of):
    """Outside of a module there are no complex numbers; inside, they keep their precision."""

    def fn(x):
        wide = jax.lax.convert_element_type(x, jnp.complex128) + 1e-12j
        return jnp.imag(wide * 1e12).astype(jnp.float32)

    x = np.arange(8, dtype=np.float32)
    with jax.enable_x64(True):
        function = Function("f", fn, (struct(8),), ("x",), ("input",))
        write_bundle(tmp_path / "b", [function], platforms=("cpu",))
    bundle = load_bundle(tmp_path / "b", mesh_of(2))
    assert bundle.programs["f"].emitted.needs_x64
    np.testing.assert_allclose(bundle.run("f", x), np.ones(8), rtol=1e-6)
    with pytest.raises(BundleError, match="x is complex128, not one of"):
        write_bundle(
            tmp_path / "c",
            [Function("f", fn, (struct(8, dtype="complex128"),), ("x",), ("input",))],
        )


def test_the_state_is_donated_and_gone_when_a_step_fails(bundle_on):
    bundle = bundle_on(2, 4)
    before = bundle.state["state/h"]
    bundle.run("step", X)
    assert before.is_deleted()
    assert not bundle.weights["weights/w"].is_deleted()
    bundle = bundle_on(2, 4)
    bundle.state["state/h"].delete()
    with pytest.raises(BundleError, match=r"step failed on the devices: .*reset_state"):
        bundle.run("step", X)
    bundle.reset_state()
    assert bundle.run("step", X)["y"].shape == (4, 4)
    bundle = bundle_on(2, 4)
    exact = bundle.run("step", X)["y"]
    bundle.reset_state()
    close(bundle.run("step", X.astype(np.float64))["y"], exact)


def test_every_weight_is_read_once(folder, mesh_of, cache_dir, monkeypatch):
    seen = record_reads(monkeypatch.setattr)
    load_bundle(folder, mesh_of(2, 4), cache_dir=cache_dir)
    assert sum(nbytes for _, _, nbytes in seen) == sum(x.nbytes for x in make_weights().values())
    assert {shape for name, shape, _ in seen if name == "weights/w"} == {(16, 4)}


# Inputs


@pytest.mark.parametrize(
    ("name", "inputs", "message"),
    [
        ("walk", (X,), "there is no function 'walk'; there are"),
        ("step", (), "step takes 1 inputs (x), not 0"),
        ("step", (X[:2],), "x has the shape [4, 8], not [2, 8]"),
        ("step", (X.astype(np.int32),), "x is float32, not int32"),
        ("peek", (1.5,), "which is int32, not float64"),
        ("peek", (2**40,), "which is int32, which not all of its numbers fit into"),
    ],
)
def test_wrong_inputs(name, inputs, message, bundle_on):
    with pytest.raises(BundleError, match=re.escape(message)):
        bundle_on(2, 4).run(name, *inputs)


def test_infer(bundle_on):
    infer = BundleInfer(bundle_on(2, 4), "step")
    assert [spec.name for spec in infer.inputs] == ["x"]
    found = infer.infer({"x": X})
    assert {name: x.shape for name, x in found.items()} == {
        "y": (4, 4), "parts/first": (4,), "parts/steps": ()
    }  # fmt: skip
    assert all(isinstance(x, np.ndarray) for x in found.values())
    with pytest.raises(BundleError, match="no input 'x'"):
        infer.infer({})
    with pytest.raises(BundleError, match="unknown input 'z'; inputs are x"):
        infer.infer({"x": X, "z": X})


# Cache


def test_second_start_neither_plans_nor_compiles(folder, mesh_of, tmp_path, monkeypatch):
    load = functools.partial(load_bundle, folder, cache_dir=tmp_path, functions=["step"])
    first = load(mesh_of(2))
    entries = {path: path.read_bytes() for path in tmp_path.rglob("*-cache")}
    assert entries  # the function's, and the state's unless this process has compiled that before
    monkeypatch.setattr("spmd.serving.bundle.programs.lower_stablehlo", None)
    second = load(mesh_of(2))
    assert {path for path in tmp_path.rglob("*-cache")} == set(entries)
    close(second.run("step", X)["y"], first.run("step", X)["y"])
    predicted = [bundle.programs["step"].emitted.seconds for bundle in (first, second)]
    assert predicted[0] and predicted[1] == predicted[0]
    with pytest.raises(TypeError):  # another mesh is another program
        load(mesh_of(1))


@pytest.mark.parametrize("kind", ["plans", "executables"])
def test_a_damaged_cache_is_made_anew(folder, mesh_of, tmp_path, kind):
    """jax warns of executables that are damaged, and leaves them as they are for ever."""
    load_bundle(folder, mesh_of(1), cache_dir=tmp_path, functions=["peek"])
    entries = {*((tmp_path / "plans").iterdir() if kind == "plans" else tmp_path.rglob("*-cache"))}
    for path in entries:
        path.write_bytes(path.read_bytes()[:-5] if kind == "plans" else b"damaged")
        os.utime(path, (0, 0))
    sizes = {path: path.stat().st_size for path in entries}
    bundle = load_bundle(folder, mesh_of(1), cache_dir=tmp_path, functions=["peek"])
    assert all(path.stat().st_size > sizes[path] for path in entries)
    assert bundle.notes == ()
    assert bundle.run("peek", 0).shape == (16,)


def test_the_log_says_what_goes_on_where_there_is_no_terminal(folder, mesh_of, cache_dir, caplog):
    caplog.set_level("INFO", "serving")
    load_bundle(folder, mesh_of(1), cache_dir=cache_dir, functions=["peek"])
    said = [record.getMessage().split()[0] for record in caplog.records]
    assert said == ["checking", "planning", "compiling", "the"]


def test_a_cache_that_cannot_be_written_is_one_note(folder, mesh_of, tmp_path):
    no_folder = tmp_path / "file"
    no_folder.write_text("")
    bundle = load_bundle(folder, mesh_of(1), cache_dir=no_folder, functions=["peek"])
    (note,) = bundle.notes
    assert note.startswith(f"{no_folder} cannot keep all that was made (Not a directory)")
    assert bundle.run("peek", 0).shape == (16,)


# Export


def test_a_full_disk_is_said_with_its_folder(tmp_path):
    with (
        pytest.raises(BundleError, match=f"^{tmp_path}/out cannot be written: No space left"),
        new_folder(tmp_path / "out"),
    ):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    assert list(tmp_path.iterdir()) == []


class Lazy:
    """A tensor that counts how often it is read."""

    dtype = "bfloat16"

    def __init__(self, *shape):
        self.shape = shape
        self.reads = 0

    def __array__(self, dtype=None, copy=None):
        self.reads += 1
        return np.arange(32).reshape(8, 4).astype(jnp.bfloat16)


def test_dtypes_and_lazy_weights(tmp_path, mesh_of):
    lazy = Lazy(8, 4)
    weights = {
        "small": np.arange(-8, 8).astype(np.int8).reshape(4, 4),
        "bits": np.arange(4).astype(jnp.float8_e4m3fn),
        "mask": np.array([True, False]),
        "lazy": lazy,
    }
    structs = jax.tree.map(lambda w: jax.ShapeDtypeStruct(w.shape, w.dtype), weights)
    function = Function(
        "all", lambda w, s: (s, {name: x.astype(jnp.float32) for name, x in w.items()}),
        (structs, struct(2, dtype="bfloat16")), ("weights", "s"), ("weights", "state"),
    )  # fmt: skip
    write_bundle(
        tmp_path / "b", [function], weights=weights,
        state=StateLeaf((2,), "bfloat16", -float("inf")), specs={"weights/lazy": "model"},
        max_file_bytes=16,
    )  # fmt: skip
    assert lazy.reads == 1
    assert len(list((tmp_path / "b" / "weights").glob("*.safetensors"))) == 4
    bundle = load_bundle(tmp_path / "b", mesh_of(2))
    found = bundle.run("all")
    for name, array in weights.items():
        np.testing.assert_array_equal(found[name], np.asarray(array).astype(np.float32))
    assert np.isneginf(np.asarray(bundle.state["state"].astype(np.float32))).all()


def bad_state(weights, state, x):
    return {"h": state["h"]}, x


def changed(number, **fields):
    functions = make_functions()
    functions[number] = dataclasses.replace(functions[number], **fields)
    return {"functions": functions}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (changed(1, fn=bad_state), "function step returns another state than it takes"),
        (changed(2, fn=lambda s, w: s["h"]), "peek has a state and has to return (state, outputs)"),
        (changed(0, name="../x"), "a function is called '../x'"),
        (changed(0, name="step"), "two functions have the same name"),
        (changed(0, roles=("output",)), "roles are weights, state, read, input"),
        (changed(0, args=(struct(2, dtype="int4"),)), "values is int4, not one of bool, int8"),
        (changed(0, args=(jax.eval_shape(jax.random.key, 0),)), "values is a key of jax.random"),
        ({"specs": {"weights/q": ("model",)}}, "the spec 'weights/q' matches no leaf"),
        ({"specs": {"x": ("model", "model")}}, "names an axis twice"),
        ({"specs": {"weights/w": (None,) * 3}}, "has 3 entries"),
        (
            {"weights": {}, "specs": {}},
            "takes weights/u float32[8, 16], and the bundle has no such leaf",
        ),
        ({"state": {**STATE, "steps": StateLeaf((), "int32", 0.5)}}, "cannot be filled with 0.5"),
        ({"primary": "walk"}, "there is no function 'walk'"),
        ({"contract": {"eos": {1}}}, "have to be JSON"),
        ({"weights": {**make_weights(), "lazy": Lazy(4, 4)}}, "lazy is read as"),
        ({"tokenizer_from": "/nowhere"}, "/nowhere holds no tokenizer"),
    ],
)
def test_what_cannot_be_exported(changes, message, tmp_path):
    with pytest.raises(BundleError, match=re.escape(message)):
        write(tmp_path / "b", **changes)
    assert not list(tmp_path.iterdir())


def test_tokenizer_files(tmp_path, mesh_of):
    source = tmp_path / "hf"
    source.mkdir()
    (source / "tokenizer.json").write_text("{}")
    (source / "chat_template.jinja").write_text("{{ messages }}")
    (source / "model.bin").write_text("not this")
    write_bundle(tmp_path / "b", [make_functions()[0]], tokenizer_from=source)
    manifest = json.loads((tmp_path / "b" / "manifest.json").read_text())
    assert manifest["tokenizer"] == ["tokenizer/tokenizer.json", "tokenizer/chat_template.jinja"]
    assert not (tmp_path / "b" / "weights").exists()
    bundle = load_bundle(tmp_path / "b", mesh_of(1))
    assert int(bundle.run("order", np.arange(6.0, dtype=np.float32))[1]) == 5
    assert bundle.compile_total == 1


def test_constants_in_pieces_are_kept(mesh: spmd.Mesh, tmp_path: Path) -> None:
    table = np.random.default_rng(0).standard_normal((512, 256), np.float32)
    x = np.ones((512, 256), np.float32)
    module = jax.jit(lambda x: x * table).lower(x).as_text()
    made = spmd.lower_stablehlo(module, mesh, [("data", "model")]).stages.emitted

    def kept(make_again: bool) -> Emitted:
        def make() -> Emitted:
            return made if make_again else pytest.fail("it was kept")

        return Cache(tmp_path).emitted(module.encode(), mesh, spmd.Options(), (), make)

    assert kept(True).constants == kept(False).constants == made.constants
    assert len(made.constants) == 1 and made.constants[0].sharding.dims != ((), ())
    np.testing.assert_array_equal(compile_emitted(kept(False), {})(x)[0], table)
