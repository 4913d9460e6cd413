"""`Trainer`: a training run of any model, from its first parameters to its last checkpoint.

    compile the step                         models/training/program.py
    find a checkpoint, or make a state       models/training/run/start.py
    take steps, evaluate, save, stop         models/training/run/loop.py
    print, write metrics and the report      models/training/trainer.py

The order of these things is here.
"""

import contextlib
import dataclasses
import functools
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, cast

import jax
import optax
from rich.console import Console

import spmd
from spmd import launch
from spmd.models.training.checkpoints.found import CheckpointError, Found
from spmd.models.training.checkpoints.store import Checkpoints
from spmd.models.training.data.loader import Dataset, checked, open_batches, structs_of
from spmd.models.training.data.samples import PackedTokens
from spmd.models.training.errors import DataError, RunError, TrainingError
from spmd.models.training.options import TrainerOptions
from spmd.models.training.program import Marks, TrainingProgram
from spmd.models.training.run import start
from spmd.models.training.run.background import Background
from spmd.models.training.run.description import RunFolder
from spmd.models.training.run.loop import Best, Loop, Outcome
from spmd.models.training.run.metrics import StepCost
from spmd.models.training.run.optimizer import OptimizerConfig
from spmd.models.training.run.profile import Profiler
from spmd.models.training.run.sinks import (
    Forgiving,
    JsonLines,
    Record,
    Sink,
    TensorBoard,
    Terminal,
)
from spmd.models.training.run.stateful import Stateful
from spmd.models.training.run.step import LossFn
from spmd.models.training.run.stop import STOPPED_EXIT_CODE, StopSignals


@dataclasses.dataclass(frozen=True, kw_only=True)
class Hooks:
    """What a program adds to a run; every process calls each of them.

    Example:
        >>> def log(record, params=None):  # a tracker's whole work
        ...     wandb.log(record, step=record["step"])
        >>> Hooks(after_step=log, after_eval=log)
    """

    # called with the checkpoint to go on from, or None; raises an error if that is not of this run,
    # or returns what has changed since
    before: Callable[[Found | None], list[str]] = lambda found: []
    # makes the parameters to start from, such as weights of others; None draws them
    first_params: Callable[[TrainingProgram], Any] = lambda program: None
    # called with the numbers of each step: `step`, `samples` seen so far, `loss`, `seconds`, rates,
    # metrics of one's own. It is one step late, so that no device waits. True ends the run as its
    # last step would; all processes have to say so after the same step (seconds differ).
    after_step: Callable[[Record], bool | None] = lambda record: None
    # called with the numbers of each evaluation (`step`, `samples`, `eval_loss`, `eval_` metrics)
    # and the parameters that were evaluated; every `eval_every` steps also where there is no
    # `held_out`. True, on process 0, ends the run.
    after_eval: Callable[[Record, Any], bool | None] | None = None
    # (parameters that are trained, optimizer state) -> what evaluations and exports use in their
    # place, such as a mean over steps; None: they themselves. It is traced.
    eval_params: Callable[[Any, Any], Any] | None = None
    # called after the last step of a run that was not stopped, while the watchdog watches
    after: Callable[[TrainingProgram, Outcome, launch.Watch], None] = (
        lambda program, outcome, watch: None
    )


__all__ = ["USER_ERRORS", "Hooks", "Stateful", "Trainer", "TrainerOptions", "exit_code"]

HOOK_S = 4 * 3600.0
"""So many seconds longer `Hooks.after_eval` may take on one process than on another."""

USER_ERRORS = (RunError, DataError, TrainingError, CheckpointError, spmd.SpmdError, OSError)
"""What a user can mend: one message instead of a traceback."""


