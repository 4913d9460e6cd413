"""Optimizers: AdamW and Adafactor, with warmup, a schedule and clipping."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import optax

from spmd.models.training.errors import RunError, check_ranges
from spmd.models.training.run.stateful import joined, parted
from spmd.ops import fp8

OPTIMIZERS = ("adamw", "adafactor")
SMALL_MODEL = 100_000_000

SCHEDULES = ("cosine", "linear", "constant", "wsd")
"""How the learning rate goes after the warmup. wsd (warmup, stable, decay) stays at the peak and
falls at the end (Hu et al., MiniCPM, 2024, section 4)."""

NOT_DECAYED = ("norm", "bias")
"""Parameters with such a word anywhere in their path are not decayed."""

NOT_DECAYED_NAMES = ("scale", "embedding")
"""Nor those of these names: flax's norms and embeddings."""

NUMBERS = {
    "positive": ("total_steps", "learning_rate", "clip_norm"),
    "at least 0": ("warmup_steps", "weight_decay"),
    "in [0, 1]": ("final_fraction", "decay_fraction"),
    "in [0, 1)": ("beta1", "beta2"),
}
"""What they have to be."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
    """Which optimizer, and how its learning rate goes.

    Raises:
        RunError: an unknown optimizer or a number out of range.
    """

    name: str  # `"adamw"` or `"adafactor"`
    # the schedule reaches its end here; None is the end of the run (`Options.steps`)
    total_steps: int | None = None
    learning_rate: float  # at the peak. Adafactor's is relative to the scale of each parameter.
    # steps of linear warmup; None takes a tenth of the run, 1 to 100
    warmup_steps: int | None = None
    schedule: str = "cosine"  # one of `SCHEDULES`
    final_fraction: float = 0.1  # learning rate at the end, as a fraction of the peak
    decay_fraction: float = 0.1  # of the run's steps, in which wsd falls
    beta1: float = 0.9  # AdamW's decay of the gradients' mean
    beta2: float = 0.95  # AdamW's decay of their squares' mean
    weight_decay: float = 0.1  # decoupled decay of AdamW; see `decay_mask` for what is not decayed
    # gradients are scaled down to this global norm; None does not clip
    clip_norm: float | None = 1.0

    def __post_init__(self) -> None:
        _check_name(self.name)
        if self.schedule not in SCHEDULES:
            raise RunError(
                f"no schedule is called {self.schedule!r}; there are {', '.join(SCHEDULES)}"
            )
        check_ranges(self, NUMBERS)

    def ending_at(self, steps: int) -> "OptimizerConfig":
        """The same, whose schedule ends with a run of so many steps unless it says where."""
        return dataclasses.replace(self, total_steps=self.total_steps or steps)


def default_learning_rate(name: str, parameters: int, *, tuned: bool = False) -> float:
    """A peak learning rate that is rarely bad.

    Args:
        tuned: whether it starts from trained weights, which a large one would spoil.
    """
    _check_name(name)
    small = parameters < SMALL_MODEL
    if name == "adamw":
        return 2e-5 if tuned else 3e-3 if small else 3e-4
    return 1e-3 if tuned else 3e-2 if small else 1e-2


def _check_name(name: str) -> None:
    if name not in OPTIMIZERS:
        raise RunError(f"no optimizer is called {name!r}; there are {', '.join(OPTIMIZERS)}")


def make_schedule(config: OptimizerConfig) -> optax.Schedule:
    """Step -> learning rate: linear up to the peak, then as the schedule's name says."""
    peak, warmup, steps = config.learning_rate, config.warmup_steps, config.total_steps
    if steps is None:
        raise RunError("total_steps: the schedule's end is not known; see `ending_at`")
    if warmup is None:
        warmup = min(100, max(1, steps // 10))
    rest = max(steps - warmup, 1)
    end = peak * config.final_fraction
    rise = optax.linear_schedule(peak / (warmup + 1), peak, max(warmup, 1))
    if config.schedule == "cosine":
        then = optax.cosine_decay_schedule(peak, rest, alpha=config.final_fraction)
    elif config.schedule == "linear":
        then = optax.linear_schedule(peak, end, rest)
    elif config.schedule == "wsd":
        falling = min(rest, max(1, round(steps * config.decay_fraction)))
        then = optax.linear_schedule(peak, end, falling, rest - falling)
    else:
        then = optax.constant_schedule(peak)
    return optax.join_schedules([rise, then], [warmup])


def make_optimizer(config: OptimizerConfig) -> optax.GradientTransformation:
    """The optax transformation that `config` describes."""
    schedule = make_schedule(config)
    if config.name == "adamw":
        rule = optax.adamw(
            schedule,
            b1=config.beta1,
            b2=config.beta2,
            weight_decay=config.weight_decay,
            mask=decay_mask,
        )
    else:
        rule = optax.adafactor(schedule)
    if config.clip_norm is None:
        return rule
    return optax.chain(optax.clip_by_global_norm(config.clip_norm), rule)


def weights_of(variables: Any) -> Any:
    """What an optimizer updates: all but the model's state, and that of 8-bit products."""
    return fp8.split(parted(variables)[0])[0]


def with_weights(variables: Any, weights: Any) -> Any:
    """`variables` with other `weights_of` them."""
    trained, state = parted(variables)
    return joined(fp8.merge(weights, fp8.split(trained)[1]), state, variables)


def initial_state(optimizer: optax.GradientTransformation, params: Any) -> Any:
    """The optimizer's state for `weights_of(params)`."""
    return optimizer.init(weights_of(params))


def updated(
    optimizer: optax.GradientTransformation, loss: Any, grads: Any, opt_state: Any, params: Any
) -> tuple[Any, Any]:
    """Parameters and optimizer state after an update.

    States are replaced by what stands in their places in the gradients, the next states: that of a
    `Stateful`, and those of 8-bit products (`spmd.ops.fp8_dot`).

    Raises:
        RunError: the optimizer wants to compute losses itself.
    """
    (trained, _), (grads, state) = parted(params), parted(grads)
    (weights, _), (grads, states) = fp8.split(trained), fp8.split(grads)
    for extra in ({}, {"value": loss}):  # what a rule takes cannot be asked
        try:
            updates, opt_state = optimizer.update(grads, opt_state, weights, **extra)
            break
        except (TypeError, ValueError) as error:
            if "value_fn" in str(error) or "obj_fn" in str(error):
                raise RunError(
                    "the optimizer computes losses of its own in a step, as L-BFGS, line searches "
                    f"and Sophia do, which is not supported: {error}"
                ) from error
            if extra or "'value'" not in str(error):
                raise
    trained = fp8.merge(optax.apply_updates(weights, updates), states)
    return joined(trained, state, params), opt_state


def updates_taken(opt_state: Any) -> jax.Array:
    """How often a state of `make_optimizer` was updated; skipped steps do not count."""
    counts = optax.tree_utils.tree_get_all_with_path(opt_state, "count")
    return jnp.asarray(counts[0][1])


def decay_mask(params: Any) -> Any:
    """True for every parameter that is decayed: its path names no norm, bias or flax embedding."""

    def is_decayed(path: tuple[Any, ...], _: Any) -> bool:
        words = jax.tree_util.keystr(path, simple=True, separator="/").lower().split("/")
        named = any(name in words for name in NOT_DECAYED_NAMES)
        return not named and not any(part in word for word in words for part in NOT_DECAYED)

    return jax.tree_util.tree_map_with_path(is_decayed, params)
