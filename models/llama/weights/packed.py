"""Reads the quantized checkpoints of Hugging Face's hub, into the layouts of `quantize.py`.

Shapes are in the names: O, I out and in, Q groups of I. What is stored for a matrix (O, I), where n
numbers of 4 or 8 bits are in an int32, the first in its lowest bits:

    fp8                 weight (O, I), weight_scale_inv of blocks, or weight_scale of all
    compressed-tensors  weight (O, I), weight_scale of all, of rows or of blocks; or
                        weight_packed (O, I/n), weight_scale (O, Q), weight_zero_point (O/n, Q)
    gptq                qweight (I/n, O), scales (Q, O), qzeros (Q, O/n), g_idx (I,): groups
    awq                 qweight (I, O/n), scales (Q, O), qzeros (Q, O/n), and eight are interleaved

A weight is `(number - zero) * scale`, and nothing is rounded: scales become float32, integers less
8 or 128 are ours. Inputs whose groups are not neighbours are sorted by group; `order` says how.
"""

import contextlib
import dataclasses
import functools
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from spmd.models.llama.config import ConfigError
from spmd.models.llama.quantize import FP8, GROUP, dequantize, pack_groups
from spmd.models.llama.weights.files import (
    Array,
    Folder,
    Index,
    StoredTensor,
    WeightsError,
    open_folder,
)
from spmd.models.training.paths import AnyPath, as_path

KEY = "quantization_config"

_VERSIONS, _LAYOUTS = ("gptq", "gptq_v2"), (
    "float-quantized", "int-quantized", "naive-quantized", "pack-quantized", "mixed-precision",
    "dense",
)  # fmt: skip
METHODS: Mapping[str, Mapping[str, Sequence[Any]]] = {
    "compressed-tensors": {
        "format": _LAYOUTS, "sparsity_config": (), "transform_config": (),
        "moe_sparsity_config": (),
    },
    "fp8": {"fmt": ("e4m3", "float8_e4m3fn"), "expert_dtype": ("fp8",)},
    "gptq": {
        "bits": (4, 8), "checkpoint_format": _VERSIONS, "format": _VERSIONS, "method": ("gptq",),
        "pack_dtype": ("int32",), "is_marlin_format": (), "adapter": (), "activation": (),
        "rotation": (),
    },
    "awq": {
        "bits": (4,), "version": ("gemm",), "format": ("gemm",), "checkpoint_format": ("gemm",),
        "method": ("awq",), "zero_point": (True,), "pack_dtype": ("int32",),
        "backend": ("autoawq", "auto", "auto_trainable"), "is_marlin_format": (), "adapter": (),
    },
}  # fmt: skip
"""`quant_method` -> the keys that say how numbers are stored, and which values of theirs are read.

Without such a value a key is to be empty."""

_KNOWN = """
    quant_method version config_groups ignore kv_cache_scheme quantization_status dequantize
    global_compression_ratio run_compressed use_optimized_inference activation_scheme scale_fmt
    weight_block_size modules_to_not_convert modules_to_convert ignored_layers group_size sym
    desc_act static_groups act_group_aware damp_percent damp_auto_increment true_sequential dynamic
    meta lm_head model_name_or_path model_file_base_name model_seqlen block_name_to_quantize
    module_name_preceding_first_block modules_in_block_to_quantize batch_size pad_token_id tokenizer
    dataset max_input_length cache_block_outputs use_cuda_fp16 use_exllama exllama_config
    disable_exllama quantizer do_fuse fuse_max_seq_len modules_to_fuse
"""
"""Other keys: which matrices are quantized, and in what groups, is seen by their tensors."""

_PARTS = """
    weight weight_scale weight_scale_inv weight_zero_point weight_packed weight_shape weight_g_idx
    qweight qzeros scales g_idx
"""
_BYTES: Mapping[str, Any] = {"F8_E4M3": FP8, "I8": np.int8}
"""safetensors' names of the dtypes that a `weight` with scales has."""