class Trainer:
    """Trains a model whose parameters are any tree, over a mesh whose axes have any names.

    In a job of several processes all of them make the same trainer, after `spmd.initialize()`.

    Args:
        init: key -> parameters, or a `Stateful` with what is kept beside them; traced, so that each
            device makes only its part.
        loss: (params, batch) -> mean loss, weighted by `batch["weights"]` if the batch has them; of
            a `Stateful` (mean loss, the next state). Metrics of one's own come behind, such as
            (mean loss, {"accuracy": a mean}); records, files and evaluations have them.
        marks: of the parameters, by path: `{"*/kernel": ("rows", "columns")}`. The rest is
            inferred.
        data: step -> the whole batch of that step, a dict of numpy arrays; steps count from 0. The
            number of rows may change during the run: the step is compiled for each.
        batch_marks: of a batch, by name.
        optimizer: which one, or one of optax. A schedule of ours ends with the run, unless it says
            where.
        options: how long, and what is kept.
        held_out: as `data`, for evaluations; None makes none.
        eval_loss: what evaluations compute, as without dropout; `loss` if left out.
        frozen: patterns over the paths of parameters that are not trained. They have no gradient
            and no optimizer state, and checkpoints do not hold them: a run that goes on makes
            them anew, by `hooks.first_params` or `init`.
        hooks: what is done besides.

    Attributes:
        compile: makes the `TrainingProgram`; it is called when the run begins.
        about: what checkpoints say of the run: `config` and `data`.
        console: where the run prints.

    Example:
        >>> trainer = Trainer(
        ...     init, loss, {"w": ("rows", None)}, data, mesh=spmd.make_mesh(rows=8),
        ...     batch_marks={"x": ("rows", None)}, optimizer=optax.adam(1e-3),
        ...     options=Options(steps=100, run_dir="runs/a", save_every=20),
        ... )
        >>> outcome = trainer.run()
    """

    def __init__(
        self,
        init: Callable[[jax.Array], Any],
        loss: LossFn,
        marks: Marks,
        data: Dataset,
        *,
        mesh: spmd.Mesh,
        batch_marks: Marks,
        optimizer: OptimizerConfig | optax.GradientTransformation,
        options: TrainerOptions,
        held_out: Dataset | None = None,
        eval_loss: LossFn | None = None,
        frozen: Sequence[str] = (),
        hooks: Hooks | None = None,
    ) -> None:
        def compile_step() -> TrainingProgram:
            rule = optimizer
            if isinstance(rule, OptimizerConfig):
                rule = rule.ending_at(options.steps)
            return TrainingProgram(
                init,
                loss,
                marks,
                structs_of(data),
                batch_marks,
                mesh=mesh,
                optimizer=rule,
                microbatches=options.microbatches,
                on_nonfinite=options.on_nonfinite,
                eval_loss=eval_loss,
                frozen=frozen,
                offload_optimizer=options.offload_optimizer,
            )

        self._set(compile_step, data, held_out, options, hooks or Hooks())

    @classmethod
    def of(
        cls,
        compile_step: Callable[[], TrainingProgram],
        data: Dataset,
        *,
        options: TrainerOptions,
        held_out: Dataset | None = None,
        hooks: Hooks | None = None,
        about: Mapping[str, Any] | None = None,
    ) -> "Trainer":
        """A trainer of a program that is made elsewhere.

        Args:
            compile_step: makes it.
            data, options, held_out, hooks: as for `Trainer`.
            about: what checkpoints say of the run.
        """
        trainer = cls.__new__(cls)
        trainer._set(compile_step, data, held_out, options, hooks or Hooks())
        trainer.about = dict(about or {})
        return trainer

    def _set(
        self,
        compile_step: Callable[[], TrainingProgram],
        data: Dataset,
        held_out: Dataset | None,
        options: TrainerOptions,
        hooks: Hooks,
    ) -> None:
        self.compile, self.data, self.held_out = compile_step, data, held_out
        self.options, self.hooks = options, hooks
        self.about: dict[str, Any] = {}
        self.folder = None if options.run_dir is None else RunFolder.at(options.run_dir)
        self.console = make_console()

    def run(self) -> Outcome:
        """Takes all steps that are left, or stops early on SIGTERM or SIGINT.

        Returns:
            The state after the last step, and what the steps were like.

        Raises:
            RunError, CheckpointError: the folder holds another run, or cannot be used.
            TrainingError: loss, gradients or an update are not finite.
            LaunchError: processes differ in what they are to do.
        """
        options, folder = self.options, self.folder
        start.agree(options, self.data)
        if note := start.restart_note(options):
            self.console.print(note)
        with contextlib.ExitStack() as stack:
            watch = stack.enter_context(start.watched(options.watchdog_timeout, folder))
            stop = stack.enter_context(StopSignals(lambda: watch.doing))
            checkpoints = stack.enter_context(start.opened(folder, options, self.about))
            found = self._found(checkpoints)
            program = self._compiled(watch)
            with watch.may_take("making the first state"):
                make = self.hooks.first_params
                state = start.first_state(
                    program, checkpoints, found, make, seed=options.seed, console=self.console
                )
            evaluate = None
            if self.held_out is not None and options.eval_batches:
                held_out = checked(self.held_out, "held_out")
                evaluate = program.evaluation(held_out, options.eval_batches, watch)
            if found is not None:  # evaluated before its first step was a fresh run alone
                options = dataclasses.replace(options, eval_first=False)
            if checkpoints is not None and program.frozen.patterns:
                checkpoints.about["frozen"] = program.frozen.sums(state.params)
            profiler = Profiler(options.profile, folder.profile) if folder else Profiler(None)
            best = found and found.meta.get("best")

            @contextlib.contextmanager
            def compiling(rows: int) -> Iterator[None]:
                self.console.print(f"compiling the step for batches of {rows} rows")
                with watch.may_take("compiling"):
                    yield

            with (
                open_sinks(options, folder, self.console, state.step) as sinks,
                open_batches(
                    self.data,
                    lambda batch: program.at(batch, compiling).in_shardings[2],
                    state.step,
                    options.data_threads,
                ) as batches,
            ):
                outcome = Loop(
                    lambda *arguments: program.at(arguments[2])(*arguments),
                    state,
                    batches,
                    options,
                    cost=program.cost,
                    sinks=sinks,
                    evaluate=evaluate,
                    after_step=self.hooks.after_step,
                    after_eval=self._after_eval(),
                    eval_params=program.eval_params(self.hooks.eval_params),
                    elsewhere=program.elsewhere() if options.audit_steps else None,
                    trained=program.trained,
                    samples=self._samples(found),
                    best=Best(**best) if best else None,
                    saver=checkpoints,
                    profiler=profiler,
                    should_stop=stop.is_requested,
                    watch=watch,
                ).run()
            for line in ending(outcome, options, program.cost, stop.name, folder):
                self.console.print(line)
            if not outcome.is_stopped:
                self.hooks.after(program, outcome, watch)
        return outcome

    def _found(self, checkpoints: Checkpoints | None) -> Found | None:
        if checkpoints is None:
            return None
        found = start.find_checkpoint(checkpoints, self.options.resume, self.console)
        for change in self.hooks.before(found):
            self.console.print(f"changed since the checkpoint: {change}")
        if isinstance(self.data, PackedTokens) and found is not None:
            self.data = self.data.going_on(found.step, self._samples(found))
        return found

    def _samples(self, found: Found | None) -> int:
        """How many samples have been seen at a checkpoint, also one that does not say it."""
        if found is None:
            return 0
        if (seen := found.meta.get("samples")) is None:
            rows = max(leaf.shape[0] for leaf in jax.tree.leaves(structs_of(self.data)))
            seen = found.step * found.meta.get("config", {}).get("global_batch", rows)
        return int(seen)

    def _after_eval(self) -> Callable[[Record, Any], bool] | None:
        hook = self.hooks.after_eval
        if hook is None:
            return None
        # One answer for all processes, which may wait for the first one's texts and pictures.
        return lambda record, params: bool(
            launch.exchange(
                "end" if hook(record, params) else "", label="after_eval", timeout_s=HOOK_S
            )[0]
        )

    def _compiled(self, watch: launch.Watch) -> TrainingProgram:
        started = time.perf_counter()
        with watch.may_take("compiling"):
            program = self.compile()
            step = program.step
        self.console.print(f"partitioned and compiled in {time.perf_counter() - started:.1f} s")
        self.console.print(step.explain() if self.options.verbose else step.summary())
        if self.folder is not None:
            self.write_report(program, self.folder.report, prices=False)
        return program

    def write_report(self, program: TrainingProgram, path: Path, *, prices: bool) -> None:
        """The page on the partitioning; with what other decisions would have cost takes a while."""
        if not launch.is_main_process():
            return
        try:
            program.step.report(path, prices=prices)
            shown = path.absolute() if self.folder is None else self.folder.shown(path)
            self.console.print(f"report: {shown}")
        except OSError as error:  # training is worth more
            self.console.print(f"the report could not be written: {error}")


