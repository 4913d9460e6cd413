r"""Train a Llama on text, partitioned over a mesh by `spmd`.

The model and the training step are single-device code. What is marked are parameters, inputs and
the activations in `models/llama/sharding.py`; the rest, the optimizer's state among it, is
inferred by the compiler, and created where it belongs.

Examples:
    python scripts/train_llama.py --mesh data=4,model=2
    python scripts/train_llama.py --run_dir runs/a --save_every 50 --resume
    python scripts/train_llama.py --model llama2-7b --mesh data=8 --noscan --seq_len 4096 \
        --global_batch 16 --data '/corpus/*.txt' --run_dir runs/7b --save_every 500
    python scripts/train_llama.py --init_from Llama-3.2-1B --export_hf Llama-3.2-1B-tuned
    scripts/launch local --processes 2 --devices_per_process 4 -- python scripts/train_llama.py

Exit codes: 0 all steps were taken; 1 an error, in one line; 2 flags that cannot be read; 75 saved
and stopped by SIGTERM or SIGINT, --resume goes on; 76 another process was lost; 77 a step took
longer than --watchdog_timeout.
"""

import argparse
import contextlib
import functools
import logging
import sys
import tempfile
import time
from collections.abc import Collection, Iterator, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import jax
from absl import logging as absl_logging
from rich.console import Console

import spmd
from models.llama import sharding
from models.llama.config import ConfigError
from models.llama.model import without_states
from models.llama.trainer import Trainer
from models.llama.weights.load import WeightsError
from models.training.checkpoints.found import CheckpointError, Found
from models.training.checkpoints.store import Checkpoints
from models.training.data import source as data
from models.training.run.background import Background
from models.training.run.description import RunConfig, RunError, RunFolder, check_same_model
from models.training.run.loop import Outcome, Schedule, TrainingError, TrainState, train
from models.training.run.optimizer import OptimizerError
from models.training.run.profile import ProfileError, Profiler
from models.training.run.records import JsonLines, TensorBoard
from models.training.run.sinks import Sinks, Terminal
from models.training.run.stop import STOPPED_EXIT_CODE, StopSignals
from scripts.flags import weights as weight_flags
from scripts.flags.run import (
    evaluates_first,
    format_axes,
    heartbeat_timeout,
    make_mesh,
    make_run,
    wanted_step,
)
from scripts.flags.train import make_parser
from scripts.flags.user_errors import one_message
from spmd import launch

PROMPT = "def "

USER_ERRORS = (
    RunError,
    ConfigError,
    OptimizerError,
    ProfileError,
    data.DataError,
    TrainingError,
    CheckpointError,
    WeightsError,
    spmd.SpmdError,
    OSError,
)
"""What a user can mend: one message instead of a traceback."""


# Data


def data_config(run: RunConfig) -> data.DataConfig:
    """What the flags name to train on."""
    return data.DataConfig(run.data, run.tokenizer, run.packing)


def load_data(run: RunConfig) -> tuple[data.PackedTokens, data.PackedTokens]:
    """(training, held-out) batches of what the flags name."""
    return data.load_datasets(
        data_config(run),
        seq_len=run.seq_len,
        batch_size=run.global_batch,
        seed=run.seed,
        vocab_size=run.model.vocab_size,
    )


# Starting and resuming


def open_checkpoints(
    run: RunConfig, folder: RunFolder, text: str, tokenizer: data.Tokenizer
) -> Checkpoints:
    """The checkpoints of a run folder.

    Args:
        run: what they are of.
        folder: where they are.
        text: fingerprint of the training data.
        tokenizer: of the data.
    """
    of_data = {"seed": run.seed, "fingerprint": text, "tokenizer": data.identity(tokenizer)}
    about = {"config": run.to_json(), "data": of_data}
    return Checkpoints(
        folder.checkpoints, keep_last=run.keep_last, keep_every=run.keep_every, about=about
    )


