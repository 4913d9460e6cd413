"""Exports a Llama as a bundle: portable StableHLO, weights, tokenizer, all that serving needs.

Weights come from a folder in Hugging Face's format, from a checkpoint of a training run, or from
chance. They are read, converted and quantized one by one; the bundle appears when it is whole.

Examples:
    scripts/export_llama --init_from Llama-3.2-1B --out llama-1b
    scripts/export_llama --init_from Llama-3.1-70B --out llama-70b --quantize int8 --slots 16
    scripts/export_llama --run_dir runs/a --step 500 --tokenizer llama/ --out mine
    scripts/export_llama --model llama2-7b --out random-7b --max_length 1024
    scripts/export_llama --model llama2-7b --quantize fp8 --plan h200:1,v6e:2x4 --traffic long
"""

import argparse
import contextlib
import itertools
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from spmd.cli.flags import Parser, numbers, positive, words
from spmd.errors import SpmdError
from spmd.models.decode import ServingShape
from spmd.models.decode.shape import SMALL, TURNS, default_rows, usual_turns
from spmd.models.llama.config import DTYPES, ConfigError
from spmd.models.llama.lora import merged_source
from spmd.models.llama.named import named_config
from spmd.models.llama.quantize import QUANTIZATIONS
from spmd.models.llama.weights.files import WeightsError
from spmd.models.llama.weights.sources import checkpoint_source, fresh_source, hf_source
from spmd.models.llama.weights.tensors import Source
from spmd.models.training.checkpoints.found import AUTO, CheckpointError
from spmd.models.training.data.beginnings import as_trained, prompt_ids
from spmd.models.training.data.tokenizer import BYTES, load_tokenizer
from spmd.models.training.errors import DataError
from spmd.scripts.flags.user_errors import ending_on_interrupt, on_disk, one_message
from spmd.serving import planned
from spmd.serving.bundle.function import BundleError
from spmd.serving.bundle.manifest import PLATFORMS
from spmd.serving.llama_bundle import POOLINGS, write_embedding_bundle, write_llama_bundle

USER_ERRORS = (
    BundleError, CheckpointError, ConfigError, DataError, SpmdError, WeightsError, OSError
)  # fmt: skip
"""What a user can mend: one message instead of a traceback."""


def add_shape_flags(parser: Parser) -> None:
    """What `make_shape` reads, and how weights and cache are stored."""
    add = parser.add_argument
    add("--slots", type=positive, default=256, help="sequences that run together, of all groups")
    add("--max_length", type=positive, help="of a sequence (default: the model's, at most 4096)")
    add(
        "--rows",
        type=numbers,
        help="tokens of a group that a step may run, ascending: one of each sequence that decodes, "
        "and pieces of prompts (default: 1, 16 from 64 slots on, all slots, 256, 512, ..., 4096)",
    )
    add(
        "--length",
        type=numbers,
        help="tokens that a step may reach back, ascending, the last is --max_length (default: it, "
        "and a quarter of it from 512 on)",
    )
    add("--page", type=positive, default=64, help="tokens of a page of the cache")
    add(
        "--groups",
        type=positive,
        default=1,
        help="slots and pages are split among so many groups: as many as the mesh's axis data has "
        "devices, or a multiple",
    )
    add("--top_logprobs", type=positive, default=20, help="alternatives that are reported")
    add(
        "--drafts",
        type=int,
        default=ServingShape._field_defaults["drafts"],
        help="next tokens of a sequence that a step may guess and try, in rows to spare; 0: none",
    )
    add(
        "--turns",
        type=positive,
        help="tokens of each sequence that one call may draw where nothing waits (default: "
        f"{TURNS} for models of less than {SMALL / 1e9:g} billion parameters, 1 for others)",
    )
    add(
        "--adapters",
        type=int,
        default=0,
        help="LoRA adapters that there is room for, to be served beside the model",
    )
    add("--adapter_rank", type=positive, default=16, help="of an adapter, at most")
    add("--dtype", choices=DTYPES, default="bfloat16", help="of activations and plain weights")
    add("--quantize", choices=QUANTIZATIONS, default="none", help="how projections are stored")
    add("--cache_dtype", choices=(*DTYPES, "int8"), help="of keys and values (default: --dtype)")


