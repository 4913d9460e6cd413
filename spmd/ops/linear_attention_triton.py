"""Linear attention on NVIDIA GPUs: Pallas kernels for Triton that keep a chunk's triangles inside.

Of `linear_attention_chunks.forward` XLA makes 58 kernels and a loop, which move some 100 float32
numbers for each value. Here a program has a chunk of a head; what goes through memory, in bfloat16,
is only what states need of a chunk, the states, and what is written to them.

    forward:   SOLVE    each chunk, if there is beta: u and w of its triangular system
               WALK     chunk after chunk: n = u - w S, S' = a_C S + K^T (a_C / a n); keeps n and S
               READ     each chunk: outputs
    gradient:  SOLVE and WALK again; the first also what outputs in a chunk owe to n
               RETURN   chunk after chunk, from the last to the first: gradients of n and of S
               PULL     each chunk: gradients of operands

With these n a chunk's system is `(1 + L) n = r`, `r = beta (v - a K S)`, and gradients therefore
`dr = (1 + L)^-T dn`, `dL = -dr n^T`. Names of shapes are those of `linear_attention_chunks`.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from spmd.ops.products_triton import compiled_with, triton

CHUNK = 64
COLUMNS = 64  # of values, that PULL sums over at a time

GATES = SUMS, BEFORE, AFTER, BETA, NUMBER = range(5)
"""What there is of a position, in float32: the sum of decays in its chunk up to it, the decay from
before the chunk and to its end, beta, and how many documents begin in the chunk up to it."""

DIMS = {
    **dict.fromkeys(("q", "k"), "bskd"),
    **dict.fromkeys(("v", "u", "new", "out", "dout", "dnew", "dnear", "dv"), "bsnp"),
    **dict.fromkeys(("w", "dq", "dk"), "bsnd"),
    **dict.fromkeys(("states", "owed"), "bzndp"),
    **{"first": "bndp", "last": "bndp", "inverse": "bsnc", "gates": "bngs", "dgates": "bnhs"},
}
"""Arrays -> a letter for each dim, those of shapes' names; g are GATES, h decay and beta."""

Arrays = dict[str, Any]


def forward(*operands: Any, delta: bool, segments: bool, **how: Any) -> Any:
    """Returns what `linear_attention_chunks.forward` does; NotImplemented for other operands.

    Queries, keys and values are bfloat16, and so are operands of products; sums are float32. Chunks
    have 64 positions, whatever is asked for. `interpret` runs kernels step by step in jax.
    """
    given = _given(operands, delta, segments)
    if given is None:
        return NotImplemented
    given = _run(READ, _with_states(given, delta, how), "out", how)
    return given["out"][:, : operands[2].shape[1]], given["last"]


def gradient(*operands: Any, delta: bool, segments: bool, **how: Any) -> Any:
    """Returns what `linear_attention_chunks.gradient` does; NotImplemented for other operands."""
    *own, dout, dlast = operands
    given = _given(own, delta, segments)
    if given is None:
        return NotImplemented
    given = _with_states({**given, "dout": _padded(dout)}, delta, how)
    given = _run(RETURN, {**given, "last": dlast}, "owed first dnew", how)
    given = _run(PULL, given, "dq dk dgates dv" if delta else "dq dk dgates", how)
    found = [given["dq"], given["dk"], given["dv" if delta else "dnew"]]
    found += [jnp.moveaxis(given["dgates"][:, :, i], 1, 2) for i in range(1 + delta)]

    def of(x: Any, dx: Any) -> Any:  # a key's is the sum of those of all heads that have it
        dx = dx[:, : x.shape[1]].reshape(*x.shape[:3], -1, *x.shape[3:])
        return jnp.sum(dx.astype(jnp.float32), axis=3).astype(x.dtype)

    return *map(of, own, found), given["first"]  # what is behind, as starts, has none


def _given(operands: Any, delta: bool, segments: bool) -> Arrays | None:
    """Returns operands by name, padded to whole chunks; None if they are not for the kernels."""
    q, k, v, decay, *rest, first = operands
    is_taken = q.dtype == k.dtype == v.dtype == jnp.bfloat16 and first.dtype == jnp.float32
    is_taken = is_taken and all(x.shape[3] in (16, 32, 64, 128) for x in (q, v)) and v.size > 0
    # As short a sequence as when decoding is no chunk, and a grid has no room for more.
    if not is_taken or not CHUNK <= q.shape[1] <= 65535 * CHUNK:
        return None
    beta, starts = rest[0] if delta else decay, rest[-1][..., None] if segments else 0
    gates = _gates(decay, beta, jnp.broadcast_to(starts, decay.shape))
    return {"q": _padded(q), "k": _padded(k), "v": _padded(v), "gates": gates, "first": first}


