"""`linear_attention`: attention through a state of fixed size: Mamba-2's and the gated delta rule.

Shapes are in the names:

    B batch    S sequence    K key heads    N heads of values and of states (N a multiple of K)
    D width of a key head    P width of a value head

Under `spmd.jit` its two composites, `spmd.linear_attention` and `spmd.linear_attention_grad`, are
one op each. Batches, heads and the values' width are split freely. The sequence may be split, too:
then a device finds what its part does to any state, `S' = M S + H`, and the state goes from each
device to the next, once. Of the third of four devices:

    m, h = linear_attention_part k, v, decay, beta
    s = the state before the sequence
    %1 = collective_permute (m s + h) from the first to the second;    the second's s is %1
    %2 = collective_permute (m s + h) from the second to the third;    the third's s is %2
    %3 = ...
    out, _ = linear_attention q, k, v, decay, beta, s

This sends B N D P numbers; `M` never moves, nor any part of the sequence. Gradients of states go
the other way.
"""

from collections.abc import Sequence
from functools import partial
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp

from spmd.errors import ArgumentError
from spmd.ir.dialect.composites import PREFIX, arguments_of
from spmd.ir.dialect.halo import Merge
from spmd.ir.dialect.rule import PASS, REDUCE, REPLICATE, Rule, RuleBuilder
from spmd.ir.program import OpKind, Value
from spmd.ir.types import TensorType
from spmd.lowering.local.composite import append_composite, lower_composite
from spmd.lowering.local.table import LocalOp
from spmd.lowering.register import register_composite
from spmd.ops import linear_attention_chunks as chunks
from spmd.ops import linear_attention_triton as triton
from spmd.ops.attention import batched_composite

FORWARD = "spmd.linear_attention"
GRADIENT = "spmd.linear_attention_grad"
PART = "spmd.linear_attention_part"
OWED = "spmd.linear_attention_owed"
STEP = "spmd.linear_attention_step"

SEQUENCE = 1  # the dim of queries, keys and values that has their positions


def linear_attention(
    q_BSKD: Any,
    k_BSKD: Any,
    v_BSNP: Any,
    decay_BSN: Any,
    beta_BSN: Any = None,
    *,
    state_BNDP: Any = None,
    segment_ids: Any = None,
    scale: float | None = None,
    chunk: int = 64,
) -> tuple[jax.Array, jax.Array]:
    """Returns what each position reads of a state that all positions up to it have written to.

    With the state `S` (D, P) of a head, at each position, one after the other:

        S = exp(decay) S
        S = S + outer(k, v)                    without beta (Mamba-2; gated linear attention)
        S = S + outer(k, beta (v - k S))       with beta (the gated delta rule)
        out = scale q S

    Args:
      q_BSKD: queries; head 0 is for the first N / K heads of values, head 1 for the next, and so
        on. In Mamba-2 they are `C`.
      k_BSKD: keys; in Mamba-2 they are `B`. The delta rule takes them normalized to length 1.
      v_BSNP: values; in Mamba-2 they are `dt * x`.
      decay_BSN: logarithms of the factors by which states shrink, at most 0; in Mamba-2 `dt * A`.
      beta_BSN: how much of what a state has under a key is replaced, from 0 to 1; None adds.
      state_BNDP: the states before the sequence, in float32, as when decoding; zeros if None.
      segment_ids: integers (B, S): states are zero where the number is another one than before, as
        where documents are packed. The first position continues `state_BNDP`.
      scale: the factor of the outputs; `1 / sqrt(D)` when left out. In Mamba-2 it is 1.
      chunk: positions that are computed together, by matrix products. The result is the same.

    Returns:
      (outputs (B, S, N, P) in the dtype of the values, states (B, N, D, P) behind the sequence in
      float32). Arithmetic is in float32, or in float64 if the keys are.

    Raises:
      ArgumentError: shapes that do not fit each other.

    Example:
      >>> out_BSNP, state_BNDP = linear_attention(q_BSKD, k_BSKD, v_BSNP, decay_BSN, beta_BSN)
    """
    q, k, v, decay, beta, state = q_BSKD, k_BSKD, v_BSNP, decay_BSN, beta_BSN, state_BNDP
    given = {"q": q, "k": k, "v": v, "decay": decay, "beta": beta, "state": state}
    given["segment_ids"] = segment_ids
    fits = q.ndim == v.ndim == 4 and q.shape == k.shape and q.shape[:2] == v.shape[:2]
    fits = fits and q.shape[2] > 0 and v.shape[2] % q.shape[2] == 0 and chunk > 0
    fits = fits and all(x is None or x.shape == v.shape[:3] for x in (decay, beta))
    fits = fits and (segment_ids is None or segment_ids.shape == v.shape[:2])
    wanted = (v.shape[0], v.shape[2], q.shape[3], v.shape[3]) if fits else ()
    if not fits or (state is not None and state.shape != wanted):
        raise ArgumentError(
            "linear attention cannot be computed",
            actual=", ".join(f"{name} {x.shape}" for name, x in given.items() if x is not None)
            + f", chunk={chunk}",
            required="q and k (B, S, K, D), v (B, S, N, P), N a multiple of K, decay and beta "
            "(B, S, N), state (B, N, D, P), segment_ids (B, S), and a positive chunk",
            fix="correct them",
        )
    if state is None:
        state = jnp.zeros(wanted, jnp.promote_types(k.dtype, jnp.float32))
    attributes = {
        "delta": beta is not None,
        "segments": segment_ids is not None,
        "scale": float(q.shape[-1] ** -0.5 if scale is None else scale),
        "chunk": chunk,
        "length": q.shape[SEQUENCE],
    }
    starts = None
    if segment_ids is not None:
        changes = segment_ids[:, 1:] != segment_ids[:, :-1]
        starts = jnp.pad(changes, ((0, 0), (1, 0))).astype(jnp.int32)
    operands = [x for x in (q, k, v, decay, beta, starts, state) if x is not None]
    found: tuple[jax.Array, jax.Array] = _attend(tuple(attributes.items()), *operands)
    return found


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attend(attributes: Any, *operands: Any) -> Any:
    return _run(FORWARD, chunks.forward, attributes, operands)


