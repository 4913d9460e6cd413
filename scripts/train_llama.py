"""Train a Llama on text, partitioned over a mesh by `spmd`.

The model and the training step are single-device code. What is marked are parameters, inputs and
the activations in `models/llama/sharding.py`; the rest, the optimizer's state among it, is
inferred by the compiler, and created where it belongs.

Examples:
    python scripts/train_llama.py --mesh data=4,model=2
    python scripts/train_llama.py --model llama2-7b --mesh data=8 --noscan --seq_len 4096 \
        --global_batch 16 --data '/corpus/*.txt' --report report.html
"""

import dataclasses
import functools
import math
import os
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import jax
import numpy as np
from absl import app, flags
from rich.console import Console

import spmd
from models.llama import sharding
from models.llama.config import (
    CONFIGS,
    DTYPES,
    FLOP_CONVENTIONS,
    ConfigError,
    LlamaConfig,
    named_config,
)
from models.llama.generate import generate, make_next_logits
from models.llama.model import init
from models.llama.training import batch_loss
from models.training import data
from models.training.loop import (
    Record,
    TrainingError,
    TrainState,
    make_train_step,
    train,
    typical_seconds,
)
from models.training.metrics import StepCost, peak_flops
from models.training.optimizer import (
    OPTIMIZERS,
    OptimizerConfig,
    default_learning_rate,
    make_optimizer,
)

PROMPT = "def "
SAMPLE_TOKENS = 200
HELD_OUT_BATCHES = 8

_MODEL = flags.DEFINE_enum("model", "quickstart", sorted(CONFIGS), "Which Llama.")
_MESH = flags.DEFINE_string("mesh", "data=4,model=2", "Mesh axes and their sizes.")
_DATA = flags.DEFINE_list(
    "data",
    [],
    "Folders made by scripts/tokenize_data, mixed by their shares if given as folder@0.7; or "
    "files, directories or glob patterns of text. Default: Python's standard library.",
)
_TOKENIZER = flags.DEFINE_string(
    "tokenizer",
    data.BYTES,
    "Of text in --data: a tokenizer.json, a folder with one, or `bytes`. Folders know theirs.",
)
_PACKING = flags.DEFINE_enum(
    "packing",
    "none",
    data.PACKINGS,
    "Whether documents that share a sequence are kept apart: by attention, positions and loss.",
)
_STEPS = flags.DEFINE_integer("steps", 200, "Training steps.")
_SEQ_LEN = flags.DEFINE_integer("seq_len", 128, "Tokens of a sequence.")
_GLOBAL_BATCH = flags.DEFINE_integer("global_batch", 16, "Sequences of a step, on all devices.")
_OPTIMIZER = flags.DEFINE_enum("optimizer", "adamw", OPTIMIZERS, "Which optimizer.")
_LEARNING_RATE = flags.DEFINE_float(
    "learning_rate", None, "Peak learning rate. Default: by optimizer and size of the model."
)
_SCAN = flags.DEFINE_bool(
    "scan", True, "Run the layers in a scan (compiles faster) or unroll them (runs faster)."
)
_DTYPE = flags.DEFINE_enum(
    "dtype", None, DTYPES, "What to compute in. Default: float32 on CPU, bfloat16 elsewhere."
)
_SEED = flags.DEFINE_integer("seed", 0, "Seed of parameters, samples and generated text.")
_REPORT = flags.DEFINE_string("report", None, "Write a report on the partitioning (HTML) here.")
_LOG_JSONL = flags.DEFINE_string("log_jsonl", None, "Append one JSON object for each step here.")
_VERBOSE = flags.DEFINE_bool("verbose", False, "Also print every sharding and collective.")


class UsageError(ValueError):
    """Flags that do not make a run; the message is one line."""


