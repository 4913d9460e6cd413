"""jraph, e3nn-jax and jax-md: graphs, geometry and particles."""

from typing import Any

import e3nn_jax as e3nn
import jax
import jax.numpy as jnp
import jax_md
import jraph
from flax import linen

from benchmarks.corpus.packages.program import Size, integers, normal, training
from benchmarks.corpus.program import Made


def graph(size: Size) -> Any:
    """A graph with random edges, as jraph's tuple."""
    nodes, edges, width = size((16, 32, 8), (16384, 65536, 512))
    return jraph.GraphsTuple(
        nodes=normal(0, nodes, width),
        edges=normal(1, edges, width),
        senders=integers(2, nodes, edges),
        receivers=integers(3, nodes, edges),
        globals=normal(4, 1, width),
        n_node=jnp.array([nodes]),
        n_edge=jnp.array([edges]),
    )


class Interaction(linen.Module):
    @linen.compact
    def __call__(self, graph: Any) -> Any:
        width = graph.nodes.shape[-1]

        def dense() -> Any:
            return jraph.concatenated_args(
                linen.Sequential([linen.Dense(2 * width), linen.gelu, linen.Dense(width)])
            )

        return jraph.GraphNetwork(dense(), dense(), dense())(graph)


def graph_network(size: Size) -> Made:
    """jraph.GraphNetwork: edges, nodes and globals are updated."""
    model, example = Interaction(), graph(size)

    def loss(params: Any, graph: Any) -> Any:
        out: Any = model.apply(params, graph)
        return jnp.mean(out.nodes**2)

    return training(loss, model.init(jax.random.key(0), example), example)


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


def molecular_dynamics(size: Size) -> Made:
    """jax-md: Langevin dynamics of particles that repel each other, all pairs."""
    particles, steps = size((16, 3), (8192, 10))
    with jax.ensure_compile_time_eval():
        displacement, shift = jax_md.space.periodic(10.0)
        energy = jax_md.energy.soft_sphere_pair(displacement)
        init, apply = jax_md.simulate.nvt_langevin(energy, shift, 1e-3, 0.1)

    def simulate(state: Any) -> Any:
        return jax.lax.fori_loop(0, steps, lambda _, state: apply(state), state)

    positions = 10 * jax.random.uniform(jax.random.key(0), (particles, 2))
    return Made(simulate, (init(jax.random.key(1), positions),), ("batch",))


PROGRAMS = (graph_network, equivariant, molecular_dynamics)
