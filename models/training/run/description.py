"""What a training run is asked to do, validated, and the folder with its results."""

import contextlib
import dataclasses
import json
import math
import secrets
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

from spmd.models.training.data.source import BYTES, Packing
from spmd.models.training.errors import RunError, check_ranges
from spmd.models.training.options import TrainerOptions
from spmd.models.training.paths import AnyPath, StorePath, as_path
from spmd.models.training.run.mirror import Mirror
from spmd.models.training.run.optimizer import OptimizerConfig

FATAL = ("optimizer.name", "lora")
"""What a resumed run has to have the same, beside the model."""

FREE_TO_CHANGE = frozenset(
    f"model.{name}"
    for name in (
        *("scan_layers", "remat", "remat_every", "dtype", "attention", "zigzag"),
        *("stages", "stage_microbatches", "stage_schedule", "hot_experts", "router_bias_rate"),
    )
)
"""How a model is run, not what it computes: a resumed run may have other values."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class RunConfig:
    """What to train, on what data, and with which options.

    Raises:
        RunError: a number is out of range, or numbers do not fit each other.
    """

    model: Any  # a frozen dataclass of sizes and dtypes
    optimizer: OptimizerConfig  # the optimizer; its schedule ends with the run unless it says where
    options: TrainerOptions  # how long the run is, and what it keeps, as for a run of any model
    mesh: Mapping[str, int]  # axis -> size
    seq_len: int  # tokens of a sequence
    global_batch: int  # sequences of a step, on all devices together
    # axis -> how many of its parts are on different slices, connected by slow links
    dcn: Mapping[str, int] = dataclasses.field(default_factory=dict)
    sharding: str = "2d"  # name of the table of specs
    z_loss: float = 0.0  # weight of the squared log-normalizer in the loss; 0 leaves it out
    dpo_beta: float = 0.1  # of preferences: how much it costs to leave the reference
    teacher: str = ""  # folder or URL of weights whose distribution is learned, too
    distill_temperature: float = 1.0  # by which both models' logits are divided for that
    distill_share: float = 0.5  # of the divergence from the teacher in the loss
    data: tuple[str, ...] = ()  # names of the data, see `DataConfig.sources`
    tokenizer: str = BYTES  # for text that is not tokenized yet
    lora: Any = None  # low-rank adapters, which are then trained alone: a frozen dataclass
    packing: Packing = "auto"  # whether documents that share a sequence are kept apart, and whole
    valid_data: tuple[str, ...] = ()  # what is evaluated on; empty holds out a part of `data`

    def __post_init__(self) -> None:
        positive = ("seq_len", "global_batch", "dpo_beta", "distill_temperature")
        wanted = {"positive": positive, "at least 0": ["z_loss"], "in [0, 1]": ["distill_share"]}
        check_ranges(self, wanted)
        for name in ("dtype", "param_dtype"):
            if getattr(self.model, name, None) == "float16":
                raise RunError(
                    f"{name}: gradients are too small for float16, as losses are not scaled; train "
                    "in bfloat16 (--export_dtype float16 is possible)"
                )
        if self.lora and getattr(self.model, "router_bias_rate", 0):
            raise RunError("router_bias_rate: with lora adapters alone are trained; set it to 0")
        axes = ("replica", "data", "expert", *(("model",) if self.sharding == "fsdp" else ()))
        split = [axis for axis in axes if self.mesh.get(axis, 1) > 1] or ["data"]
        unit = math.prod(self.mesh.get(axis, 1) for axis in split) * self.options.microbatches
        if self.global_batch % unit == 0:
            return
        over = " x ".join(f"{axis}={self.mesh.get(axis, 1)}" for axis in split)
        if self.options.microbatches > 1:
            over += f" times {self.options.microbatches} microbatches"
        raise RunError(
            f"global_batch: {self.global_batch} sequences do not divide over {over}; the "
            f"next that do are {math.ceil(self.global_batch / unit) * unit}"
        )

    def to_json(self) -> dict[str, Any]:
        """The whole configuration as plain values, with the options beside the other fields."""
        optimizer = self.optimizer.ending_at(self.options.steps)
        values = dataclasses.asdict(dataclasses.replace(self, optimizer=optimizer))
        values |= values.pop("options")
        text = json.dumps(values, default=lambda x: dict(x) if isinstance(x, Mapping) else str(x))
        plain: dict[str, Any] = json.loads(text)
        return plain

    def flat(self) -> dict[str, Any]:
        """`to_json` without nesting: `model.hidden_size`, `optimizer.name`, `seq_len`, ..."""
        return _flat(self.to_json())


def check_same_model(saved: Mapping[str, Any], run: RunConfig) -> list[str]:
    """Compares a checkpoint's configuration with that of the run that resumes from it.

    Args:
        saved: `RunConfig.to_json()` of the run that saved.

    Returns:
        A line such as `"seq_len: 128 -> 256"` for each field that may change but that changes what
        is learned.

    Raises:
        RunError: model or optimizer differ; the message names every such field.
    """
    ours = run.flat()
    theirs = _flat(saved)
    changed = [k for k in (*theirs, *ours) if theirs.get(k, ours.get(k)) != ours.get(k)]
    changed = [key for key in dict.fromkeys(changed) if key in ours and key not in FREE_TO_CHANGE]
    fatal = [key for key in changed if key.startswith("model.") or key in FATAL]
    if fatal:
        listed = ", ".join(
            f"{key} is {theirs[key]!r} there and {ours[key]!r} here" for key in fatal
        )
        raise RunError(f"the checkpoint is of another run: {listed}; use its values or start anew")
    # Of packing the hash of the data tells.
    learned = "optimizer. seq_len tokenizer global_batch seed data z_loss dpo_beta teacher distill_"
    return [f"{k}: {theirs[k]} -> {ours[k]}" for k in changed if k.startswith((*learned.split(),))]


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for name, value in values.items():
        if prefix == "" and name in ("model", "optimizer"):
            flat |= _flat(value, f"{name}.")
        else:
            flat[prefix + name] = value
    return flat


@dataclasses.dataclass(frozen=True)
class Within:
    """A file or folder in a run's folder, as an attribute of that."""

    name: str

    def __get__(self, folder: "RunFolder", kind: type) -> Path:
        return folder.path / self.name


