"""`experts`: one op for a mixture of experts: gated MLPs, of which each row has chosen some.

Shapes are in the names:

    B, S dims of the rows    H width of a row    C choices of each row
    E experts    M width inside an expert    T all rows (B * S)
    X choices of all rows (B * S * C)    R choices that are computed at a time

Rows are sorted by their expert and multiplied by `jax.lax.ragged_dot`: there is no capacity, and no
row is dropped. As the order depends on values, a partitioner that split the ops inside would have
to gather all rows. Under `spmd.jit` the op stays whole. One device can compute it for some of the
rows and some of the experts, and its result is then a term of the sum:

    rows are split       every device has its own rows and all experts (they are gathered)
    experts are split    every device has all rows of its group (they are gathered) and its own
                         experts; results are summed, each where it is needed
    both are split       over the same devices: a row is sent to each expert that it has chosen,
                         and the result back (`spmd.ops.experts_exchange`)
    M is split           as in any MLP: results are summed

The planner takes what is fastest. On N devices, a gather sends each row N - 1 times, an exchange at
most C times: it is faster for more devices than choices.
"""

import functools
import math
import re
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.custom_batching import custom_vmap

from spmd.errors import ArgumentError
from spmd.ir.dialect.composites import AXES, arguments_of
from spmd.ir.dialect.rule import Exchange, Rule, parse_rule
from spmd.ir.program import OpKind, Value
from spmd.lowering.local.composite import lower_composite, lower_exchanging
from spmd.lowering.local.table import LocalOp
from spmd.lowering.register import register_composite
from spmd.ops import experts_exchange, experts_local, products_triton

EIGHT_BITS = (jnp.dtype("int8"), jnp.dtype("float8_e4m3fn"))

NUMBERS = 3  # which operand the experts' numbers are

FORWARD = "spmd.experts"
GRADIENT = "spmd.experts_grad"


def experts(
    x_BSH: Any,
    gates_BSC: Any,
    chosen_BSC: Any,
    gate_EMH: Any,
    up_EMH: Any,
    down_EHM: Any,
    *,
    biases: Sequence[Any] = (),
    scales: Sequence[Any] = (),
    limit: float | None = None,
) -> jax.Array:
    """Returns each row's sum of `gates * down(silu(gate(x)) * up(x))` over its chosen experts.

    Args:
      x_BSH: rows.
      gates_BSC: the factor of each choice in the sum, in any float dtype.
      chosen_BSC: the C experts of each row, integers from 0 to E - 1, all C different; -1 is none.
      gate_EMH: each expert's weights of `gate`, in the dtype of the rows.
      up_EMH: each expert's weights of `up`, in the dtype of the rows.
      down_EHM: each expert's weights of `down`, in the dtype of the rows.
      biases: what is added by `gate` (E, M), `up` (E, M) and `down` (E, H), in that dtype.
      scales: weights are int8 or 8-bit floats, and their outputs are multiplied by these, float32
        of `gate` (E, M), `up` (E, M) and `down` (E, H). Such experts have no gradient.
      limit: experts are gpt-oss' (OpenAI 2025, section 2.1), `g * sigmoid(1.702 g) * (u + 1)` in
        the place of `silu(g) * u`, with g cut off above the limit, and u above and below.

    Returns:
      (B, S, H) in the dtype of the rows.

    Raises:
      ArgumentError: shapes or dtypes that do not fit each other.

    Example:
      >>> gates_BSC, chosen_BSC = jax.lax.top_k(jax.nn.softmax(logits_BSE), 2)
      >>> out_BSH = experts(x_BSH, gates_BSC, chosen_BSC, gate_EMH, up_EMH, down_EHM)
    """
    x, gates, chosen, gate, up, down = x_BSH, gates_BSC, chosen_BSC, gate_EMH, up_EMH, down_EHM
    arrays = {"x": x, "gates": gates, "chosen": chosen, "gate": gate, "up": up, "down": down}
    fits = all(a.ndim == 3 for a in arrays.values()) and (limit is None or limit > 0)
    fits = fits and gates.shape == chosen.shape and gates.shape[:2] == x.shape[:2]
    fits = fits and gate.shape == up.shape and gate.shape[2] == x.shape[2]
    fits = fits and down.shape == (gate.shape[0], gate.shape[2], gate.shape[1])
    dtypes = {gate.dtype, up.dtype, down.dtype}
    fits = fits and dtypes in ([{t} for t in EIGHT_BITS] if scales else [{x.dtype}])
    for name, given, dtype in (("bias", biases, x.dtype), ("scale", scales, jnp.float32)):
        fits = fits and len(given) in (0, 3)
        of = zip(("gate", "up", "down"), (gate, up, down), given, strict=False)
        for part, weight, array in of:
            arrays[f"{name} of {part}"] = array
            fits = fits and array.shape == weight.shape[:2] and array.dtype == dtype
    if not fits or not jnp.issubdtype(chosen.dtype, jnp.integer):
        raise ArgumentError(
            "experts cannot be computed",
            actual=", ".join(f"{name} {a.dtype} {a.shape}" for name, a in arrays.items())
            + f", limit {limit}",
            required="x (B, S, H), gates (B, S, C), chosen (B, S, C) of integers, gate and up "
            "(E, M, H), down (E, H, M), biases and scales (E, M), (E, M) and (E, H), rows and "
            "weights of one dtype, or 8-bit weights with float32 scales, a positive limit",
            fix="correct them",
        )
    # The experts' numbers are an operand so that a device with some of them knows which; 0 is none.
    numbers_E = jnp.arange(1, gate.shape[0] + 1, dtype=jnp.int32)
    into = (gate, up, down, *biases[:2], *scales)
    operands = (x, gates, chosen.astype(jnp.int32) + 1, numbers_E, *into)
    run = functools.partial(_run, FORWARD, "forward") if scales else _mix
    out_BSH: jax.Array = run(limit, *operands)
    if biases:
        # Where M is split its parts of a sum are added up: this bias would be, as often.
        of_expert_BSEC = jax.nn.one_hot(chosen, len(down), axis=2, dtype=gates.dtype)
        of_expert_BSE = jnp.einsum("bsec,bsc->bse", of_expert_BSEC, gates)
        out_BSH += of_expert_BSE.astype(x.dtype) @ biases[2]
    return out_BSH


