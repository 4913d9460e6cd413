"""e3nn-jax: graphs and geometry."""

from typing import Any

import e3nn_jax as e3nn
import jax
import jax.numpy as jnp
from flax import linen

from benchmarks.corpus.packages.program import Size, integers, normal, training
from benchmarks.corpus.program import Made


def equivariant(size: Size) -> Made:
    """Message passing of e3nn: spherical harmonics, tensor products, scatters."""
    nodes, edges, channels = size((8, 16, 2), (8192, 32768, 64))
    inner = e3nn.Irreps(f"{channels}x0e + {channels}x1o")

    class Layer(linen.Module):
        @linen.compact
        def __call__(self, x: Any, positions: Any, senders: Any, receivers: Any) -> Any:
            vectors = e3nn.IrrepsArray("1o", positions[receivers] - positions[senders])
            harmonics = e3nn.spherical_harmonics("0e + 1o + 2e", vectors, True)
            sent = e3nn.flax.Linear(inner)(e3nn.IrrepsArray(inner, x))[senders]
            messages = e3nn.tensor_product(sent, harmonics, filter_ir_out="0e + 1o")
            radial = e3nn.flax.MultiLayerPerceptron((32, messages.irreps.num_irreps), jax.nn.gelu)
            lengths = jnp.sum(vectors.array**2, -1, keepdims=True)
            messages = messages * radial(lengths)
            gathered = e3nn.scatter_sum(messages, dst=receivers, output_size=nodes)
            return e3nn.flax.Linear(inner)(gathered).array

    model = Layer()
    points = (normal(0, nodes, inner.dim), normal(1, nodes, 3))
    batch = (*points, integers(2, nodes, edges), integers(3, nodes, edges))

    def loss(params: Any, *batch: Any) -> Any:
        out: Any = model.apply(params, *batch)
        return jnp.mean(out**2)

    return training(loss, model.init(jax.random.key(0), *batch), *batch)


PROGRAMS = (equivariant,)
