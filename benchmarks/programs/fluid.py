"""A step of an incompressible fluid in two dims, on a staggered grid (as jax-cfd has it).

The grid is periodic in x, and has walls in y. Velocities are moved by a flux-limited upwind scheme
in rolls and pads; diffusion is explicit; the pressure comes from conjugate gradients in a `while`
loop that runs until the residual is small.

Shapes: all fields are (X, Y); `u` is on faces in x, `v` on faces in y, `p` in centres.
"""

from typing import Any

import jax.numpy as jnp
from jax import lax

import spmd
from benchmarks.programs.program import Built, marked

CELLS = (2048, 1024)
DT, VISCOSITY = 1e-3, 1e-3
TOLERANCE, MOST_ROUNDS = 1e-5, 200


def build(mesh: spmd.Mesh) -> Built:
    """The step, both dims of the fields split over the mesh's two axes."""
    field = marked(mesh, tuple(mesh.axis_names), CELLS)
    return Built(step, (field, field), donate=(0, 1))


def step(u: Any, v: Any) -> tuple[Any, Any]:
    """Velocities after a step."""
    new_u = u + DT * (VISCOSITY * _laplacian(u) - _moved(u, u, v))
    new_v = v + DT * (VISCOSITY * _laplacian(v) - _moved(v, u, v))
    p = _solved((_before(new_u, 0) + _before(new_v, 1)) / DT)
    return new_u - DT * _after(p, 0), new_v - DT * _after(p, 1)


def _next(f: Any, dim: int) -> Any:
    """Each cell's next one: around the end in x, the last again before a wall in y."""
    return jnp.roll(f, -1, 0) if dim == 0 else jnp.pad(f[:, 1:], ((0, 0), (0, 1)), mode="edge")


def _after(f: Any, dim: int) -> Any:
    return _next(f, dim) - f


def _before(f: Any, dim: int) -> Any:
    """Less the one before: around the end in x; nothing goes through a wall in y."""
    return f - (jnp.roll(f, 1, 0) if dim == 0 else jnp.pad(f[:, :-1], ((0, 0), (1, 0))))


def _laplacian(f: Any) -> Any:
    return sum(_before(_after(f, dim), dim) for dim in (0, 1))


def _moved(f: Any, u: Any, v: Any) -> Any:
    """What leaves a cell less what enters it, by van Leer's limiter."""
    return sum(_before(_flux(f, speed, dim), dim) for dim, speed in enumerate((u, v)))


def _flux(f: Any, speed: Any, dim: int) -> Any:
    slope, behind, ahead = _after(f, dim), _before(f, dim), _next(_after(f, dim), dim)
    from_here = f + 0.5 * _limited(behind, slope)
    from_next = _next(f, dim) - 0.5 * _limited(ahead, slope)
    return jnp.where(speed > 0, speed * from_here, speed * from_next)


def _limited(a: Any, b: Any) -> Any:
    both = a * b
    return jnp.where(both > 0, 2 * both / jnp.where(both > 0, a + b, 1.0), 0.0)


def _solved(right: Any) -> Any:
    """The p whose Laplacian is `right`, less its mean."""
    right = right - right.mean()

    def goes_on(carry: Any) -> Any:
        *_, size, rounds = carry
        return (size > TOLERANCE**2 * jnp.vdot(right, right)) & (rounds < MOST_ROUNDS)

    def better(carry: Any) -> Any:
        p, rest, way, size, rounds = carry
        along = -_laplacian(way)
        far = size / jnp.vdot(way, along)
        p, rest = p + far * way, rest - far * along
        new = jnp.vdot(rest, rest)
        return p, rest, rest + new / size * way, new, rounds + 1

    first = -right
    start = jnp.zeros_like(right), first, first, jnp.vdot(first, first), 0
    return lax.while_loop(goes_on, better, start)[0]