def exit_code(outcome: Outcome) -> int:
    """What a program of a run exits with: 0, or 75 (try again) if it was stopped."""
    return STOPPED_EXIT_CODE if outcome.is_stopped else 0


def make_console() -> Console:
    """Where a run prints; process 0 alone does."""
    return Console(
        file=cast(IO[str], Forgiving()),
        markup=False,
        highlight=False,
        soft_wrap=True,
        quiet=not launch.is_main_process(),
    )


@contextlib.contextmanager
def open_sinks(
    options: TrainerOptions, folder: RunFolder | None, console: Console, step: int
) -> Iterator[list[Sink]]:
    """Where numbers go; nowhere but on process 0.

    Args:
        options: which files are written, and how often a line is printed.
        folder: holds the files; None writes none.
        step: the one to go on from: what files have of later ones is dropped.
    """
    if not launch.is_main_process():
        yield []
        return
    sinks: list[Sink] = [Terminal(console, options.steps, options.lines_every)]
    if folder is not None and "jsonl" in options.metrics:
        lines = functools.partial(JsonLines, folder.metrics, after=step)
        sinks.append(Background(str(folder.metrics), lines))
    if folder is not None and "tensorboard" in options.metrics:
        events = functools.partial(TensorBoard, folder.tensorboard, after=step)
        sinks.append(Background(str(folder.tensorboard), events))
    try:
        yield sinks
    finally:
        for sink in sinks:
            sink.close()