_OTHERS = """
    input_scale input_zero_point output_scale output_zero_point q_scale k_scale v_scale prob_scale
"""
"""Last words of scales of activations and of caches: weights do not depend on them."""

_AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)
"""Where AWQ's int32 holds the first, second, ... of eight neighbours."""


def check_quantization(given: Any) -> None:
    """Checks that the `quantization_config` of a `config.json` is one that is read here.

    Raises:
        ConfigError: it is not, or has keys that are unknown here.
    """
    if given is None:
        return
    if not isinstance(given, Mapping) or given.get("quant_method") not in METHODS:
        method = given.get("quant_method") if isinstance(given, Mapping) else given
        raise ConfigError(
            f"weights quantized by quant_method {json.dumps(method)} are not read, those by "
            f"{', '.join(METHODS)} are; start from the checkpoint that was quantized, or let "
            "transformers dequantize() the model and save_pretrained it, and quantize by --quantize"
        )
    keys, wrong = METHODS[given["quant_method"]], []
    for key, most in keys.items():
        value = given.get(key)
        found = value.lower() if isinstance(value, str) else value
        is_dense = isinstance(found, Mapping) and found.get("format") == "dense"  # not sparse
        if not (found is None or is_dense or (found in most if most else not found)):
            listed = f" ({', '.join(map(json.dumps, most))} can be read)" if most else ""
            wrong.append(f"{key} {json.dumps(value)}{listed}")
    for name, group in (given.get("config_groups") or {}).items():
        weights = group.get("weights") or {} if isinstance(group, Mapping) else {"type": group}
        kind = weights.get("type", "int"), weights.get("num_bits", 8)
        if kind not in (("float", 8), ("int", 8), ("int", 4)):
            wrong.append(f"{name}'s weights, {kind[1]} bits of {json.dumps(kind[0])}")
        elif isinstance(group, Mapping) and group.get("format") not in (*_LAYOUTS, None):
            wrong.append(f"{name}'s format {json.dumps(group['format'])}")
    if wrong:
        raise ConfigError(f"{KEY}: {given['quant_method']} cannot be read with {'; '.join(wrong)}")
    unknown = sorted(set(given) - {*keys, *_KNOWN.split()})
    if unknown:
        raise ConfigError(
            f"{KEY} has unknown keys {', '.join(unknown)}, which might change the weights; if they "
            "do not, remove them"
        )


