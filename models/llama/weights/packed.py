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
from typing import Any, NamedTuple

import jax
import numpy as np

from spmd.models.llama.config import ConfigError
from spmd.models.llama.quantize import FP8, GROUP, dequantize, pack_groups
from spmd.models.llama.weights import bundled, stacked
from spmd.models.llama.weights.files import (
    NUMPY_NAMES,
    Array,
    Folder,
    HeldTensor,
    Index,
    StoredTensor,
    WeightsError,
    open_folder,
)
from spmd.models.training.paths import AnyPath, as_path, json_object

KEY = "quantization_config"

_LAYOUTS = ("dense", "naive-quantized", "float-quantized", "int-quantized", "pack-quantized")
METHODS: Mapping[str, Mapping[str, Sequence[Any]]] = {
    "compressed-tensors": {
        "format": (*_LAYOUTS, "mixed-precision"), "sparsity_config": (), "transform_config": (),
        "moe_sparsity_config": (),
    },
    "mxfp4": {},
    "fp8": {"fmt": ("e4m3", "float8_e4m3fn"), "expert_dtype": ("fp8",)},
    "gptq": {
        "bits": (4, 8), "checkpoint_format": ("gptq", "gptq_v2"), "format": ("gptq", "gptq_v2"),
        "pack_dtype": ("int32",), "is_marlin_format": (),
    },
    "awq": {
        "bits": (4,), "version": ("gemm",), "format": ("gemm",), "checkpoint_format": ("gemm",),
        "pack_dtype": ("int32",), "backend": ("autoawq", "auto"),
    },
}  # fmt: skip
"""`quant_method` -> the keys that say how numbers are stored, and which values of theirs are read.

A key without any is to be empty."""

_KNOWN = """
    quant_method version config_groups ignore kv_cache_scheme quantization_status dequantize
    global_compression_ratio run_compressed use_optimized_inference activation_scheme scale_fmt
    weight_block_size modules_to_not_convert modules_to_convert ignored_layers group_size sym
    desc_act static_groups act_group_aware damp_percent damp_auto_increment true_sequential dynamic
    meta lm_head model_name_or_path model_file_base_name model_seqlen block_name_to_quantize
    module_name_preceding_first_block modules_in_block_to_quantize batch_size pad_token_id tokenizer
    dataset max_input_length cache_block_outputs use_cuda_fp16 use_exllama exllama_config
    disable_exllama quantizer do_fuse fuse_max_seq_len modules_to_fuse zero_point backend method
"""
"""Other keys: which matrices are quantized, and in what groups, is seen by their tensors."""

_BYTES: Mapping[str, Any] = {"F8_E4M3": FP8, "I8": np.int8}
"""safetensors' names of the dtypes that a `weight` with scales has."""

_PARTS = """
    weight weight_scale weight_scale_inv weight_zero_point weight_packed weight_shape weight_g_idx
    qweight qzeros scales g_idx
"""
_OTHERS = """
    input_scale input_zero_point output_scale output_zero_point q_scale k_scale v_scale prob_scale
"""
"""Last words of scales of activations and of caches: weights do not depend on them."""


def check_quantization(given: Any) -> None:
    """Checks that the `quantization_config` of a `config.json` is one that is read here.

    Raises:
        ConfigError: it is not, or has keys that are unknown here.
    """
    if given is None:
        return
    method = given.get("quant_method") if isinstance(given, Mapping) else given
    if not isinstance(method, str) or method not in METHODS:
        raise ConfigError(
            f"{KEY}: weights of quant_method {json.dumps(method)} are not read, those of "
            f"{', '.join(METHODS)} are; start from the checkpoint that was quantized, or let "
            "transformers dequantize() the model and save_pretrained it, and quantize by --quantize"
        )
    keys, wrong = METHODS[method], []
    for key, most in keys.items():
        value = given.get(key)
        found = value.lower() if isinstance(value, str) else value
        is_dense = isinstance(found, Mapping) and found.get("format") == "dense"  # not sparse
        if not (found is None or is_dense or (found in most if most else not found)):
            listed = f" ({', '.join(map(json.dumps, most))} can be read)" if most else ""
            wrong.append(f"{key} {json.dumps(value)}{listed}")
    groups: Any = given.get("config_groups") or {}
    for name, group in groups.items() if isinstance(groups, Mapping) else [("?", groups)]:
        scheme = group if isinstance(group, Mapping) else {"format": group}
        weights = scheme.get("weights") or {}
        kind = weights.get("type", "int"), weights.get("num_bits", 8)
        if kind not in (("float", 8), ("int", 8), ("int", 4)):
            wrong.append(f"{name}'s weights, {kind[1]} bits of {json.dumps(kind[0])}")
        elif scheme.get("format") not in (*_LAYOUTS, None):
            wrong.append(f"{name}'s format {json.dumps(scheme['format'])}")
    unknown = sorted(set(given) - {*keys, *_KNOWN.split()})
    wrong += [f"{key}, which is unknown: remove it if no weight depends on it" for key in unknown]
    if wrong:
        raise ConfigError(f"{KEY}: {method} cannot be read with {'; '.join(wrong)}")


