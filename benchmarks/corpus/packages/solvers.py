"""diffrax, optimistix and lineax: solvers, and gradients through them."""

from typing import Any

import diffrax
import equinox as eqx
import jax
import jax.numpy as jnp
import lineax as lx
import optimistix as optx

from benchmarks.corpus.packages.equinox import of_model
from benchmarks.corpus.packages.program import Size, normal
from benchmarks.corpus.program import Made


def field(size: Size) -> tuple[Any, int, int]:
    """A vector field, its dims and a batch."""
    dims, width, batch = size((4, 16, 8), (1024, 4096, 2048))
    model = eqx.nn.MLP(dims, dims, width, 2, jax.nn.tanh, key=jax.random.key(0))
    return model, dims, batch


def adaptive_ode(size: Size) -> Made:
    """diffrax.diffeqsolve with a PID controller: examples under vmap take different steps."""
    model, dims, batch = field(size)

    def loss(model: Any, y0: Any, y1: Any) -> Any:
        def solve(y0: Any) -> Any:
            return diffrax.diffeqsolve(
                diffrax.ODETerm(lambda t, y, args: model(y)),
                diffrax.Dopri5(),
                0.0,
                1.0,
                0.1,
                y0,
                stepsize_controller=diffrax.PIDController(rtol=1e-2, atol=1e-2),
                max_steps=16,
                throw=False,
            ).ys

        return jnp.mean((jax.vmap(solve)(y0)[:, 0] - y1) ** 2)

    return of_model(model, loss, normal(1, batch, dims), normal(2, batch, dims))


def equilibrium(size: Size) -> Made:
    """A deep equilibrium layer: optimistix's fixed point, differentiated implicitly."""
    dims, batch = size((8, 8), (2048, 2048))

    def loss(model: Any, x: Any) -> Any:
        def solve(x: Any) -> Any:
            solver = optx.FixedPointIteration(rtol=1e-5, atol=1e-5)
            adjoint = optx.ImplicitAdjoint(linear_solver=lx.GMRES(rtol=1e-5, atol=1e-5))
            return optx.fixed_point(
                lambda y, x: 0.3 * jnp.tanh(model(y) + x),
                solver,
                jnp.zeros(dims),
                args=x,
                max_steps=32,
                adjoint=adjoint,
                throw=False,
            ).value

        return jnp.mean(jax.vmap(solve)(x) ** 2)

    model = eqx.nn.Linear(dims, dims, key=jax.random.key(0))
    return of_model(model, loss, normal(1, batch, dims))


def least_squares(size: Size) -> Made:
    """optimistix.LevenbergMarquardt for each example of a batch."""
    points, batch = size((16, 8), (512, 4096))

    def fit(t: Any, y: Any) -> Any:
        def residuals(theta: Any, _: Any) -> Any:
            return theta[0] * jnp.exp(-theta[1] * t) + theta[2] - y

        solver = optx.LevenbergMarquardt(rtol=1e-4, atol=1e-4)
        start = jnp.array([1.0, 1.0, 0.0])
        return optx.least_squares(residuals, solver, start, max_steps=16, throw=False).value

    t = jnp.linspace(0, 2, points)
    y = 2 * jnp.exp(-0.7 * t) + 0.3 + 0.01 * normal(1, batch, points)
    return Made(jax.vmap(fit, (None, 0)), (t, y), ("open", "batch"))


PROGRAMS = (adaptive_ode, equilibrium, least_squares)