def _attend_forward(attributes: Any, *operands: Any) -> Any:
    return _attend(attributes, *operands), operands


def _attend_backward(attributes: Any, operands: Any, given: Any) -> Any:
    found = iter(_run(GRADIENT, chunks.gradient, attributes, (*operands, *given)))
    floats = (jnp.issubdtype(x.dtype, jnp.floating) for x in operands)
    return tuple(next(found) if is_float else None for is_float in floats)


_attend.defvjp(_attend_forward, _attend_backward)


def _run(name: str, function: Any, attributes: Any, operands: Any) -> Any:
    return batched_composite(name, function, dict(attributes), 0, len(operands))(*operands)


# ---------------------------------------------------------------------------------------------
# How devices split it.


def _rule(kind: OpKind, summed: str) -> Rule:
    """Returns the rule of a composite; `summed` is the kind of factors that keys are shared by.

    `b s k d, b s k d, b s (k g) p, b s (k g), .. -> b s (k g) p, b (k g) d p {s: reduce}`. The
    state behind the sequence is the last device's term of a sum; what a device gets is a `Merge`.
    """
    build, said = RuleBuilder(), arguments_of(kind)
    (batch, length, keys, depth), (_, _, heads, width) = (kind.operands[i].shape for i in (0, 2))
    b, s = build.factor(batch), build.factor(length, REDUCE)
    k = n = build.factor(keys)
    if keys == 1:  # a dim of one factor need not divide
        k, n = build.factor(1, REPLICATE), build.factor(heads, summed)
    elif heads != keys:
        n = k + build.factor(heads // keys, summed)
    d, p = build.factor(depth, REPLICATE), build.factor(width, summed)
    key, value, number, state = [b, s, k, d], [b, s, n, p], [b, s, n], [b, n, d, p]
    operands = [key, key, value, number, *[number] * said["delta"]]
    gradients = [*operands, state]
    operands += [*[[b, s]] * said["segments"], state]
    results = [value, state]
    if kind.attrs["name"] == GRADIENT:
        operands, results = [*operands, *results], gradients
    sent = TensorType((batch, heads, depth, width), "f32")
    merge = Merge(s[0], ((sent, tuple(state)),))
    return build.build(operands, results, reduction="add", merges=(merge,))


def _flops(kind: OpKind, runs: int) -> float:
    """Returns the FLOPs of `runs` times the forward pass, and of finding M and H of a part."""
    (batch, length, _, depth), (_, _, heads, width) = (kind.operands[i].shape for i in (0, 2))
    said = arguments_of(kind)
    size = min(said["chunk"], max(length, 1))
    inside = size * (2 * depth + width) + said["delta"] * size * (2 * depth + width + size)
    state = (2 * width + said["delta"] * (depth + depth * width // size)) * depth
    is_part = length < said["length"]
    more = is_part * (state + said["delta"] * 2 * depth * depth + inside)
    return float(2 * batch * length * heads * (runs * (inside + state) + more))


def _lower_forward(op: LocalOp) -> Sequence[Value]:
    """Appends the op to one device's program, the state coming from the device before it."""
    if not op.dim(0, SEQUENCE).axes:
        return lower_composite(op)
    here = _Here(op)
    *operands, state = op.operands
    m, h = here.part()
    state = here.passed(m, h, state)
    out, last = append_composite(op.b, (*operands, state), op.result_types(), op.attrs)
    return out, here.only(here.count - 1, last)


def _lower_gradient(op: LocalOp) -> Sequence[Value]:
    """Appends the gradient to one device's program; that of the state before is the first's term.

    before: `dq, .., ds = linear_attention_grad q, .., s, dout, dlast`
    after:  each device finds the state before its part again, and by `%1 = linear_attention_owed`
            what its outputs owe to that state. `M^T d + %1` goes from the last device to the first,
            `d` being the gradient of the state behind a part: all that its gradients depend on
    """
    if not op.dim(0, SEQUENCE).axes:
        return lower_composite(op)
    here = _Here(op)
    *operands, state, dout, dlast = op.operands
    m, h = here.part()
    q, k, _, *others = operands
    types = [op.b.types[state]]
    (owed,) = here.append(OWED, (q, k, *others, dout), types, "delta segments scale chunk")
    state, dlast = here.passed(m, h, state), here.passed(m, owed, dlast, back=True)
    given = (*operands, state, dout, dlast)
    *gradients, dstate = append_composite(op.b, given, op.result_types(), op.attrs)
    return *gradients, here.only(0, dstate)


class _Here:
    """Appends what devices along a split sequence tell each other of states."""

    def __init__(self, op: LocalOp) -> None:
        self.op, self.b, self.axes = op, op.b, op.dim(0, SEQUENCE).axes
        self.count, self.number = op.mesh.extent(self.axes), op.b.axis_index(self.axes)

    def append(
        self,
        name: str,
        operands: Sequence[Value],
        types: Sequence[TensorType],
        said: str,
        **more: Any,
    ) -> tuple[Value, ...]:
        """Appends composite `name` with the attributes of the op that `said` names, and `more`."""
        own = [key for key in self.op.attrs if not key.startswith(PREFIX)]
        kept = {key: self.op.attrs[key] for key in (*own, *(PREFIX + x for x in said.split()))}
        more = {PREFIX + key: x for key, x in more.items()}
        return append_composite(self.b, operands, types, {**kept, **more, "name": name})

    def part(self) -> tuple[Value, ...]:
        """Returns M and H of this device's part of the sequence."""
        said = arguments_of(self.op.op.kind)
        operands = self.op.operands[1 : 4 + said["delta"] + said["segments"]]
        state = self.b.types[self.op.operands[4 + said["delta"] + said["segments"]]]
        depth = state.shape[2] if said["delta"] else 1
        types = state.with_shape((*state.shape[:2], depth, depth)), state
        return self.append(PART, operands, types, "delta segments chunk")

    def passed(self, m: Value, h: Value, state: Value, *, back: bool = False) -> Value:
        """Returns this device's state: `m s + h` of the device before it (behind it, if `back`)."""
        b, types, mesh = self.b, [self.b.types[state]], self.op.mesh
        order = range(self.count)[:: -1 if back else 1]
        for before, here in pairwise(order):
            (sent,) = self.append(STEP, (m, h, state), types, "", back=back)
            pairs = tuple((group[before], group[here]) for group in mesh.groups(self.axes))
            with b.noted(f"states of {self.op.op.label} go on to the next part of the sequence"):
                got = b.collective("collective_permute", sent, types[0], self.axes, pairs=pairs)
            state = b.select(self._is(here), got, state)
        return state

    def only(self, place: int, x: Value) -> Value:
        """Returns `x` on the device at a place along the sequence, zeros on the others."""
        return self.b.select(self._is(place), x, self.b.splat(0, self.b.types[x]))

    def _is(self, place: int) -> Value:
        return self.b.compare("EQ", self.number, self.b.constant(place, "i32"))


for name, function, kernel, summed, runs, lower in (
    (FORWARD, chunks.forward, triton.forward, PASS, 1, _lower_forward),
    (GRADIENT, chunks.gradient, triton.gradient, REDUCE, 3, _lower_gradient),
):
    register_composite(
        name,
        partial(_rule, summed=summed),
        decomposition=function,
        kernels={"cuda": kernel},
        flops=partial(_flops, runs=runs),
        lower=lower,
    )
for name, function in ((PART, chunks.part), (OWED, chunks.owed), (STEP, chunks.step)):
    register_composite(name, "whole", decomposition=function)
