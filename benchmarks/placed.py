r"""Programs whose best plan no mark suggests: marked at their arguments alone, and by hand.

Each row is one program over one axis of all devices at hand. `free` is marked at its arguments
alone, `by hand` has the marks that somebody added inside to make it fast, `jax.jit` compiles the
free one. Milliseconds are medians of runs, measured; `predicted` is for the same machine. All three
compute the same, which is checked.

Example:
    benchmarks/run placed --scale 1
    XLA_FLAGS=--xla_force_host_platform_device_count=8 JAX_PLATFORMS=cpu \
        benchmarks/run placed --scale 8
"""

import argparse
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

import spmd
from benchmarks.attention import milliseconds
from benchmarks.tables import print_table
from spmd.cli.flags import Parser, positive, words

BF16, F32 = jnp.bfloat16, jnp.float32
AXIS = "x"

Spec = tuple[Any, ...]
Mark = Callable[[Any, Spec], Any]
"""Marks a value inside of a program; the free one leaves it as it is."""


def leave(x: Any, _: Spec) -> Any:
    """Marks nothing."""
    return x


def put(x: Any, spec: Spec) -> Any:
    """Marks a value by hand."""
    return spmd.mark_sharding(x, _mesh(), spec)


class Built(NamedTuple):
    """A program: a function, the shapes, specs and types of its arguments, specs of its results."""

    fn: Callable[..., Any]
    args: Sequence[tuple[tuple[int, ...], Spec, Any]]
    out_specs: Any = None


def newton_schulz(x: Any) -> Any:
    """Matrices (L, rows, columns) -> nearly orthogonal ones, in five steps (Jordan et al. 2024)."""
    x = x / (jnp.sqrt(jnp.sum(x * x, axis=(1, 2), keepdims=True)) + 1e-7)
    for _ in range(5):
        gram = jnp.einsum("lij,lkj->lik", x, x)
        step = -4.775 * gram + 2.0315 * jnp.einsum("lij,ljk->lik", gram, gram)
        x = 3.4445 * x + jnp.einsum("lij,ljk->lik", step, x)
    return x