@dataclasses.dataclass(frozen=True, eq=False)
class Matrix:
    """A quantized matrix of a folder, of which nothing is read yet but which inputs are a group."""

    shape: tuple[int, int]  # O, I
    dtype: Any  # of numbers: int8, 8-bit floats, or uint8 where they have 4 bits
    block: tuple[int, int]  # how many outputs, and how many inputs have a scale
    has_zeros: bool
    order_I: Array | None  # the inputs, sorted by group; None if they are
    # reads numbers (O, I), scales and zeros, which have a row and a column for each block
    read: Callable[[], tuple[Array, Array, Array | None]]

    @property
    def group(self) -> int | None:
        """How many inputs of a row have a scale in our layout; None if whole rows have."""
        inputs, wide = self.shape[1], self.block[1]
        if wide == inputs and not self.has_zeros and self.dtype != np.uint8:
            return None
        return math.gcd(inputs, wide, GROUP)

    @property
    def types(self) -> dict[str, jax.ShapeDtypeStruct]:
        """What `unpacked` returns."""
        (outputs, inputs), group = self.shape, self.group
        scales = (outputs, inputs // group) if group else (outputs,)
        width = group // 2 if group and self.dtype == np.uint8 else group
        found: dict[str, Any] = {"scales": (scales, np.float32)}
        found["values"] = (*scales, width) if group else self.shape, self.dtype
        if self.has_zeros:
            found["zeros"] = scales, np.int8
        if self.order_I is not None:
            found["order"] = (inputs,), np.int32
        return {name: jax.ShapeDtypeStruct(*of) for name, of in found.items()}


@functools.lru_cache(maxsize=1)
def unpacked(matrix: Matrix) -> dict[str, Array]:
    """Reads a matrix as `values`, `scales` and perhaps `zeros`, which `spmd.ops.linear` takes.

    If there is an `order` (I,), column i of them is that of input `order[i]`. The matrix that was
    read last is kept.
    """
    numbers_OI, scales, zeros = matrix.read()
    outputs, inputs = matrix.shape
    blocks = np.arange(0, inputs, matrix.group or inputs) // matrix.block[1]
    places = np.arange(outputs)[:, None] // matrix.block[0], blocks
    scales = scales.astype(np.float32)[places]
    if matrix.group is None:
        return {"values": numbers_OI, "scales": scales[:, 0]}
    parts = {"scales": scales}
    if matrix.has_zeros:
        assert zeros is not None
        parts["zeros"] = zeros[places]
    if matrix.order_I is not None:
        parts["order"] = matrix.order_I
        numbers_OI = numbers_OI[:, matrix.order_I]
    numbers_OQW = numbers_OI.reshape(outputs, -1, matrix.group)
    packs = matrix.dtype == np.uint8
    return {**parts, "values": pack_groups(numbers_OQW) if packs else numbers_OQW}


@dataclasses.dataclass(frozen=True)
class Weights(Folder):
    """An open folder whose quantized matrices are read as what they stand for, in float32."""

    method: str = ""  # what quantized them
    # by the names of the tensors that they are
    matrices: Mapping[str, Matrix] = dataclasses.field(default_factory=dict)

    def read(self, name: str, index: Index) -> Array:
        """Reads a slice of a tensor; one that is not quantized is in the dtype of the file."""
        if name not in self.matrices:
            return super().read(name, index)
        parts = unpacked(self.matrices[name])
        rows = {part: x if part == "order" else x[index[0]] for part, x in parts.items()}
        return dequantize(rows)[:, index[1]]

    def is_idle_bias(self, name: str) -> bool:
        """Whether a tensor is one of the biases, all of them 0, that GPTQ's files may have."""
        module, _, last = name.rpartition(".")
        if last != "bias" or f"{module}.weight" not in self.matrices:
            return False
        return not np.any(self.read(name, tuple(slice(0, n) for n in self.tensors[name].shape)))


@contextlib.contextmanager
def open_weights(path: str | AnyPath) -> Iterator[Weights]:
    """Opens a folder as `open_folder` does, and finds its quantized matrices as its config says.

    Raises:
        WeightsError: as of `open_folder`, or a quantized matrix lacks a tensor, or has a wrong one.
        ConfigError: as of `check_quantization`.
    """
    given = stored_quantization(path)
    with open_folder(path) as stored:
        modules = _modules(stored) if given else []
        matrices = {f"{module.name}.weight": _matrix(module, given) for module in modules}
        used = {f"{module.name}.{part}" for module in modules for part in module.parts}
        left = {
            name: tensor
            for name, tensor in stored.tensors.items()
            if name not in used and not (given and name.rpartition(".")[2] in _OTHERS.split())
        }
        for module, (name, matrix) in zip(modules, matrices.items(), strict=True):
            left[name] = StoredTensor(next(iter(module.parts.values())).file, matrix.shape, "F32")
        method = given.get("quant_method", "")
        yield Weights(stored.path, left, stored._files, stored._maps, method, matrices)


def stored_quantization(path: str | AnyPath) -> Mapping[str, Any]:
    """The `quantization_config` of a folder's `config.json`; empty if it has none."""
    try:
        text = (as_path(path) / "config.json").read_text(encoding="utf-8")
        given = json.loads(text).get(KEY)
    except (OSError, ValueError, AttributeError):
        return {}  # who needs the file says what is wrong with it
    check_quantization(given)
    return given or {}


# One matrix in each format


@dataclasses.dataclass(frozen=True)
class _Module:
    """A quantized module of a folder: its tensors by the last word of their names."""

    stored: Folder
    name: str
    parts: Mapping[str, StoredTensor]

    def shape(self, part: str) -> tuple[int, ...]:
        if part not in self.parts:
            raise self.wrong(f"has no {part}; download the whole checkpoint")
        return self.parts[part].shape

    def read(self, part: str) -> Array:
        index = tuple(slice(0, size) for size in self.shape(part))
        return np.asarray(self.stored.view(f"{self.name}.{part}", index))

    def wrong(self, what: str) -> WeightsError:
        return WeightsError(f"{self.stored.path}: {self.name} is quantized and {what}")


def _modules(stored: Folder) -> list[_Module]:
    found: dict[str, dict[str, StoredTensor]] = {}
    for name, tensor in stored.tensors.items():
        module, _, last = name.rpartition(".")
        if last in _PARTS.split():
            found.setdefault(module, {})[last] = tensor
    return [
        _Module(stored, name, parts)
        for name, parts in found.items()
        if "weight" not in parts or parts["weight"].dtype in _BYTES
    ]


def _matrix(module: _Module, given: Mapping[str, Any]) -> Matrix:
    return (_transposed if given["quant_method"] in ("gptq", "awq") else _plain)(module, given)


def _transposed(module: _Module, given: Mapping[str, Any]) -> Matrix:
    """Of GPTQ and AWQ."""
    bits, is_awq = given.get("bits", 4), given["quant_method"] == "awq"
    rows, columns = module.shape("qweight")
    each, version = 32 // bits, given.get("checkpoint_format") or given.get("format")
    shape = (columns * each, rows) if is_awq else (columns, rows * each)
    # GPTQ's first version stores zeros less one. Its packages add to whole words, carries and all.
    less = 0 if is_awq or version == "gptq_v2" else 0xFFFFFFFF // (2**bits - 1)
    has_zeros = is_awq or not given.get("sym")
    module.shape("qzeros")

    def read() -> tuple[Array, Array, Array]:
        numbers = _numbers(module.read("qweight"), bits, 1 if is_awq else 0)
        zeros = _numbers(module.read("qzeros").view(np.uint32) + np.uint32(less), bits, 1)
        if is_awq:
            numbers, zeros = _in_order(numbers), _in_order(zeros)
        zeros = _zeros(zeros)
        if not has_zeros and np.any(zeros):
            raise module.wrong(f"has zeros of its own; {KEY} says sym: set it to false")
        return numbers.T, module.read("scales").T, zeros.T

    block = 0, max(0, given.get("group_size") or 0)
    return _made(module, shape, bits, module.shape("scales")[::-1], block, has_zeros, read)


def _plain(module: _Module, given: Mapping[str, Any]) -> Matrix:
    """Of compressed-tensors, and of 8-bit floats as DeepSeek stores them."""
    schemes = [group.get("weights") or {} for group in (given.get("config_groups") or {}).values()]
    blocks = [given.get("weight_block_size"), *(x.get("block_structure") for x in schemes)]
    block = next((tuple(found) for found in blocks if found), (0, 0))
    # Beside symmetric weights there may be zeros, too, all of them 0.
    has_zeros = "weight_zero_point" in module.parts
    has_zeros &= not all(x.get("symmetric", True) for x in schemes)
    scale = "weight_scale_inv" if "weight_scale_inv" in module.parts else "weight_scale"
    is_packed = "weight_packed" in module.parts
    shape, bits = module.shape("weight_packed" if is_packed else "weight"), 8
    if is_packed:
        columns, shape = shape[1], module.read("weight_shape").tolist()
        bits = 32 * columns // shape[1]

    def read() -> tuple[Array, Array, Array | None]:
        numbers, zeros = module.read("weight_packed" if is_packed else "weight"), None
        if is_packed:
            numbers = _numbers(numbers, bits, 1)[:, : shape[1]]
        if has_zeros:
            zeros = module.read("weight_zero_point")
            if zeros.dtype == np.int32:
                zeros = _zeros(_numbers(zeros, bits, 0)[: shape[0]])
            zeros = zeros.reshape(_in_two(zeros.shape))
        scales = module.read(scale)
        return numbers, scales.reshape(_in_two(scales.shape)), zeros

    return _made(module, shape, bits, _in_two(module.shape(scale)), block, has_zeros, read)


def _made(
    module: _Module,
    shape: Sequence[int],
    bits: int,
    scales: Sequence[int],
    block: Sequence[int],
    has_zeros: bool,
    read: Callable[[], tuple[Array, Array, Array | None]],
) -> Matrix:
    """A matrix, after a look at which blocks have a scale, and which inputs are in a group.

    Args:
        scales: the shape of the scales, a row and a column for each block.
        block: the config's; 0 where it says nothing, and all blocks have one size.
    """
    outputs, inputs = shape
    sizes = tuple(map(_per_scale, shape, scales, block))
    if 0 in sizes or bits not in (4, 8) or math.gcd(*sizes[1:], inputs) % (8 // bits):
        what = f"{bits}-bit numbers and scales of shape {tuple(scales)}, which fit no (O, I)"
        raise module.wrong(f"has {what} = {tuple(shape)}")
    order_I = None
    name = next((name for name in ("g_idx", "weight_g_idx") if name in module.parts), "")
    if name:
        group_I = module.read(name)
        sorted_I = np.argsort(group_I, kind="stable").astype(np.int32)
        if np.any(np.diff(group_I) < 0):
            order_I = sorted_I
        if np.any(group_I[sorted_I] != np.arange(inputs) // sizes[1]) and np.any(group_I >= 0):
            raise module.wrong(f"has a {name} whose groups are not of {sizes[1]} inputs each")
    stored = module.parts.get("weight")
    dtype = _BYTES[stored.dtype] if stored else np.uint8 if bits == 4 else np.int8
    return Matrix((outputs, inputs), dtype, (sizes[0], sizes[1]), has_zeros, order_I, read)


def _per_scale(size: int, scales: int, given: int) -> int:
    """How many of a dim have a scale; 0 if so many scales do not fit it."""
    if scales in (1, size):
        return size // scales
    found = given or size // scales
    return found if -(-size // found) == scales else 0


def _in_two(shape: Sequence[int]) -> tuple[int, int]:
    """The shape of scales with both dims: of one scale, of rows', or of blocks'."""
    first, second = (*shape, 1, 1)[:2]
    return first, second


def _numbers(words: Array, bits: int, dim: int) -> Array:
    """What int32s hold along a dim: uint8 of 4 bits, or int8, which are stored plus 128."""
    words = np.ascontiguousarray(np.moveaxis(words, dim, 1)).astype("<i4", copy=False)
    numbers = words.view(np.uint8)
    if bits == 4:
        both = np.stack([numbers & 15, numbers >> 4], axis=-1)
        return np.moveaxis(both.reshape(len(words), -1), 1, dim)
    return np.moveaxis((numbers ^ 128).view(np.int8), 1, dim)


def _zeros(numbers: Array) -> Array:
    """Zeros as int8, less the 8 that 4-bit numbers are stored with."""
    return numbers if numbers.dtype == np.int8 else numbers.view(np.int8) - np.int8(8)


def _in_order(numbers: Array) -> Array:
    """AWQ's numbers, of which eight neighbours are interleaved, in the order of outputs."""
    return numbers.reshape(len(numbers), -1, 8)[..., _AWQ_PLACES].reshape(numbers.shape)