@dataclasses.dataclass(frozen=True)
class Run:
    """What the flags ask for, validated."""

    config: LlamaConfig
    optimizer: OptimizerConfig
    mesh: spmd.Mesh
    train_data: data.PackedTokens
    held_out_data: data.PackedTokens
    tokenizer: data.Tokenizer


@dataclasses.dataclass(frozen=True)
class Programs:
    """The compiled training step, and how long it took to compile."""

    step: Any
    seconds: float


# Flags -> Run


def parse_mesh(text: str) -> dict[str, int]:
    """`"data=4,model=2"` -> `{"data": 4, "model": 2}`.

    Raises:
        UsageError: not of that form, an unknown or repeated axis, or a size below 1.
    """
    axes: dict[str, int] = {}
    for item in text.split(","):
        name, _, size = (part.strip() for part in item.partition("="))
        if not size.isdecimal() or int(size) < 1:
            raise UsageError(f"--mesh: {item!r} is not of the form axis=size, as in data=4,model=2")
        if name not in sharding.MESH_AXES:
            known = ", ".join(sharding.MESH_AXES)
            raise UsageError(f"--mesh: no axis is called {name!r}; the model splits over {known}")
        if name in axes:
            raise UsageError(f"--mesh: axis {name!r} is given twice")
        axes[name] = int(size)
    return axes


def pick_devices(axes: Mapping[str, int], devices: Sequence[Any]) -> Sequence[Any]:
    """As many of the visible devices as the mesh needs.

    Raises:
        UsageError: there are fewer; says how to get virtual CPU devices.
    """
    needed = math.prod(axes.values())
    if needed <= len(devices):
        return devices[:needed]
    raise UsageError(
        f"--mesh: {format_axes(axes)} needs {needed} devices, and {len(devices)} of the kind "
        f"{devices[0].device_kind} can be seen; give a smaller mesh or, for "
        "virtual CPU devices, set JAX_PLATFORMS=cpu "
        f"XLA_FLAGS=--xla_force_host_platform_device_count={needed}"
    )


def format_axes(axes: Mapping[str, int]) -> str:
    """The inverse of `parse_mesh`."""
    return ",".join(f"{name}={size}" for name, size in axes.items())


def check_flags(axes: Mapping[str, int]) -> None:
    """Raise `UsageError` for numbers and paths that cannot work, before anything is loaded."""
    for flag in (_STEPS, _SEQ_LEN, _GLOBAL_BATCH):
        if flag.value < 1:
            raise UsageError(f"--{flag.name} must be positive, not {flag.value}")
    if _LEARNING_RATE.value is not None and _LEARNING_RATE.value <= 0:
        raise UsageError(f"--learning_rate must be positive, not {_LEARNING_RATE.value}")
    if _SEED.value < 0:
        raise UsageError(f"--seed must not be negative, and is {_SEED.value}")
    ways = axes.get("data", 1)
    if _GLOBAL_BATCH.value % ways:
        raise UsageError(
            f"--global_batch: {_GLOBAL_BATCH.value} sequences do not divide over data={ways}; the "
            f"next that do are {math.ceil(_GLOBAL_BATCH.value / ways) * ways}"
        )
    for name, path in (("report", _REPORT.value), ("log_jsonl", _LOG_JSONL.value)):
        if path:
            check_writable(name, Path(path))


def check_writable(flag: str, path: Path) -> None:
    """Raise `UsageError` unless a file can be written at `path`."""
    if path.is_dir():
        raise UsageError(f"--{flag}: {path} is a directory; name a file")
    if not path.absolute().parent.is_dir():
        raise UsageError(f"--{flag}: the directory {path.absolute().parent} does not exist")
    if not os.access(path if path.exists() else path.absolute().parent, os.W_OK):
        raise UsageError(f"--{flag}: {path} cannot be written")


