"""Exports a Llama as a bundle: portable StableHLO, weights, tokenizer, all that serving needs.

Weights come from a folder in Hugging Face's format, from a checkpoint of a training run, or from
chance. They are read, converted and quantized one by one; the bundle appears when it is whole.

Examples:
    scripts/export_llama --init_from Llama-3.2-1B --out llama-1b
    scripts/export_llama --init_from Llama-3.1-70B --out llama-70b --quantize int8 --slots 16
    scripts/export_llama --run_dir runs/a --step 500 --tokenizer llama/ --out mine
    scripts/export_llama --model llama2-7b --out random-7b --max_length 1024
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Sequence
from pathlib import Path

from absl import app, flags
from rich.console import Console

from models.llama.config import DTYPES, ConfigError, named_config
from models.llama.decode import ServingShape
from models.llama.hf_files import WeightsError
from models.llama.quantize import QUANTIZATIONS
from models.llama.sources import Source, checkpoint_source, fresh_source, hf_source
from models.training.checkpoint import AUTO, CheckpointError
from models.training.errors import DataError
from models.training.tokenizer import BYTES, load_tokenizer
from serving.function import BundleError
from serving.llama import export_llama
from serving.manifest import PLATFORMS
from spmd.errors import SpmdError

_OUT = flags.DEFINE_string("out", None, "The folder to make.")
_INIT_FROM = flags.DEFINE_string("init_from", None, "Folder in Hugging Face's format.")
_RUN_DIR = flags.DEFINE_string("run_dir", None, "Folder of a training run.")
_STEP = flags.DEFINE_string("step", AUTO, "Step of its checkpoint; `auto` is the latest whole one.")
_MODEL = flags.DEFINE_string("model", None, "A named configuration, with random weights.")
_SEED = flags.DEFINE_integer("seed", 0, "Of the random weights.", lower_bound=0)
_TOKENIZER = flags.DEFINE_string(
    "tokenizer", None, "Folder with tokenizer files. Default: that of --init_from."
)
_NAME = flags.DEFINE_string("name", None, "What the bundle is called. Default: like --out.")
_SLOTS = flags.DEFINE_integer("slots", 8, "Sequences that are decoded together.", lower_bound=1)
_MAX_LENGTH = flags.DEFINE_integer(
    "max_length", None, "Tokens of a sequence. Default: the model's, at most 4096.", lower_bound=16
)
_PREFILL = flags.DEFINE_list(
    "prefill", None, "Lengths of prompts' pieces, ascending. Default: 128, 512 where they fit."
)
_LENGTH = flags.DEFINE_list(
    "length",
    None,
    "Lengths that functions read of sequences, ascending, the last is --max_length. Default: it, "
    "and half and a quarter of it from 512 on.",
)
_DECODE_STEPS = flags.DEFINE_integer(
    "decode_steps", 10, "Tokens that one call makes at most.", lower_bound=1
)
_TOP_LOGPROBS = flags.DEFINE_integer(
    "top_logprobs", 20, "Likeliest alternatives that can be reported.", lower_bound=0
)
_DTYPE = flags.DEFINE_enum("dtype", "bfloat16", DTYPES, "Of activations and plain weights.")
_QUANTIZE = flags.DEFINE_enum("quantize", "none", QUANTIZATIONS, "How projections are stored.")
_KV_CACHE_DTYPE = flags.DEFINE_enum(
    "kv_cache_dtype", None, (*DTYPES, "int8"), "Of keys and values. Default: --dtype."
)
_GOLDEN_PROMPTS = flags.DEFINE_string(
    "golden_prompts",
    None,
    "File with a prompt a line. What the model goes on with is computed on the devices that are "
    "here, and kept in the bundle for servers to compare with.",
)
_PLATFORMS = flags.DEFINE_list("platforms", list(PLATFORMS), "Platforms to export for.")

USER_ERRORS = (
    BundleError, CheckpointError, ConfigError, DataError, SpmdError, WeightsError, OSError
)  # fmt: skip
"""What a user can mend: one message instead of a traceback."""


def open_source() -> contextlib.AbstractContextManager[Source]:
    """The model that the flags name.

    Raises:
        BundleError: they name none, or several.
    """
    named = [flag.name for flag in (_INIT_FROM, _RUN_DIR, _MODEL) if flag.value]
    if len(named) != 1:
        raise BundleError(
            "name one model, with --init_from, --run_dir or --model"
            + (f", not with {' and '.join(f'--{name}' for name in named)}" if named else "")
        )
    if _INIT_FROM.value:
        return hf_source(_INIT_FROM.value)
    if _RUN_DIR.value:
        if _STEP.value != AUTO and not _STEP.value.isdecimal():
            raise BundleError(f"--step: {_STEP.value!r} is no number, and not {AUTO}")
        return checkpoint_source(_RUN_DIR.value, _STEP.value)
    return fresh_source(named_config(str(_MODEL.value)), _SEED.value)


def make_shape(source: Source) -> ServingShape:
    """The sizes that the flags ask for."""
    longest = _MAX_LENGTH.value or min(source.config.max_position_embeddings, 4096)
    lengths = [n for n in (longest // 4, longest // 2) if n >= 512]
    chunks = [n for n in (128, 512) if n < longest] or [longest]
    return ServingShape(
        slots=_SLOTS.value,
        max_length=longest,
        chunks=_numbers(_PREFILL, chunks),
        lengths=_numbers(_LENGTH, [*lengths, longest]),
        decode_steps=_DECODE_STEPS.value,
        top_logprobs=min(_TOP_LOGPROBS.value, source.config.vocab_size),
        cache_dtype=_KV_CACHE_DTYPE.value or _DTYPE.value,
    )


def _numbers(flag: flags.FlagHolder[list[str] | None], default: Sequence[int]) -> tuple[int, ...]:
    if flag.value is None:
        return tuple(default)
    if not all(word.strip().isdecimal() for word in flag.value):
        raise BundleError(f"--{flag.name}: {','.join(flag.value)} are no numbers, as 128,512 are")
    return tuple(int(word) for word in flag.value)


def golden_prompts(source: Source) -> list[list[int]]:
    """The prompts of --golden_prompts as token ids, with the token that begins a text."""
    if not _GOLDEN_PROMPTS.value:
        return []
    lines = Path(_GOLDEN_PROMPTS.value).read_text(encoding="utf-8").splitlines()
    texts = [line for line in lines if line.strip()]
    if not texts:
        raise BundleError(f"--golden_prompts: {_GOLDEN_PROMPTS.value} has no line with text")
    folder = source.tokenizer_from
    tokenizer = load_tokenizer(BYTES if folder is None else str(folder))
    begin = [] if tokenizer.bos_id is None else [tokenizer.bos_id]
    return [[*begin, *map(int, ids)] for ids in tokenizer.encode_batch(texts)]


def run(console: Console) -> None:
    """Export, and say what came of it."""
    if not _OUT.value:
        raise BundleError("name the folder to make with --out")
    unknown = sorted(set(_PLATFORMS.value) - set(PLATFORMS))
    if unknown or not _PLATFORMS.value:
        raise BundleError(f"--platforms: {unknown} are not among {', '.join(PLATFORMS)}")
    out = Path(_OUT.value)
    with open_source() as source:
        if _TOKENIZER.value:
            source = source.with_tokenizer(Path(_TOKENIZER.value))
        shape = make_shape(source)
        console.print(f"{source.about}: {source.config.parameter_count():,} parameters")
        console.print(
            f"{shape.slots} slots of {shape.max_length} tokens, {shape.cache_dtype} cache, prompts "
            f"by {_listed(shape.chunks)}, lengths {_listed(shape.lengths)}"
        )
        export_llama(
            source,
            out,
            shape,
            dtype=_DTYPE.value,
            kind=_QUANTIZE.value,
            name=_NAME.value or out.name,
            golden_prompts=golden_prompts(source),
            platforms=_PLATFORMS.value,
            console=console,
        )
    size = sum(path.stat().st_size for path in out.rglob("*") if path.is_file())
    console.print(f"exported: {out.absolute()}, {size / 1e9:.3f} GB")


def _listed(sizes: Sequence[int]) -> str:
    return ", ".join(map(str, sizes))


def main(argv: Sequence[str]) -> None:
    """Run, and turn what a user can mend into one message instead of a traceback."""
    console = Console(markup=False, highlight=False, soft_wrap=True)
    if len(argv) > 1:
        sys.exit(f"error: {argv[1]!r} is no flag; see --help")
    try:
        run(console)
    except USER_ERRORS as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    app.run(main)
