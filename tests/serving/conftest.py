import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import export

import spmd
from spmd.models.llama.named import named_config
from spmd.models.llama.weights.sources import fresh_source
from spmd.serving.bundle.function import Function, StateLeaf
from spmd.serving.bundle.write import write_bundle
from spmd.serving.llama_bundle import write_llama_bundle
from tests.reading import modules_are_read_here as modules_are_read_here


class Parts(NamedTuple):
    first: jax.Array
    steps: jax.Array


def recurrent(weights, state, x):
    """A tiny recurrent model that counts its steps."""
    h = jnp.tanh(state["h"] @ weights["w"] + x @ weights["u"])
    outputs = {"y": h @ weights["v"], "parts": Parts(h[:, 0], state["steps"])}
    return {"h": h, "steps": state["steps"] + 1}, outputs


def peek(state, which):
    return state, state["h"][which]


def attend(weights, x):
    q, k, v = (jnp.einsum("bsh,nhd->bsnd", x, weights["heads"][i]) for i in range(3))
    return spmd.ops.attention(q, k, v)


def order(x):
    return jnp.sort(x), jnp.argmax(x)


def struct(*shape, dtype="float32"):
    return jax.ShapeDtypeStruct(shape, dtype)


STATE = {"h": StateLeaf((4, 16), "float32", 0.5), "steps": StateLeaf((), "int32")}
SPECS = {
    "weights/w": (None, "model"), "weights/u": ("...", "model"),
    "weights/heads": (None, "model", None, None), "state/h": ("data", "model"), "x": ("data", ...),
    "outputs/y": (),
}  # fmt: skip


def make_weights():
    rng = np.random.default_rng(0)
    shapes = {"w": (16, 16), "u": (8, 16), "v": (16, 4), "heads": (3, 4, 16, 8)}
    return {name: rng.normal(size=shape).astype(np.float32) for name, shape in shapes.items()}


def make_functions():
    structs = {name: struct(*x.shape) for name, x in make_weights().items()}
    core = {name: structs[name] for name in ("w", "u", "v")}
    heads = {"heads": structs["heads"]}
    state = {"h": struct(4, 16), "steps": struct(dtype="int32")}
    return [
        Function("order", order, (struct(6),), ("values",), ("input",)),
        Function(
            "step", recurrent, (core, state, struct(4, 8)), ("weights", "state", "x"),
            ("weights", "state", "input"), {"kind": "step", "length": 8},
        ),
        Function(
            "peek", peek, (state, struct(dtype="int32")), ("held", "which"), ("state", "input")
        ),
        Function(
            "attend", attend, (heads, struct(2, 8, 16)), ("weights", "x"), ("weights", "input")
        ),
    ]  # fmt: skip


def write(folder, **changes):
    given = {
        "weights": make_weights(), "specs": SPECS, "state": STATE, "primary": "step",
        "contract": {"eos": [0]}, "goldens": [{"prompt": [1, 2], "tokens": [3]}], **changes,
    }  # fmt: skip
    write_bundle(folder, given.pop("functions", None) or make_functions(), **given)


def layer(weights, x):
    """A model of tensors, whose rows are apart."""
    return {"y": jnp.tanh(x @ weights["k"]), "most": x.argmax(-1)}


LAYER = {"k": np.random.default_rng(0).standard_normal((8, 4), np.float32)}


def write_layer(folder, **more):
    """That with a symbolic batch."""
    (b,) = export.symbolic_shape("b")
    structs = {"k": struct(8, 4)}, struct(b, 8)
    function = Function("layer", layer, structs, ("w", "x"), ("weights", "input"))
    write_bundle(folder, [function], weights=LAYER, **more)


def write_tiny(folder, shape, layers=1, **more):
    """A tiny Llama of bytes, with random weights."""
    config = dataclasses.replace(named_config("tiny"), num_hidden_layers=layers)
    with fresh_source(config, 0) as source:
        write_llama_bundle(source, folder, shape, dtype="float32", **more)


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    """A bundle with every kind of function."""
    path = tmp_path_factory.mktemp("bundles") / "bundle"
    write(path)
    return path


@pytest.fixture(scope="session")
def mesh_of(devices8):
    def mesh(*sizes):
        names = ("data", "model") if len(sizes) == 2 else ("model",)
        axes = dict(zip(names, sizes, strict=True))
        return spmd.make_mesh(**axes, devices=devices8[: int(np.prod(sizes))])

    return mesh