class Matrix(NamedTuple):
    """A quantized matrix: `values`, `scales` and perhaps `zeros`, as `spmd.ops.linear` takes them.

    If there is an `order` (I,), column i of them is that of input `order[i]`.
    """

    shape: tuple[int, int]  # O, I
    types: Mapping[str, jax.ShapeDtypeStruct]  # of its parts
    make: Callable[[], dict[str, Array]]  # reads them


@functools.lru_cache(maxsize=1)
def latest(make: Callable[[], dict[str, Array]]) -> dict[str, Array]:
    """The parts of a matrix, read once if they are asked for one after the other."""
    return make()


@dataclasses.dataclass(frozen=True)
class Weights(Folder):
    """An open folder whose quantized matrices are read as what they stand for, in float32."""

    matrices: Mapping[str, Matrix] = dataclasses.field(default_factory=dict)  # by tensor's name
    views: Mapping[str, HeldTensor] = dataclasses.field(default_factory=dict)  # likewise

    def read(self, name: str, index: Index) -> Array:
        """Reads a slice of a tensor; one that is not quantized is in the dtype of the file."""
        if name in self.views:
            return self.views[name].read(index)
        if name not in self.matrices:
            return super().read(name, index)
        parts = latest(self.matrices[name].make)
        rows = {part: x if part == "order" else x[index[0]] for part, x in parts.items()}
        return dequantize(rows)[:, index[1]]

    def is_idle_bias(self, name: str) -> bool:
        """Whether a tensor is one of the biases, all of them 0, that GPTQ's files may have."""
        whole = tuple(slice(0, size) for size in self.tensors[name].shape)
        is_of_one = name.removesuffix("bias") + "weight" in self.matrices
        return name.endswith(".bias") and is_of_one and not np.any(self.read(name, whole))


@contextlib.contextmanager
def open_weights(path: str | AnyPath) -> Iterator[Weights]:
    """Opens a folder as `open_folder` does, and finds its quantized matrices as its config says.

    Raises:
        WeightsError: as of `open_folder`, or a quantized matrix lacks a tensor, or has a wrong one.
        ConfigError: as of `check_quantization`.
    """
    path = as_path(path)
    is_bundle = bundled.is_bundle(path)
    with open_folder(path / bundled.FOLDER if is_bundle else path) as stored:
        config = json_object(path / "config.json")  # who needs it says what is wrong with it
        given: Any = config.get(KEY)
        kind = config.get("model_type")
        check_quantization(given)
        modules: dict[str, dict[str, StoredTensor]] = {}
        left, matrices = {}, {}
        for name, tensor in stored.tensors.items():
            module, _, last = name.rpartition(".")
            if given and last in _PARTS.split() and (last != "weight" or tensor.dtype in _BYTES):
                modules.setdefault(module, {})[last] = tensor
            elif not given or last not in _OTHERS.split():
                left[name] = tensor
        for module, parts in modules.items():
            read = _transposed if given["quant_method"] in ("gptq", "awq") else _plain
            whole = _Module(stored, module, parts)
            with whole.named():
                matrix = matrices[f"{module}.weight"] = read(whole, given)
            first = next(iter(parts.values()))
            left[f"{module}.weight"] = dataclasses.replace(first, shape=matrix.shape, dtype="F32")
        views: Mapping[str, HeldTensor] = {}
        if is_bundle:
            left, views = {}, bundled.views(stored, path)
        elif kind in stacked.FAMILIES:
            left = {name: x for name, x in left.items() if not stacked.is_stacked(name)}
            views = stacked.apart(stored)
        left |= {name: view.tensor for name, view in views.items()}
        fields = {f.name: getattr(stored, f.name) for f in dataclasses.fields(stored)}
        yield Weights(**fields | {"tensors": left}, matrices=matrices, views=views)


