"""Modules of ops that jax never emits (or not for CPUs), each with numpy's answer."""

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import scipy.special

from tests.ir.dialect.cases_linalg import LOWER, SIDES, SPD, matrices

Array = np.ndarray[Any, Any]


class ModuleCase(NamedTuple):
    """A module's text, its arguments and a function of them that gives its results."""

    name: str
    text: str
    args: tuple[Array, ...]
    want: Callable[..., Any]


_TYPES = {"f": "f32", "i": "i32", "u": "ui32", "b": "i1", "c": "complex<f32>"}


def tensor(array: Any) -> str:
    a = np.asarray(array)
    dtype = "i64" if a.dtype == np.int64 else _TYPES[a.dtype.kind]
    return "tensor<" + "".join(f"{n}x" for n in a.shape) + dtype + ">"


Part = tuple[str, Callable[..., Any], tuple[Any, ...]]
"""A body, numpy's function and arguments."""


def case(name: str, body: str, want: Callable[..., Any], *args: Any) -> ModuleCase:
    """A case whose body reads `%0`, `%1`, ... of types `$0`, ... and defines `%r` of type `$r`.

    `%r:2` and types `$r0`, `$r1` stand for an op of two results. A body may begin with functions,
    up to a line of dashes.
    """
    return together(name, (body, want, args))


def together(name: str, *parts: Part) -> ModuleCase:
    """One case of several bodies, each of which has arguments of its own."""
    all_args, names, types, texts, functions = list[Any](), list[str](), list[str](), "", ""
    for number, (body, want, args) in enumerate(parts):
        with np.errstate(all="ignore"):
            found = want(*args)
        results = list(map(tensor, found if isinstance(found, tuple) else (found,)))
        before, _, text = body.rpartition("----")
        for kind, given in (("", list(map(tensor, args))), ("r", results)):
            for i, type_ in enumerate(given):
                text = text.replace(f"${kind}{i}", type_)
        text = text.replace("$r", results[0]).replace("%r", f"%res{number}")
        for i in range(len(args)):
            text = text.replace(f"%{i}", f"%arg{len(all_args) + i}")
        texts += text + "\n"
        count = len(results)
        names += [f"%res{number}" + (f"#{i}" if count > 1 else "") for i in range(count)]
        types += results
        functions += before
        all_args += args
    params = ", ".join(f"%arg{i}: {tensor(a)}" for i, a in enumerate(all_args))
    module = f"""module {{
    {functions}
    func.func public @main({params}) -> ({", ".join(types)}) {{
      {texts}
      return {", ".join(names)} : {", ".join(types)}
    }}
    }}"""

    def all_of(*given: Any) -> tuple[Any, ...]:
        found, rest = list[Any](), list(given)
        for _, want, args in parts:
            own, rest = rest[: len(args)], rest[len(args) :]
            made = want(*own)
            found += made if isinstance(made, tuple) else (made,)
        return tuple(found)

    return ModuleCase(name, module, tuple(map(np.asarray, all_args)), all_of)


X = matrices(8, 16)
Y = matrices(8, 16, seed=1)
ROW = matrices(16, seed=2)
I = np.random.RandomState(0).randint(1, 8, (8, 16)).astype(np.int32)  # noqa: E741
J = np.random.RandomState(1).randint(1, 5, (16,)).astype(np.int32)
B = X > 0
IMAGE = matrices(8, 4, 4, 8)
SCALE, OFFSET, MEAN, VARIANCE = (matrices(8, seed=s) + 2 for s in range(3, 7))
INDEX = np.asarray([3, 1, 15, 0], np.int32)
LONGS = np.random.RandomState(0).randint(-(2**62), 2**62, (8, 4)).astype(np.int64)
ROWS = matrices(16, 8)
EXPERTS = matrices(4, 8, 8)
SIZES = np.asarray([3, 0, 7, 4], np.int32)
ALL_ROWS = np.asarray([3, 2, 7, 4], np.int32)


# Numpy's answers.


def training(x: Array, scale: Array, offset: Array) -> Any:
    mean, var = x.mean((0, 1, 2)), x.var((0, 1, 2))
    return (x - mean) / np.sqrt(var + 0.001) * scale + offset, mean, var