def _padded(x_BS: Any) -> Any:
    return jnp.pad(x_BS, [(0, 0), (0, -x_BS.shape[1] % CHUNK), *[(0, 0)] * (x_BS.ndim - 2)])


def _gates(*given_BSN: Any) -> Any:
    """Returns (B, N, GATES, S), of decays, beta, and 1 where a document begins, else 0."""
    seen_CC = jnp.tri(CHUNK, dtype=bool)
    whole = [jnp.moveaxis(_padded(x_BSN.astype(jnp.float32)), 1, 2) for x_BSN in given_BSN]
    decay, beta, starts = (x_BNS.reshape(*x_BNS.shape[:2], -1, CHUNK) for x_BNS in whole)
    # In one kernel, where a cumsum takes several.
    sums, number = (jnp.where(seen_CC, x[..., None, :], 0).sum(-1) for x in (decay, starts))
    before = jnp.where(number == 0, jnp.exp(sums), 0)
    after = jnp.where(number == number[..., -1:], jnp.exp(sums[..., -1:] - sums), 0)
    found = jnp.stack([sums, before, after, beta, number], axis=2)
    return found.reshape(*found.shape[:3], -1)


def _with_states(given: Arrays, delta: bool, how: Arrays) -> Arrays:
    """Adds states, and what is written to them; and if there is `dout`, what gradients need."""
    more = "dnear" if "dout" in given else ""
    if delta:
        given = _run(SOLVE, given, f"u w {more and 'inverse'} {more}", how)
        return _run(WALK, given, "states last new", how)
    given = _run(SOLVE, given, more, how) if more else given
    return _run(WALK, {**given, "u": given["v"], "new": given["v"]}, "states last", how)


class ChunkKernel(NamedTuple):
    """A kernel: what it reads of what there is, its warps, and how many turns it has under way."""

    function: Callable[[Arrays, float], None]
    needed: str
    warps: int
    stages: int = 1
    columns: int = 0  # of values of a program that goes from chunk to chunk; else it has a chunk


