r"""A Llama training step: `spmd.jit` beside plain `jax.jit` and PyTorch's FSDP2, one after another.

`jax.jit` gets the same program but for attention, which composites leave to the compiler: the peer
gets the kernel that plain jax has. It gets the same marks, parameters and
optimizer-state shardings; its partitioner is XLA's own. PyTorch (`benchmarks/torch_fsdp.py`) runs
the same sizes over all GPUs in processes of its own, before jax takes their memory.

`ms/step` is the median over `--steps` steps after two warm-up steps, each waited for; `ahead` is
the mean where none is, as in a training loop that logs now and then, and `J/step` the energy that
one GPU takes for it: where GPUs are at their power limit, that decides about the time. `--kinds`
adds where the time of one GPU went, by kind of kernel, and for ours what was predicted.

Example:
    benchmarks/run train --model llama2-7b --meshes data=8,data=4:model=2 --seq_len 1024
    benchmarks/run train --model llama2-7b --layers 8 --noscan --seq_len 4096 --global_batch 4 \
        --meshes data=2 --peers jax,torch --kinds
"""

import argparse
import dataclasses
import itertools
import math
import time
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

import spmd
from benchmarks import compiled_ahead as ahead
from benchmarks import kinds, torch_fsdp
from benchmarks.kinds import SECONDS, Kinds, joules, kinds_of, of_first_device
from benchmarks.tables import print_table
from spmd.cli.flags import Parser, Switch, positive, words
from spmd.explain.measured import Part
from spmd.measure.profile import PROFILED, Run, run_steps
from spmd.models.llama.config import ATTENTIONS, MATMULS, LlamaConfig
from spmd.models.llama.flops import flops_per_token
from spmd.models.llama.fresh import init
from spmd.models.training.run.metrics import peak_flops
from spmd.models.training.run.optimizer import initial_state


def parse_axes(text: str) -> dict[str, int]:
    """`data=4:model=2` as sizes of axes, 1 for an axis that is not there."""
    return {"data": 1, "model": 1, **ahead.parse_axes(text)}


class Loop:
    """A training loop: each step gets the state that the step before it left.

    Args:
      params, state: donated to the first step.
    """

    def __init__(self, step: Any, params: Any, state: Any, batch: Any) -> None:
        self._step, self._batch, self._state = step, batch, (params, state)
        self._loss: Any = None

    def run(self, _: None = None) -> None:
        """One step, waited for."""
        jax.block_until_ready(self._issue())

    def ahead(self, steps: int) -> tuple[float, float]:
        """Mean seconds and joules of a step where none is waited for, of the first GPU.

        On CPUs every one is: of several steps at once XLA's collectives may wait for each other.
        """
        start, before = time.perf_counter(), joules()
        for _ in range(steps):
            issue = self.run if jax.default_backend() == "cpu" else self._issue
            issue()
        jax.block_until_ready(self._loss)
        return (time.perf_counter() - start) / steps, (joules() - before) / steps

    @property
    def loss(self) -> float:
        """Of the last step."""
        return float(self._loss)

    def _issue(self) -> Any:
        *self._state, self._loss = self._step(*self._state, self._batch)
        return self._loss


@dataclasses.dataclass
class Row:
    """One program's line in the tables."""

    # name, mesh: the program, and how it is split
    name: str
    mesh: str
    # seconds, ahead: of one step, waited for or not
    seconds: float
    ahead: float
    joules: float  # of the first GPU in one step
    compile_seconds: float  # until it could run
    bytes: int  # memory of one device at its fullest
    loss: float  # of the last step
    kinds: Kinds | None = None  # where the time of the first device went, if that was asked for
    parts: Sequence[Part] = ()  # of our own program, kind by kind what was predicted and measured

    def cells(self, given: argparse.Namespace, config: LlamaConfig, devices: int) -> list[str]:
        """As `HEADER` has them."""
        rate = given.global_batch * given.seq_len / self.ahead / devices
        peak = peak_flops(jax.devices()[0].device_kind, config.dtype)
        mfu = flops_per_token(config, given.seq_len) * rate / peak if peak else float("nan")
        times = (f"{self.seconds * 1e3:.1f}", f"{self.ahead * 1e3:.1f}", f"{rate:,.0f}")
        energy = "-" if math.isnan(self.joules) else f"{self.joules:.1f}"
        sizes = (f"{self.bytes / 2**30:.1f}", f"{self.compile_seconds:.1f}", f"{self.loss:.4f}")
        return [self.name, self.mesh, *times, f"{mfu:.1%}", energy, *sizes]


HEADER = (
    *("program", "mesh", "ms/step", "ahead", "tokens/s/device", "MFU"),
    *("J/step", "peak GiB", "compile s", "loss"),
)


def config_of(given: argparse.Namespace) -> LlamaConfig:
    """The model that the flags name."""
    return ahead.model_of(
        given.model,
        given.layers,
        dtype=jnp.dtype(given.dtype).name,
        scan_layers=given.scan,
        attention=given.attention,
        param_dtype=given.param_dtype,
        remat=given.remat,
        matmul=given.matmul,
    )