def training_gradient(x: Array, scale: Array, mean: Array, var: Array, dy: Array) -> Any:
    n = x.size // x.shape[-1]
    inv, centered = 1 / np.sqrt(var + 0.001), x - mean
    weighted = (dy * centered).sum((0, 1, 2))
    dx = scale * inv / n * (n * dy - dy.sum((0, 1, 2)) - centered * inv**2 * weighted)
    return dx, weighted * inv, dy.sum((0, 1, 2))


def group_of(sizes: Array, rows: int) -> Array:
    return np.searchsorted(np.cumsum(sizes), np.arange(rows), side="right")


def ragged_rows(x: Array, w: Array, sizes: Array) -> Any:
    groups = group_of(sizes, len(x))
    return np.stack([x[i] @ w[g] if g < len(w) else 0 * w[0, 0] for i, g in enumerate(groups)])


def ragged_contraction(x: Array, y: Array, sizes: Array) -> Any:
    groups = group_of(sizes, len(x))
    return np.stack([x[groups == g].T @ y[groups == g] for g in range(len(sizes))])


def ragged_batched(x: Array, w: Array, sizes: Array) -> Any:
    return np.stack([ragged_rows(x[i], w[:, i], sizes[i]) for i in range(len(x))])


def q_of(a: Array) -> Any:
    """The product of the first columns' Householder reflections, from LAPACK's factors."""
    m, n = a.shape[-2:]
    out = []
    for matrix in a:
        q = np.eye(m)
        for k in range(n):
            v = np.concatenate([np.zeros(k), [1.0], matrix[k + 1 :, k]])
            q = q @ (np.eye(m) - 0.5 * np.outer(v, v))
        out.append(q[:, :n])
    return np.stack(out).astype(np.float32)


def scan_max(x: Array, init: Array) -> Any:
    y = np.maximum.accumulate(np.concatenate([init[:, None], x], 1), 1)[:, 1:]
    return y, y[:, -1].copy()


def scan_reversed(x: Array, init: Array) -> Any:
    y = np.cumsum(np.concatenate([x, init[None]], 0)[::-1], 0)[1:][::-1]
    return y.astype(np.float32), y[0].astype(np.float32)


def convolved(x: Array, w: Array) -> Any:
    """NHWC by HWIO, one row and column of zeros around."""
    y = np.pad(x, ((0, 0), (1, 1), (1, 1), (0, 0)))
    h, v = x.shape[1:3]
    return sum(y[:, i : i + h, j : j + v] @ w[i, j] for i in range(3) for j in range(3))


def top_k(x: Array) -> Any:
    order = np.argsort(-x, -1, kind="stable")[:, :3].astype(np.int32)
    return np.take_along_axis(x, order, -1), order


def mulhi(x: Array, y: Array) -> Any:
    return ((x.astype(object) * y.astype(object)) >> 64).astype(np.int64)


def custom_call(target: str, signature: str, attrs: str = "") -> str:
    results = "%r:2" if signature.count("$r") > 1 else "%r"
    count = signature.partition("->")[0].count("$")
    operands = ", ".join(f"%{i}" for i in range(count))
    return f"{results} = stablehlo.custom_call @{target}({operands}) {attrs} : {signature}"


def broadcasting(name: str, want: Any, *args: Any, attrs: str = "") -> Part:
    operands = ", ".join(f"%{i}" for i in range(len(args)))
    types = ", ".join(f"${i}" for i in range(len(args)))
    return f'%r = "chlo.broadcast_{name}"({operands}) {attrs} : ({types}) -> $r', want, args


_COMPARE = "{comparison_direction = #chlo<comparison_direction LT>}"


def polygamma(n: Array, x: Array) -> Any:
    return scipy.special.polygamma(n.astype(np.int32), x).astype(np.float32)