# One matrix in each format


class _Module(NamedTuple):
    """A quantized module of a folder: its tensors by the last word of their names."""

    stored: Folder
    name: str
    parts: Mapping[str, StoredTensor]

    def shape(self, part: str, *ranks: int) -> tuple[int, ...]:
        tensor = self.parts.get(part)
        if tensor is None:
            raise self.wrong(f"has no {part}; download the whole checkpoint")
        dtypes = ("I32",) if part in ("qweight", "qzeros", "weight_packed") else NUMPY_NAMES
        if tensor.dtype not in dtypes or len(tensor.shape) not in (ranks or (2,)):
            raise self.wrong(f"its {part} {tensor.shape} of {tensor.dtype} cannot be read")
        return tensor.shape

    def read(self, part: str) -> Array:
        index = tuple(slice(0, size) for size in self.parts[part].shape)
        return np.asarray(self.stored.view(f"{self.name}.{part}", index))

    def wrong(self, what: str) -> WeightsError:
        return WeightsError(f"{self.stored.path}: {self.name} is quantized, and {what}")

    @contextlib.contextmanager
    def named(self) -> Iterator[None]:
        """Names the module in errors of what fits nothing."""
        try:
            yield
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as error:
            if isinstance(error, WeightsError):
                raise
            raise self.wrong(f"its tensors fit not each other, or not {KEY}: {error}") from error


