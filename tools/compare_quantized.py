"""What quantizing a Llama costs in quality: perplexity and error of the logits, beside bfloat16.

Text is cut into sequences; each model reads the same ones. `bfloat16` is the unquantized model as
it is served, `float32` what it is compared with. The error of the logits is the root of their mean
squared difference to float32's, over the standard deviation of these; agreement is the share of
positions at which the likeliest token is the same.

Examples:
    tools/run compare_quantized --init_from Llama-3.2-1B --text wiki.txt
    tools/run compare_quantized --run_dir runs/a
"""

import argparse
import dataclasses
import functools
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.progress import track

from spmd.cli.flags import Parser
from spmd.models import decode
from spmd.models.llama import quantize
from spmd.models.llama.config import ConfigError, LlamaConfig
from spmd.models.llama.decode import LlamaRows
from spmd.models.llama.weights.files import WeightsError
from spmd.models.llama.weights.tensors import Source
from spmd.models.training.checkpoints.found import CheckpointError
from spmd.models.training.data import source as data
from spmd.models.training.data.tokenizer import BYTES, load_tokenizer
from spmd.models.training.errors import DataError
from spmd.scripts.export_llama import open_source
from spmd.scripts.flags.user_errors import ending_on_interrupt, one_message
from spmd.serving.bundle.function import BundleError
from spmd.serving.llama_bundle import serving_weights

USER_ERRORS = (
    BundleError, CheckpointError, ConfigError, DataError, WeightsError, OSError
)  # fmt: skip


class Form(NamedTuple):
    """One way to store a model."""

    name: str
    quantization: str
    dtype: str
    cache_dtype: str


FORMS = (
    Form("float32", "none", "float32", "float32"),
    Form("bfloat16", "none", "bfloat16", "bfloat16"),
    Form("int8", "int8", "bfloat16", "bfloat16"),
    Form("fp8", "fp8", "bfloat16", "bfloat16"),
    Form("int4", "int4", "bfloat16", "bfloat16"),
    Form("bfloat16, int8 cache", "none", "bfloat16", "int8"),
    Form("int8, int8 cache", "int8", "bfloat16", "int8"),
)


def make_parser() -> Parser:
    """The flags."""
    parser = Parser("tools/run compare_quantized", __doc__)
    add = parser.add_argument
    add("--init_from", help="folder in Hugging Face's format")
    add("--run_dir", help="folder of a training run")
    add("--step", default="auto", help="of its checkpoint; auto: the latest whole one")
    add("--model", help="a named configuration, with random weights")
    add("--seed", type=int, default=0, help="of the random weights")
    add("--text", type=Path, help="file (default: Python's standard library)")
    add("--sequences", type=int, default=16, help="read by each model")
    add("--seq_len", type=int, default=128, help="tokens of each")
    return parser


def logits(source: Source, form: Form, tokens_BS: Any) -> Any:
    """(B, S, V) of a model stored in one way, through the functions that serve it."""
    config = dataclasses.replace(source.config, dtype=form.dtype, param_dtype=form.dtype)
    tree = serving_weights(source, form.dtype, form.quantization)
    weights = jax.tree.map(lambda tensor: jnp.asarray(np.asarray(tensor)), tree)
    rows = tokens_BS.shape[1]
    # One page holds a whole sequence.
    shape = decode.ServingShape(1, rows, (rows,), (rows,), rows, cache_dtype=form.cache_dtype)
    model = LlamaRows(config)
    leaves = decode.state_leaves(model, shape, 1)
    state = jax.tree.map(lambda leaf: jnp.full(leaf.shape, leaf.fill, leaf.dtype), leaves)
    read = jax.jit(functools.partial(decode.row_logits, model=model))
    place = {
        "slots": np.zeros((1, rows), np.int32),
        "positions": np.arange(rows, dtype=np.int32)[None],
        "first": np.asarray([[0, rows]], np.int32),
        "table": np.zeros((1, 1, 1), np.int32),
    }
    found = [read(weights, state, {"tokens": row_S[None], **place})[0][0] for row_S in tokens_BS]
    return np.stack([np.asarray(row, np.float32) for row in found])


def perplexity(logits_BSV: Any, tokens_BS: Any) -> float:
    """Of every token after the first."""
    log_probabilities = jax.nn.log_softmax(logits_BSV[:, :-1], axis=-1)
    said = np.take_along_axis(np.asarray(log_probabilities), tokens_BS[:, 1:, None], axis=-1)
    return math.exp(-float(np.mean(said)))


def gigabytes(config: LlamaConfig, form: Form) -> float:
    """Of the stored weights."""
    stored = dataclasses.replace(config, param_dtype=form.dtype, scan_layers=False)
    types = quantize.quantized_types(stored, form.quantization)
    leaves = jax.tree.leaves(types)
    return float(sum(math.prod(x.shape) * x.dtype.itemsize for x in leaves)) / 1e9


def run(given: argparse.Namespace, console: Console) -> None:
    """Print the table."""
    with open_source(given) as source:
        folder = source.tokenizer_from
        tokenizer = load_tokenizer(BYTES if folder is None else str(folder))
        needed = given.sequences * given.seq_len
        files = [given.text] if given.text else data.standard_library_files()
        text = ""
        for file in files:  # a token is rarely more than sixteen characters
            text += file.read_text(encoding="utf-8", errors="replace")[: 16 * needed - len(text)]
        ids = np.asarray(tokenizer.encode_batch([text])[0], np.int32)
        if len(ids) < needed:
            raise DataError(f"the text has {len(ids)} tokens; {needed} are to be read")
        tokens_BS = ids[:needed].reshape(given.sequences, given.seq_len)
        config = source.config
        console.print(f"{source.about}, {given.sequences} x {given.seq_len} tokens")
        console.print("| form | weights, GB | perplexity | to float32 | logit error | agreement |")
        console.print("| --- | --- | --- | --- | --- | --- |")
        exact: Any = None
        base = 1.0
        for form in track(FORMS, "comparing", console=console, transient=True):
            try:
                found = logits(source, form, tokens_BS)
            except ConfigError as error:
                console.print(f"| {form.name} | {error} | | | | |")
                continue
            score = perplexity(found, tokens_BS)
            if exact is None:
                exact, base = found, score
            error_size = float(np.sqrt(np.mean(np.square(found - exact))) / np.std(exact))
            same = float(np.mean(found.argmax(-1) == exact.argmax(-1)))
            console.print(
                f"| {form.name} | {gigabytes(config, form):.4g} | {score:.4f} | "
                f"{score / base:.4f} | {error_size:.2%} | {same:.2%} |"
            )


def main(arguments: Sequence[str] | None = None) -> None:
    """Run, and turn what a user can mend into one message instead of a traceback."""
    given = make_parser().parse_args(arguments)
    console = Console(markup=False, highlight=False, soft_wrap=True)
    with ending_on_interrupt(), one_message(*USER_ERRORS):
        run(given, console)