def find_checkpoint(
    run: RunConfig, wanted: int | str | None, checkpoints: Checkpoints, console: Console
) -> Found | None:
    """Where `--resume` goes on; None to start anew."""
    if wanted is None:
        steps = checkpoints.steps()
        if not steps:
            return None
        raise RunError(
            f"--run_dir: {checkpoints.folder.parent} holds a run that has come to step {steps[0]}; "
            "go on from there with --resume, or name another folder"
        )
    found = checkpoints.find(wanted)
    for note in checkpoints.notes:
        console.print(note)
    if found is None:
        console.print("no checkpoint yet: starting anew")
        return None
    changes = check_same_model(found.meta["config"], run)
    ours = checkpoints.about["data"]
    text = found.meta.get("data", ours)  # weights alone: of no data
    if text.get("tokenizer", ours["tokenizer"]) != ours["tokenizer"]:
        raise RunError(
            "the checkpoint was trained with another tokenizer: its tokens mean something else; "
            "name it with --tokenizer, or start anew"
        )
    if text["fingerprint"] != ours["fingerprint"]:
        changes.append("the text that is trained on")
    for change in changes:
        console.print(f"changed since the checkpoint: {change}")
    return found


def start(
    given: argparse.Namespace,
    trainer: Trainer,
    checkpoints: Checkpoints | None,
    found: Found | None,
    console: Console,
) -> TrainState:
    """The state to go on from: a checkpoint's, or a fresh one, perhaps with weights of others."""
    if checkpoints is None or found is None:
        shardings = without_states(trainer.step.in_shardings[0])
        params = weight_flags.load_params(given, trainer.model, shardings, console)
        return trainer.fresh_state(params)
    started = time.perf_counter()
    state = checkpoints.restore(found, trainer.targets())
    seconds = time.perf_counter() - started
    console.print(f"resuming after step {found.step}, restored in {seconds:.1f} s")
    if state.opt_state is None:
        console.print("the checkpoint holds weights alone: the optimizer starts anew")
        return trainer.fresh_state(state.params, found.step)
    return state


# Running


def open_sinks(
    run: RunConfig, kinds: Collection[str], folder: RunFolder | None, console: Console, step: int
) -> Sinks:
    """Where numbers go; nowhere but on process 0."""
    if not launch.is_main_process():
        return Sinks()
    sinks = Sinks([Terminal(console, run.steps, run.lines_every)])
    if folder is not None and "jsonl" in kinds:
        lines = functools.partial(JsonLines, folder.metrics, after=step)
        sinks.append(Background(str(folder.metrics), lines))
    if folder is not None and "tensorboard" in kinds:
        events = functools.partial(TensorBoard, folder.tensorboard, after=step)
        sinks.append(Background(str(folder.tensorboard), events))
    return sinks


def keep_compiled(folder: RunFolder) -> None:
    """Programs that are compiled from here on are kept: a restart compiles none of them again."""
    if (
        getattr(jax.config, "jax_compilation_cache_dir", None) is None
    ):  # the user may know a better place
        jax.config.update("jax_compilation_cache_dir", str(folder.compiled.absolute()))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
        jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def train_model(
    trainer: Trainer,
    state: TrainState,
    train_data: data.PackedTokens,
    held_out: data.PackedTokens,
    *,
    stop: StopSignals,
    sinks: Sinks,
    checkpoints: Checkpoints | None,
    folder: RunFolder | None,
    watch: launch.Watch,
    evaluates_first: bool,
) -> Outcome:
    """Train to the end, or until a signal comes."""
    run = trainer.run
    evaluate = trainer.evaluation(held_out, run.eval_batches, watch) if run.eval_batches else None
    schedule = Schedule(
        steps=run.steps,
        eval_every=run.eval_every,
        save_every=run.save_every,
        max_skipped=run.max_skipped,
        evaluates_first=evaluates_first,
    )
    shardings = trainer.step.in_shardings[2]
    with data.Loader(train_data, shardings=shardings, start_step=state.step) as batches:
        return train(
            trainer.step,
            state,
            batches,
            schedule,
            cost=trainer.cost(),
            sinks=sinks,
            evaluate=evaluate,
            saver=checkpoints,
            profiler=Profiler(run.profile, folder.profile) if folder else None,
            should_stop=stop.is_requested,
            watch=watch,
        )


@contextlib.contextmanager
def watched(folder: RunFolder | None, timeout: float) -> Iterator[launch.Watch]:
    """What hears of progress; too long without any ends the job."""
    if not timeout:
        yield launch.Unwatched()
        return
    where = Path("watchdog") if folder is None else folder.path / "watchdog"
    with launch.Watchdog(timeout, where) as dog:
        yield dog


# Printing


