"""brax, mctx, ott: control, planning and transport."""

from typing import Any

import jax
import jax.numpy as jnp
import mctx
from brax import envs
from ott.geometry import pointcloud
from ott.problems.linear import linear_problem
from ott.solvers.linear import sinkhorn

from benchmarks.corpus.packages.program import Size, normal, training
from benchmarks.corpus.program import Made


def brax_rollout(size: Size) -> Made:
    """Steps of brax's physics in many environments."""
    batch, steps = size((8, 2), (4096, 8))
    with jax.ensure_compile_time_eval():
        env = envs.create("inverted_pendulum", batch_size=batch, backend="generalized")

    def rollout(state: Any, actions: Any) -> Any:
        return jax.lax.scan(lambda s, a: (env.step(s, a), s.reward), state, actions)

    actions = 0.1 * normal(1, steps, batch, env.action_size)
    return Made(rollout, (env.reset(jax.random.key(0)), actions), ("batch", "open"))


def mlp(params: Any, x: Any) -> Any:
    return jnp.tanh(x @ params["w_in"]) @ params["w_out"]


def weights(seed: int, inner: int, width: int, out: int) -> Any:
    return {
        "w_in": normal(seed, inner, width) / inner**0.5,
        "w_out": normal(seed + 1, width, out) / width**0.5,
    }


def mctx_search(size: Size) -> Made:
    """MuZero's tree search of mctx with a learned model."""
    batch, width, actions, simulations = size((8, 8, 4, 4), (1024, 512, 64, 16))

    def search(params: Any, states: Any, key: Any) -> Any:
        def predict(params: Any, states: Any) -> Any:
            return mlp(params["policy"], states), mlp(params["value"], states)[:, 0]

        def recurrent(params: Any, key: Any, action: Any, states: Any) -> Any:
            moved = jax.nn.one_hot(action, actions) @ params["action"]
            states = jnp.tanh(mlp(params["model"], states + moved))
            logits, value = predict(params, states)
            out = mctx.RecurrentFnOutput(
                reward=value, discount=jnp.full(batch, 0.9), prior_logits=logits, value=value
            )
            return out, states

        logits, value = predict(params, states)
        root = mctx.RootFnOutput(prior_logits=logits, value=value, embedding=states)
        found = mctx.muzero_policy(params, key, root, recurrent, simulations)
        return found.action, found.action_weights

    params = {
        "policy": weights(0, width, 4 * width, actions),
        "value": weights(2, width, 4 * width, 1),
        "model": weights(4, width, 4 * width, width),
        "action": normal(6, actions, width),
    }
    args = (params, normal(7, batch, width), jax.random.key(8))
    return Made(search, args, ("params", "batch", "open"))


def transport(size: Size) -> Made:
    """A step that learns a map by ott's entropic transport cost between point clouds."""
    points, dims, width = size((16, 4, 8), (4096, 256, 2048))

    def loss(params: Any, x: Any, y: Any) -> Any:
        geometry = pointcloud.PointCloud(x + mlp(params, x), y, epsilon=1.0)
        solver = sinkhorn.Sinkhorn(threshold=1e-3, max_iterations=20)
        return solver(linear_problem.LinearProblem(geometry)).reg_ot_cost

    x, y = normal(0, points, dims), 0.5 + normal(1, points, dims)
    return training(loss, weights(2, dims, width, dims), x, y)


PROGRAMS = (brax_rollout, mctx_search, transport)