def _run(kernel: ChunkKernel, given: Arrays, made: str, how: Arrays) -> Arrays:
    """Adds the arrays named `made` to those that there are."""
    (b, s, k, d), (_, _, n, p) = (given[x].shape for x in "kv")
    sizes = {"b": b, "s": s, "k": k, "d": d, "n": n, "p": p, "z": s // CHUNK, "c": CHUNK}
    sizes |= {"g": len(GATES), "h": 2}
    axes = "pnb" if kernel.columns else "nsb"  # neighbours read the same keys
    some = {"p": min(kernel.columns, p)} if kernel.columns else {"s": CHUNK, "z": None}
    blocks = {**sizes, **dict.fromkeys("bkn"), **some}

    def spec(name: str) -> pl.BlockSpec:
        def index(*program: Any) -> tuple[Any, ...]:
            at = dict(zip(axes, program, strict=True))
            at |= {"k": at["n"] // (n // k), "z": at.get("s", 0)}
            return tuple(at.get(dim, 0) for dim in DIMS[name])

        return pl.BlockSpec(tuple(blocks[dim] for dim in DIMS[name]), index)

    names, needed = made.split(), [name for name in kernel.needed.split() if name in given]
    shapes = [tuple(sizes[dim] for dim in DIMS[name]) for name in names]
    dtypes = [jnp.float32 if x in ("first", "last", "dgates") else jnp.bfloat16 for x in names]
    found = pl.pallas_call(
        lambda *refs: kernel.function(dict(zip(needed + names, refs, strict=True)), how["scale"]),
        name=f"linear_attention{kernel.function.__name__}",
        grid=tuple(sizes[x] // (blocks[x] or 1) for x in axes),
        in_specs=[spec(name) for name in needed],
        out_specs=[spec(name) for name in names],
        out_shape=list(map(jax.ShapeDtypeStruct, shapes, dtypes)),
        **compiled_with(kernel.warps, kernel.stages, how.get("interpret", False)),
    )(*(given[name] for name in needed))
    return {**given, **dict(zip(names, found, strict=True))}


# ---------------------------------------------------------------------------------------------
# Kernels: x are refs by name, operands' and results'.


def _dot(a: Any, b: Any, a_turned: bool = False, b_turned: bool = False) -> Any:
    return triton().dot(a, b, trans_a=a_turned, trans_b=b_turned)


def _places() -> list[Any]:
    return [jax.lax.broadcasted_iota(jnp.int32, (CHUNK, CHUNK), dim) for dim in range(2)]


def _pairs(gates: Any, *, strictly: bool = False) -> Any:
    """Returns (C, C): the decay from position j to i, 0 where j is not seen."""
    (i_CC, j_CC), sum_C, number_C = _places(), gates[SUMS], gates[NUMBER]
    seen_CC = (j_CC + strictly <= i_CC) & (number_C[:, None] == number_C[None])
    return jnp.where(seen_CC, jnp.exp(sum_C[:, None] - sum_C[None]), 0)


def _inverse(lower_CC: Any) -> Any:
    """Returns `(1 + lower)^-1`, by blocks of sizes 1, 2, 4, ..: see `linear_attention_chunks`."""
    (i_CC, j_CC), size = _places(), 1
    inverse_CC = jnp.where(i_CC == j_CC, jnp.float32(1), 0)
    while size < CHUNK:
        is_left_CC = (i_CC // size == j_CC // size + 1) & (i_CC // size % 2 == 1)
        left_CC = jnp.where(is_left_CC, lower_CC, 0)
        inverse_CC -= left_CC if size == 1 else _dot(_dot(inverse_CC, left_CC), inverse_CC)
        size *= 2
    return inverse_CC


def _solve(x: Arrays, scale: float) -> None:
    gates, dtype, k_CD = x["gates"], x["k"].dtype, x["k"][...]
    if "w" in x:
        beta_C = gates[BETA]
        lower_CC = _dot(k_CD, k_CD, b_turned=True) * _pairs(gates, strictly=True)
        inverse_CC = _inverse(beta_C[:, None] * lower_CC)
        x["u"][...] = _dot((inverse_CC * beta_C[None]).astype(dtype), x["v"][...]).astype(dtype)
        shrunk_CC = inverse_CC * (beta_C * gates[BEFORE])[None]
        x["w"][...] = _dot(shrunk_CC.astype(dtype), k_CD).astype(dtype)
        if "inverse" in x:
            x["inverse"][...] = inverse_CC.astype(dtype)
    if "dnear" in x:
        scores_CC = _dot(x["q"][...], k_CD, b_turned=True) * _pairs(gates)
        near_CP = _dot(scores_CC.astype(dtype), x["dout"][...], a_turned=True)
        x["dnear"][...] = (scale * near_CP).astype(dtype)


def _turns(x: Arrays, kept: str, ends: tuple[str, str], added: Any, *, back: bool = False) -> None:
    """Makes S' = whole S + added of each chunk, whose S (or gradient of S') is `kept`."""
    gates, states, count = x["gates"], x[kept], x[kept].shape[0]

    def whole(i: Any) -> Any:  # read a turn ahead, so as not to wait for it
        z = jnp.minimum(i, count - 1)
        return gates[BEFORE, (count - 1 - z if back else z) * CHUNK + CHUNK - 1]

    def turn(i: Any, carry: Any) -> Any:
        (state_DP, factor), following, z = carry, whole(i + 1), count - 1 - i if back else i
        kept_DP = state_DP.astype(states.dtype)
        states[z] = kept_DP
        return factor * state_DP + added(pl.ds(z * CHUNK, CHUNK), kept_DP), following

    first, last = (x[name] for name in ends)
    last[...], _ = jax.lax.fori_loop(0, count, turn, (first[...], whole(0)))


def _walk(x: Arrays, scale: float) -> None:
    gates, dtype = x["gates"], x["k"].dtype

    def added(here: Any, kept_DP: Any) -> Any:
        new_CP = x["u"][here].astype(jnp.float32)
        if "w" in x:
            new_CP -= _dot(x["w"][here], kept_DP)
            x["new"][here] = new_CP.astype(dtype)
        new_CP = (gates[AFTER, here][:, None] * new_CP).astype(dtype)
        return _dot(x["k"][here], new_CP, a_turned=True)

    _turns(x, "states", ("first", "last"), added)


def _return(x: Arrays, scale: float) -> None:
    gates, dtype = x["gates"], x["k"].dtype

    def added(here: Any, kept_DP: Any) -> Any:
        dnew_CP = gates[AFTER, here][:, None] * _dot(x["k"][here], kept_DP)
        dnew_CP += x["dnear"][here].astype(jnp.float32)
        x["dnew"][here] = dnew_CP.astype(dtype)
        far_CP = (scale * gates[BEFORE, here])[:, None] * x["dout"][here].astype(jnp.float32)
        sum_DP = _dot(x["q"][here], far_CP.astype(dtype), a_turned=True)
        if "w" in x:
            sum_DP += _dot(x["w"][here], (-dnew_CP).astype(dtype), a_turned=True)
        return sum_DP

    _turns(x, "owed", ("last", "first"), added, back=True)


def _read(x: Arrays, scale: float) -> None:
    gates, dtype, q_CD = x["gates"], x["k"].dtype, x["q"][...]
    scores_CC = _dot(q_CD, x["k"][...], b_turned=True) * _pairs(gates)
    out_CP = _dot(q_CD, x["states"][...]) * gates[BEFORE][:, None]
    out_CP += _dot(scores_CC.astype(dtype), x["new"][...])
    x["out"][...] = (scale * out_CP).astype(dtype)


def _pull(x: Arrays, scale: float) -> None:
    gates, dtype, (depth, width) = x["gates"], x["k"].dtype, x["states"].shape
    delta, columns = "inverse" in x, min(COLUMNS, width)

    def terms(i: Any) -> Any:
        """What some columns of values give to sums that have no decays and factors yet."""
        here, names = pl.ds(i * columns, columns), ("new", "dout", "states", "owed")
        new_CP, dout_CP, states_DP, owed_DP = (x[name][:, here] for name in names)
        yield from (_dot(dout_CP, y, b_turned=True) for y in (new_CP, states_DP))
        yield _dot(new_CP, owed_DP, b_turned=True)
        yield jnp.sum(states_DP.astype(jnp.float32) * owed_DP.astype(jnp.float32))
        if delta:
            dr_CP = _dot(x["inverse"][...], x["dnew"][:, here], a_turned=True)
            x["dv"][:, here] = (gates[BETA][:, None] * dr_CP).astype(dtype)
            yield jnp.sum(dr_CP * x["v"][:, here].astype(jnp.float32), axis=1)
            yield from (_dot(dr_CP.astype(dtype), y, b_turned=True) for y in (new_CP, states_DP))

    shapes = [(CHUNK, CHUNK), (CHUNK, depth), (CHUNK, depth), ()]
    shapes += [(CHUNK,), (CHUNK, CHUNK), (CHUNK, depth)] * delta
    sums = [jnp.zeros(shape, jnp.float32) for shape in shapes]
    add = lambda i, sums: list(map(jnp.add, sums, terms(i)))  # noqa: E731
    dscores_CC, dq_CD, dk_CD, dwhole, *more = jax.lax.fori_loop(0, width // columns, add, sums)

    q_CD, k_CD, before_C = x["q"][...], x["k"][...], gates[BEFORE]
    dscores_CC *= scale * _pairs(gates)
    moved_CC = dscores_CC * _dot(q_CD, k_CD, b_turned=True)
    dscores_CC = dscores_CC.astype(dtype)
    dq_CD *= scale * before_C[:, None]
    dsum_C = jnp.sum(q_CD.astype(jnp.float32) * dq_CD, axis=1)
    x["dq"][...] = (dq_CD + _dot(dscores_CC, k_CD)).astype(dtype)
    dk_CD *= gates[AFTER][:, None]
    kept_C = jnp.sum(k_CD.astype(jnp.float32) * dk_CD, axis=1)
    dwhole = jnp.sum(kept_C) + gates[BEFORE, CHUNK - 1] * dwhole
    dk_CD += _dot(dscores_CC, q_CD, a_turned=True)
    if delta:
        (dbeta_C, dlower_CC, far_CD), beta_C = more, gates[BETA]
        dlower_CC *= -_pairs(gates, strictly=True)
        products_CC = dlower_CC * _dot(k_CD, k_CD, b_turned=True)
        dlower_CC = (beta_C[:, None] * dlower_CC).astype(dtype)
        far_CD *= -before_C[:, None]
        far_C = jnp.sum(k_CD.astype(jnp.float32) * far_CD, axis=1)
        x["dgates"][1] = dbeta_C + far_C + jnp.sum(products_CC, axis=1)
        dsum_C += beta_C * far_C
        moved_CC += beta_C[:, None] * products_CC
        dk_CD += beta_C[:, None] * far_CD + _dot(dlower_CC, k_CD)
        dk_CD += _dot(dlower_CC, k_CD, a_turned=True)
    x["dk"][...] = dk_CD.astype(dtype)
    dsum_C += jnp.sum(moved_CC, axis=1) - jnp.sum(moved_CC, axis=0) - kept_C
    i_CC, j_CC = _places()  # a decay is in the sums of all positions from its own on
    x["dgates"][0] = dwhole + jnp.sum(jnp.where(i_CC >= j_CC, dsum_C[:, None], 0), axis=0)


SOLVE = ChunkKernel(_solve, "q k v gates dout", 4)
WALK = ChunkKernel(_walk, "k u w gates first", 4, 3, 32)
READ = ChunkKernel(_read, "q k new gates states", 4)
RETURN = ChunkKernel(_return, "q k w gates dout dnear last", 4, 2, 32)
PULL = ChunkKernel(_pull, "q k v new gates dout states owed inverse dnew", 8)
