"""The weights of a bundle that `scripts/export_llama` wrote, to train, convert or distil from.

the bundle's weights/layers/0/mlp/up_proj/weight    model.layers.0.mlp.up_proj.weight
.../up_proj/values, scales, perhaps zeros, order    the same, of quantized ones in float32
"""

import functools
import json
from collections.abc import Mapping

import ml_dtypes
import numpy as np

from spmd.models.llama.config import ConfigError, LlamaConfig
from spmd.models.llama.quantize import dequantize
from spmd.models.llama.weights.files import Array, Folder, HeldTensor, Index, StoredTensor
from spmd.models.llama.weights.names import parameters
from spmd.models.training.paths import AnyPath

MANIFEST, FOLDER = "manifest.json", "weights"


def is_bundle(folder: AnyPath) -> bool:
    """Whether a folder is one of a bundle, and not of Hugging Face."""
    return (folder / MANIFEST).is_file() and not (folder / "config.json").is_file()


def small_files(folder: AnyPath) -> AnyPath:
    """Where the tokenizer's files of a folder are: a bundle's have a folder of their own."""
    return folder / "tokenizer" if is_bundle(folder) else folder


def read_manifest(folder: AnyPath) -> tuple[LlamaConfig, Mapping[str, str]]:
    """The model of a bundle, with layers unrolled, and its weights: path -> numpy's dtype.

    Raises:
        ConfigError: it is of no Llama, or of another version.
    """
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        config = LlamaConfig(**{**manifest["contract"]["model"], "scan_layers": False})
        return config, {leaf["path"]: str(leaf["dtype"]) for leaf in manifest["weights"]}
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ConfigError(
            f"{folder / MANIFEST} is not that of a Llama's bundle, whose weights can be read: "
            f"{error}; name the folder that it was exported from"
        ) from error


def views(stored: Folder, folder: AnyPath) -> dict[str, HeldTensor]:
    """A bundle's weights, by Hugging Face's names.

    Args:
        stored: its folder of weights.
    """
    config, dtypes = read_manifest(folder)
    found: dict[str, HeldTensor] = {}
    for parameter in parameters(config)[0]:
        path = f"{FOLDER}/{parameter.path}"
        module = path.removesuffix("/weight")
        kept = next((x for x in (path, f"{module}/values") if x in stored.tensors), None)
        if kept is None:
            continue  # who needs it says that it is missing
        of = stored.tensors[kept]
        for name, place in parameter.places.items():
            at = tuple(slice(i, i + 1) for i in place)
            if kept == path:
                read = functools.partial(_plain, stored, path, at)
                found[name] = HeldTensor(
                    StoredTensor(of.file, parameter.tensor_shape, of.dtype), read
                )
            else:
                read = functools.partial(_quantized, stored, module, dtypes, at)
                found[name] = HeldTensor(StoredTensor(of.file, parameter.tensor_shape, "F32"), read)
    return found


def _plain(stored: Folder, path: str, at: Index, index: Index) -> Array:
    whole = stored.read(path, (*at, *index))
    return whole.reshape(whole.shape[len(at) :])


def _quantized(
    stored: Folder, module: str, dtypes: Mapping[str, str], at: Index, index: Index
) -> Array:
    parts = {}
    for part in ("values", "scales", "zeros", "order"):
        if (name := f"{module}/{part}") not in stored.tensors:
            continue
        first, *rest = stored.tensors[name].shape[len(at) :]
        rows = slice(0, first) if part == "order" else index[0]
        array = _plain(stored, name, at, (rows, *(slice(0, size) for size in rest)))
        kind = dtypes[name]
        is_float8 = kind.startswith("float8")
        parts[part] = array.view(getattr(ml_dtypes, kind)) if is_float8 else array
    return np.asarray(dequantize(parts))[:, index[1]]
