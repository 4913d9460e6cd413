"""Microseconds of the project's kernels on one device, beside what plain jax has for the same.

    attention    causal, of whole sequences; of four documents in each where it is packed; with
                 heads of 192 as DeepSeek's, whose values are 128 wide
    experts      a layer's mixture, with routers that choose experts about alike; `dense` is an MLP
                 of one expert's weights for as many rows as there are choices
    linear_attention  the gated delta rule at Qwen3-Next's sizes; `scan` is its definition, position
                 by position
    pages        attention over a cache in pages anywhere: 64 slots of 512 positions decode, alone
                 or beside a chunk of one more slot's prompt; and whole prompts
    products     with the weights of a 7B's layer: queries, keys and values; the attention's output;
                 gate and up; down

The floor is the longer of two: reading weights or cache once, and the arithmetic (of causal masks
half, of gradients without what is computed again) at the chip's measured speed. `ours` is compiled
by `spmd.jit`, the others by `jax.jit`.

Example:
    benchmarks/run kernels --only 'products.*int8|attention'
"""

import functools
import itertools
import re
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

import spmd
from benchmarks.tables import print_table
from spmd.cli.flags import Parser, positive
from spmd.measure.profile import run_steps
from spmd.mesh.topology import Topology
from spmd.models.llama.quantize import quantize_weight
from spmd.ops import attention, experts, linear_attention, linears, paged_attention
from spmd.ops.linear import EIGHT_BIT_ROWS

OURS = "ours"
TOGETHER = 4
"""Runs that are timed together: the host's part of one is no part of the device's time."""


class Case(NamedTuple):
    """One line of the table."""

    name: str  # the kernel, and its sizes
    by: str  # whose it is; of `OURS` what `spmd.jit` makes
    fn: Callable[..., Any]  # what is run: `calls` times the kernel, one after the other
    args: Callable[[], Sequence[Any]]  # makes what it is given
    flops: float  # of one call, at least
    bytes: float = 0.0  # that one call reads, at least
    calls: int = 1
    dtype: str = "bf16"  # in which it multiplies, as topologies call it


def normal(seed: int, *shape: int, dtype: str = "bfloat16") -> Any:
    """Random numbers, made on the device."""
    key = jax.random.key(seed)
    if dtype == "int8":
        return jax.random.randint(key, shape, -127, 128, jnp.int8)
    return jax.random.normal(key, shape, dtype)


def with_gradient(case: Case, of: tuple[int, ...]) -> Iterator[Case]:
    """A case, and the same with the gradient of a loss by some arguments."""
    yield case
    # Of each product of the forward pass there are two more; attention has five of its two.
    more = 3.5 if case.name.startswith("attention") else 3
    name, size = f"{case.name}, with gradient", case.bytes
    if case.name.startswith("linear_attention"):  # operands are read again, and gradients written
        size *= 3
    fn = jax.value_and_grad(lambda *args: jnp.sum(case.fn(*args).astype(jnp.float32) ** 2), of)
    yield case._replace(name=name, fn=fn, flops=more * case.flops, bytes=size)


def attention_cases(tokens: int = 16384, heads: int = 32, width: int = 128) -> Iterator[Case]:
    """Our kernel, the reference in plain jax, and jax's own wrapper of cuDNN."""

    def attended(implementation: Any, documents: int, q: Any, k: Any, v: Any) -> Any:
        ids = jnp.arange(q.shape[1], dtype=jnp.int32) * documents // q.shape[1]
        segments = jnp.broadcast_to(ids, q.shape[:2]) if documents > 1 else None
        return attention(q, k, v, segment_ids=segments, implementation=implementation)

    def args(*shape: int) -> list[Any]:
        return [normal(seed, *shape) for seed in range(3)]

    bys = (OURS, "xla", *(["cudnn"] if jax.default_backend() == "gpu" else []))
    for length, documents, by in itertools.product((2048, 4096, 8192), (1, 4), bys):
        batch, packed = tokens // length, ", packed" if documents > 1 else ""
        yield from with_gradient(
            Case(
                f"attention, {batch} x {length}{packed}",
                by,
                functools.partial(attended, "auto" if by == OURS else by, documents),
                functools.partial(args, batch, length, heads, width),
                2.0 * batch * heads * length**2 * width,
            ),
            (0, 1, 2),
        )