def make_run() -> Run:
    """The run that the flags ask for."""
    axes = parse_mesh(_MESH.value)
    check_flags(axes)
    devices = pick_devices(axes, jax.devices())
    default_dtype = "float32" if devices[0].platform == "cpu" else "bfloat16"
    config = dataclasses.replace(
        named_config(_MODEL.value),
        scan_layers=_SCAN.value,
        dtype=_DTYPE.value or default_dtype,
    )
    optimizer = OptimizerConfig(
        name=_OPTIMIZER.value,
        total_steps=_STEPS.value,
        learning_rate=_LEARNING_RATE.value
        or default_learning_rate(_OPTIMIZER.value, config.parameter_count()),
    )
    train_data, held_out_data = load_data(config)
    mesh = spmd.make_mesh(devices=devices, **axes)
    tokenizer = data.tokenizer_of(data_config())
    return Run(config, optimizer, mesh, train_data, held_out_data, tokenizer)


def data_config() -> data.DataConfig:
    """What the flags name to train on."""
    return data.DataConfig(tuple(_DATA.value), _TOKENIZER.value, cast(data.Packing, _PACKING.value))


def load_data(config: LlamaConfig) -> tuple[data.PackedTokens, data.PackedTokens]:
    """(training, held-out) batches of what the flags name."""
    return data.load_datasets(
        data_config(),
        seq_len=_SEQ_LEN.value,
        batch_size=_GLOBAL_BATCH.value,
        seed=_SEED.value,
        vocab_size=config.vocab_size,
    )


# Compiling and running


def make_loss(run: Run) -> Any:
    """`loss_fn(params, batch)` with the activations of the table marked."""
    return batch_loss(run.config, sharding.activation_marks(run.mesh, run.config))


def marked_structs(run: Run) -> tuple[Any, Any]:
    """(parameters, batch) as structs with the shardings of the tables; nothing is allocated."""
    params = jax.eval_shape(functools.partial(init, config=run.config), jax.random.key(0))
    batch = run.train_data.struct()
    return (
        sharding.mark_params(params, run.mesh, run.config),
        sharding.mark_batch(batch, run.mesh),
    )


def compile_step(run: Run) -> Programs:
    """Partition and compile the training step; the optimizer state's sharding is inferred."""
    optimizer = make_optimizer(run.optimizer)
    params, batch = marked_structs(run)
    started = time.perf_counter()
    step = spmd.jit(
        make_train_step(make_loss(run), optimizer), mesh=run.mesh, donate_argnums=(0, 1)
    )
    compiled = step.compile(params, jax.eval_shape(optimizer.init, params), batch)
    return Programs(compiled, time.perf_counter() - started)


def init_state(run: Run, compiled: Any) -> TrainState:
    """Parameters and optimizer state, each created in its sharding and never whole."""
    key = jax.random.key(_SEED.value)
    params = compiled.init(0, functools.partial(init, config=run.config), key)
    opt_state = compiled.init(1, make_optimizer(run.optimizer).init, params)
    return TrainState(params, opt_state)