BROADCASTING = together(
    "chlo.broadcast",
    broadcasting("add", np.add, X, ROW),
    broadcasting("and", np.bitwise_and, I, J),
    broadcasting("atan2", np.arctan2, X, ROW),
    broadcasting("compare", np.less, X, ROW, attrs=_COMPARE),
    broadcasting("complex", lambda x, y: (x + 1j * y).astype(np.complex64), X, ROW),
    broadcasting("divide", np.divide, X, ROW),
    broadcasting("maximum", np.maximum, X, ROW),
    broadcasting("minimum", np.minimum, ROW, X),
    broadcasting("multiply", np.multiply, X, np.float32(3)),
    broadcasting("next_after", np.nextafter, X, ROW),
    broadcasting("or", np.bitwise_or, I, J),
    broadcasting("polygamma", polygamma, np.ones(16, np.float32), X + 3),
    broadcasting("power", np.power, X + 2, ROW),
    broadcasting("remainder", np.fmod, X, ROW),
    broadcasting("select", lambda p, x, y: np.where(p, x, y), B, X, ROW),
    broadcasting("shift_left", np.left_shift, I, J),
    broadcasting("shift_right_arithmetic", np.right_shift, -I, J),
    broadcasting("shift_right_logical", np.right_shift, I, J),
    broadcasting("subtract", np.subtract, X, ROW,
                 attrs="{broadcast_dimensions = array<i64: 1>}"),
    broadcasting("xor", np.bitwise_xor, I, J),
    broadcasting("zeta", lambda x, q: scipy.special.zeta(x, q).astype(np.float32), X + 3, ROW + 2),
)  # fmt: skip

INFINITE = np.where(X < -1, -np.inf, np.where(X > 1, np.inf, X))
ONE_OPERAND = together("one operand", *(
    (f'%r = "{name}"(%0) : ($0) -> $r', want, (INFINITE,))
    for name, want in (
        ("chlo.is_inf", np.isinf), ("chlo.is_pos_inf", np.isposinf),
        ("chlo.is_neg_inf", np.isneginf), ("chlo.tan", np.tan), ("chlo.conj", np.conj),
        ("stablehlo.logistic", lambda x: 1 / (1 + np.exp(-x))),
    )
))  # fmt: skip

NORM = (
    case("stablehlo.batch_norm_inference",
        """%r = "stablehlo.batch_norm_inference"(%0, %1, %2, %3, %4)
        {epsilon = 0.001 : f32, feature_index = 3 : i64} : ($0, $1, $2, $3, $4) -> $r""",
        lambda x, s, o, m, v: (x - m) / np.sqrt(v + 0.001) * s + o, IMAGE, SCALE, OFFSET, MEAN,
        VARIANCE),
    case("stablehlo.batch_norm_training",
        """%r:3 = "stablehlo.batch_norm_training"(%0, %1, %2)
        {epsilon = 0.001 : f32, feature_index = 3 : i64} : ($0, $1, $2) -> ($r0, $r1, $r2)""",
        training, IMAGE, SCALE, OFFSET),
    case("stablehlo.batch_norm_grad",
        """%r:3 = "stablehlo.batch_norm_grad"(%0, %1, %2, %3, %4)
        {epsilon = 0.001 : f32, feature_index = 3 : i64}
        : ($0, $1, $2, $3, $4) -> ($r0, $r1, $r2)""",
        training_gradient, IMAGE, SCALE, MEAN, VARIANCE, matrices(8, 4, 4, 8, seed=9)),
)  # fmt: skip

