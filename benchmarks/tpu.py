"""Training steps for TPU slices that are not here: ours beside plain `jax.jit`, by XLA's compiler.

Both get the same program, marks, donation and optimizer-state shardings, and are compiled with
libtpu (`tpu` extra), minutes for each program. The peer runs with its windowed einsums, which are
the default, and without. Nothing runs: times are modelled (`benchmarks/hlo/modelled.py`).

Example:
    benchmarks/run tpu --rows v5e-16-scanned --cache plans
"""

import dataclasses
import functools
import json
import os
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

if "jax" not in sys.modules:
    os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import optax
from jax.sharding import NamedSharding, PartitionSpec

import spmd
from benchmarks.hlo.modelled import modelled
from spmd.cli.flags import Parser, Switch, words
from spmd.explain.memory import Memory
from spmd.lowering.ahead import devices_ahead
from spmd.mesh.spec import jax_mesh
from spmd.models.llama import sharding
from spmd.models.llama.config import LlamaConfig
from spmd.models.llama.named import named_config
from spmd.models.llama.step import argument_types, train_step


class Setup(NamedTuple):
    """One configuration, of Llama-2 7B's width."""

    topology: str  # the slice
    mesh: tuple[int, int]  # sizes of the axes data and model
    scanned: bool  # whether layers are scanned, or written out
    remat: str = "none"  # which activations are kept


ROWS = {
    "v5e-16-scanned": Setup("v5e:4x4", (16, 1), True),
    "v5e-16-unrolled": Setup("v5e:4x4", (16, 1), False),
    "v5e-8x2-scanned": Setup("v5e:4x4", (8, 2), True, "full"),
    "v5e-4x4-scanned": Setup("v5e:4x4", (4, 4), True),
    "v5e-4x4-unrolled": Setup("v5e:4x4", (4, 4), False),
    "v4-16-scanned": Setup("v4:2x2x4", (16, 1), True),
    "v4-4x4-scanned": Setup("v4:2x2x4", (4, 4), True),
    "v5p-16-scanned": Setup("v5p:2x2x4", (16, 1), True),
    "v5p-4x4-scanned": Setup("v5p:2x2x4", (4, 4), True),
}

PROGRAMS: Mapping[str, Mapping[str, str]] = {
    "spmd.jit": {},
    "jax.jit": {},
    "jax.jit, no windowed einsum": {
        "xla_tpu_enable_windowed_einsum_for_all_gather": "false",
        "xla_tpu_enable_windowed_einsum_for_reduce_scatter": "false",
    },
}
"""What is compiled, and its compiler options."""


class Built(NamedTuple):
    """What the TPU compiler made of a program."""

    text: str  # its HLO
    temporary: int  # bytes of temporary values on one device
    seconds: float  # how long it took


def config_of(row: Setup, layers: int) -> LlamaConfig:
    """Its model."""
    return dataclasses.replace(
        named_config("llama2-7b"),
        num_hidden_layers=layers,
        dtype="bfloat16",
        attention="einsum",
        scan_layers=row.scanned,
        remat=row.remat,
    )


def build(
    row: Setup, name: str, layers: int, shape: tuple[int, int], options: Mapping[str, str]
) -> Built:
    """Compiles one program.

    Args:
      name: of `PROGRAMS`.
      shape: sequences in a batch, and tokens in each.
      options: compiler options besides those of `PROGRAMS`.
    """
    mesh, topology = spmd.Mesh(None, row.mesh, ("data", "model")), spmd.Topology(row.topology)
    config, optimizer = config_of(row, layers), optax.adamw(1e-4)
    types = argument_types(config, optimizer, mesh, shape)
    step = train_step(config, optimizer, sharding.activation_marks(mesh, config))
    options = {**PROGRAMS[name], **options}
    start = time.perf_counter()
    if name == "spmd.jit":
        jitted = spmd.jit(
            step,
            mesh=mesh,
            donate_argnums=(0, 1),
            options=spmd.Options(compiler_options=options),
        )
        compiled = jitted.compile(*types, topology=topology)
        text, temporary = compiled.as_text("hlo"), compiled.memory.temporary
    else:
        there = placed(types, optimizer, mesh, topology)
        where = jax.tree.map(lambda x: x.sharding, there)
        plain = jax.jit(step, donate_argnums=(0, 1), out_shardings=(*where[:2], None))
        peer = plain.lower(*there).compile(compiler_options=dict(options))
        text, temporary = peer.as_text() or "", Memory.of(peer.memory_analysis()).temporary
    return Built(text, temporary, time.perf_counter() - start)


@functools.cache
def mesh_ahead(mesh: spmd.Mesh, topology: spmd.Topology) -> jax.sharding.Mesh:
    """The mesh on the slice's devices; those of two calls of jax's would not be the same ones."""
    return jax_mesh(mesh, devices_ahead(mesh, topology))