def train_model(
    run: Run, compiled: Any, state: TrainState, console: Console
) -> tuple[TrainState, list[Record]]:
    """Train for `--steps` steps."""
    batch_shardings = compiled.in_shardings[2]
    config = run.config
    cost = StepCost(
        tokens=_GLOBAL_BATCH.value * _SEQ_LEN.value,
        devices=run.mesh.size,
        flops_per_token={c: config.flops_per_token(_SEQ_LEN.value, c) for c in FLOP_CONVENTIONS},
        peak_flops=peak_flops(jax.devices()[0].device_kind, config.dtype),
    )
    with data.Loader(run.train_data, shardings=batch_shardings, start_step=state.step) as loader:
        return train(
            compiled,
            state,
            lambda step: next(loader),
            steps=_STEPS.value,
            cost=cost,
            console=console,
            log_every=max(1, _STEPS.value // 20),
            jsonl=Path(_LOG_JSONL.value) if _LOG_JSONL.value else None,
        )


def held_out_loss(run: Run, params: Any) -> float:
    """Mean loss over a few batches that were not trained on."""
    _, batch = marked_structs(run)
    compiled = spmd.jit(make_loss(run), mesh=run.mesh).compile(params, batch)
    shardings = compiled.in_shardings[1]
    losses = [
        float(compiled(params, data.place(run.held_out_data(step), shardings)))
        for step in range(HELD_OUT_BATCHES)
    ]
    return sum(losses) / len(losses)


def sample_text(run: Run, params: Any) -> str:
    """The model's continuation of `PROMPT`."""
    window = _SEQ_LEN.value
    step = spmd.jit(make_next_logits(run.config), mesh=run.mesh)
    next_logits = step.compile(params, np.zeros((1, window), np.int32), np.int32(0))
    tokenizer = run.tokenizer
    tokens = generate(
        next_logits,
        params,
        tokenizer.encode_batch([PROMPT])[0].tolist(),
        tokens=SAMPLE_TOKENS,
        window=window,
        seed=_SEED.value,
    )
    text = PROMPT + tokenizer.decode(tokens)
    return "".join(char if char.isprintable() or char in "\n\t" else "\ufffd" for char in text)


# Printing


def print_run(run: Run, console: Console) -> None:
    """What runs on what."""
    config, mesh = run.config, run.mesh
    device = jax.devices()[0]
    console.print(
        f"{_MODEL.value}: {config.parameter_count():,} parameters, "
        f"{config.num_hidden_layers} layers {'scanned' if config.scan_layers else 'unrolled'}, "
        f"{config.dtype}, {run.optimizer.name}"
    )
    console.print(
        f"mesh {format_axes(mesh.shape)}: {mesh.size} of {jax.device_count()} "
        f"{device.device_kind} devices"
    )
    console.print(
        f"{_GLOBAL_BATCH.value} x {_SEQ_LEN.value} tokens a step, {_STEPS.value} steps, from "
        f"{run.train_data.token_count:,} tokens of "
        f"{', '.join(_DATA.value) or 'the Python standard library'}"
    )
    for sentence in sharding.dropped_marks(config, mesh.shape):
        console.print(f"not marked: {sentence}")


def print_compiled(programs: Programs, console: Console) -> None:
    """How compilation went, and with --verbose what came of it."""
    console.print(f"partitioned and compiled in {programs.seconds:.1f} s")
    console.print(programs.step.explain() if _VERBOSE.value else programs.step.summary())


def print_result(records: list[Record], held_out: float, console: Console) -> None:
    """What training achieved."""
    seconds = typical_seconds(records)
    tokens = _GLOBAL_BATCH.value * _SEQ_LEN.value
    console.print(
        f"loss {records[0]['loss']:.3f} -> {records[-1]['loss']:.3f}, held out {held_out:.3f}; "
        f"{1000 * seconds:.0f} ms a step, {tokens / seconds:,.0f} tokens/s; "
        f"{sum(record['seconds'] for record in records):.0f} s in all"
    )


def run_training() -> None:
    """Everything that the flags ask for, in order."""
    console = Console(markup=False, highlight=False, soft_wrap=True)
    run = make_run()
    print_run(run, console)
    programs = compile_step(run)
    print_compiled(programs, console)
    state, records = train_model(run, programs.step, init_state(run, programs.step), console)
    print_result(records, held_out_loss(run, state.params), console)
    console.print(f"--- a sample\n{sample_text(run, state.params)}\n---")
    if _REPORT.value:
        programs.step.report(_REPORT.value)
        console.print(f"report: {Path(_REPORT.value).absolute()}")


def main(argv: Sequence[str]) -> None:
    """Run, and turn what a user can mend into one message instead of a traceback."""
    try:
        if len(argv) > 1:
            raise UsageError(f"{argv[1]!r} is no flag; lists are given as --data a,b")
        run_training()
    except (UsageError, ConfigError, data.DataError, TrainingError, spmd.SpmdError) as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    app.run(main)