def make_parser() -> Parser:
    """The flags."""
    parser = Parser("scripts/export_llama", __doc__, settings=True)
    add = parser.add_argument
    add("--out", type=on_disk, help="the folder to make")
    add(
        "--plan",
        type=words,
        metavar="MACHINES",
        help="export nothing: what machines that need not be here would give (h200:1,v6e:2x4)",
    )
    add("--traffic", default="streams", help="to plan for, as of spmd plan --serve")
    add("--init_from", help="folder or URL in Hugging Face's format")
    add("--run_dir", help="folder or URL of a training run")
    add("--step", default=AUTO, help="of its checkpoint; auto: the latest whole one")
    add("--model", help="a named configuration, with random weights")
    add("--seed", type=int, default=0, help="of the random weights")
    add("--tokenizer", type=Path, help="folder with tokenizer files (default: --init_from)")
    add("--name", help="what the bundle is called (default: like --out)")
    add_shape_flags(parser)
    add("--merge_adapter", help="folder of an adapter in PEFT's format, merged into the weights")
    add(
        "--embeddings",
        choices=POOLINGS,
        help="make vectors of texts, of up to --max_length tokens, instead of texts: of the last "
        "token, or of the mean of all",
    )
    add(
        "--golden_prompts",
        type=Path,
        help="file with a prompt a line; what the model goes on with is computed on the devices "
        "that are here, and kept in the bundle for servers to compare with",
    )
    add("--platforms", type=words, default=",".join(PLATFORMS), help="that it can be served on")
    return parser


def open_source(given: argparse.Namespace) -> contextlib.AbstractContextManager[Source]:
    """The model that the flags name.

    Raises:
        BundleError: they name none, or several.
    """
    named = [name for name in ("init_from", "run_dir", "model") if getattr(given, name)]
    if len(named) != 1:
        raise BundleError(
            "name one model, with --init_from, --run_dir or --model"
            + (f", not with {' and '.join(f'--{name}' for name in named)}" if named else "")
        )
    if given.init_from:
        return hf_source(given.init_from)
    if given.run_dir:
        if given.step != AUTO and not given.step.isdecimal():
            raise BundleError(f"--step: {given.step!r} is no number, and not {AUTO}")
        return checkpoint_source(given.run_dir, given.step)
    return fresh_source(named_config(given.model), given.seed)