def print_run(
    run: RunConfig, name: str, mesh: spmd.Mesh, train_data: data.PackedTokens, console: Console
) -> None:
    """What runs on what."""
    model = run.model
    console.print(
        f"{name}: {model.parameter_count():,} parameters, "
        f"{model.num_hidden_layers} layers {'scanned' if model.scan_layers else 'unrolled'}, "
        f"{model.dtype}, {run.optimizer.name}"
    )
    console.print(
        f"mesh {format_axes(mesh.shape)}: {mesh.size} of {jax.device_count()} "
        f"{jax.devices()[0].device_kind} devices"
    )
    parts = f" in {run.microbatches} microbatches" if run.microbatches > 1 else ""
    console.print(
        f"{run.global_batch} x {run.seq_len} tokens a step{parts}, {run.steps} steps, from "
        f"{train_data.token_count:,} tokens of "
        f"{', '.join(run.data) or 'the Python standard library'}"
    )
    for part in train_data.parts if run.data else ():
        for note in part.corpus.notes:
            console.print(f"note: {note}")
    for sentence in notices(run):
        console.print(sentence)


def notices(run: RunConfig) -> Iterator[str]:
    """What is done otherwise than one might expect, a sentence each."""
    longest = run.model.max_position_embeddings
    if run.seq_len > longest:
        yield (
            f"note: sequences of {run.seq_len} tokens are longer than the {longest} that the model "
            "is meant for (max_position_embeddings)"
        )
    for dropped in sharding.dropped_marks(run.model, run.mesh, sharding.TABLES[run.sharding]):
        yield f"not marked: {dropped}"


def print_outcome(run: RunConfig, outcome: Outcome, console: Console) -> None:
    """What training achieved."""
    if outcome.first is None or outcome.last is None or outcome.typical_seconds is None:
        console.print(f"nothing left to do: {run.steps} steps have been taken")
        return
    rate = run.global_batch * run.seq_len / outcome.typical_seconds
    held_out = "" if outcome.eval_loss is None else f", held out {outcome.eval_loss:.3f}"
    skipped = f"; {outcome.skipped} steps skipped" if outcome.skipped else ""
    console.print(
        f"loss {outcome.first['loss']:.3f} -> {outcome.last['loss']:.3f}{held_out}; "
        f"{1000 * outcome.typical_seconds:.0f} ms a step, {rate:,.0f} tokens/s; "
        f"{outcome.seconds:.0f} s in all{skipped}"
    )


def write_report(trainer: Trainer, path: Path, console: Console, *, prices: bool) -> None:
    """The page on the partitioning; with what other decisions would have cost takes a while."""
    if not launch.is_main_process():
        return
    try:
        trainer.step.report(path, prices=prices)
        console.print(f"report: {path.absolute()}")
    except OSError as error:  # training is worth more
        console.print(f"the report could not be written: {error}")


def by_flag(run: RunConfig, given: argparse.Namespace) -> dict[str, str]:
    """What all processes have to agree on, by the flag that says it where there is one."""
    flags = {"optimizer.name": "--optimizer", "optimizer.total_steps": "--steps"}
    flags |= {f"optimizer.{name}": f"--{name}" for name in vars(given)}
    flags |= {name: f"--{name}" for name in vars(given)}
    return {flags.get(name, name): str(value) for name, value in run.flat().items()}