def muon(scale: int, mark: Mark) -> Built:
    """Newton-Schulz of a stack of matrices whose rows are split: best layer by layer."""
    shape, spec = (16, 2048 // scale, 8192 // scale), (None, AXIS, None)

    def update(w: Any, g: Any) -> Any:
        return w - 1e-3 * newton_schulz(mark(g, (AXIS, None, None)))

    return Built(update, [(shape, spec, F32)] * 2, spec)


def muon_unrolled(scale: int, mark: Mark) -> Built:
    """A step of `optax.contrib.muon` over matrices one by one: best stacked, and layer by layer."""
    shape, spec, count = (2048 // scale, 8192 // scale), (AXIS, None), 16
    names = [f"layer{i:02}" for i in range(count)]
    dims = optax.contrib.MuonDimensionNumbers((0,), (1,))
    optimizer = optax.contrib.muon(1e-3, muon_weight_dimension_numbers=dict.fromkeys(names, dims))
    stacked = optax.contrib.MuonDimensionNumbers((1,), (2,))
    by_hand = optax.contrib.muon(1e-3, muon_weight_dimension_numbers={"w": stacked})

    def step(*both: Any) -> Any:
        params, grads = both[:count], both[count:]
        if mark is put:  # one stack, split by layers
            one = {"w": jnp.stack(params)}
            given = {"w": put(jnp.stack(grads), (AXIS, None, None))}
            updates, _ = by_hand.update(given, by_hand.init(one), one)
            return list(optax.apply_updates(one, updates)["w"])
        named = dict(zip(names, params, strict=True))
        given = dict(zip(names, grads, strict=True))
        updates, _ = optimizer.update(given, optimizer.init(named), named)
        return list(optax.apply_updates(named, updates).values())

    return Built(step, [(shape, spec, F32)] * (2 * count), [spec] * count)


def linear_attention(scale: int, mark: Mark) -> Built:
    """Gated linear attention whose sequence is split, in chunks: best head by head."""
    batch, length, heads, width = 1, 65_536 // scale, 8, 128
    chunks, spec = length // 64, (None, AXIS)

    def cut(x: Any) -> Any:
        return x.reshape(batch, chunks, 64, heads, -1).transpose(1, 0, 3, 2, 4)

    def chunk(state: Any, x: Any) -> Any:
        q, k, v, g = x
        decay = jnp.cumsum(g[..., 0], -1)[..., None]
        out = jnp.einsum("bhck,bhkv->bhcv", q * jnp.exp(decay), state)
        near = jnp.tril(jnp.einsum("bhck,bhdk->bhcd", q, k))
        out = out + jnp.einsum("bhcd,bhdv->bhcv", near, v)
        state = state * jnp.exp(decay[:, :, -1:]) + jnp.einsum("bhck,bhcv->bhkv", k, v)
        return state, out

    def attended(*args: Any) -> Any:
        q, k, v, g = (mark(x, (None, None, AXIS)) for x in args)
        decays = -jax.nn.softplus(g)
        first = jnp.zeros((batch, heads, width, width), q.dtype)
        _, out = lax.scan(chunk, first, (cut(q), cut(k) / width, cut(v), cut(decays)))
        return out.transpose(1, 0, 3, 2, 4).reshape(batch, length, heads, width)

    args = [((batch, length, heads, width), spec, F32)] * 3
    return Built(attended, [*args, ((batch, length, heads), spec, F32)], spec)


def attention(scale: int, mark: Mark) -> Built:
    """Causal attention whose sequence is split: best head by head."""
    shape, spec = (1, 32_768 // scale, 32, 128), (None, AXIS)

    def attended(*args: Any) -> Any:
        q, k, v = (mark(x, (None, None, AXIS)) for x in args)
        return spmd.ops.attention(q, k, v, causal=True)

    return Built(attended, [(shape, spec, BF16)] * 3, spec)


PROGRAMS: dict[str, Callable[[int, Mark], Built]] = {
    "muon": muon,
    "muon-unrolled": muon_unrolled,
    "linear-attention": linear_attention,
    "attention": attention,
}


def _mesh() -> spmd.Mesh:
    return spmd.make_mesh(**{AXIS: len(jax.devices())})


def row(given: argparse.Namespace, name: str) -> list[str]:
    """One line of the table."""
    mesh, rng = _mesh(), np.random.default_rng(0)
    built = [PROGRAMS[name](given.scale, mark) for mark in (leave, put)]
    args = [
        spmd.mark_sharding(jnp.asarray(rng.standard_normal(shape, np.float32), dtype), mesh, spec)
        for shape, spec, dtype in built[0].args
    ]
    quiet = spmd.Options(progress=False)
    ours = [
        spmd.jit(each.fn, mesh=mesh, out_specs=each.out_specs, options=quiet).compile(*args)
        for each in built
    ]
    programs: list[Callable[..., Any]] = [jax.jit(built[0].fn), *ours]
    times, results = [], []
    for program in programs:
        results.append(jax.tree.map(np.asarray, program(*args)))
        times.append(milliseconds(given, program, args))
    apart = max(_apart(results[0], other) for other in results[1:])
    sent = [sum(c.bytes * (c.count or 1) for c in each.collectives) / 2**20 for each in ours]
    cells = [name, *(f"{t:.2f}" for t in times), f"{times[0] / times[1]:.2f}"]
    cells += [f"{times[2] / times[1]:.2f}", *(f"{each.cost * 1e3:.2f}" for each in ours)]
    return [*cells, *(f"{mib:.0f}" for mib in sent), f"{apart:.1e}"]


def _apart(one: Any, other: Any) -> float:
    """The largest difference of two results, of the largest entry of either."""
    pairs = zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True)
    return max(
        float(np.max(np.abs(a.astype(np.float64) - b)) / max(1e-30, np.max(np.abs(a))))
        for a, b in pairs
    )


def make_parser() -> Parser:
    """The flags."""
    parser = Parser("benchmarks/run placed", __doc__)
    add = parser.add_argument
    add("--programs", type=words, default=list(PROGRAMS), help="rows; all if left out")
    add("--scale", type=positive, default=1, help="divides the sizes, for slow machines")
    add("--steps", type=positive, default=10, help="runs that are timed")
    return parser


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints the table."""
    given = make_parser().parse_args(arguments)
    device, count = jax.devices()[0].device_kind, len(jax.devices())
    print(f"jax {jax.__version__}, {count} x {device}, sizes divided by {given.scale}\n")
    titles = ["program", "jax.jit, ms", "free, ms", "by hand, ms", "jax.jit / free"]
    titles += ["by hand / free", "free, predicted ms", "by hand, predicted ms"]
    titles += ["free, MiB sent", "by hand, MiB sent", "apart"]
    print_table(titles, (row(given, name) for name in given.programs))