def bench(given: argparse.Namespace, text: str) -> Iterator[Row]:
    """The programs of jax, over one mesh."""
    mesh, config = spmd.make_mesh(**parse_axes(text)), config_of(given)
    optimizer = getattr(optax, given.optimizer)(1e-4)
    shape = given.global_batch, given.seq_len
    offload = {"offload_optimizer": given.offload_optimizer}
    case = ahead.Case(config, mesh, None, shape, optimizer=optimizer, **offload)
    start = time.perf_counter()
    compiled = case.lower().compile()
    compile_seconds = time.perf_counter() - start
    # Tokens without meaning.
    tokens = np.random.RandomState(0).randint(0, config.vocab_size, case.shape).astype(np.int32)
    batch = jax.device_put({"inputs": tokens, "targets": tokens}, compiled.in_shardings[2])

    def fresh(placed: Any) -> tuple[Any, Any]:
        params = jax.jit(lambda key: init(key, config), out_shardings=placed[0])(jax.random.key(0))
        return params, jax.jit(partial(initial_state, optimizer), out_shardings=placed[1])(params)

    def measured(name: str, program: Any, placed: Any, compile_seconds: float) -> tuple[Row, Run]:
        loop = Loop(program, *fresh(placed), batch)
        run = run_steps(loop.run, lambda: None, given.steps, PROFILED if given.kinds else 0)
        ahead = loop.ahead(max(given.steps, math.ceil(SECONDS / run.seconds)))
        row = Row(name, text, run.seconds, *ahead, compile_seconds, 0, loop.loss)
        if given.kinds and jax.devices()[0].platform == "gpu":
            row.kinds = kinds_of(map(of_first_device, run.steps))
        return row, run

    row, run = measured("spmd.jit", compiled, compiled.in_formats, compile_seconds)
    row.bytes = compiled.memory.peak_bytes
    row.parts = compiled.compared(run).kinds if given.kinds else ()
    yield row
    if "jax" in given.peers and not given.offload_optimizer:
        start = time.perf_counter()
        # The attention that is best there.
        fused = jax.devices()[0].platform == "gpu" and config.dtype in ("bfloat16", "float16")
        theirs = dataclasses.replace(config, attention="cudnn" if fused else "einsum")
        plain = jax.jit(
            case._replace(config=theirs).step(),
            donate_argnums=(0, 1),
            in_shardings=compiled.in_shardings,
            out_shardings=(*compiled.in_shardings[:2], None),
        )
        peer = plain.lower(*case.types()).compile()
        row, _ = measured("jax.jit", peer, compiled.in_shardings, time.perf_counter() - start)
        memory: Any = peer.memory_analysis()
        row.bytes = memory.argument_size_in_bytes + memory.temp_size_in_bytes
        yield row


def torch_row(given: argparse.Namespace, text: str) -> Row:
    """PyTorch's line: over as many GPUs, all of them FSDP2's."""
    axes = parse_axes(text)
    sizes = (given.layers, math.prod(axes.values()), given.global_batch, given.seq_len)
    found = torch_fsdp.measure(given.model, *sizes, given.steps)
    row = Row(f"PyTorch {found.version}", text, *found[:6])
    row.kinds = found.kinds
    return row


def make_parser() -> Parser:
    """The flags."""
    parser = Parser("benchmarks/run train", __doc__)
    add = parser.add_argument
    add("--model", default="quickstart", help="named config")
    add("--meshes", type=words, default="data=8", help="meshes; axes are joined by ':'")
    add("--layers", type=int, default=0, help="overrides the number of layers; 0 keeps it")
    add("--seq_len", type=positive, default=1024, help="tokens in a sequence")
    add("--global_batch", type=positive, default=16, help="sequences in a step")
    add("--steps", type=positive, default=8, help="timed steps")
    add("--dtype", default="bfloat16", help="compute dtype")
    add("--scan", action=Switch, default=True, help="scan over layers, or unroll them")
    add("--optimizer", choices=["adamw", "adafactor"], default="adamw", help="of optax")
    add("--offload_optimizer", action=Switch, help="in the host's memory; without jax")
    add("--param_dtype", default="float32", help="what parameters are stored in")
    add("--matmul", choices=MATMULS, default="dtype", help="of the layers' projections")
    add("--remat", default="none", help="activations to keep, as in scripts/train_llama.py")
    add("--peers", type=words, default="jax", help="of jax, torch; 'none' for ours alone")
    add("--kinds", action=Switch, help="where the time went, by kind of kernel")
    add("--attention", choices=ATTENTIONS, default="auto", help="attention of our program")
    return parser


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints one table, and with `--kinds` two more."""
    parser = make_parser()
    given = parser.parse_args(arguments)
    if unknown := set(given.peers) - {"jax", "torch", "none"}:
        parser.error(f"--peers: there is no {min(unknown)}, only jax and torch")
    for_torch = [text for text in given.meshes if "torch" in given.peers and "model" not in text]
    rows = [torch_row(given, text) for text in for_torch]  # before jax takes the GPUs' memory
    device, config = jax.devices()[0], config_of(given)
    print(f"jax {jax.__version__}, {len(jax.devices())} x {device.device_kind}")
    print(f"{given.model}, {config.num_hidden_layers} layers, batch {given.global_batch} x "
          f"{given.seq_len}, {given.dtype} on {given.param_dtype}, "
          f"products in {given.matmul}, {given.optimizer}, "
          f"{'scanned' if given.scan else 'unrolled'}, recomputed: {given.remat}\n")  # fmt: skip

    def measured() -> Iterator[Row]:
        for text in given.meshes:
            for row in bench(given, text):
                rows.append(row)
                yield row

    devices = {text: math.prod(parse_axes(text).values()) for text in given.meshes}
    done = itertools.chain(tuple(rows), measured())
    print_table(HEADER, (row.cells(given, config, devices[row.mesh]) for row in done))
    if given.kinds:
        print()
        by_kind = [(row, row.kinds) for row in rows if row.kinds]
        print_table(
            ("milliseconds", "mesh", *kinds.HEADER),
            ([row.name, row.mesh, *kinds.cells()] for row, kinds in by_kind),
        )
        for row in rows:
            if row.parts:
                print()
                print_table(
                    (f"spmd.jit, {row.mesh}", "predicted ms", "measured ms"),
                    ([p.name, *(f"{s * 1e3:.1f}" for s in p[1:])] for p in row.parts),
                )
