"""Turns a checkpoint of a Llama for n devices into one for m devices.

What is read: a folder in Hugging Face's format, a folder of ranks that this program wrote, or a
checkpoint of a training run. What is written: with --ranks one file of safetensors for each rank,
as tensor-parallel engines want them (key heads are repeated where there are fewer than ranks); with
--mesh, of a training run, a checkpoint in the pieces that the devices of that mesh hold, optimizer
and all; else a folder in Hugging Face's format. No number changes unless --dtype says so. A run
with --ranks or neither that was stopped goes on where it was when it is started again.

Examples:
    scripts/reshard_checkpoints --from Llama-3.1-8B --out 8b-for-4 --ranks 4
    scripts/reshard_checkpoints --from 8b-for-4 --out 8b-for-16 --ranks 16
    scripts/reshard_checkpoints --from 8b-for-16 --out 8b-whole
    scripts/reshard_checkpoints --from runs/a --step 500 --out tuned --dtype bfloat16
    scripts/reshard_checkpoints --from runs/a --out runs/b --mesh data=32,model=4
"""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import jax
from rich.console import Console

from models.llama.config import DTYPES, ConfigError
from models.llama.hf_files import WeightsError
from models.llama.ranks import SHARDING_FILE, ranks_source
from models.llama.reshard import write_hf, write_ranks
from models.llama.sources import Source, checkpoint_source, hf_source
from models.training.checkpoint import AUTO, CheckpointError
from models.training.relayout import relayout
from models.training.run import RunFolder

USER_ERRORS = (CheckpointError, ConfigError, WeightsError, OSError)
"""What a user can mend: one message instead of a traceback."""


def make_parser() -> argparse.ArgumentParser:
    """The flags."""
    parser = argparse.ArgumentParser(
        prog="scripts/reshard_checkpoints",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("--from", required=True, type=Path, dest="source", help="the folder to read")
    add("--step", default=AUTO, help="of a training run; auto (default): the latest whole one")
    add("--out", required=True, type=Path, help="the folder to make")
    add("--ranks", type=int, help="files to make, one for each device; none: one whole model")
    add("--mesh", type=axes, help="axes and sizes: a run's checkpoint for the devices of this mesh")
    add("--dtype", choices=DTYPES, help="what to convert to (default: nothing is converted)")
    return parser


def axes(text: str) -> dict[str, int]:
    """`data=4,model=2` as axis -> size."""
    pairs = [item.partition("=") for item in text.split(",")]
    found = {name.strip(): int(size) for name, _, size in pairs}
    if len(found) != len(pairs) or min(found.values()) < 1:
        raise ValueError
    return found


def copy_run(given: argparse.Namespace, console: Console) -> None:
    """A run's checkpoint for another mesh.

    Raises:
        WeightsError: flags that do not go with --mesh, or no run.
    """
    if given.ranks is not None or given.dtype:
        raise WeightsError(
            "--mesh copies a run's checkpoint; --ranks and --dtype do not go with it"
        )
    source, target = RunFolder(given.source).checkpoints, RunFolder(given.out).checkpoints
    if not source.is_dir():
        raise WeightsError(f"--mesh: {given.source} is no folder of a training run")
    step = relayout(source, target, given.mesh, step=given.step, console=console)
    console.print(f"wrote {target / str(step)}; go on from it with --run_dir {given.out} --resume")


def open_source(folder: Path, step: str) -> contextlib.AbstractContextManager[Source]:
    """The tensors of a folder, whatever kind it is.

    Raises:
        WeightsError: it is no folder, or --step is given and it holds no run.
    """
    if not folder.is_dir():
        raise WeightsError(f"--from: {folder} is no folder")
    if RunFolder(folder).checkpoints.is_dir():
        return checkpoint_source(folder, step)
    if step != AUTO:
        raise WeightsError(f"--step: {folder} is no folder of a training run")
    is_cut = (folder / SHARDING_FILE).exists()
    return ranks_source(folder) if is_cut else hf_source(folder)


def run(given: argparse.Namespace, console: Console) -> None:
    """Convert, and say what came of it."""
    if given.step != AUTO and not given.step.isdecimal():
        raise WeightsError(f"--step: {given.step!r} is no number, and not {AUTO}")
    if given.mesh:
        copy_run(given, console)
        return
    started = time.perf_counter()
    with open_source(given.source, given.step) as source:
        console.print(f"{source.about}: {source.config.parameter_count():,} parameters")
        if given.ranks is None:
            write_hf(source, given.out, dtype=given.dtype, console=console)
        else:
            write_ranks(source, given.out, given.ranks, dtype=given.dtype, console=console)
    files = sorted(given.out.glob("*.safetensors"))
    size = sum(file.stat().st_size for file in files)
    seconds = time.perf_counter() - started
    console.print(f"wrote {given.out}: {len(files)} files, {size / 1e9:.3f} GB, {seconds:.1f} s")


def main(arguments: Sequence[str] | None = None) -> None:
    """Run, and turn what a user can mend into one message instead of a traceback."""
    given = make_parser().parse_args(arguments)
    console = Console(markup=False, highlight=False, soft_wrap=True)
    try:
        run(given, console)
    except USER_ERRORS as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    jax.config.update("jax_platforms", "cpu")  # devices are for others
    main()
