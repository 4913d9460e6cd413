"""Runs layers that differ in nothing but their parameters.

They are scanned or unrolled; of some the activations are recomputed in the backward pass; and where
the config has stages, they are those of a pipeline.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp

import spmd
from models.llama.config import LlamaConfig
from models.llama.experts import Loads
from models.llama.parameters import Params
from models.llama.remat import Policy

Rows = tuple[jax.Array | None, jax.Array | None]
"""What differs between sequences: their angles (B, S, E) and segment ids (B, S), if they do."""

Ran = tuple[jax.Array, Loads | None]
"""What layers return: the stream behind them, and the sum of their experts' loads."""


Run = Callable[[Params, jax.Array, Rows], Ran]
"""Called with a layer, the stream before it, and what differs between sequences."""


def run_span(
    run: Run,
    policy: Policy | None,
    layers: Params,
    span: range,
    x_BSH: jax.Array,
    rows: Rows,
    config: LlamaConfig,
) -> Ran:
    """Runs some layers, one after the other.

    Args:
        run: runs one layer.
        policy: what is kept of a layer that is recomputed; None recomputes nothing.
        layers: the parameters of all layers, stacked or apart.
        span: the indices of those that are run.
        x_BSH: the stream before them.
        rows: handed to `run`.
        config: the model.
    """
    # XLA must not merge the recomputation with the first computation (CSE), or everything stays in
    # memory after all. In a scan it cannot: forward and backward are different loops.
    lean = jax.checkpoint(run, policy=policy, prevent_cse=not config.scan_layers)
    group = config.remat_every if policy is not None else 1

    def run_some(some: Sequence[Params], x_BSH: jax.Array, rows: Rows) -> Ran:
        loads = []
        for index, layer in enumerate(some, start=1):
            recomputed = policy is not None and index % group == 0
            x_BSH, found = (lean if recomputed else run)(layer, x_BSH, rows)
            loads.append(found)
        return x_BSH, jax.tree.map(lambda *each: sum(each), *loads)

    def run_group(x_BSH: jax.Array, stacked: Params, rows: Rows = rows) -> Ran:
        return run_some(_apart(stacked, group), x_BSH, rows)

    if not config.scan_layers:
        return run_some([layers[str(index)] for index in span], x_BSH, rows)
    groups = _grouped(layers, span, group, config)
    if config.stages > 1:
        return _run_stages(run_group, groups, x_BSH, rows, config), None
    x_BSH, loads = jax.lax.scan(run_group, x_BSH, groups)
    return x_BSH, jax.tree.map(functools.partial(jnp.sum, axis=0), loads)


def _grouped(layers: Params, span: range, group: int, config: LlamaConfig) -> Params:
    """The layers of a span, (L, ...), in groups of so many: (L / group, group, ...)."""
    if len(span) < config.num_hidden_layers:
        layers = jax.tree.map(lambda x: x[span.start : span.stop], layers)
    if group == 1:
        return layers
    count = len(span) // group
    grouped: Params = jax.tree.map(lambda x: x.reshape(count, group, *x.shape[1:]), layers)
    return grouped


def _apart(stacked: Params, group: int) -> list[Params]:
    """The layers of one group of `_grouped`."""
    if group == 1:
        return [stacked]
    return [jax.tree.map(lambda x, i=i: x[i], stacked) for i in range(group)]


def _run_stages(
    run_group: Callable[[jax.Array, Params, Rows], Ran],
    groups: Params,
    x_BSH: jax.Array,
    rows: Rows,
    config: LlamaConfig,
) -> jax.Array:
    """Runs groups of layers as the stages of a pipeline."""
    return spmd.pipeline(
        lambda stacked, x_BSH, rows: run_group(x_BSH, stacked, rows)[0],
        groups,
        x_BSH,
        rows,
        stages=config.stages,
        microbatches=config.stage_microbatches,
        schedule=None if config.stage_schedule == "auto" else config.stage_schedule,
    )