def latent_attention_cases(tokens: int = 8192, heads: int = 16) -> Iterator[Case]:
    """Keys of 192, values of 128: as DeepSeek's; padded for who takes one width alone."""

    def padded(attend: Callable[..., Any], q: Any, k: Any, v: Any) -> Any:
        wide = jnp.pad(v, [(0, 0)] * 3 + [(0, k.shape[3] - v.shape[3])])
        return attend(q, k, wide)[..., : v.shape[3]]

    def by_jax(implementation: str) -> Callable[..., Any]:
        attend = jax.nn.dot_product_attention
        return functools.partial(attend, is_causal=True, implementation=implementation)

    def cudnn(q: Any, k: Any, v: Any) -> Any:
        from jax._src.cudnn.fused_attention_stablehlo import MaskType, dot_product_attention

        return dot_product_attention(q, k, v, scale=q.shape[-1] ** -0.5, mask_type=MaskType.CAUSAL)

    def args(batch: int, length: int) -> list[Any]:
        shapes = enumerate((192, 192, 128))
        return [normal(seed, batch, length, heads, width) for seed, width in shapes]

    bys: dict[str, Callable[..., Any]] = {
        OURS: functools.partial(padded, attention),
        "xla": functools.partial(padded, by_jax("xla")),
    }
    if jax.default_backend() == "gpu":
        bys |= {"cudnn, padded": functools.partial(padded, by_jax("cudnn")), "cudnn": cudnn}
    for length, (by, fn) in itertools.product((2048, 8192), bys.items()):
        batch = tokens // length
        name, given = f"attention, {batch} x {length}, 192", functools.partial(args, batch, length)
        flops = 1.0 * batch * heads * length**2 * (192 + 128)
        yield from with_gradient(Case(name, by, fn, given, flops), (0, 1, 2))