@dataclasses.dataclass(frozen=True)
class RunFolder:
    """Where a run's results are."""

    CHECKPOINTS: ClassVar[str] = "checkpoints"
    TOKENIZER: ClassVar[str] = "tokenizer"

    config = Within("config.json")  # the run's configuration
    settings = Within("settings.yaml")  # what was asked for, as a program reads it again
    metrics = Within("metrics.jsonl")  # one JSON object for each record
    report = Within("report.html")  # on how the program was partitioned
    tensorboard = Within("tensorboard")  # event files
    tokenizer = Within(TOKENIZER)  # that is trained with; not there if tokens are bytes
    compiled = Within("compiled")  # compiled programs, which a restart finds there
    profile = Within("profile")  # traces
    reference = Within("reference.npz")  # of preferences: log-probabilities before the first step

    path: Path  # the folder
    # for a run on an object store, its folder there, with the same files; `path` is then a
    # temporary folder
    kept: StorePath | None = None

    @classmethod
    def at(cls, where: str | AnyPath) -> "RunFolder":
        """The folder of a path or URL.

        Raises:
            StoreError: the store cannot be used from here.
        """
        path = as_path(where)
        if isinstance(path, Path):
            return cls(path)
        return cls(Path(tempfile.gettempdir()) / f"run-{secrets.token_hex(8)}", path)

    @contextlib.contextmanager
    def kept_up(self) -> Iterator[None]:
        """Inside, what is written into `path` is kept on the store, if the run is on one."""
        if self.kept is None:
            yield
            return
        try:
            with Mirror(self.path, self.kept):
                yield
        finally:
            shutil.rmtree(self.path, ignore_errors=True)

    def shown(self, path: Path) -> AnyPath:
        """Where people find a file of the folder."""
        if self.kept is None or not path.is_relative_to(self.path):
            return path.absolute()
        return self.kept / path.relative_to(self.path).as_posix()

    @property
    def checkpoints(self) -> AnyPath:
        """The folder of checkpoints."""
        return (self.kept or self.path) / self.CHECKPOINTS

    def make(self) -> None:
        """Makes the folder.

        Raises:
            RunError: it cannot be made, or not be written to.
        """
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            probe = self.path / ".writable"
            probe.touch()
            probe.unlink(missing_ok=True)  # all processes try, at the same moment
        except OSError as error:
            raise RunError(f"run_dir: {self.path} cannot be written: {error.strerror}") from error

    def write_config(self, config: RunConfig) -> None:
        """Writes `config.json`."""
        self.config.write_text(json.dumps(config.to_json(), indent=1) + "\n", encoding="utf-8")
