"""Writes the quantized checkpoints of the hub after their formats' specifications.

Numbers are drawn first, so what a matrix stands for is known without reading a file.
"""

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from spmd.models.llama.weights.files import TensorEntry, plan_files, write_files

Array = np.ndarray[Any, Any]
Made = tuple[dict[str, Array], Array]
"""The tensors that stand for a matrix, by the last words of their names; the matrix in float32."""

AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


def in_words(numbers: Array, bits: int, order: tuple[int, ...] | None = None) -> Array:
    """Numbers (N, M) -> int32 (N, M / n): the i-th of n is number `order[i]` of its neighbours."""
    count = 32 // bits
    words = np.zeros((numbers.shape[0], numbers.shape[1] // count), np.uint32)
    for i, place in enumerate(order or range(count)):
        words |= numbers[:, place::count].astype(np.uint32) << np.uint32(bits * i)
    return words.view(np.int32)


def in_groups(weight: Array, bits: int, group: int, sym: bool, mixed: bool) -> tuple[Array, ...]:
    """Numbers (O, I), zeros and scales (O, Q), groups (I,), and what they stand for."""
    rng, (outputs, inputs) = np.random.default_rng(weight.size), weight.shape
    width, half = inputs if group == -1 else group, 2 ** (bits - 1)
    groups_I = np.arange(inputs) // width
    if mixed:
        rng.shuffle(groups_I)
    shape = outputs, inputs // width
    zeros = np.full(shape, half) if sym else rng.integers(1, 2 * half - 1, shape)
    scales = (rng.uniform(0.5, 1.5, shape) * np.abs(weight).max() / half).astype(np.float16)
    wide = scales.astype(np.float32)[:, groups_I]
    numbers = np.clip(np.rint(weight / wide) + zeros[:, groups_I], 0, 2 * half - 1).astype(int)
    return numbers, zeros, scales, groups_I, (numbers - zeros[:, groups_I]).astype("f4") * wide


def gptq(bits: int, group: int, sym: bool, mixed: bool, version: str) -> tuple[Any, Any]:
    def made(weight: Array) -> Made:
        numbers, zeros, scales, groups_I, whole = in_groups(weight, bits, group, sym, mixed)
        less = 0 if version == "gptq_v2" else 1
        return {
            "qweight": in_words(numbers, bits).T,
            "qzeros": in_words((zeros - less).T, bits),
            "scales": scales.T,
            "g_idx": groups_I.astype(np.int32),
        }, whole

    about = {"checkpoint_format": version, "bits": bits, "group_size": group, "sym": sym}
    return made, {"quant_method": "gptq", "desc_act": mixed, **about}


def awq(group: int) -> tuple[Any, Any]:
    def made(weight: Array) -> Made:
        numbers, zeros, scales, _, whole = in_groups(weight, 4, group, False, False)
        words = (in_words(x.T, 4, AWQ_ORDER) for x in (numbers, zeros))
        return dict(zip(("qweight", "qzeros", "scales"), (*words, scales.T), strict=True)), whole

    about = {"version": "gemm", "bits": 4, "group_size": group, "zero_point": True}
    return made, {"quant_method": "awq", **about}


def pack_quantized(bits: int, group: int, sym: bool, mixed: bool) -> tuple[Any, Any]:
    def made(weight: Array) -> Made:
        numbers, zeros, scales, groups_I, whole = in_groups(weight, bits, group, sym, mixed)
        parts = {
            "weight_packed": in_words(numbers, bits),
            "weight_scale": scales,
            "weight_shape": np.array(weight.shape),
        }
        if not sym:
            parts["weight_zero_point"] = in_words(zeros.T, bits).T
        return parts | ({"weight_g_idx": groups_I.astype(np.int32)} if mixed else {}), whole

    return made, compressed("pack-quantized", type="int", num_bits=bits, symmetric=sym)


def compressed(form: str, **weights: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None}
    about = {"format": form, "config_groups": {"group_0": group}, "ignore": ["lm_head"]}
    return {"quant_method": "compressed-tensors", "quantization_status": "compressed", **about}


def of_bytes(dtype: str, scaled: tuple[int, int], native: bool = False) -> tuple[Any, Any]:
    """8-bit numbers; blocks of so many rows and columns, or of all if 0, have a scale."""

    def made(weight: Array) -> Made:
        block = [wide or size for wide, size in zip(scaled, weight.shape, strict=True)]
        shape = [-(-size // wide) for wide, size in zip(block, weight.shape, strict=True)]
        rng = np.random.default_rng(1)
        most = 448 if dtype == "float8_e4m3fn" else 127
        scales = (rng.uniform(1, 2, shape) * np.abs(weight).max() / most).astype(ml_dtypes.bfloat16)
        wide = np.kron(scales.astype("f4"), np.ones(block, "f4"))[: len(weight), : weight.shape[1]]
        numbers = np.rint(weight / wide) if dtype == "int8" else weight / wide
        numbers = numbers.astype(dtype)
        name = "weight_scale_inv" if native else "weight_scale"
        scales = scales if shape != [1, 1] else scales[0]
        return {"weight": numbers, name: scales, "input_scale": scales[:1]}, (
            numbers.astype("f4") * wide
        )

    is_block = all(scaled)
    if native:
        about = {"weight_block_size": list(scaled) if is_block else None, "fmt": "e4m3"}
        return made, {"quant_method": "fp8", "activation_scheme": "dynamic", **about}
    form, kind = ("int-quantized", "int") if dtype == "int8" else ("float-quantized", "float")
    block = {"block_structure": list(scaled)} if is_block else {}
    return made, compressed(form, type=kind, num_bits=8, symmetric=True, **block)


FORMATS: Mapping[str, tuple[Callable[[Array], Made], Mapping[str, Any]]] = {
    **{
        f"{version}-{bits}-{group}-{sym}-{mixed}": gptq(bits, group, sym, mixed, version)
        for version in ("gptq", "gptq_v2")
        for bits, group in ((4, 32), (4, 64), (4, 128), (4, -1), (8, 64))
        for sym in (True, False)
        for mixed in (True, False)
    },
    **{f"awq-{group}": awq(group) for group in (32, 64, 128)},
    **{
        f"packed-{bits}-{group}-{sym}-{mixed}": pack_quantized(bits, group, sym, mixed)
        for bits, group, sym, mixed in (
            (4, 128, True, False), (4, 32, False, False), (4, 64, False, True), (8, -1, True, False)
        )
    },
    **{
        f"{dtype}-{rows}-{columns}": of_bytes(dtype, (rows, columns))
        for dtype, rows, columns in (
            ("float8_e4m3fn", 0, 0), ("float8_e4m3fn", 1, 0), ("float8_e4m3fn", 128, 128),
            ("int8", 1, 0),
        )
    },
    "fp8-blocks": of_bytes("float8_e4m3fn", (128, 128), native=True),
    "fp8-uneven-blocks": of_bytes("float8_e4m3fn", (48, 80), native=True),
    "fp8-whole": of_bytes("float8_e4m3fn", (0, 0), native=True),
}  # fmt: skip
"""Name -> what makes a matrix's tensors, and the `quantization_config`."""


def write(folder: Path, tensors: Mapping[str, Array], config: Mapping[str, Any]) -> None:
    """Write a folder of any dtypes."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    entries = [TensorEntry(name, x.shape, x.dtype.name) for name, x in tensors.items()]
    write_files(folder, plan_files(entries, 10**9), iter(tensors.values()))


def quantized(
    name: str, tensors: Mapping[str, Array], of: Callable[[str], bool]
) -> tuple[dict[str, Array], dict[str, Array]]:
    """The tensors with some in a format, and with what these stand for."""
    stored, whole = dict(tensors), dict(tensors)
    for tensor, weight in tensors.items():
        if of(tensor):
            parts, whole[tensor] = FORMATS[name][0](stored.pop(tensor))
            module = tensor.removesuffix("weight")
            stored |= {module + part: x for part, x in parts.items()}
    return stored, whole