def make_shape(source: Source, given: argparse.Namespace) -> ServingShape:
    """The sizes that the flags ask for."""
    most = min(source.config.max_position_embeddings, 4096)
    longest = given.max_length or max(most // given.page, 1) * given.page
    quarter = longest // 4 // given.page * given.page
    return ServingShape(
        slots=given.slots,
        max_length=longest,
        rows=given.rows or default_rows(max(given.slots // given.groups, 1), longest),
        lengths=given.length or ((quarter, longest) if quarter >= 512 else (longest,)),
        page=given.page,
        groups=given.groups,
        top_logprobs=min(given.top_logprobs, source.config.vocab_size),
        drafts=given.drafts,
        turns=given.turns or usual_turns(source.config.parameter_count()),
        cache_dtype=given.cache_dtype or given.dtype,
        adapters=given.adapters,
        adapter_rank=given.adapter_rank,
    )


def shipped_tokenizer(given: argparse.Namespace) -> contextlib.AbstractContextManager[Path]:
    """The folder of --tokenizer; with a run, it begins texts as documents of training began."""
    if not given.run_dir or not (given.tokenizer / "tokenizer.json").is_file():
        return contextlib.nullcontext(given.tokenizer)
    return as_trained(given.tokenizer, load_tokenizer(str(given.tokenizer)))


def golden_prompts(source: Source, file: Path | None) -> list[list[int]]:
    """The prompts of --golden_prompts as token ids, with what the tokenizer puts before them."""
    if file is None:
        return []
    lines = file.read_text(encoding="utf-8").splitlines()
    texts = [line for line in lines if line.strip()]
    if not texts:
        raise BundleError(f"--golden_prompts: {file} has no line with text")
    folder = source.tokenizer_from
    tokenizer = load_tokenizer(BYTES if folder is None else str(folder))
    return [prompt_ids(tokenizer, text)[0] for text in texts]


def plan(given: argparse.Namespace) -> int:
    """What serving such a bundle would be like, as `spmd plan --serve` says it; the exit code."""
    if not (model := given.init_from or given.model):
        raise BundleError("--plan is for a model by --init_from or --model")
    sizes = ("traffic", "slots", "max_length", "page", "quantize", "cache_dtype")
    flags = [(f"--{name}", str(x)) for name in sizes if (x := getattr(given, name)) is not None]
    return planned.main([model, *given.plan, *itertools.chain(*flags)])


def run(given: argparse.Namespace, console: Console) -> None:
    """Export, and say what came of it."""
    if given.out is None:
        raise BundleError("--out is missing, the folder to make")
    unknown = sorted(set(given.platforms) - set(PLATFORMS))
    if unknown:
        raise BundleError(f"--platforms: {unknown[0]!r} is not among {', '.join(PLATFORMS)}")
    with contextlib.ExitStack() as stack:
        source = stack.enter_context(open_source(given))
        if given.tokenizer:
            source = source.with_tokenizer(stack.enter_context(shipped_tokenizer(given)))
        if given.merge_adapter:
            source = merged_source(source, given.merge_adapter)
        shape = make_shape(source, given)
        console.print(f"{source.about}: {source.config.parameter_count():,} parameters")
        names = {"name": given.name or given.out.name, "platforms": given.platforms}
        if given.embeddings:
            if given.quantize != "none":
                raise BundleError("--embeddings: its weights are not quantized; leave that out")
            length, pooling = min(shape.max_length, given.max_length or 512), given.embeddings
            console.print(f"vectors of up to {length} tokens, {pooling}")
            more = {"dtype": given.dtype, "console": console, **names}
            write_embedding_bundle(source, given.out, length, pooling, **more)
            return
        split = f" in {shape.groups} groups" if shape.groups > 1 else ""
        console.print(
            f"{shape.slots} slots of {shape.max_length} tokens{split}, {shape.cache_dtype} cache "
            f"in pages of {shape.page}, steps of {_listed(shape.rows)} rows, lengths "
            f"{_listed(shape.lengths)}"
        )
        trained = source.config.max_position_embeddings
        if shape.max_length > trained:
            console.print(
                f"note: --max_length {shape.max_length} is more than the {trained} positions of "
                "the model; what it says behind them is likely to make no sense"
            )
        write_llama_bundle(
            source,
            given.out,
            shape,
            dtype=given.dtype,
            kind=given.quantize,
            golden_prompts=golden_prompts(source, given.golden_prompts),
            console=console,
            **names,
        )
    size = sum(path.stat().st_size for path in given.out.rglob("*") if path.is_file())
    console.print(f"exported: {given.out.absolute()}, {size / 1e9:.3f} GB")


def _listed(sizes: Sequence[int]) -> str:
    return ", ".join(map(str, sizes))


def main(arguments: Sequence[str] | None = None) -> None:
    """Run, and turn what a user can mend into one message instead of a traceback."""
    given = make_parser().parse_args(arguments)
    console = Console(markup=False, highlight=False, soft_wrap=True)
    with ending_on_interrupt(), one_message(*USER_ERRORS):
        if given.plan is not None:
            sys.exit(plan(given))
        run(given, console)


if __name__ == "__main__":
    main()
