"""The programs of the corpus."""

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
from benchmarks.corpus.program import Program

PROGRAMS: list[Program] = [
    Program("equinox.attention", equinox_models.attention, heavy=True),
    Program("vision.resnet", vision.resnet, heavy=True),
    Program("vision.unet", vision.unet, heavy=True),
    Program("sequence.lstm", sequences.lstm, heavy=True),
    Program("sequence.experts", sequences.experts),
    Program("sequence.state_space", sequences.state_space),
    Program("numerics.linalg_gradients", numerics.linalg_gradients, heavy=True),
    Program("numerics.indexing", numerics.indexing, heavy=True),
    Program("numerics.control_flow", numerics.control_flow),
    Program("science.ode", science.ode, heavy=True),
    Program("science.signals", science.signals, heavy=True),
    Program("science.quantized", science.quantized),
    *sampling.programs(),
    Program("transforms.per_example", transforms.per_example, heavy=True),
    Program("transforms.remat", transforms.remat, heavy=True),
    Program("transforms.implicit", transforms.implicit),
    Program("manual.megatron_mlp", manual.megatron_mlp, on_mesh=True),
    Program("manual.ring_attention", manual.ring_attention, heavy=True, on_mesh=True),
    *optimizers.programs(),
]