def run_training(given: argparse.Namespace) -> int:
    """Everything that the flags ask for, in order; the exit code."""
    console = Console(
        markup=False, highlight=False, soft_wrap=True, quiet=not launch.is_main_process()
    )
    devices = jax.devices()
    run = make_run(given, devices[0].platform)
    mesh = make_mesh(run, devices)
    train_data, held_out = load_data(run)
    launch.check_same(by_flag(run, given) | {"training text (hash)": train_data.fingerprint})
    launch.check_same_sources()
    folder = RunFolder(Path(given.run_dir)) if given.run_dir else None
    tokenizer = data.tokenizer_of(data_config(run))
    print_run(run, weight_flags.model_name(given), mesh, train_data, console)
    with contextlib.ExitStack() as stack:
        watch = stack.enter_context(watched(folder, given.watchdog_timeout))
        stop = stack.enter_context(StopSignals(lambda: watch.doing))
        checkpoints, found = None, None
        if folder is not None:
            folder.make()
            keep_compiled(folder)
            fingerprint = train_data.fingerprint
            checkpoints = open_checkpoints(run, folder, fingerprint, tokenizer)
            stack.enter_context(checkpoints)
            found = find_checkpoint(run, wanted_step(given), checkpoints, console)
            if launch.is_main_process():
                folder.write_config(run)
                weight_flags.write_tokenizer(tokenizer, folder.tokenizer)
        started = time.perf_counter()
        with watch.may_take("compiling"):
            trainer = Trainer(run, mesh, train_data.struct())
        console.print(f"partitioned and compiled in {time.perf_counter() - started:.1f} s")
        console.print(trainer.step.explain() if given.verbose else trainer.step.summary())
        if folder is not None:
            write_report(trainer, folder.report, console, prices=False)
        with watch.may_take("making the first state"):
            state = start(given, trainer, checkpoints, found, console)
        with open_sinks(run, given.metrics, folder, console, state.step) as sinks:
            outcome = train_model(
                trainer,
                state,
                train_data,
                held_out,
                stop=stop,
                sinks=sinks,
                checkpoints=checkpoints,
                folder=folder,
                watch=watch,
                evaluates_first=found is None and evaluates_first(given),
            )
        print_outcome(run, outcome, console)
        if outcome.is_stopped:
            return print_stopped(stop, outcome, folder, console)
        with watch.may_take("exporting"):
            export(given, outcome, run, tokenizer, folder, console)
        if given.sample_tokens:
            with watch.may_take("writing a sample"):
                params, length = outcome.state.params, given.sample_tokens
                text = trainer.sample_text(params, PROMPT, length, tokenizer)
            console.print(f"--- a sample\n{text}\n---")
        if given.report:
            with watch.may_take("writing the report"):
                write_report(trainer, Path(given.report), console, prices=True)
    return 0


def export(
    given: argparse.Namespace,
    outcome: Outcome,
    run: RunConfig,
    tokenizer: data.Tokenizer,
    folder: RunFolder | None,
    console: Console,
) -> None:
    """Writes --export_hf; if that fails, says where the training is kept.

    Raises:
        WeightsError: it failed.
    """
    params = outcome.state.params
    try:
        weight_flags.export_params(given, params, run.model, tokenizer, console)
    except WeightsError as error:
        if folder is not None:
            safe = f"step {outcome.state.step} is in {folder.checkpoints}: with --resume the same"
            safe += " command exports it"
        else:
            given.export_hf = str(Path(tempfile.mkdtemp()) / Path(given.export_hf).name)
            weight_flags.export_params(given, params, run.model, tokenizer, console)
            safe = f"the weights are in {given.export_hf} instead"
        raise WeightsError(f"{error}; {safe}") from error


def print_stopped(
    stop: StopSignals, outcome: Outcome, folder: RunFolder | None, console: Console
) -> int:
    """Says how to go on; the exit code."""
    step = outcome.state.step
    then = "nothing was saved: there is no --run_dir"
    if folder is not None:
        then = f"saved in {folder.checkpoints}, --resume goes on"
    if folder is not None and outcome.last is None:
        then = "there was nothing new to save, --resume goes on"
    console.print(f"stopped by {stop.name} after step {step}: {then}")
    return STOPPED_EXIT_CODE


def quiet() -> None:
    """Libraries keep their tracebacks to themselves: of a save that fails we say it in one line."""
    absl_logging.set_verbosity(absl_logging.FATAL)
    logging.getLogger("asyncio").setLevel(logging.CRITICAL)
    logging.getLogger("jax").setLevel(logging.ERROR)
    show = sys.unraisablehook

    def show_others(what: "sys.UnraisableHookArgs") -> None:
        # After a failed save tensorstore's threads answer to an event loop that is gone.
        if str(what.exc_value) != "Event loop is closed":
            show(what)

    sys.unraisablehook = show_others


def main(arguments: Sequence[str] | None = None) -> None:
    """Run, and turn what a user can mend into one message instead of a traceback."""
    given = make_parser(__doc__).parse_args(arguments)
    quiet()
    with launch.stopping_peers(), one_message(*USER_ERRORS):
        spmd.initialize(heartbeat_timeout_s=heartbeat_timeout(given))
        sys.exit(run_training(given))


if __name__ == "__main__":
    main()