def _on_gpus(x_RI: Any, weights_EOI: Any, sizes_E: Any) -> Any:
    """Returns rows times their experts' weights (a `Product`), by Triton if it fits, else XLA."""
    found = products_triton.ragged_product(x_RI, weights_EOI, sizes_E)
    return experts_local.ragged(x_RI, weights_EOI, sizes_E) if found is NotImplemented else found


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _mix(limit: float | None, *operands: Any) -> Any:
    return _run(FORWARD, "forward", limit, *operands)


def _mix_backward(limit: float | None, operands: tuple[Any, ...], dout_BSH: Any) -> tuple[Any, ...]:
    dx, dgates, *dweights = _run(GRADIENT, "gradient", limit, *operands, dout_BSH)
    return dx, dgates, None, None, *dweights


# Products are computed again in the backward pass: kept, they would be M / H times the rows.
_mix.defvjp(lambda limit, *operands: (_mix(limit, *operands), operands), _mix_backward)


def _run(name: str, function: str, limit: float | None, *operands: Any) -> Any:
    more: dict[str, Any] = {} if limit is None else {"limit": limit}
    return _composite(name, function, {"count": operands[NUMBERS].shape[0], **more})(*operands)


def _composite(name: str, function: str, attributes: dict[str, Any]) -> Any:
    """Returns a function as composite `name`; under `jax.vmap` one whose operands have a dim more.

    All operands have it but the experts' numbers. `spmd.pipeline` maps over stages: split over
    them, a device has its own stage's rows and experts.
    """

    @custom_vmap
    def run(*operands: Any) -> Any:
        composite = jax.lax.composite(_kernel(function, experts_exchange.by_gather), name)
        return composite(*operands, **attributes)

    @run.def_vmap  # type: ignore[untyped-decorator]
    def mapped(size: int, batched: Sequence[bool], *operands: Any) -> Any:
        whole = [
            x if is_batched or i == NUMBERS else jnp.broadcast_to(x, (size, *x.shape))
            for i, (x, is_batched) in enumerate(zip(operands, batched, strict=True))
        ]
        more = {**attributes, "mapped": attributes.get("mapped", 0) + 1}
        results = _composite(name, function, more)(*whole)
        return results, jax.tree.map(lambda _: True, results)

    return run


