"""Predicted memory of a device beside XLA's own figures, over several kinds of programs.

The programs are those of this file and those of `benchmarks/run bytes`. Nothing runs: they are
compiled for eight virtual CPU devices, or for the accelerators of the machine, or for accelerators
that are not here (`--topology v5e:2x4` or `h200:8`, with the `tpu` or `cuda` extra): there, layers
of Llama-2 7B's width are compiled too. XLA takes the more memory the more there is;
`--compiler_option` can give it less.

Example:
    benchmarks/run memory --only 'decode|resnet'
    benchmarks/run memory --topology h200:8 --only 7b \
        --compiler_option xla_gpu_memory_limit_slop_factor=3
"""

import dataclasses
import os
import re
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

if "jax" not in sys.modules:  # jax reads both when it is imported
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import jax
import jax.numpy as jnp
import numpy as np
import optax

import spmd
from benchmarks.programs import catalog
from benchmarks.programs.program import Program as CatalogProgram
from spmd.cli.flags import Parser, positive
from spmd.explain.memory import Memory
from spmd.models.llama import fresh, objective, sharding
from spmd.models.llama.config import LlamaConfig
from spmd.models.llama.named import named_config

LLAMA = LlamaConfig(
    vocab_size=2048,
    hidden_size=256,
    intermediate_size=704,
    num_hidden_layers=4,
    num_attention_heads=8,
)


class Program(NamedTuple):
    """A function with marked arguments."""

    fn: Callable[..., Any]  # a function for one device
    args: tuple[Any, ...]  # `ShapeDtypeStruct`s
    donate: tuple[int, ...]  # which arguments are donated
    mesh: tuple[int, int]  # sizes of the axes data and model

    def lower(
        self, topology: spmd.Topology | None = None, options: spmd.Options | None = None
    ) -> spmd.Lowered:
        """Plans the program."""
        mesh = make_mesh(self.mesh)
        jitted = spmd.jit(self.fn, mesh=mesh, donate_argnums=self.donate, options=options)
        return jitted.lower(*self.args, topology=topology)


def make_mesh(sizes: tuple[int, int]) -> spmd.Mesh:
    """Devices 0 to n - 1, here or not."""
    return spmd.Mesh(None, sizes, ("data", "model"))


def training(loss: Callable[..., Any], params: Any, batch: Any, mesh: tuple[int, int]) -> Program:
    """A step of AdamW."""
    optimizer = optax.adamw(1e-3)

    def step(params: Any, state: Any, batch: Any) -> Any:
        value, grads = jax.value_and_grad(loss)(params, batch)
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, value

    return Program(step, (params, jax.eval_shape(optimizer.init, params), batch), (0, 1), mesh)


def llama(sizes: tuple[int, int], scale: int, **fields: Any) -> Program:
    """A small Llama's training step."""
    return llama_step(dataclasses.replace(LLAMA, **fields), sizes, (16 * scale, 256))


def wide_llama(sizes: tuple[int, int], scale: int, **fields: Any) -> Program:
    """Four layers of Llama-2 7B's width, bf16 compute."""
    config = dataclasses.replace(
        named_config("llama2-7b"), num_hidden_layers=4, dtype="bfloat16", **fields
    )
    return llama_step(config, sizes, (32 * scale, 4096))


def llama_step(config: LlamaConfig, sizes: tuple[int, int], tokens: tuple[int, int]) -> Program:
    """A Llama's training step on so many sequences of so many tokens."""
    mesh = make_mesh(sizes)
    marks = sharding.activation_marks(mesh, config)
    params = jax.eval_shape(lambda key: fresh.init(key, config), jax.random.key(0))
    token = jax.ShapeDtypeStruct(tokens, np.int32)

    def loss(params: Any, batch: Any) -> jax.Array:
        return objective.loss(params, batch["inputs"], batch["targets"], config, marks)

    batch = sharding.mark_batch({"inputs": token, "targets": token}, mesh)
    return training(loss, sharding.mark_params(params, mesh, config), batch, sizes)


def mlp(sizes: tuple[int, int], scale: int) -> Program:
    """Four matrices with ReLUs between."""
    mesh = make_mesh(sizes)
    params = {f"w{i}": struct(mesh, (1024, 1024), ("data", "model")) for i in range(4)}

    def loss(params: Any, x: jax.Array) -> jax.Array:
        h = x
        for w in params.values():
            h = spmd.mark_sharding(jax.nn.relu(h @ w), mesh, ("data", "model"))
        return jnp.mean(h**2)

    return training(loss, params, struct(mesh, (1024 * scale, 1024), ("data", None)), sizes)


