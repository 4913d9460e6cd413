"""numpyro, flowjax, blackjax: inference and flows."""

from typing import Any

import blackjax
import flowjax.distributions
import flowjax.flows
import jax
import jax.numpy as jnp
import numpyro
import numpyro.distributions as dist
from numpyro.infer import SVI, Trace_ELBO, autoguide

from benchmarks.corpus.packages.equinox import of_model
from benchmarks.corpus.packages.program import Size, integers, made_eagerly, normal
from benchmarks.corpus.program import Made


def regression(x: Any, y: Any) -> None:
    """Logistic regression with a hidden layer, as a numpyro model."""
    width = 2 * x.shape[1]
    w_in = numpyro.sample("w_in", dist.Normal(jnp.zeros((x.shape[1], width)), 1.0).to_event(2))
    scale = numpyro.sample("scale", dist.HalfCauchy(1.0))
    w_out = numpyro.sample("w_out", dist.Normal(jnp.zeros(width), scale).to_event(1))
    with numpyro.plate("data", x.shape[0]):
        numpyro.sample("y", dist.Bernoulli(logits=jnp.tanh(x @ w_in) @ w_out), obs=y)


def observations(size: Size) -> tuple[Any, Any]:
    batch, dims = size((16, 4), (16384, 1024))
    return normal(1, batch, dims) / dims**0.5, integers(2, 2, batch)


def svi(size: Size) -> Made:
    """Numpyro's SVI.update with AutoNormal."""
    x, y = observations(size)
    guide = autoguide.AutoNormal(regression)
    inference = SVI(regression, guide, numpyro.optim.Adam(1e-2), Trace_ELBO(num_particles=2))
    state = inference.init(jax.random.key(0), x, y)
    return Made(inference.update, (state, x, y), ("params", "batch", "batch"))


@made_eagerly
def coupling_flow(size: Size) -> Made:
    """Flowjax's coupling flow of rational quadratic splines, its layers scanned."""
    dims, width, layers, batch = size((4, 8, 2, 16), (64, 2048, 4, 8192))
    model = flowjax.flows.coupling_flow(
        jax.random.key(0),
        base_dist=flowjax.distributions.Normal(jnp.zeros(dims)),
        transformer=flowjax.bijections.RationalQuadraticSpline(knots=4, interval=4),
        nn_width=width,
        flow_layers=layers,
    )

    def loss(model: Any, x: Any) -> Any:
        return -model.log_prob(x).mean()

    return of_model(model, loss, normal(1, batch, dims))


def blackjax_nuts(size: Size) -> Made:
    """A transition of blackjax's NUTS for each of several chains."""
    chains, dims = size((8, 4), (1024, 512))

    def step(positions: Any, precision: Any, keys: Any) -> Any:
        def density(z: Any) -> Any:
            return -0.5 * z @ precision @ z

        kernel = blackjax.nuts(density, 0.1, jnp.ones(dims), max_num_doublings=3)
        states = jax.vmap(kernel.init)(positions)
        return jax.vmap(kernel.step)(keys, states)[0]

    root = normal(1, dims, dims) / dims**0.5
    keys = jax.random.split(jax.random.key(2), chains)
    args = (normal(0, chains, dims), root @ root.T + jnp.eye(dims), keys)
    return Made(step, args, ("batch", "params", "open"))


PROGRAMS = (svi, coupling_flow, blackjax_nuts)