def _flops(kind: OpKind, products: int) -> float:
    """Returns an op's FLOPs: `products` H x M products for each choice of one of its experts."""
    rows, (*_, choices) = (t.shape for t in kind.operands[:2])
    here, inner, _ = kind.operands[4].shape[-3:]
    # Where choices are sent to their experts, as many come as go.
    share = 1.0 if AXES in kind.attrs else here / int(arguments_of(kind)["count"])
    return 2.0 * products * math.prod(rows) * choices * share * inner


_OPERANDS = "b s h, b s c, b s c, e, e m h, e m h, e h m"
_BIASES, _SCALES = ", e m, e m", ", e m, e m, e h"
_WHOLE = {"h": "replicate", "c": "replicate", "e": "reduce", "m": "reduce"}


def _rule(kind: OpKind, results: str, kinds: dict[str, str], trips: int) -> Rule:
    owed, _, made = results.partition(" -> ")
    has_biases, has_scales = experts_local.more_of(len(kind.operands) - (8 if owed else 7))
    biases, scales = _BIASES * has_biases, _SCALES * has_scales
    text = f"{_OPERANDS}{biases}{scales}{owed} -> {made}{biases if owed else ''}"
    mapped = int(arguments_of(kind).get("mapped", 0))
    if mapped:
        each = " ".join(f"z{i}" for i in range(mapped))
        text = re.sub(r"(^|, |-> )(?!e,)", rf"\1{each} ", text)
    rule = parse_rule(text, kind.operands, kind.results, kinds=kinds, reduction="add")
    rows, choices = kind.operands[:2]
    (*_, (b,), (s,), _), ((e,),) = rule.operands[0], rule.operands[NUMBERS]
    sent = rows.bytes * choices.shape[-1] * trips
    factors = list(rule.factors)
    factors[e] = factors[e]._replace(exchange=Exchange((b, s), sent))
    return rule._replace(factors=tuple(factors))


def _lower(op: LocalOp) -> tuple[Value, ...]:
    """Appends the op at one device's shapes; it exchanges if atoms split both rows and experts."""
    ((e,),) = op.rule.operands[NUMBERS]
    exchanges = op.rule.is_exchanged(e, op.choice.assignment)
    return lower_exchanging(op, e) if exchanges else lower_composite(op)


def _kernel(
    name: str, send: experts_exchange.Send, product: experts_local.Product = experts_local.ragged
) -> Any:

    def run(
        *operands: Any, count: int, axes: tuple[str, ...] = (), limit: float = 0.0, mapped: int = 0
    ) -> Any:
        if mapped:
            again = functools.partial(run, count=count, axes=axes, limit=limit, mapped=mapped - 1)
            numbers, others = operands[NUMBERS], (*operands[:NUMBERS], *operands[NUMBERS + 1 :])

            def one(of: Sequence[Any]) -> Any:
                return again(*of[:NUMBERS], numbers, *of[NUMBERS:])

            if others[0].shape[0] > 1:
                return jax.lax.map(one, others)
            return jax.tree.map(lambda x: x[None], one([x[0] for x in others]))
        how: dict[str, Any] = {"count": count, "mlp": experts_local.ExpertMlp(product, limit)}
        if not axes:
            return getattr(experts_local, name)(*operands, **how)
        return getattr(experts_exchange, name)(*operands, axes=axes, send=send, **how)

    return run


# On all of them what one device computes stays a function of its own, so that its time is that of
# the rows that are expected, and not of those that there is room for.
_PLATFORMS: dict[str, tuple[experts_exchange.Send, experts_local.Product]] = {
    "cpu": (experts_exchange.by_gather, experts_local.ragged),
    "cuda": (experts_exchange.by_collective, _on_gpus),
    "tpu": (experts_exchange.by_collective, experts_local.tpu_product),
}
"""Platform -> (how devices exchange rows, how rows are multiplied by their experts' weights)."""

_OWED = ", b s h -> b s h, b s c, e m h, e m h, e h m"

for name, function, products, trips, results, kinds in (
    (FORWARD, "forward", 3, 2, " -> b s h", _WHOLE),
    (GRADIENT, "gradient", 9, 3, _OWED, {**_WHOLE, "b": "reduce", "s": "reduce"}),
):
    register_composite(
        name,
        functools.partial(_rule, results=results, kinds=kinds, trips=trips),
        kernels={platform: _kernel(function, *how) for platform, how in _PLATFORMS.items()},
        flops=functools.partial(_flops, products=products),
        lower=_lower,
    )