def _transposed(module: _Module, given: Mapping[str, Any]) -> Matrix:
    """Of GPTQ and AWQ."""
    bits, is_awq = given["bits"], given["quant_method"] == "awq"
    rows, columns = module.shape("qweight")
    each, version = 32 // bits, given.get("checkpoint_format") or given.get("format")
    shape = (columns * each, rows) if is_awq else (columns, rows * each)
    # GPTQ's first version stores zeros less one. Its packages add to whole words, carries and all.
    less = 0 if is_awq or version == "gptq_v2" else 0xFFFFFFFF // (2**bits - 1)
    has_zeros = is_awq or not given.get("sym")
    groups = module.shape("scales")[0]
    if given.get("desc_act"):
        module.shape("g_idx", 1)
    if module.shape("qzeros") != (groups, -(-shape[0] // each)):
        raise module.wrong(f"its qzeros {module.shape('qzeros')} are not those of {groups} groups")

    def read() -> tuple[Array, Array, Array]:
        numbers = _numbers(module.read("qweight"), bits, 1 if is_awq else 0)
        zeros = _numbers(module.read("qzeros").view(np.uint32) + np.uint32(less), bits, 1)
        if is_awq:
            # Where an int32 holds the first, second, ... of eight neighbours.
            order = np.resize((0, 4, 1, 5, 2, 6, 3, 7), shape[0]) + np.arange(shape[0]) // 8 * 8
            numbers, zeros = numbers[:, order], zeros[:, order]
        if not has_zeros and np.any(zeros):
            raise module.wrong(f"has zeros of its own, but {KEY} says sym: set it to false")
        return numbers.T, module.read("scales").T, zeros.T

    block = 0, max(0, given.get("group_size") or 0)
    return _matrix(module, shape, bits, module.shape("scales")[::-1], block, has_zeros, read)


def _plain(module: _Module, given: Mapping[str, Any]) -> Matrix:
    """Of compressed-tensors, and of 8-bit floats as DeepSeek stores them."""
    schemes = [x.get("weights") or {} for x in (given.get("config_groups") or {}).values()]
    blocks = [given.get("weight_block_size"), *(x.get("block_structure") for x in schemes)]
    block = next((tuple(found) for found in blocks if found), (0, 0))
    # Beside symmetric weights there may be zeros, too, all of them 0.
    has_zeros = "weight_zero_point" in module.parts
    has_zeros &= not all(x.get("symmetric", True) for x in schemes)
    scale = "weight_scale_inv" if "weight_scale_inv" in module.parts else "weight_scale"
    name = "weight_packed" if "weight_packed" in module.parts else "weight"
    shape, bits = module.shape(name), 8
    if name == "weight_packed" and module.shape("weight_shape", 1):
        columns, shape = shape[1], tuple(module.read("weight_shape").tolist())
        bits = 32 * columns // shape[1]
        if any(x.get("actorder") in ("group", "dynamic") for x in schemes):
            module.shape("weight_g_idx", 1)
    scales = (*module.shape(scale, 0, 1, 2), 1, 1)[:2]

    def read() -> tuple[Array, Array, Array | None]:
        numbers, zeros = module.read(name), None
        if name == "weight_packed":
            numbers = _numbers(numbers, bits, 1)[:, : shape[1]]
        if has_zeros:
            zeros = module.read("weight_zero_point")
            if zeros.dtype == np.int32:
                zeros = _numbers(zeros, bits, 0)[: shape[0]]
            zeros = zeros.reshape(scales)
        return numbers, module.read(scale).reshape(scales), zeros

    return _matrix(module, shape, bits, scales, block, has_zeros, read)


def _matrix(
    module: _Module, shape: Sequence[int], bits: int, scaled: Sequence[int], block: Sequence[int],
    has_zeros: bool, read: Callable[[], tuple[Array, Array, Array | None]],
) -> Matrix:  # fmt: skip
    """A matrix, after a look at what has a scale, and which inputs are in a group.

    Args:
        scaled: the shape of the scales: a row and a column for each block.
        block: the config's; 0 where it says nothing, and all blocks are of one size.
        read: reads numbers (O, I), scales and zeros.
    """
    outputs, inputs = shape
    sizes = [
        size // count if count in (1, size) else wide or size // max(1, count)
        for size, count, wide in zip(shape, scaled, block, strict=True)
    ]
    counts = [-(-size // max(1, wide)) for size, wide in zip(shape, sizes, strict=True)]
    if counts != [*scaled] or bits not in (4, 8) or math.gcd(inputs, sizes[1]) % (8 // bits):
        raise module.wrong(f"{bits}-bit numbers {tuple(shape)} do not fit scales {tuple(scaled)}")
    order_I = None
    for name in {"g_idx", "weight_g_idx"} & module.parts.keys():
        group_I, wanted_I = module.read(name), np.arange(inputs) // sizes[1]
        sorted_I = np.argsort(group_I, kind="stable").astype(np.int32)
        if np.any(group_I != -1) and not np.array_equal(group_I[sorted_I], wanted_I):
            raise module.wrong(f"the groups of its {name} are not of {sizes[1]} inputs each")
        order_I = sorted_I if np.any(np.diff(group_I) < 0) else None
    dtype = _BYTES[module.parts["weight"].dtype] if "weight" in module.parts else np.int8
    is_whole = sizes[1] == inputs and bits == 8 and not has_zeros  # a row has one scale
    group = inputs if is_whole else math.gcd(inputs, sizes[1], GROUP)
    of_scales = (outputs,) if is_whole else (outputs, inputs // group)
    of_values = (*of_scales, group // 2 if bits == 4 else group)
    types: dict[str, Any] = {"values": (of_values, np.uint8 if bits == 4 else dtype)}
    types |= {"scales": (of_scales, np.float32)}
    types |= {"zeros": (of_scales, np.int8)} if has_zeros else {}
    types |= {"order": ((inputs,), np.int32)} if order_I is not None else {}
    places = np.arange(outputs)[:, None] // sizes[0], np.arange(0, inputs, group) // sizes[1]

    @module.named()
    def make() -> dict[str, Array]:
        numbers_OI, scales, zeros = read()
        found: dict[str, Array] = {"scales": scales.astype(np.float32)[places].reshape(of_scales)}
        if has_zeros and zeros is not None:
            found["zeros"] = zeros[places]
        if order_I is not None:
            found["order"], numbers_OI = order_I, numbers_OI[:, order_I]
        if bits == 4:
            numbers_OQI = numbers_OI.reshape(*of_scales, group).view(np.uint8)
            numbers_OI = pack_groups(numbers_OQI + np.uint8(8))
        return {**found, "values": numbers_OI.reshape(of_values)}

    structs = {part: jax.ShapeDtypeStruct(*of) for part, of in types.items()}
    return Matrix((outputs, inputs), structs, make)


def _numbers(words: Array, bits: int, dim: int) -> Array:
    """What int32s hold along a dim, as int8: 4 bits less 8, or 8 bits less 128."""
    words = np.ascontiguousarray(np.moveaxis(words, dim, 1)).astype("<i4", copy=False)
    numbers = words.view(np.uint8)
    if bits == 4:
        numbers = np.stack([numbers & 15, numbers >> 4], axis=-1).reshape(len(words), -1)
    return np.moveaxis((numbers - np.uint8(2 ** (bits - 1))).view(np.int8), 1, dim)
