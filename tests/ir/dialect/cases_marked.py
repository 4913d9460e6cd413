"""Marked programs, one per theme, on which our propagation is laid beside Shardy's."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax

import spmd
from benchmarks.shardy import marked_text

MESH = spmd.Mesh(None, (4, 2), ("data", "model"))
CUBE = spmd.Mesh(None, (2, 2, 2), ("x", "y", "z"))
TOPOLOGY = spmd.Topology("cpu:8")


class Arg(NamedTuple):
    struct: jax.ShapeDtypeStruct
    at: Any


class Marked(NamedTuple):
    """A function and its arguments: trees of `Arg`."""

    name: str
    fn: Callable[..., Any]
    args: tuple[Any, ...]
    mesh: spmd.Mesh = MESH

    def text(self) -> str:
        structs, specs = (jax.tree.map(pick, self.args, is_leaf=is_arg) for pick in PARTS)
        jitted = spmd.jit(self.fn, mesh=self.mesh, in_specs=specs)
        return marked_text(jitted.request(*structs, topology=TOPOLOGY))


PARTS = (lambda a: a.struct, lambda a: a.at)


def is_arg(x: Any) -> bool:
    return isinstance(x, Arg)


def arg(*shape: int, at: Any = None, dtype: Any = np.float32) -> Arg:
    return Arg(jax.ShapeDtypeStruct(shape, dtype), at)


ints = partial(arg, dtype=np.int32)


def mark(x: Any, *spec: Any) -> Any:
    return spmd.mark_sharding(x, MESH, spec)


def gradients(fn: Callable[..., Any]) -> Callable[..., Any]:
    def all_of(*args: Any) -> Any:
        return jax.grad(lambda *a: (fn(*a) ** 2).sum(), tuple(range(len(args))))(*args)

    return all_of


# Loops and branches.


def scanned(x: Any, ws: Any) -> Any:
    return lax.scan(lambda h, w: (jnp.tanh(h @ w), h.sum(1)), x, ws)


def scan_marked_inside(x: Any, w: Any) -> Any:
    def body(h: Any, _: Any) -> Any:
        return jnp.tanh(mark(h, "data", "model") @ w), None

    return lax.scan(body, x + 1, None, length=3)[0]


def while_loop(x: Any, y: Any) -> Any:
    def body(state: Any) -> Any:
        i, a, b = state
        return i + 1, a * 2 + b, jnp.sin(b)

    return lax.while_loop(lambda s: (s[0] < 5) & (s[1].sum() < 1e3), body, (0, x, y))


def swapped_carries(x: Any, y: Any) -> Any:
    return lax.fori_loop(0, 4, lambda _, s: (s[1] * 2, s[0] + 1), (x, y))


def branches(x: Any, y: Any, flag: Any) -> Any:
    return lax.cond(flag > 0, lambda a, b: a + b, lambda a, b: jnp.sin(b), x, y)


def switch(x: Any, w: Any, which: Any) -> Any:
    return lax.switch(which, [lambda a: a @ w, lambda a: jnp.tanh(a), lambda a: a * 3], x)


# Calls.


@jax.jit
def layer(x: Any, w: Any) -> Any:
    return jax.nn.gelu(x @ w)


@jax.custom_vjp
def clipped(x: Any) -> Any:
    return jnp.sin(x) * 2


clipped.defvjp(lambda x: (clipped(x), x), lambda x, g: (jnp.clip(g, -1, 1) * jnp.cos(x),))


def rematerialized(x: Any, v: Any, w: Any) -> Any:
    block = jax.checkpoint(lambda h, w: jnp.tanh(h @ w) + h)
    return block(block(x, v), w)


# Models.


def mlp(x: Any, w_in: Any, w_out: Any) -> Any:
    return jax.nn.relu(x @ w_in) @ w_out


def attention(x: Any, wq: Any, wk: Any, wv: Any, wo: Any) -> Any:
    b, s, _ = x.shape
    q, k, v = ((x @ w).reshape(b, s, 4, -1) for w in (wq, wk, wv))
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / 2
    scores = jnp.where(jnp.tril(jnp.ones((s, s), bool)), scores, -1e9)
    return jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), v).reshape(b, s, -1) @ wo


def experts(x: Any, gate: Any, up: Any, down: Any) -> Any:
    weights = jax.nn.softmax(x @ gate)
    h = jax.nn.gelu(jnp.einsum("bsd,edf->ebsf", x, up))
    return jnp.einsum("ebsf,efd,bse->bsd", h, down, weights)


def conv(x: Any, k: Any, stride: int = 1, **options: Any) -> Any:
    return lax.conv_general_dilated(
        x, k, (stride, stride), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"), **options
    )


def resnet_block(x: Any, k1: Any, k2: Any, scale: Any) -> Any:
    h = jax.nn.relu(conv(x, k1) * scale)
    h = (h - h.mean((0, 1, 2))) * lax.rsqrt(h.var((0, 1, 2)) + 1e-5)
    return jax.nn.relu(x + conv(h, k2))


def adam_step(params: Any, grads: Any) -> Any:
    optimizer = optax.adam(1e-3)
    updates, state = optimizer.update(grads, optimizer.init(params), params)
    return optax.apply_updates(params, updates), state


def embedding(ids: Any, table: Any) -> Any:
    return jnp.take(table, ids, axis=0) * 2


def layer_norm(x: Any, scale: Any, bias: Any) -> Any:
    mean = x.mean(-1, keepdims=True)
    var = ((x - mean) ** 2).mean(-1, keepdims=True)
    return (x - mean) * lax.rsqrt(var + 1e-5) * scale + bias


def cross_entropy(logits: Any, labels: Any) -> Any:
    return -jnp.take_along_axis(jax.nn.log_softmax(logits), labels[..., None], -1).mean()


BOTH = arg(8, 16, at=("data", "model"))
ROWS = arg(8, 16, at=("data", ...))
COLUMNS = arg(8, 16, at=(..., "model"))
PLAIN = arg(8, 16)
SQUARE = arg(16, 16)
SQUARE_ROWS = arg(16, 16, at=("data", ...))
XW = (ROWS, arg(16, 32, at=(..., "model")))
MLP = (
    arg(16, 16, at=("data", None)),
    arg(16, 32, at=("data", "model")),
    arg(32, 16, at=("model", "data")),
)
ATTENTION = (
    arg(8, 16, 32, at=("data", None, None)),
    *(arg(32, 32, at=(None, "model")) for _ in range(3)),
    arg(32, 32, at=("model", None)),
)
EXPERTS = (
    arg(8, 16, 32, at=("data", None, None)),
    arg(32, 4),
    arg(4, 32, 64, at=("model", ..., ...)),
    arg(4, 64, 32),
)
IMAGE = arg(8, 16, 16, 8, at=("data", ..., ..., ...))
KERNEL = arg(3, 3, 8, 16, at=(..., ..., ..., "model"))

MARKED: tuple[Marked, ...] = (
    # Elementwise.
    Marked("elementwise.chain", lambda x: jnp.exp(jnp.sin(x) * 2 + x), (BOTH,)),
    Marked("elementwise.backward", lambda x, y: mark(x * y + 1, "data", "model"), (PLAIN, PLAIN)),
    Marked("elementwise.both_ends", lambda x, y: jnp.where(x > 0, x, y) + y, (ROWS, COLUMNS)),
    Marked("elementwise.longer_wins", lambda x, y: x + y,
           (SQUARE_ROWS, arg(16, 16, at=(("data", "model"), ...)))),
    Marked("elementwise.uneven", lambda x, y: jnp.sin(mark(x + y, "data", ...)) * 2,
           (arg(10, 16), arg(10, 16))),
    Marked("elementwise.shared_constant", lambda x, y: (x + 1, y + 1),
           (arg(8, 16, at=("data", None)), arg(8, 16, at=(None, "model")))),
    # Closed and open dims.
    Marked("dims.closed_argument", lambda x, y: x * 2 + y, (arg(8, 16, at=("data", None)), BOTH)),
    Marked("dims.open_argument", lambda x, y: x * 2 + y, (ROWS, BOTH)),
    Marked("dims.closed_inside", lambda x: jnp.sin(mark(jnp.cos(x), "data", None)) + x, (BOTH,)),
    Marked("dims.open_inside", lambda x, y: jnp.sin(mark(x, "data", ...)) + y, (PLAIN, COLUMNS)),
    Marked("dims.replicated_inside", lambda x: jnp.sin(mark(x * 2, None, None)) + 1, (BOTH,)),
    # dot_general.
    Marked("dot.free_dims", lambda x, w: x @ w, XW),
    Marked("dot.contracting", lambda x, w: x @ w, (COLUMNS, arg(16, 32))),
    Marked("dot.batch", lambda x, y: jnp.einsum("bik,bkj->bij", x, y),
           (arg(8, 4, 6, at=("data", ..., "model")), arg(8, 6, 4))),
    Marked("dot.backward", lambda x, w: mark(x @ w, "data", "model"), (PLAIN, arg(16, 32))),
    Marked("dot.many_dims", lambda x, y: jnp.einsum("abcd,bdef->abcef", x, y),
           (arg(2, 4, 6, 8, at=("model", "data", ..., ...)), arg(4, 8, 6, 4))),
    Marked("dot.outer", lambda x, y: jnp.outer(x, y),
           (arg(8, at=("data",)), arg(16, at=("model",)))),
    Marked("dot.vector", lambda x, v: x @ v, (BOTH, arg(16))),
    Marked("dot.axis_wanted_twice", lambda x, w: x @ w, (ROWS, arg(16, 32, at=(..., "data")))),
    Marked("dot.gradients", gradients(lambda x, w: x @ w), XW),
    # Reshape, transpose, broadcast.
    Marked("reshape.split", lambda x: x.reshape(4, 2, 16) * 2, (BOTH,)),
    Marked("reshape.merge", lambda x: x.reshape(8, 16) * 2,
           (arg(4, 2, 16, at=("data", "model", ...)),)),
    Marked("reshape.split_sub_axis", lambda x: x.reshape(2, 4, 16) + 1, (ROWS,)),
    Marked("reshape.merge_sub_axis", lambda x: mark(x.reshape(8, 16), "data", ...),
           (arg(2, 4, 16),)),
    Marked("reshape.split_both_axes", lambda x: jnp.sin(x.reshape(4, 8)),
           (arg(32, at=(("data", "model"),)),)),
    Marked("reshape.size_one", lambda x: x.reshape(8, 1, 16, 1) + 1, (BOTH,)),
    Marked("reshape.drop_size_one", lambda x: x.reshape(8, 16) + 1,
           (arg(1, 8, 1, 16, at=(..., "data", ..., "model")),)),
    Marked("reshape.minor_of_merge", lambda x: x.reshape(8, 16) * 2,
           (arg(4, 2, 16, at=(..., "model", ...)),)),
    Marked("reshape.unrelated", lambda x: x.reshape(8, 3) * 2, (arg(6, 4, at=("model", ...)),)),
    Marked("reshape.heads", lambda x: x.reshape(8, 16, 4, 8).swapaxes(1, 2),
           (arg(8, 16, 32, at=("data", ..., "model")),)),
    Marked("transpose", lambda x: x.transpose(2, 0, 1) * 2,
           (arg(4, 8, 16, at=("model", "data", ...)),)),
    Marked("broadcast.rows", lambda x, b: x + b, (BOTH, arg(16))),
    Marked("broadcast.size_one", lambda x, c: x * c, (BOTH, arg(8, 1))),
    Marked("broadcast.backward", lambda b: mark(jnp.broadcast_to(b, (8, 16)), "data", "model"),
           (arg(16),)),
    # Reductions.
    Marked("reduce.sum", lambda x: (x.sum(0), x.sum(1), x.sum()), (BOTH,)),
    Marked("reduce.backward", lambda x: mark(x.sum(1), "data"), (PLAIN,)),
    Marked("reduce.argmax", lambda x: (x.argmax(1), x.max(1)), (BOTH,)),
    Marked("reduce.softmax", jax.nn.softmax, (BOTH,)),
    Marked("reduce.layer_norm", layer_norm, (BOTH, arg(16), arg(16))),
    Marked("reduce.cumsum", lambda x: jnp.cumsum(x, 1), (ROWS,)),
    Marked("reduce.cumsum_split", lambda x: jnp.cumsum(x, 1), (COLUMNS,)),
    # Joining and cutting.
    Marked("concatenate.other_dim", lambda x, y: jnp.concatenate([x, y], 1), (ROWS, arg(8, 8))),
    Marked("concatenate.own_dim", lambda x, y: jnp.concatenate([x, y], 1), (COLUMNS, PLAIN)),
    Marked("stack", lambda x, y: jnp.stack([x, y]), (BOTH, PLAIN)),
    Marked("pad.other_dim", lambda x: jnp.pad(x, ((0, 0), (1, 1))), (ROWS,)),
    Marked("pad.own_dim", lambda x: jnp.pad(x, ((0, 0), (0, 16))), (COLUMNS,)),
    Marked("slice.other_dim", lambda x: x[:, 2:10], (ROWS,)),
    Marked("slice.own_dim", lambda x: x[:, :8], (BOTH,)),
    Marked("slice.halves", lambda x: jnp.sin(x[:, :8]) * x[:, 8:], (BOTH,)),
    Marked("reverse", lambda x: x[:, ::-1], (BOTH,)),
    Marked("dynamic_slice", lambda x, i: lax.dynamic_slice(x, (0, i), (8, 4)), (BOTH, ints())),
    Marked("dynamic_update_slice", lambda x, y, i: lax.dynamic_update_slice(x, y, (0, i)),
           (BOTH, arg(8, 4), ints())),
    # Indexing.
    Marked("gather.embedding", embedding,
           (ints(8, 16, at=("data", ...)), arg(64, 32, at=(..., "model")))),
    Marked("gather.vocabulary_split", embedding,
           (ints(8, 16, at=("data", ...)), arg(64, 32, at=("model", ...)))),
    Marked("gather.backward", lambda i, t: mark(embedding(i, t), "data", None, "model"),
           (ints(8, 16), arg(64, 32))),
    Marked("gather.batched", lambda x, i: jnp.take_along_axis(x, i, 1), (ROWS, ints(8, 4))),
    Marked("scatter.add", lambda x, i, y: x.at[i].add(y),
           (arg(64, 32, at=(..., "model")), ints(16, at=("data",)), arg(16, 32))),
    Marked(
        "scatter.embedding_gradient",
        lambda i, t: jax.grad(lambda t: embedding(i, t).sum())(t),
        (ints(8, 16, at=("data", ...)), arg(64, 32, at=(..., "model"))),
    ),
    Marked("sort", lambda x: jnp.sort(x, 1), (ROWS,)),
    Marked("top_k", lambda x: lax.top_k(x, 4), (ROWS,)),
    Marked("iota.one_hot", lambda i: jax.nn.one_hot(i, 32) @ jnp.ones((32, 4)),
           (ints(8, at=("data",)),)),
    Marked("cross_entropy", cross_entropy, (arg(8, 64, at=("data", "model")), ints(8))),
    Marked("cross_entropy.gradient", lambda x, y: jax.grad(cross_entropy)(x, y),
           (arg(8, 64, at=("data", "model")), ints(8, at=("data",)))),
    # Convolution and pooling.
    Marked("conv", conv, (IMAGE, KERNEL)),
    Marked("conv.gradients", gradients(conv), (IMAGE, KERNEL)),
    Marked("conv.features_in", lambda x, k: conv(x, k, 2),
           (arg(8, 16, 16, 8, at=("data", ..., ..., "model")), arg(3, 3, 8, 16))),
    Marked("conv.grouped", lambda x, k: conv(x, k, feature_group_count=4),
           (IMAGE, arg(3, 3, 2, 16, at=(..., ..., ..., "model")))),
    Marked("conv.spatial", conv, (arg(8, 16, 16, 8, at=(..., "data", ..., ...)), arg(3, 3, 8, 16))),
    Marked("pooling",
           lambda x: lax.reduce_window(x, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "SAME"),
           (arg(8, 16, 16, 8, at=("data", ..., ..., "model")),)),
    # Conflicts.
    Marked("conflict.two_arguments", lambda x, y: x + y, (ROWS, arg(8, 16, at=("model", ...)))),
    Marked("conflict.transposed", lambda x: x + x.T, (arg(16, 16, at=("data", "model")),)),
    Marked("conflict.square", lambda x: x @ x, (arg(16, 16, at=("data", "model")),)),
    Marked("conflict.chain", lambda x, v, w: (x @ v) @ w,
           (ROWS, arg(16, 16, at=("model", "data")), SQUARE_ROWS)),
    Marked(
        "conflict.square_of_disputed",
        lambda x, w: (lambda h: h @ h + h.T)(jnp.sin(x @ w)),
        (SQUARE_ROWS, arg(16, 16, at=(None, "data"))),
    ),
    Marked("conflict.weights_from_behind", lambda x, w, v: jnp.sin(x @ w) + v @ w,
           (SQUARE_ROWS, arg(16, 16, at=(None, "data")), SQUARE)),
    Marked(
        "conflict.weights_from_a_loss",
        gradients(lambda x, v, w: jnp.tanh(jnp.tanh(x @ v) @ w)),
        (
            arg(16, 16, at=("data", None)),
            arg(16, 16, at=("model", "data")),
            arg(16, 16, at=("model", "data")),
        ),
    ),
    Marked("conflict.order_of_axes", lambda x, y: x * y,
           (arg(16, 16, at=(("data", "model"), ...)), arg(16, 16, at=(("model", "data"), ...)))),
    # Control flow.
    Marked("while.forward", while_loop, (BOTH, PLAIN)),
    Marked("while.backward", lambda x, y: mark(while_loop(x, y)[1], "data", "model"),
           (PLAIN, PLAIN)),
    Marked("while.swapped", swapped_carries, (ROWS, COLUMNS)),
    Marked("scan.forward", scanned, (ROWS, arg(3, 16, 16, at=(None, None, "model")))),
    Marked("scan.marked_inside", scan_marked_inside, (PLAIN, SQUARE)),
    Marked(
        "scan.gradients",
        gradients(lambda x, ws: scanned(x, ws)[0]),
        (ROWS, arg(3, 16, 16, at=(None, "model", ...))),
    ),
    Marked("cond.forward", branches, (ROWS, COLUMNS, ints())),
    Marked("cond.backward", lambda x, y, f: mark(branches(x, y, f), "data", "model"),
           (PLAIN, PLAIN, ints())),
    Marked("case", switch, (ROWS, arg(16, 16, at=(..., "model")), ints())),
    Marked("optimization_barrier", lambda x, y: lax.optimization_barrier((x, y + 1)),
           (ROWS, COLUMNS)),
    # Calls and transformations.
    Marked("calls.function_twice", lambda x, v, w: layer(layer(x, v), w) + 1, (*XW, arg(32, 16))),
    Marked("calls.custom_vjp", gradients(lambda x, w: clipped(x @ w)), XW),
    Marked("calls.remat", gradients(rematerialized),
           (ROWS, arg(16, 16, at=(..., "model")), SQUARE)),
    Marked(
        "calls.vmap",
        lambda x, w: jax.vmap(lambda a: jnp.tanh(a @ w))(x),
        (arg(8, 4, 16, at=("data", ..., ...)), arg(16, 32, at=(..., "model"))),
    ),
    # Three axes.
    Marked("cube.matmul", lambda x, w: x @ w,
           (arg(8, 16, at=(("x", "y"), ...)), arg(16, 32, at=("x", "z"))), CUBE),
    Marked("cube.merge", lambda x: jnp.sin(x.reshape(16, 16)),
           (arg(2, 8, 16, at=("x", ("y", "z"), ...)),), CUBE),
    Marked("cube.split", lambda x: jnp.sin(x.reshape(2, 2, 4, 16)),
           (arg(16, 16, at=(("x", "y", "z"), ...)),), CUBE),
    # Models.
    Marked("model.mlp", mlp, MLP),
    Marked("model.mlp_gradients", gradients(mlp), MLP),
    Marked("model.attention", attention, ATTENTION),
    Marked("model.attention_gradients", gradients(attention), ATTENTION),
    Marked("model.experts", experts, EXPERTS),
    Marked("model.experts_gradients", gradients(experts), EXPERTS),
    Marked("model.resnet_block", resnet_block,
           (IMAGE, arg(3, 3, 8, 8, at=(..., ..., ..., "model")), arg(3, 3, 8, 8), arg(8))),
    Marked("model.resnet_gradients", gradients(resnet_block),
           (IMAGE, arg(3, 3, 8, 8, at=(..., ..., ..., "model")), arg(3, 3, 8, 8), arg(8))),
    Marked(
        "model.adam",
        adam_step,
        ({"a": arg(16, 32, at=("data", "model")), "b": arg(32)}, {"a": arg(16, 32), "b": arg(32)}),
    ),
)  # fmt: skip