CONTRACT = (
    case("stablehlo.dot", "%r = stablehlo.dot %0, %1 : ($0, $1) -> $r", np.matmul, X, Y.T.copy()),
    case("dot_vector", "%r = stablehlo.dot %0, %1 : ($0, $1) -> $r", np.matmul, X, ROW),
    case("stablehlo.einsum",
        '%r = stablehlo.einsum %0, %1, config = "ijl,kj->ki" : ($0, $1) -> $r',
        lambda x, y: np.einsum("ijl,kj->ki", x, y), SIDES, matrices(8, 4)),
    case("einsum_batch",
        '%r = stablehlo.einsum %0, %1, config = "...ij,...kj->...ik" : ($0, $1) -> $r',
        lambda x, y: np.einsum("...ij,...kj->...ik", x, y), SIDES, matrices(8, 8, 16)),
    case("stablehlo.unary_einsum",
        '%r = "stablehlo.unary_einsum"(%0) {einsum_config = "ijk->ki"} : ($0) -> $r',
        lambda x: np.einsum("ijk->ki", x), SIDES),
    case("unary_einsum_diagonal",
        '%r = "stablehlo.unary_einsum"(%0) {einsum_config = "iji->ji"} : ($0) -> $r',
        lambda x: np.einsum("iji->ji", x), matrices(8, 4, 8)),
    case("stablehlo.broadcast", "%r = stablehlo.broadcast %0, sizes = [4, 2] : ($0) -> $r",
        lambda x: np.broadcast_to(x, (4, 2, 8, 16)), X),
    case("stablehlo.torch_index_select",
        """%r = "stablehlo.torch_index_select"(%0, %1) {dim = 1 : i64, batch_dims = 0 : i64}
        : ($0, $1) -> $r""",
        lambda x, i: x[:, i], X, INDEX),
    case("torch_index_select_batch",
        """%r = "stablehlo.torch_index_select"(%0, %1) {dim = 2 : i64, batch_dims = 1 : i64}
        : ($0, $1) -> $r""",
        lambda x, i: np.stack([a[:, b] for a, b in zip(x, i, strict=True)]), SIDES,
        np.stack([(INDEX + n) % 16 for n in range(8)]).astype(np.int32)),
    case("stablehlo.map",
        """%r = "stablehlo.map"(%0, %1) ({
          ^bb0(%a: tensor<f32>, %b: tensor<f32>):
            %one = stablehlo.constant dense<1.0> : tensor<f32>
            %p = stablehlo.multiply %a, %b : tensor<f32>
            %q = stablehlo.add %p, %one : tensor<f32>
            stablehlo.return %q : tensor<f32>
        }) {dimensions = array<i64: 0, 1>} : ($0, $1) -> $r""",
        lambda x, y: x * y + 1, X, Y),
)  # fmt: skip

DYNAMIC = (
    case("stablehlo.dynamic_reshape",
        """%s = stablehlo.constant dense<[4, 32]> : tensor<2xi32>
        %r = stablehlo.dynamic_reshape %0, %s : ($0, tensor<2xi32>) -> $r""",
        lambda x: x.reshape(4, 32), X),
    case("stablehlo.dynamic_broadcast_in_dim",
        """%s = stablehlo.constant dense<[8, 16]> : tensor<2xi32>
        %r = "stablehlo.dynamic_broadcast_in_dim"(%0, %s)
        {broadcast_dimensions = array<i64: 1>} : ($0, tensor<2xi32>) -> $r""",
        lambda x: np.broadcast_to(x, (8, 16)), ROW),
    case("stablehlo.dynamic_iota",
        """%s = stablehlo.constant dense<[8, 16]> : tensor<2xi32>
        %i = stablehlo.dynamic_iota %s, dim = 0 : (tensor<2xi32>) -> $0
        %r = stablehlo.add %i, %0 : $0""",
        lambda x: x + np.arange(8, dtype=np.float32)[:, None], X),
    case("stablehlo.dynamic_gather",
        """%s = stablehlo.constant dense<[8, 1]> : tensor<2xi32>
        %r = "stablehlo.dynamic_gather"(%0, %1, %s) {dimension_numbers =
          #stablehlo.gather<offset_dims = [0], collapsed_slice_dims = [1],
            start_index_map = [1], index_vector_dim = 1>,
          indices_are_sorted = false} : ($0, $1, tensor<2xi32>) -> $r""",
        lambda x, i: x[:, i], X, INDEX),
    case("stablehlo.dynamic_conv",
        """%p = stablehlo.constant dense<1> : tensor<2x2xi32>
        %r = "stablehlo.dynamic_conv"(%0, %1, %p) {
          dimension_numbers = #stablehlo.conv<[b, 0, 1, f]x[0, 1, i, o]->[b, 0, 1, f]>,
          feature_group_count = 1 : i64, batch_group_count = 1 : i64}
        : ($0, $1, tensor<2x2xi32>) -> $r""",
        convolved, IMAGE, matrices(3, 3, 8, 4, seed=8)),
    case("stablehlo.dynamic_pad",
        """%z = stablehlo.constant dense<2.0> : tensor<f32>
        %one = stablehlo.constant dense<1> : tensor<1xi32>
        %zero = stablehlo.constant dense<0> : tensor<1xi32>
        %l = stablehlo.concatenate %zero, %one, dim = 0
          : (tensor<1xi32>, tensor<1xi32>) -> tensor<2xi32>
        %h = stablehlo.constant dense<[0, 3]> : tensor<2xi32>
        %n = stablehlo.constant dense<0> : tensor<2xi32>
        %r = stablehlo.dynamic_pad %0, %z, %l, %h, %n
        : ($0, tensor<f32>, tensor<2xi32>, tensor<2xi32>, tensor<2xi32>) -> $r""",
        lambda x: np.pad(x, ((0, 0), (1, 3)), constant_values=2.0), X),
    case("stablehlo.real_dynamic_slice",
        """%s = stablehlo.constant dense<[0, 3]> : tensor<2xi32>
        %l = stablehlo.constant dense<[8, 11]> : tensor<2xi32>
        %t = stablehlo.constant dense<[1, 2]> : tensor<2xi32>
        %r = stablehlo.real_dynamic_slice %0, %s, %l, %t
        : ($0, tensor<2xi32>, tensor<2xi32>, tensor<2xi32>) -> $r""",
        lambda x: x[:, 3:11:2], X),
    case("real_dynamic_slice_computed",
        """%n = stablehlo.constant dense<[8, 4]> : tensor<2xi32>
        %l = stablehlo.add %1, %n : tensor<2xi32>
        %t = stablehlo.constant dense<1> : tensor<2xi32>
        %r = stablehlo.real_dynamic_slice %0, %1, %l, %t : ($0, $1, $1, tensor<2xi32>) -> $r""",
        lambda x, s: x[s[0] : s[0] + 8, s[1] : s[1] + 4], X, np.asarray([0, 5], np.int32)),
    case("stablehlo.get_dimension_size",
        """%n = stablehlo.get_dimension_size %0, dim = 1 : ($0) -> tensor<i32>
        %m = stablehlo.set_dimension_size %0, %n, dim = 1 : ($0, tensor<i32>) -> $0
        %f = stablehlo.convert %n : (tensor<i32>) -> tensor<f32>
        %b = stablehlo.broadcast %f, sizes = [8, 16] : (tensor<f32>) -> $0
        %r = stablehlo.multiply %m, %b : $0""",
        lambda x: x * 16, X),
)  # fmt: skip