def linear_attention_cases(
    keys: int = 16, heads: int = 32, width: int = 128, chunk: int = 64
) -> Iterator[Case]:
    """Our chunks, and the definition where it does not take all day."""

    def ours(*args: Any) -> Any:
        return linear_attention(*args, chunk=chunk)[0]

    def scan(q: Any, k: Any, v: Any, decay: Any, beta: Any) -> Any:
        q, k = (jnp.repeat(x, heads // keys, axis=2) for x in (q, k))

        def step(state: Any, at: Any) -> Any:
            q, k, v, decay, beta = (x.astype(jnp.float32) for x in at)
            state *= jnp.exp(decay)[..., None, None]
            new = beta[..., None] * (v - jnp.einsum("bnd,bndp->bnp", k, state))
            state += k[..., None] * new[..., None, :]
            return state, jnp.einsum("bnd,bndp->bnp", q, state) * width**-0.5

        xs = [jnp.moveaxis(x, 1, 0) for x in (q, k, v, decay, beta)]
        out = jax.lax.scan(step, jnp.zeros((len(v), heads, width, width)), xs)[1]
        return jnp.moveaxis(out, 0, 1).astype(v.dtype)

    def args(batch: int, length: int) -> list[Any]:
        q, k, v = (normal(i, batch, length, n, width) for i, n in enumerate((keys, keys, heads)))
        k /= jnp.linalg.norm(k.astype(jnp.float32), axis=-1, keepdims=True).astype(k.dtype)
        decay, beta = (normal(i, batch, length, heads, dtype="float32") for i in (3, 4))
        return [q, k, v, jax.nn.log_sigmoid(decay + 3), jax.nn.sigmoid(beta)]

    # Of a position and a head of values: triangles of a chunk by two products of a key head's, two
    # with the inverse and one with values; and three products with a state.
    each = chunk * (2 * keys / heads * width + 3 * width) + 3 * 2 * width**2
    size = 2 * 2 * (keys + heads) * width + 2 * 4 * heads  # of a position: gates are float32
    for batch, length in ((1, 2048), (4, 2048), (1, 8192), (4, 8192), (1, 32768)):
        tokens, given = batch * length, functools.partial(args, batch, length)
        for by, fn in ((OURS, ours), ("scan", scan))[: 2 if tokens == 2048 else 1]:
            name = f"linear_attention, {batch} x {length}"
            case = Case(name, by, fn, given, each * heads * tokens, size * tokens)
            yield from with_gradient(case, (0, 1, 2, 3, 4))


MIXTURES = {"Mixtral 8x7B": (4096, 14336, 8, 2), "Qwen 3 30B-A3B": (2048, 768, 128, 8)}
"""Width of a row, width inside an expert, experts, choices of a row."""


def expert_cases() -> Iterator[Case]:
    """Our mixture under `spmd.jit` and `jax.jit`, whose `ragged_dot` is XLA's; and a dense MLP."""

    def dense(x: Any, gates: Any, _: Any, gate: Any, up: Any, down: Any) -> Any:
        rows = jnp.repeat(x[0], gates.shape[-1], axis=0)
        return (jax.nn.silu(rows @ gate[0].T) * (rows @ up[0].T)) @ down[0].T

    def args(tokens: int, hidden: int, inner: int, count: int, choices: int) -> list[Any]:
        logits = normal(0, 1, tokens, count, dtype="float32")
        gates, chosen = jax.lax.top_k(jax.nn.softmax(logits), choices)
        shapes = ((1, tokens, hidden), *((count, *s) for s in [(inner, hidden)] * 2),
                  (count, hidden, inner))  # fmt: skip
        x, *weights = (normal(i, *s) / s[-1] ** 0.5 for i, s in enumerate(shapes, 1))
        return [x, gates, chosen, *weights]

    for (model, sizes), tokens in itertools.product(MIXTURES.items(), (8192, 64)):
        hidden, inner, count, choices = sizes
        for by, fn in ((OURS, experts), ("jax.jit", experts), ("dense", dense)):
            case = Case(
                f"experts, {model}, {tokens} rows",
                by,
                fn,
                functools.partial(args, tokens, *sizes),
                6.0 * tokens * choices * hidden * inner,
                6.0 * (1 if by == "dense" else min(count, tokens * choices)) * hidden * inner,
            )
            yield from with_gradient(case, (0, 1, 3, 4, 5))


def paged(q: Any, pool: Any, *rest: Any) -> Any:
    """`paged_attention`, with scales behind the tables."""
    return paged_attention(q, pool, *rest[:4], scales=rest[4] if rest[4:] else None)


def paged_args(
    slots: int, context: int, chunk: int, heads: tuple[int, int], dtype: str, page: int = 64
) -> list[Any]:
    """Of one row of each slot, and of a chunk of one more; pages lie in random order.

    Args:
      heads: key heads, and query heads of each; 128 wide.
    """
    count, end = slots + (chunk > 0), max(context, chunk)
    order = np.random.default_rng(0).permutation(count * -(-end // page)).astype(np.int32)
    rows = np.asarray([1] * slots + [chunk] * (chunk > 0))
    positions = np.concatenate([np.full(slots, context - 1), np.arange(end - chunk, end)])
    shape = (1, len(order), page, heads[0], 2, 128)
    tables = (
        order.reshape(1, count, -1), np.repeat(np.arange(count), rows)[None], positions[None],
        np.cumsum([0, *rows])[None],
    )  # fmt: skip
    scales = [jnp.full(shape[:-1], 0.01)] if dtype == "int8" else []
    return [
        normal(0, 1, rows.sum(), *heads, 128), normal(1, *shape, dtype=dtype),
        *(jnp.asarray(table, jnp.int32) for table in tables), *scales,
    ]  # fmt: skip


def in_turn(fn: Callable[..., Any], calls: int) -> Callable[..., Any]:
    """Calls that follow each other, as a model's layers: each gets the result of the one before."""

    def run(x: Any, *rest: Any) -> Any:
        for _ in range(calls):
            x = fn(x, *rest)
        return x

    return run


def page_cases() -> Iterator[Case]:
    """Slots that decode, a chunk beside them, and whole prompts beside cuDNN's."""
    slots, context, calls = 64, 512, 16
    for dtype, chunk in itertools.product(("bfloat16", "int8"), (0, 448)):
        held = slots * context + (context if chunk else 0)
        item = 1 + 4 / 128 if dtype == "int8" else 2  # with scales
        case = functools.partial(paged_args, slots, context, chunk, (8, 4), dtype)
        name = f"pages, {slots} x {context}, {dtype}" + (f", a chunk of {chunk}" if chunk else "")
        seen = slots * context + chunk * (context - chunk / 2)
        flops = 4.0 * seen * 8 * 4 * 128
        yield Case(name, OURS, in_turn(paged, calls), case, flops, held * 8 * 2 * 128 * item, calls)

    def cudnn(q: Any, key: Any, value: Any) -> Any:
        heads = q.reshape(*q.shape[:2], -1, q.shape[-1])
        return jax.nn.dot_product_attention(
            heads, key, value, is_causal=True, implementation="cudnn"
        ).reshape(q.shape)

    def whole(length: int) -> list[Any]:
        return [normal(0, 1, length, 32, 1, 128), *(normal(i, 1, length, 32, 128) for i in (1, 2))]

    for length in (512, 2048, 8192, 32768):
        flops = 2.0 * length**2 * 32 * 128  # two products of each token with all before it
        args = functools.partial(paged_args, 0, length, length, (32, 1), "bfloat16")
        name = f"pages, a prompt of {length}"
        yield Case(name, OURS, in_turn(paged, 4), args, flops, calls=4)
        if jax.default_backend() == "gpu":
            of_whole = functools.partial(whole, length)
            yield Case(name, "cudnn", in_turn(cudnn, 4), of_whole, flops, calls=4)


def product_cases(width: int = 4096, inner: int = 11008, calls: int = 8) -> Iterator[Case]:
    """Weights of several kinds, and plain ones under `jax.jit`, which is cuBLAS on GPUs."""

    def layers(x_BI: Any, *layers: Any) -> Any:
        for qkv, out, gate_up, down in layers:
            heads = sum(linears(x_BI, qkv)) * 3**-0.5  # XLA would not compute what nothing uses
            gate, up = linears(linears(heads, out)[0], gate_up)
            x_BI = linears(gate * up, down)[0]
        return x_BI

    @functools.cache
    def weights(kind: str) -> list[Any]:
        # No two in the same memory, so that none is in a cache of the chip.
        rng = np.random.default_rng(0)

        def make(outputs: int, inputs: int) -> Any:
            plain = rng.standard_normal((outputs, inputs), np.float32) / np.float32(inputs**0.5)
            if kind == "bfloat16":
                return jnp.asarray(plain, jnp.bfloat16)
            return jax.tree.map(jnp.asarray, quantize_weight(plain, kind))

        one, wide = make(width, width), make(inner, width)
        whole = [[one, one, one], [one], [wide, wide], [make(width, inner)]]
        return [jax.tree.map(jnp.copy, whole) for _ in range(calls)]

    def args(kind: str, rows: int) -> list[Any]:
        return [normal(0, rows, width), *weights(kind)]

    products = 4 * width**2 + 3 * width * inner
    items = {"bfloat16": 2.0, "int8": 1.0, "fp8": 1.0, "int4": 0.5}  # scales are next to nothing
    for kind, rows in itertools.product(items, (1, 16, 64, 256, 1024, 2048, 8192)):
        for by in (OURS, "jax.jit") if kind == "bfloat16" else (OURS,):
            dtype = "f8E4M3FN" if kind == "fp8" and rows >= EIGHT_BIT_ROWS else "bf16"
            given = functools.partial(args, kind, rows)
            size, flops = items[kind] * products, 2.0 * rows * products
            yield Case(
                f"products, {kind}, {rows} rows", by, layers, given, flops, size, calls, dtype
            )


def compiled(case: Case, structs: Sequence[Any]) -> Callable[..., Any] | str:
    """The case's program for such arguments; where it cannot be compiled, why."""
    mesh = spmd.make_mesh(devices=jax.devices()[:1], x=1)
    jitted: Any = spmd.jit(case.fn, mesh=mesh) if case.by == OURS else jax.jit(case.fn)
    try:
        program: Callable[..., Any] = jitted.lower(*structs).compile()
    except (RuntimeError, ValueError, NotImplementedError) as error:
        return _reason(error)
    return program


def _reason(error: Exception) -> str:
    return str(error).strip().splitlines()[0][:60]


def _struct(x: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(x.shape, x.dtype)


def line(case: Case, run: Callable[..., Any] | str, topology: Topology, steps: int) -> list[str]:
    """A row of the table: medians of calls that are issued before the first one is done.

    Where a kernel does not run, with the reason in place of numbers.
    """
    if isinstance(run, str):
        return [case.name, case.by, run, "", "", "", ""]
    busy = topology.arithmetic_seconds(case.flops, case.dtype)
    least = 1e6 * max(case.bytes / topology.hbm_bandwidth, busy)
    args = case.args()

    def several(_: Any) -> None:
        jax.block_until_ready([run(*args) for _ in range(TOGETHER)])

    try:
        seconds = run_steps(several, lambda: None, steps, 0).seconds
    except RuntimeError as error:
        return [case.name, case.by, _reason(error), "", "", "", ""]
    took = 1e6 * seconds / TOGETHER / case.calls
    rates = f"{case.flops / took / 1e6:.0f}", f"{case.bytes / took / 1e3:.0f}"
    return [case.name, case.by, f"{took:.1f}", f"{least:.1f}", f"{took / least:.2f}", *rates]


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints one table."""
    parser = Parser("benchmarks/run kernels", __doc__)
    add = parser.add_argument
    add("--only", default="", help="cases whose name this regular expression finds")
    add("--steps", type=positive, default=10, help="timed runs, after two others")
    given = parser.parse_args(arguments)
    device = jax.devices()[0]
    topology = Topology.for_devices([device])
    print(f"jax {jax.__version__}, {device.device_kind}")
    cases = itertools.chain(
        attention_cases(), latent_attention_cases(), expert_cases(), linear_attention_cases(),
        page_cases(), product_cases(),
    )  # fmt: skip
    wanted = [case for case in cases if re.search(given.only, case.name)]
    with ThreadPoolExecutor() as pool:  # before any is timed: compilers try kernels on the device
        shapes = (jax.tree.map(_struct, case.args()) for case in wanted)
        runs = list(pool.map(compiled, wanted, shapes))
    header = ("kernel", "by", "us", "floor, us", "x floor", "TFLOP/s", "GB/s")
    rows = (line(*pair, topology, given.steps) for pair in zip(wanted, runs, strict=True))
    print_table(header, rows)