def resnet(sizes: tuple[int, int], scale: int) -> Program:
    """Three residual blocks of convolutions and batch norms."""
    mesh = make_mesh(sizes)
    params = {
        f"{block}/{i}": struct(mesh, (3, 3, 64, 64), (None, None, None, "model"))
        for block in range(3)
        for i in range(2)
    }

    def norm(x: jax.Array) -> jax.Array:
        mean, var = jnp.mean(x, (0, 1, 2)), jnp.var(x, (0, 1, 2))
        return (x - mean) * jax.lax.rsqrt(var + 1e-5)

    def conv(x: jax.Array, w: jax.Array) -> jax.Array:
        return jax.lax.conv_general_dilated(
            x, w, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )

    def loss(params: Any, x: jax.Array) -> jax.Array:
        for block in range(3):
            h = jax.nn.relu(norm(conv(x, params[f"{block}/0"])))
            x = jax.nn.relu(x + norm(conv(h, params[f"{block}/1"])))
        return jnp.mean(x**2)

    image = struct(mesh, (32 * scale, 32, 32, 64), ("data", None, None, None))
    return training(loss, params, image, sizes)


def moe(sizes: tuple[int, int], scale: int) -> Program:
    """Tokens sent to the best of sixteen experts by one-hot dispatch."""
    mesh, experts, capacity = make_mesh(sizes), 16, 64 * scale
    params = {
        "router": struct(mesh, (256, experts), (None, None)),
        "w_in": struct(mesh, (experts, 256, 512), (("data", "model"), None, None)),
        "w_out": struct(mesh, (experts, 512, 256), (("data", "model"), None, None)),
    }

    def loss(params: Any, x: jax.Array) -> jax.Array:
        gates = jax.nn.softmax(x @ params["router"])
        chosen = jax.nn.one_hot(jnp.argmax(gates, -1), experts)
        place = jnp.cumsum(chosen, 0) * chosen - 1
        slots = jax.nn.one_hot(jnp.max(place, -1).astype(jnp.int32), capacity)
        dispatch = chosen[:, :, None] * slots[:, None, :]
        sent = jnp.einsum("tec,th->ech", dispatch, x)
        hidden = jax.nn.gelu(jnp.einsum("ech,ehm->ecm", sent, params["w_in"]))
        out = jnp.einsum("ecm,emh->ech", hidden, params["w_out"])
        combine = dispatch * jnp.max(gates, -1)[:, None, None]
        return jnp.mean((jnp.einsum("tec,ech->th", combine, out) - x) ** 2)

    return training(loss, params, struct(mesh, (1024 * scale, 256), ("data", None)), sizes)


def decode(sizes: tuple[int, int], scale: int) -> Program:
    """One token of every sequence, keys and values written into a donated cache."""
    mesh, layers, heads, width = make_mesh(sizes), 4, 8, 64
    hidden = heads * width
    split = {"qkv": (None, None, "model"), "out": (None, "model", None)}
    params = {
        "qkv": struct(mesh, (layers, hidden, 3 * hidden), split["qkv"]),
        "out": struct(mesh, (layers, hidden, hidden), split["out"]),
    }
    cache = tuple(
        struct(mesh, (layers, 16 * scale, 512, heads, width), (None, "data", None, "model", None))
        for _ in range(2)
    )

    def step(params: Any, cache: Any, x: jax.Array, position: jax.Array) -> Any:
        keys, values = cache
        for layer in range(layers):
            q, k, v = jnp.split(x @ params["qkv"][layer], 3, -1)
            q, k, v = (t.reshape(-1, 1, heads, width) for t in (q, k, v))
            at = (layer, 0, position, 0, 0)
            keys = jax.lax.dynamic_update_slice(keys, k[None], at)
            values = jax.lax.dynamic_update_slice(values, v[None], at)
            scores = jnp.einsum("bqnd,bknd->bnqk", q, keys[layer])
            mixed = jnp.einsum("bnqk,bknd->bqnd", jax.nn.softmax(scores), values[layer])
            x = x + mixed.reshape(x.shape) @ params["out"][layer]
        return (keys, values), x

    x = struct(mesh, (16 * scale, hidden), ("data", None))
    return Program(step, (params, cache, x, jax.ShapeDtypeStruct((), np.int32)), (1,), sizes)


def struct(mesh: spmd.Mesh, shape: tuple[int, ...], spec: Any) -> Any:
    """A marked float32 tensor that is not there."""
    return spmd.mark_sharding(jax.ShapeDtypeStruct(shape, np.float32), mesh, spec)