LINALG = (
    case("stablehlo.cholesky", '%r = "stablehlo.cholesky"(%0) {lower = true} : ($0) -> $r',
        np.linalg.cholesky, SPD),
    case("stablehlo.triangular_solve",
        """%r = "stablehlo.triangular_solve"(%0, %1) {left_side = true, lower = true,
        unit_diagonal = false, transpose_a = #stablehlo<transpose NO_TRANSPOSE>}
        : ($0, $1) -> $r""",
        lambda a, b: np.linalg.solve(a, b), LOWER, SIDES),
    case("triangular_solve_right",
        """%r = "stablehlo.triangular_solve"(%0, %1) {left_side = false, lower = true,
        unit_diagonal = false, transpose_a = #stablehlo<transpose TRANSPOSE>} : ($0, $1) -> $r""",
        lambda a, b: np.swapaxes(np.linalg.solve(a, np.swapaxes(b, 1, 2)), 1, 2), LOWER,
        np.swapaxes(SIDES, 1, 2).copy()),
    case("custom_call:Eigh",
        """%e:2 = stablehlo.custom_call @Eigh(%0) {backend_config = "1,1,100,1e-6"}
        : ($0) -> ($0, tensor<8x4xf32>)
        %r = stablehlo.abs %e#0 : $0""",
        lambda a: np.abs(np.linalg.eigh(a)[1]), SPD),
    case("custom_call:Qr", custom_call("Qr", "($0) -> ($r0, $r1)"),
        lambda a: (np.stack([np.linalg.qr(x, "raw")[0].T for x in a]),
                   np.stack([np.linalg.qr(x, "raw")[1] for x in a])),
        matrices(8, 6, 4)),
    case("custom_call:ProductOfElementaryHouseholderReflectors",
        custom_call("ProductOfElementaryHouseholderReflectors", "($0, $1) -> $r"),
        lambda a, t: q_of(a), matrices(8, 6, 4), np.full((8, 4), 0.5, np.float32)),
)  # fmt: skip


