"""A residual network with batch norm: split by batch, and by batch and rows of the image."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax

import spmd
from benchmarks.corpus.vision import batch_norm, conv
from benchmarks.programs.program import Built, Program, marked, on_meshes, structs_of, training_step

BATCH, SIZE, WIDTHS, BLOCKS, CLASSES = 32, 32, (32, 64, 128), 2, 10


def resnet_programs() -> list[Program]:
    """Data-parallel on every axis of the mesh, and with images cut into strips over `model`."""
    return [
        *on_meshes("resnet/data-parallel", partial(build, spec=("data",)), "8x1"),
        *on_meshes("resnet/data-parallel", partial(build, spec=(("data", "model"),)), "4x2"),
        *on_meshes("resnet/split-rows", partial(build, spec=("data", "model")), "4x2", "2x4"),
        *on_meshes(
            "resnet/split-rows-columns", partial(build, spec=(None, "data", "model")), "4x2"
        ),
    ]


def build(mesh: spmd.Mesh, spec: tuple[Any, ...]) -> Built:
    """A training step with SGD and momentum; parameters are whole, images split by `spec`."""
    optimizer = optax.sgd(1e-2, momentum=0.9)

    def loss_fn(params: Any, images: Any, labels: Any) -> Any:
        logits = forward(params, images)
        return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()

    step = training_step(jax.value_and_grad(loss_fn), optimizer)
    params = jax.tree.map(lambda s: marked(mesh, (), s.shape, s.dtype), structs_of(init))
    images = marked(mesh, spec, (BATCH, SIZE, SIZE, 3))
    labels = marked(mesh, spec[:1], (BATCH,), jnp.int32)
    return Built(step, (params, structs_of(optimizer.init, params), images, labels), donate=(0, 1))


def init() -> dict[str, Any]:
    """Parameters, all zero: only their shapes matter."""
    params: dict[str, Any] = {"stem": conv_params(3, WIDTHS[0])}
    before = WIDTHS[0]
    for stage, width in enumerate(WIDTHS):
        for block in range(BLOCKS):
            params[f"{stage}-{block}"] = {
                "first": conv_params(before, width),
                "second": conv_params(width, width),
            }
            if before != width:
                params[f"{stage}-{block}"]["skip"] = jnp.zeros((1, 1, before, width))
            before = width
    return {**params, "head": jnp.zeros((before, CLASSES))}


def conv_params(before: int, after: int) -> dict[str, Any]:
    """A 3x3 kernel and the batch norm behind it."""
    norm = {"scale": jnp.ones(after), "bias": jnp.zeros(after)}
    return {"kernel": jnp.zeros((3, 3, before, after)), **norm}


def forward(params: Any, images: Any) -> Any:
    """Logits."""
    x = jax.nn.relu(conv_norm(images, params["stem"]))
    for stage in range(len(WIDTHS)):
        for block in range(BLOCKS):
            p = params[f"{stage}-{block}"]
            stride = 2 if "skip" in p else 1
            h = jax.nn.relu(conv_norm(x, p["first"], stride))
            skip = conv(x, p["skip"], stride) if "skip" in p else x
            x = jax.nn.relu(skip + conv_norm(h, p["second"]))
    return x.mean((1, 2)) @ params["head"]


def conv_norm(x: Any, p: Any, stride: int = 1) -> Any:
    """A convolution, normalized over batch and positions."""
    return batch_norm(conv(x, p["kernel"], stride), p)
