"""Programs with `jax.shard_map` regions, over the mesh axes `x` (manual) and what else there is.

Each is made for a mesh of jax; `x` is its first axis. `PROGRAMS` names them, `MODULES` are texts
of what jax itself does not write on a CPU.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

import spmd

X = (np.arange(16 * 12, dtype=np.float32).reshape(16, 12) % 7 - 3) / 4
W = np.sin(np.arange(12 * 8, dtype=np.float32)).reshape(12, 8)

Function = Callable[..., Any]


class Manual(NamedTuple):
    """A function of `X` and `W` on a mesh of jax with so many axes or more.

    Attributes:
      gradient: whether the gradients by both arguments are compared too.
    """

    name: str
    make: Callable[[Any], Function]
    gradient: bool
    axes: int


def manual(mesh: Any, body: Function, ins: Any, outs: Any, whole: bool = False) -> Function:
    """`shard_map` over `x` alone, or over all axes; nothing is said about replication."""
    names = set(mesh.axis_names) if whole else {"x"}
    return jax.shard_map(
        body, mesh=mesh, in_specs=ins, out_specs=outs, axis_names=names, check_vma=False
    )


def ring(mesh: Any) -> list[tuple[int, int]]:
    size = mesh.shape["x"]
    return [(i, (i + 1) % size) for i in range(size)]


# Collectives.


def reductions(mesh: Any) -> Function:
    def body(x: Any, w: Any) -> Any:
        y = x @ w
        return lax.psum(y, "x"), lax.pmean(y, "x"), lax.psum(jnp.int32(3) * y.shape[0], "x")

    return manual(mesh, body, (P("x"), P()), (P(), P(), P()))


def extremes(mesh: Any) -> Function:
    def body(x: Any, w: Any) -> Any:
        y = x @ w
        return lax.pmax(y, "x"), lax.pmin(y, "x")

    return manual(mesh, body, (P("x"), P()), (P(), P()))


def all_axes(mesh: Any) -> Function:
    """Manual over everything, checked: `pvary` and its transpose are in it."""
    names = tuple(mesh.axis_names)

    def body(x: Any, w: Any) -> Any:
        y = jnp.tanh(x @ w)
        return lax.psum(y.sum(0), names), y * lax.axis_index(names)

    return jax.shard_map(
        body, mesh=mesh, in_specs=(P(names), P()), out_specs=(P(), P(names)), check_vma=True
    )


def checked(mesh: Any) -> Function:
    """Manual over `x` alone, checked."""

    def body(x: Any, w: Any) -> Any:
        return lax.psum(jnp.sin(x @ w), "x")

    return jax.shard_map(
        body, mesh=mesh, in_specs=(P("x"), P()), out_specs=P(), axis_names={"x"}, check_vma=True
    )


def gathers(mesh: Any) -> Function:
    def body(x: Any, w: Any) -> Any:
        tiled = lax.all_gather(x * x, "x", axis=1, tiled=True)
        return tiled, lax.all_gather(x @ w, "x")

    return manual(mesh, body, (P("x"), P()), (P("x"), P("x")))


def gather_in_another_order(mesh: Any) -> Function:
    names = tuple(reversed(mesh.axis_names))

    def body(x: Any, w: Any) -> Any:
        return lax.all_gather(x @ w, names, tiled=True) * (1 + lax.axis_index(names))

    return manual(mesh, body, (P(names), P()), P(names), whole=True)


def scatters(mesh: Any) -> Function:
    def body(x: Any, w: Any) -> Any:
        y = x.reshape(-1, 12) @ w
        tiled = lax.psum_scatter(y, "x", scatter_dimension=1, tiled=True)
        return tiled, lax.psum_scatter(jnp.tile(y, (mesh.shape["x"], 1)), "x", tiled=True)

    return manual(mesh, body, (P("x"), P()), (P("x"), P("x")))


def exchanges(mesh: Any) -> Function:
    def body(x: Any, w: Any) -> Any:
        y = jnp.cos(x @ w)
        there = lax.all_to_all(y, "x", split_axis=1, concat_axis=0, tiled=True)
        return there, lax.all_to_all(there * y.sum(), "x", 0, 1, tiled=True)

    return manual(mesh, body, (P("x"), P()), (P("x"), P("x")))


def permutes(mesh: Any) -> Function:
    def body(x: Any, w: Any) -> Any:
        y = lax.ppermute(x @ w, "x", ring(mesh))
        return y, lax.ppermute(y + 1, "x", [(0, 1)])  # all but one receive nothing: zeros

    return manual(mesh, body, (P("x"), P()), (P("x"), P("x")))


def groups(mesh: Any) -> Function:
    """Groups that are no axis: pairs of devices half the axis apart, in turns."""
    size = mesh.shape["x"]
    pairs = [[i, size - 1 - i] for i in range(size // 2)]

    def body(x: Any, w: Any) -> Any:
        gathered = lax.all_gather(x @ w, "x", axis_index_groups=pairs, tiled=True)
        return lax.psum_scatter(gathered * 2, "x", axis_index_groups=pairs, tiled=True)

    return manual(mesh, body, (P("x"), P()), P("x"))


# Regions and control flow, inside and outside.


def scan_inside(mesh: Any) -> Function:
    def body(x: Any, w: Any) -> Any:
        def step(carry: Any, row: Any) -> Any:
            carry = lax.ppermute(jnp.tanh(carry * row[None, :]), "x", ring(mesh))
            return carry, carry.sum()

        last, sums = lax.scan(step, x @ w, w)
        return last, sums[None]

    return manual(mesh, body, (P("x"), P()), (P("x"), P("x")))


def inside_scan(mesh: Any) -> Function:
    step_of = manual(mesh, lambda x, w: x + lax.psum(jnp.sin(x @ w), "x"), (P("x"), P()), P("x"))

    def fn(x: Any, w: Any) -> Any:
        square = w @ w.T

        def step(carry: Any, scale: Any) -> Any:
            carry = step_of(carry * scale, square)
            return carry / 4, carry.mean()

        return lax.scan(step, x, jnp.linspace(0.5, 1, 3))

    return fn


def cond_inside(mesh: Any) -> Function:
    """Devices go different ways; what they do over the free axes is theirs."""

    def body(x: Any, w: Any) -> Any:
        even = lax.axis_index("x") % 2 == 0
        return lax.cond(even, lambda y: jnp.sin(y), lambda y: y * y.sum(), x @ w)

    return manual(mesh, body, (P("x"), P()), P("x"))


def inside_cond(mesh: Any) -> Function:
    yes = manual(mesh, lambda y: lax.psum(y, "x") + y, P("x"), P("x"))

    def fn(x: Any, w: Any) -> Any:
        y = x @ w
        return lax.cond(y.sum() > 0, yes, lambda y: y * 2, y)

    return fn


def while_inside(mesh: Any) -> Function:
    """Every device runs its own number of iterations."""

    def body(x: Any, w: Any) -> Any:
        def step(state: Any) -> Any:
            return state[0] + 1, state[1] * 1.5 + 1

        start = (jnp.int32(0), x @ w)
        return lax.while_loop(lambda s: s[0] < lax.axis_index("x"), step, start)[1]

    return manual(mesh, body, (P("x"), P()), P("x"))


def rematerialized(mesh: Any) -> Function:
    body = manual(mesh, lambda x, w: lax.psum(jnp.tanh(x @ w), "x"), (P("x"), P()), P())
    return jax.checkpoint(body)


def mapped(mesh: Any) -> Function:
    body = manual(mesh, lambda x, w: lax.psum(jnp.tanh(x @ w), "x") + 1, (P("x"), P()), P())

    return lambda x, w: jax.vmap(body, in_axes=(0, None))(jnp.stack([x, 2 * x, -x]), w)


def nested(mesh: Any) -> Function:
    """Over `x`, and inside of that over the second axis."""
    other = mesh.axis_names[1]

    def inner(x: Any, w: Any) -> Any:
        return lax.psum(x @ w + lax.axis_index(other), other)

    def body(x: Any, w: Any) -> Any:
        specs: dict[str, Any] = {"in_specs": (P(None, other), P(other)), "out_specs": P()}
        part = jax.shard_map(inner, **specs, axis_names={other}, check_vma=False)
        return lax.psum(jnp.sin(part(x, w)), "x"), x * 2

    return manual(mesh, body, (P("x"), P()), (P(), P("x")))


# What crosses the boundary.


def uneven(mesh: Any) -> Function:
    """Free axes that divide nothing: sums see no padding, whatever comes in or goes out."""
    own = spmd.Mesh(None, mesh.devices.shape, mesh.axis_names)
    other = mesh.axis_names[1]

    def body(y: Any) -> Any:
        z = jnp.cos(y) + lax.axis_index("x")
        return lax.psum(z, "x"), z.sum(1), z @ jnp.ones((5, 3)), jnp.flip(z, 1)

    def fn(x: Any, w: Any) -> Any:
        y = spmd.mark_sharding(x @ w[:, :5], own, ("x", other))
        return manual(mesh, body, P("x"), (P(), P("x"), P("x"), P("x")))(y)

    return fn


def uneven_across(mesh: Any) -> Function:
    """A dim split over a manual axis, and unevenly over a free one inside of that."""
    own = spmd.Mesh(None, mesh.devices.shape, mesh.axis_names)
    other = mesh.axis_names[1]
    rows = 3 * mesh.shape["x"]

    def body(y: Any) -> Any:
        return jnp.cumsum(y, 0), y.max(0, keepdims=True), y.sum()[None]

    def fn(x: Any, w: Any) -> Any:
        y = jnp.concatenate([x @ w, x @ w])[:rows]
        y = spmd.mark_sharding(y, own, (("x", other),))
        cumulative, most, total = manual(mesh, body, P("x"), (P("x"), P("x"), P("x")))(y)
        return spmd.mark_sharding(cumulative, own, (("x", other),)), most, total

    return fn


def marked_inside(mesh: Any) -> Function:
    own = spmd.Mesh(None, mesh.devices.shape, mesh.axis_names)
    other = mesh.axis_names[1]

    def body(x: Any, w: Any) -> Any:
        y = spmd.mark_sharding(x @ w, own, (None, other))
        return lax.psum(y, "x"), spmd.mark_sharding(y * 2, own, (..., None))

    return manual(mesh, body, (P("x"), P()), (P(), P("x")))


def scalars_and_several(mesh: Any) -> Function:
    """Scalars, integers, one value twice, a result that no device computes from its operands."""

    def body(x: Any, s: Any, n: Any) -> Any:
        y = x * s + n
        return y, y, lax.psum(y.sum(), "x"), s * 2, jnp.zeros((2, 3)), n + 1

    def fn(x: Any, w: Any) -> Any:
        call = manual(mesh, body, (P("x"), P(), P()), (P("x"), P("x"), P(), P(), P("x"), P()))
        return call(x, w.sum(), jnp.int32(3))

    return fn


def one_after_another(mesh: Any) -> Function:
    """What leaves one region enters the next one split in another way."""
    first = manual(mesh, lambda y: jnp.sin(y), P("x"), P("x"))
    second = manual(mesh, lambda y: lax.ppermute(y, "x", ring(mesh)), P(None, "x"), P(None, "x"))

    return lambda x, w: second(first(x @ w) * 2) @ w.T


WITHOUT_GRADIENT = (extremes, while_inside)
OF_TWO_AXES = (gather_in_another_order, nested, uneven, uneven_across, marked_inside)
PROGRAMS = tuple(
    Manual(make.__name__, make, make not in WITHOUT_GRADIENT, 2 if make in OF_TWO_AXES else 1)
    for make in (
        reductions, extremes, all_axes, checked, gathers, gather_in_another_order, scatters,
        exchanges, permutes, groups, scan_inside, inside_scan, cond_inside, inside_cond,
        while_inside, rematerialized, mapped, nested, uneven, uneven_across, marked_inside,
        scalars_and_several, one_after_another,
    )
)  # fmt: skip

# Texts.

CHANNEL = "channel_handle = #stablehlo.channel_handle<handle = 1, type = 1>"
EVEN_GROUPS = "replica_groups = dense<[[0, 2, 4, 6], [1, 3, 5, 7]]> : tensor<2x4xi64>"


def region(body: str, results: str = "%r", axes: str = '"x"') -> str:
    """A module on a mesh x=4, y=2 with one manual region over a `tensor<8x4xf32>`, `%a` inside."""
    return f"""
    sdy.mesh @mesh = <["x"=4, "y"=2]>
    func.func @main(%x: tensor<8x4xf32>) -> tensor<8x4xf32> {{
      %0 = sdy.manual_computation(%x) in_shardings=[<@mesh, [{{"x", ?}}, {{?}}]>]
          out_shardings=[<@mesh, [{{"x", ?}}, {{?}}]>] manual_axes={{{axes}}}
          (%a: tensor<2x4xf32>) {{
        {body}
        sdy.return {results} : tensor<2x4xf32>
      }} : (tensor<8x4xf32>) -> tensor<8x4xf32>
      return %0 : tensor<8x4xf32>
    }}"""


SUM = """({
    ^bb0(%p: tensor<f32>, %q: tensor<f32>):
      %s = stablehlo.add %p, %q : tensor<f32>
      stablehlo.return %s : tensor<f32>
  })"""
SEVERAL_OPERANDS = region(
    f"""%n = stablehlo.negate %a : tensor<2x4xf32>
        %r:2 = "stablehlo.all_reduce"(%a, %n) <{{{CHANNEL}, {EVEN_GROUPS},
          use_global_device_ids}}> {SUM}
          : (tensor<2x4xf32>, tensor<2x4xf32>) -> (tensor<2x4xf32>, tensor<2x4xf32>)
        %t = stablehlo.subtract %r#0, %r#1 : tensor<2x4xf32>""",
    "%t",
)
EVERYONE = region(
    f"""%r = "stablehlo.all_reduce"(%a) <{{{CHANNEL},
          replica_groups = dense<> : tensor<0x0xi64>}}> {SUM}
          : (tensor<2x4xf32>) -> tensor<2x4xf32>""",
    axes='"x", "y"',
)
# Devices along the free axis y have different ids. Their results may not differ: half of an id.
IDS = region(
    """%d = stablehlo.partition_id : tensor<ui32>
        %e = stablehlo.replica_id : tensor<ui32>
        %f = stablehlo.subtract %d, %e : tensor<ui32>
        %two = stablehlo.constant dense<2> : tensor<ui32>
        %row = stablehlo.divide %f, %two : tensor<ui32>
        %g = stablehlo.convert %row : (tensor<ui32>) -> tensor<f32>
        %h = stablehlo.broadcast_in_dim %g, dims = [] : (tensor<f32>) -> tensor<2x4xf32>
        %r = stablehlo.add %a, %h : tensor<2x4xf32>""",
    axes='"x", "y"',
)
NAMED = """
    sdy.mesh @mesh = <["x"=4, "y"=2]>
    func.func @main(%x: tensor<8x4xf32>) -> tensor<8x4xf32> {
      %0 = sdy.named_computation<"layer">(%x) in_shardings=[<@mesh, [{"x"}, {?}]>]
          out_shardings=[<@mesh, [{}, {"y"}]>] (%a: tensor<8x4xf32>) {
        %1 = stablehlo.sine %a : tensor<8x4xf32>
        sdy.return %1 : tensor<8x4xf32>
      } : (tensor<8x4xf32>) -> tensor<8x4xf32>
      %2 = sdy.named_computation<"plain">(%0) (%a: tensor<8x4xf32>) {
        %3 = stablehlo.negate %a : tensor<8x4xf32>
        sdy.return %3 : tensor<8x4xf32>
      } : (tensor<8x4xf32>) -> tensor<8x4xf32>
      return %2 : tensor<8x4xf32>
    }"""
MODULES = (SEVERAL_OPERANDS, EVERYONE, IDS, NAMED)
BROADCAST = region(
    f"""%r = "stablehlo.collective_broadcast"(%a) <{{{CHANNEL}, {EVEN_GROUPS}}}>
          : (tensor<2x4xf32>) -> tensor<2x4xf32>"""
)