def ragged(name: str, numbers: str, want: Any, *args: Any) -> ModuleCase:
    body = f"""%r = "chlo.ragged_dot"(%0, %1, %2)
      {{ragged_dot_dimension_numbers = #chlo.ragged_dot<{numbers}>}} : ($0, $1, $2) -> $r"""
    return case(name, body, want, *args)


_ROWS = """lhs_contracting_dimensions = [1], rhs_contracting_dimensions = [1],
    lhs_ragged_dimensions = [0], rhs_group_dimensions = [0]"""

MISC = (
    ragged("chlo.ragged_dot", _ROWS, ragged_rows, ROWS, EXPERTS, SIZES),
    ragged("ragged_dot_all_rows", _ROWS, ragged_rows, ROWS, EXPERTS, ALL_ROWS),
    ragged("ragged_dot_uneven", _ROWS, ragged_rows, ROWS[:15], EXPERTS[:3], SIZES[[0, 2, 3]]),
    ragged("ragged_dot_contraction",
        """lhs_contracting_dimensions = [0], rhs_contracting_dimensions = [0],
        lhs_ragged_dimensions = [0]""",
        ragged_contraction, ROWS, matrices(16, 4, seed=1), SIZES),
    ragged("ragged_dot_batch",
        """lhs_batching_dimensions = [0], rhs_batching_dimensions = [1],
        lhs_contracting_dimensions = [2], rhs_contracting_dimensions = [2],
        lhs_ragged_dimensions = [1], rhs_group_dimensions = [0]""",
        ragged_batched, matrices(4, 16, 8), matrices(4, 4, 8, 8),
        np.stack([np.roll(SIZES, n) for n in range(4)])),
    case("chlo.constant",
        """%c = "chlo.constant"() {value = dense<2.0> : tensor<f32>} : () -> tensor<f32>
        %r = "chlo.broadcast_add"(%0, %c) : ($0, tensor<f32>) -> $r""",
        lambda x: x + 2, X),
    case("chlo.constant_like",
        """%c = "chlo.constant_like"(%0) {value = 2.5 : f32} : ($0) -> $0
        %r = stablehlo.multiply %0, %c : $0""",
        lambda x: x * 2.5, X),
    case("chlo._asin_acos_kernel",
        """%k = "chlo._asin_acos_kernel"(%0) : ($0) -> $0
        %w = stablehlo.real %k : ($0) -> $r
        %x = stablehlo.real %0 : ($0) -> $r
        %r = stablehlo.atan2 %x, %w : $r""",
        lambda z: np.arcsin(z).real, (X + 1j * Y).astype(np.complex64)),
    case("mulhi_64", "%r = chlo.mulhi %0, %1 : $0, $1 -> $r", mulhi, LONGS, LONGS[::-1].copy()),
    case("chlo.scan",
        """%r:2 = "chlo.scan"(%0, %1) ({
          ^bb0(%a: $1, %b: $1):
            %m = stablehlo.maximum %a, %b : $1
            stablehlo.return %m, %m : $1, $1
        }) {dimension = 1 : i64, is_associative = true, is_reverse = false,
            operandSegmentSizes = array<i32: 1, 1>, resultSegmentSizes = array<i32: 1, 1>}
        : ($0, $1) -> ($r0, $r1)""",
        scan_max, X, np.zeros(8, np.float32)),
    case("scan_reversed",
        """%r:2 = "chlo.scan"(%0, %1) ({
          ^bb0(%a: $1, %b: $1):
            %m = stablehlo.add %a, %b : $1
            stablehlo.return %m, %m : $1, $1
        }) {dimension = 0 : i64, is_associative = true, is_reverse = true,
            operandSegmentSizes = array<i32: 1, 1>, resultSegmentSizes = array<i32: 1, 1>}
        : ($0, $1) -> ($r0, $r1)""",
        scan_reversed, X, ROW),
    case("custom_call:mhlo.topk",
        custom_call(
            "mhlo.topk", "($0) -> ($r0, $r1)",
            "{mhlo.attributes = {k = 3 : i64, largest = true}, mhlo.version = 1 : i64}",
        ),
        top_k, X),
    case(
        "custom_call:AllocateBuffer",  # what nobody wrote to may be anything, and is read by nobody
        """%e = stablehlo.custom_call @AllocateBuffer() : () -> $0
        %t = stablehlo.constant dense<true> : tensor<i1>
        %r = stablehlo.select %t, %0, %e : tensor<i1>, $0""",
        lambda x: x, X,
    ),
    case("custom_call:TopK", custom_call("TopK", "($0) -> ($r0, $r1)"), top_k, X),
    together("custom_call:mhlo", *(
        (custom_call(f"mhlo.{name}", "($0) -> $r", "{mhlo.attributes = {}}"), want, (x,))
        for name, want, x in (
            ("acos", np.arccos, X), ("acosh", np.arccosh, X + 2), ("asin", np.arcsin, X),
            ("asinh", np.arcsinh, X), ("atan", np.arctan, X), ("atanh", np.arctanh, X * 0.9),
            ("cosh", np.cosh, X), ("erf", scipy.special.erf, X), ("sinh", np.sinh, X),
            ("tan", np.tan, X),
        )
    )),
    case("custom_call:Sharding",
        custom_call("Sharding", "($0) -> $r", '{mhlo.sharding = "{devices=[8,1]<=[8]}"}'),
        lambda x: x, X),
    case("custom_call:annotate_device_placement",
        """%a = stablehlo.add %0, %0 : $0
        %p = stablehlo.custom_call @annotate_device_placement(%a) {has_side_effect = true,
          mhlo.frontend_attributes = {_xla_buffer_placement = "device"}} : ($0) -> $0
        %r = stablehlo.add %p, %0 : $0""",
        lambda x: x * 3, X),
    case("custom_call:LayoutConstraint",
        custom_call(
            "LayoutConstraint", "($0) -> $r",
            "{operand_layouts = [dense<[0, 1]> : tensor<2xindex>],"
            " result_layouts = [dense<[0, 1]> : tensor<2xindex>]}",
        ),
        lambda x: x, X),
    case("stablehlo.tuple",
        """%t = stablehlo.tuple %0, %1 : tuple<$0, $1>
        %a = stablehlo.get_tuple_element %t[1] : (tuple<$0, $1>) -> $1
        %b = stablehlo.get_tuple_element %t[0] : (tuple<$0, $1>) -> $0
        %r = stablehlo.subtract %a, %b : $0""",
        lambda x, y: y - x, X, Y),
    case("stablehlo.if",
        """%z = stablehlo.constant dense<0.0> : tensor<f32>
        %s = "stablehlo.reduce"(%0, %z) ({
          ^bb0(%a: tensor<f32>, %b: tensor<f32>):
            %m = stablehlo.add %a, %b : tensor<f32>
            stablehlo.return %m : tensor<f32>
        }) {dimensions = array<i64: 0, 1>} : ($0, tensor<f32>) -> tensor<f32>
        %p = stablehlo.compare GT, %s, %z : (tensor<f32>, tensor<f32>) -> tensor<i1>
        %r = "stablehlo.if"(%p) ({
          %u = stablehlo.add %0, %0 : $0
          stablehlo.return %u : $0
        }, {
          %v = stablehlo.negate %0 : $0
          stablehlo.return %v : $0
        }) : (tensor<i1>) -> $r""",
        lambda x: x * 2 if x.sum() > 0 else -x, X),
    case("stablehlo.composite",
        """func.func private @half(%a: tensor<8x16xf32>) -> tensor<8x16xf32> {
          %h = stablehlo.constant dense<0.5> : tensor<8x16xf32>
          %m = stablehlo.multiply %a, %h : tensor<8x16xf32>
          return %m : tensor<8x16xf32>
        }
        ----
        %r = stablehlo.composite "my.half" %0 {decomposition = @half} : ($0) -> $r""",
        lambda x: x * 0.5, X),
)  # fmt: skip

MODULES: tuple[ModuleCase, ...] = (
    BROADCASTING, ONE_OPERAND, *CONTRACT, *DYNAMIC, *LINALG, *MISC, *NORM,
)  # fmt: skip
