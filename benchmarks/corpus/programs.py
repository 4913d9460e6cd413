"""The corpus as a table, a line for each program: `python -m benchmarks.corpus.programs`."""

from typing import Any

import jax

import spmd
from benchmarks.corpus import (
    equinox_models,
    manual,
    numerics,
    optimizers,
    sampling,
    science,
    sequences,
    transforms,
    vision,
)
from benchmarks.corpus.program import MESHES, QUICK_MESH, Program

MODELS: list[Program] = [
    Program("equinox.mlp", equinox_models.mlp, heavy=True),
    Program("equinox.attention", equinox_models.attention, heavy=True),
    Program("vision.resnet", vision.resnet, heavy=True),
    Program("vision.unet", vision.unet, heavy=True),
    Program("sequence.lstm", sequences.lstm, heavy=True),
    Program("sequence.spectral", sequences.spectral),
    Program("sequence.experts", sequences.experts),
    Program("sequence.ragged_experts", sequences.ragged_experts, heavy=True),
    Program("sequence.state_space", sequences.state_space),
    Program("sequence.mixed_precision", sequences.mixed_precision),
]

FUNCTIONS: list[Program] = [
    Program("numerics.linalg", numerics.linalg, heavy=True),
    Program("numerics.linalg_gradients", numerics.linalg_gradients, heavy=True),
    Program("numerics.einsum", numerics.einsum, heavy=True),
    Program("numerics.sorting", numerics.sorting, heavy=True),
    Program("numerics.indexing", numerics.indexing, heavy=True),
    Program("numerics.cumulative", numerics.cumulative, heavy=True),
    Program("numerics.control_flow", numerics.control_flow),
    Program("science.ode", science.ode, heavy=True),
    Program("science.minimize", science.minimize, heavy=True),
    Program("science.special", science.special, heavy=True),
    Program("science.signals", science.signals, heavy=True),
    Program("science.quantized", science.quantized),
    *sampling.programs(),
    Program("transforms.jacobians", transforms.jacobians, heavy=True),
    Program("transforms.per_example", transforms.per_example, heavy=True),
    Program("transforms.remat", transforms.remat, heavy=True),
    Program("transforms.custom_vjp", transforms.custom_vjp),
    Program("transforms.implicit", transforms.implicit),
]

MANUAL: list[Program] = [
    Program("manual.megatron_mlp", manual.megatron_mlp, on_mesh=True),
    Program("manual.ring_attention", manual.ring_attention, heavy=True, on_mesh=True),
    Program("manual.ring_matmul", manual.ring_matmul, heavy=True, on_mesh=True),
]

PROGRAMS: list[Program] = [*MODELS, *FUNCTIONS, *MANUAL, *optimizers.programs()]


def specs(program: Program) -> tuple[str, ...]:
    """The program's marks, without running what it makes its arguments with."""
    found: list[tuple[str, ...]] = []

    def make() -> Any:
        made = program.made(spmd.make_mesh(**MESHES[QUICK_MESH]))
        found.append(made.specs)
        return jax.tree.leaves(made.args)

    jax.eval_shape(make)
    return found[0]


def table() -> list[str]:
    """Name, first line of the docstring, marks and whether it is heavy, tab-separated."""
    lines = []
    for program in PROGRAMS:
        what = (program.make.__doc__ or "").partition("\n")[0].strip()
        marks = ", ".join(specs(program))
        lines.append("\t".join([program.name, what, marks, str(program.heavy)]))
    return lines


if __name__ == "__main__":
    print("\n".join(table()))