def placed(types: Any, optimizer: Any, mesh: spmd.Mesh, topology: spmd.Topology) -> Any:
    """The arguments on the slice's devices; the optimizer's moments lie as their parameters."""
    where = mesh_ahead(mesh, topology)

    def place(x: Any, like: Any) -> Any:
        spec = [None if entry is spmd.OPEN else entry for entry in like.sharding.spec]
        sharding_ = NamedSharding(where, PartitionSpec(*spec))
        return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding_)

    def whole(x: Any) -> Any:
        return jax.ShapeDtypeStruct(
            x.shape, x.dtype, sharding=NamedSharding(where, PartitionSpec())
        )

    params, state, batch = types
    return (
        jax.tree.map(place, params, params),
        optax.tree_map_params(optimizer, place, state, params, transform_non_params=whole),
        jax.tree.map(place, batch, batch),
    )


def built(given: Any, row: str, name: str) -> Built:
    """Compiles a program, or reads what was made of it last time."""
    shape = (given.batch, given.seq_len)
    options = dict(option.split("=", 1) for option in given.options)
    if given.cache is None:
        return build(ROWS[row], name, given.layers, shape, options)
    label = "_".join([row, name, str(given.layers), *given.options]).replace(" ", "_")
    text, figures = given.cache / f"{label}.hlo", given.cache / f"{label}.json"
    if figures.exists():
        known = json.loads(figures.read_text(encoding="utf-8"))
        return Built(text.read_text(encoding="utf-8"), *known)
    made = build(ROWS[row], name, given.layers, shape, options)
    given.cache.mkdir(parents=True, exist_ok=True)
    text.write_text(made.text, encoding="utf-8")
    figures.write_text(json.dumps(made[1:]), encoding="utf-8")
    return made


def cells(row: Setup, name: str, made: Built) -> list[str]:
    """A line of the table."""
    mesh, topology = spmd.Mesh(None, row.mesh, ("data", "model")), spmd.Topology(row.topology)
    step = modelled(made.text, mesh, topology)
    return [
        name,
        f"{step.seconds * 1e3:.1f}",
        f"{step.kernel_seconds * 1e3:.1f}",
        f"{step.exposed_seconds * 1e3:.1f} ({step.exposed_seconds / step.seconds:.1%})",
        f"{step.large_hidden} of {step.large}",
        f"{step.sent / 1e9:.2f}",
        f"{made.temporary / 2**30:.2f}",
        f"{made.seconds:.0f}",
    ]


HEADER = (
    "row",
    "program",
    "modelled ms",
    "kernels ms",
    "exposed ms",
    "asynchronous above 1 MB",
    "GB sent",
    "temporary GiB",
    "compile s",
)


def make_parser() -> Parser:
    """The flags."""
    parser = Parser("benchmarks/run tpu", __doc__)
    add = parser.add_argument
    add("--rows", type=words, default=",".join(ROWS), help="which configurations")
    add("--programs", type=words, default="0,1,2", help="ours, jax.jit, the same without einsums")
    add("--layers", type=int, default=4, help="how many layers")
    add("--batch", type=int, default=32, help="sequences in a step")
    add("--seq_len", type=int, default=1024, help="tokens in a sequence")
    add("--options", type=words, default=(), help="compiler options, name=value")
    add("--cache", type=Path, help="folder that keeps what the TPU compiler made")
    add("--synchronous", action=Switch, default=False, help="list large synchronous collectives")
    return parser


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints one table."""
    given = make_parser().parse_args(arguments)
    print(f"jax {jax.__version__}, {given.layers} layers, batch {given.batch} x {given.seq_len}")
    print("| " + " | ".join(HEADER) + " |")
    print("|" + " --- |" * len(HEADER))
    names = list(PROGRAMS)
    for row in given.rows:
        for number in map(int, given.programs):
            made = built(given, row, names[number])
            print(
                "| " + " | ".join([row, *cells(ROWS[row], names[number], made)]) + " |", flush=True
            )
            if given.synchronous:
                _list(ROWS[row], made)


def _list(row: Setup, made: Built) -> None:
    """Prints the large collectives that nothing runs beside."""
    mesh = spmd.Mesh(None, row.mesh, ("data", "model"))
    for c, waited in modelled(made.text, mesh, spmd.Topology(row.topology)).synchronous:
        print(f"    {c.count} x {c.kind} among {c.group_size}, {c.bytes / 1e6:.1f} MB each, "
              f"{waited * 1e3:.2f} ms together: {c.op_name} {c.source}")  # fmt: skip


if __name__ == "__main__":
    main()