def ending(
    outcome: Outcome,
    options: TrainerOptions,
    cost: StepCost,
    signal: str | None,
    folder: RunFolder | None,
) -> Iterator[str]:
    """What training achieved, and if it was stopped, how to go on.

    Args:
        signal: what it was stopped by.
        folder: where it was saved.
    """
    first, last, seconds = outcome.first, outcome.last, outcome.typical_seconds
    if first is not None and last is not None and seconds is not None:
        rate = last[f"{cost.unit}_per_s"] * last["seconds"] / seconds
        held_out = "" if outcome.eval_loss is None else f", held out {outcome.eval_loss:.3f}"
        skipped = f"; {outcome.skipped} steps skipped" if outcome.skipped else ""
        yield (
            f"loss {first['loss']:.3f} -> {last['loss']:.3f}{held_out}; "
            f"{1000 * seconds:.0f} ms a step, {rate:,.0f} {cost.unit}/s; "
            f"{outcome.seconds:.0f} s in all{skipped}"
        )
    elif not outcome.is_stopped and not outcome.is_done:
        yield f"nothing left to do: {options.steps} steps have been taken"
    if (options.keep_best or options.patience) and (best := outcome.best):
        kept = ", kept" if options.keep_best and folder is not None else ""
        yield f"best held out {best.eval_loss:.3f}, after step {best.step}{kept}"
    if outcome.is_done:
        why = "a hook asked for it"
        if options.patience and outcome.best and outcome.best.since >= options.patience:
            why = f"{outcome.best.since} evaluations have not been better"
        yield f"ended after step {outcome.state.step} of {options.steps}: {why}"
    if outcome.is_stopped:
        if folder is None:
            then = "nothing was saved: there is no run_dir"
        elif last is None:
            then = "there was nothing new to save, resuming goes on"
        else:
            then = f"saved in {folder.checkpoints}, resuming goes on"
        yield f"stopped by {signal} after step {outcome.state.step}: {then}"
