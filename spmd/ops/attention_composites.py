"""The composites of attention: how each is split, what it costs, and what computes it where."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from spmd.lowering.register import register_composite
from spmd.ops import attention_cudnn, attention_reference, attention_splash
from spmd.ops.attention_order import in_usual_order
from spmd.ops.attention_pieces import piece, piece_gradient
from spmd.ops.attention_rules import (
    ARITHMETIC,
    FORWARD,
    GRADIENT,
    PIECE,
    PIECE_GRADIENT,
    forward_flops,
    forward_rule,
    gradient_flops,
    gradient_rule,
    piece_gradient_rule,
    piece_rule,
)
from spmd.ops.attention_split import lower_forward, lower_gradient

__all__ = ["FORWARD", "GRADIENT"]

Kernel = Callable[..., Any]

KERNELS = {"cuda": attention_cudnn, "tpu": attention_splash}


def _on_each(name: str, made: Callable[[Kernel], Kernel]) -> dict[str, Kernel]:
    """What is made of each platform's kernel, `forward` or `gradient`."""
    return {platform: made(getattr(kernels, name)) for platform, kernels in KERNELS.items()}


register_composite(
    FORWARD,
    forward_rule,
    decomposition=attention_reference.forward,
    kernels=_on_each("forward", partial(in_usual_order, dims=(1, 1, 1), results=(1, 2))),
    flops=forward_flops,
    arithmetic=ARITHMETIC,
    lower=lower_forward,
)
register_composite(
    GRADIENT,
    gradient_rule,
    decomposition=attention_reference.gradient,
    kernels=_on_each(
        "gradient", partial(in_usual_order, dims=(1, 1, 1, 1, 2, 1), results=(1, 1, 1))
    ),
    flops=gradient_flops,
    arithmetic=ARITHMETIC,
    lower=lower_gradient,
)
for name, rule, run, kernel_of, flops in (
    (PIECE, piece_rule, piece, "forward", forward_flops),
    (PIECE_GRADIENT, piece_gradient_rule, piece_gradient, "gradient", gradient_flops),
):
    register_composite(
        name,
        rule,
        decomposition=partial(run, getattr(attention_reference, kernel_of)),
        kernels=_on_each(kernel_of, partial(partial, run)),
        flops=flops,
        arithmetic=ARITHMETIC,
    )