PROGRAMS: dict[str, Callable[[int], Program]] = {
    "mlp 4x2": lambda scale: mlp((4, 2), scale),
    "llama scan 8x1": lambda scale: llama((8, 1), scale),
    "llama scan 4x2": lambda scale: llama((4, 2), scale),
    "llama scan 8x1 bf16": lambda scale: llama((8, 1), scale, dtype="bfloat16"),
    "llama scan 8x1 remat": lambda scale: llama((8, 1), scale, remat="full"),
    "llama unrolled 8x1": lambda scale: llama((8, 1), scale, scan_layers=False),
    "llama unrolled 4x2": lambda scale: llama((4, 2), scale, scan_layers=False),
    "resnet 8x1": lambda scale: resnet((8, 1), scale),
    "resnet 4x2": lambda scale: resnet((4, 2), scale),
    "moe 4x2": lambda scale: moe((4, 2), scale),
    "decode 4x2": lambda scale: decode((4, 2), scale),
}

WIDE: dict[str, Callable[[int], Program]] = {
    f"7b {stack} {'x'.join(map(str, sizes))} {remat}": partial(
        lambda sizes, fields, scale: wide_llama(sizes, scale, **fields),
        sizes,
        {"remat": remat, "scan_layers": stack == "scan"},
    )
    for stack in ("scan", "unrolled")
    for sizes in ((8, 1), (4, 2))
    for remat in ("none", "full", "dots", "save_attention")
}
"""For accelerators: CPUs would have nothing to compute attention with but all its weights."""


FAMILIES = ("llama-train", "llama-serve", "moe", "resnet", "recommender", "remat")
"""Of the programs of `benchmarks/run bytes`; its others are single reshards."""

Lower = Callable[[spmd.Topology | None], spmd.Lowered]
"""Plans a program for a topology, or for the devices of the machine."""


def programs(only: str, scale: int, options: spmd.Options | None = None) -> dict[str, Lower]:
    """Those whose name the regular expression finds something in, ours first."""
    found: dict[str, Lower] = {
        name: partial(lower, name, scale, options=options) for name in (*PROGRAMS, *WIDE)
    }
    for program in catalog.programs():
        if program.family in FAMILIES:
            found[program.name] = partial(lower_from_catalog, program, options=options)
    return {name: make for name, make in found.items() if re.search(only, name)}


def lower(
    name: str,
    scale: int,
    topology: spmd.Topology | None = None,
    options: spmd.Options | None = None,
) -> spmd.Lowered:
    """Plans one of `PROGRAMS` or `WIDE`."""
    return (PROGRAMS | WIDE)[name](scale).lower(topology, options)


def lower_from_catalog(
    program: CatalogProgram,
    topology: spmd.Topology | None = None,
    options: spmd.Options | None = None,
) -> spmd.Lowered:
    """Plans a program of `benchmarks/run bytes`."""
    mesh, built = program.make()
    jitted = spmd.jit(built.fn, mesh=mesh, donate_argnums=built.donate, options=options)
    return jitted.lower(*built.args, topology=topology)


def row(name: str, lowered: spmd.Lowered) -> str:
    """Prediction beside XLA's report, for one program."""
    predicted = Memory.predicted(lowered.predicted_memory)
    reported = lowered.compile().memory
    cells = [
        f"{figure / 2**20:.1f}"
        for figure in (
            predicted.arguments,
            predicted.temporary,
            reported.temporary,
            predicted.peak_bytes,
            reported.peak_bytes,
        )
    ]
    ratio = predicted.peak_bytes / reported.peak_bytes
    return f"| {name} | {' | '.join(cells)} | {ratio:.2f} |"


def make_parser() -> Parser:
    """The flags."""
    parser = Parser("benchmarks/run memory", __doc__)
    add = parser.add_argument
    add("--topology", default="", help="compile for this machine instead, e.g. v5e:2x4")
    add("--only", default="", help="programs whose name this regular expression finds")
    add("--compiler_option", action="append", default=[], help="NAME=VALUE for XLA; repeatable")
    add(
        "--scale",
        type=positive,
        default=1,
        help="batches of this file's programs are so much larger",
    )
    return parser


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints one table."""
    given = make_parser().parse_args(arguments)
    topology = spmd.Topology(given.topology) if given.topology else None
    machine = topology or f"{len(jax.devices())} x {jax.devices()[0].device_kind}"
    print(f"jax {jax.__version__}, {machine}; MiB of each device")
    print(
        "| program | arguments | temporary, predicted | XLA's | peak, predicted | XLA's | ratio |"
    )
    print("| --- " * 7 + "|")
    options = spmd.Options(
        compiler_options=dict(option.split("=", 1) for option in given.compiler_option)
    )
    for name, make in programs(given.only, given.scale, options).items():
        if topology is not None or name not in WIDE:
            print(row(name, make(topology)), flush=True)


if __name__ == "__main__":
    main()
