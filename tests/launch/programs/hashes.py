"""Prints a hash of what a few training steps are compiled to, of all that could depend on the run.

Nothing is run: eight virtual devices are enough.
"""

import json

import jax
import jax.numpy as jnp
import numpy as np

import spmd
from benchmarks.corpus import sequences
from benchmarks.corpus.program import mark
from spmd.launch.agree import digest, without_locations
from tests.programs import llama


def convolutions(mesh: spmd.Mesh) -> spmd.Lowered:
    """The gradient of two convolutions, split over batch and channels."""

    def loss(params, images):
        h = images
        for w in params:
            h = jax.nn.relu(jax.lax.conv_general_dilated(h, w, (1, 1), "SAME"))
        return jnp.mean(h * h)

    params = [np.ones((8, 4, 3, 3), np.float32), np.ones((8, 8, 3, 3), np.float32)]
    step = spmd.jit(jax.grad(loss), mesh=mesh, in_specs=(None, ("data", None, "model")))
    return step.lower(params, np.ones((8, 4, 16, 16), np.float32))


def experts(mesh: spmd.Mesh) -> spmd.Lowered:
    """A mixture of experts, as the corpus has it."""
    made = sequences.experts()
    args = [mark(arg, word, mesh) for arg, word in zip(made.args, made.specs, strict=True)]
    return spmd.jit(made.fn, mesh=mesh).lower(*args)


def main() -> None:
    """Llama in a scan and unrolled; experts; convolutions."""
    mesh = spmd.make_mesh(data=2, model=4)
    lowered = {
        "llama": llama(mesh, "adamw", scan=True).lower(),
        "llama, unrolled": llama(mesh, "adafactor", scan=False).lower(),
        "experts": experts(mesh),
        "convolutions": convolutions(mesh),
    }
    texts = {name: without_locations(made.as_text("emitted")) for name, made in lowered.items()}
    print(json.dumps({name: digest(text) for name, text in texts.items()}))


if __name__ == "__main__":
    main()
