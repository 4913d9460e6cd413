"""Continues prompts with a bundle's model, in the terminal.

A prompt is given as an argument, read from a file, a line each, or asked for at the terminal.

Examples:
    scripts/generate llama-1b --prompt "def main(" --max_tokens 60
    scripts/generate llama-70b --mesh model=8 --file prompts.txt --temperature 0
    scripts/generate mine
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.console import Console

from models.training.tokenizer import Tokenizer
from scripts import bundle_flags
from scripts.user_errors import one_message
from serving.backend import Backend, Sampling
from serving.errors import ServingError
from serving.function import BundleError
from serving.load import load_model
from serving.model_backend import generate
from spmd.errors import SpmdError

USER_ERRORS = (BundleError, ServingError, SpmdError, OSError, UnicodeDecodeError)
"""What a user can mend: one message instead of a traceback."""


def make_parser() -> argparse.ArgumentParser:
    """The flags."""
    parser = argparse.ArgumentParser(
        prog="scripts/generate",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    bundle_flags.add_flags(parser)
    default = Sampling()
    add = parser.add_argument
    add("--prompt", action="append", default=[], help="a text to go on with (repeatable)")
    add("--file", type=Path, help="a prompt a line")
    add("--max_tokens", type=int, default=100, help="to add (%(default)s)")
    add("--temperature", type=float, default=0.8, help="0: the likeliest token (%(default)s)")
    add("--top_k", type=int, default=default.top_k, help="0: all (%(default)s)")
    add("--top_p", type=float, default=default.top_p, help="(%(default)s)")
    add("--min_p", type=float, default=default.min_p, help="(%(default)s)")
    add("--repetition_penalty", type=float, default=default.repetition_penalty, help="(1.0)")
    add("--seed", type=int, default=0, help="of the draws (%(default)s)")
    add("--ignore_eos", action="store_true", help="go on behind the end of a text")
    return parser


def prompts(given: argparse.Namespace, console: Console) -> Iterator[str]:
    """The texts to go on with."""
    yield from given.prompt
    if given.file is not None:
        yield from (t for t in given.file.read_text(encoding="utf-8").splitlines() if t)
    if given.prompt or given.file is not None:
        return
    while True:
        try:
            text = console.input("> ")
        except (EOFError, KeyboardInterrupt):
            return
        if text:
            yield text


def check(given: argparse.Namespace) -> None:
    """Raise a `BundleError` for numbers out of range."""
    ranges = {
        "max_tokens": (1, None), "temperature": (0, None), "top_k": (0, None), "top_p": (0, 1),
        "min_p": (0, 1), "seed": (0, 2**32 - 1),
    }  # fmt: skip
    for name, (low, high) in ranges.items():
        value = getattr(given, name)
        if value < low or (high is not None and value > high):
            limit = f"at least {low}" if high is None else f"from {low} to {high}"
            raise BundleError(f"--{name} is {value}; it has to be {limit}")
    if given.repetition_penalty <= 0:
        raise BundleError("--repetition_penalty has to be positive")


def encode(text: str, tokenizer: Tokenizer, backend: Backend, most: int) -> list[int]:
    """The tokens of a prompt, with the one that begins a text."""
    begin = [] if tokenizer.bos_id is None else [tokenizer.bos_id]
    ids = [*begin, *map(int, tokenizer.encode_batch([text])[0])]
    room = backend.limits.max_length - most
    if not 1 <= len(ids) <= room:
        raise BundleError(
            f"the prompt has {len(ids)} tokens: with --max_tokens {most} there is room for 1 to "
            f"{max(room, 0)} of {backend.limits.max_length}"
        )
    return ids


def run(given: argparse.Namespace, console: Console) -> None:
    """Load, and go on with every prompt."""
    check(given)
    start = time.perf_counter()
    loaded = load_model(bundle_flags.load(given, console), given.bundle)
    backend, tokenizer = loaded.backend, loaded.tokenizer
    if backend is None or tokenizer is None:
        raise BundleError(f"{given.bundle} is no language model")
    ends = loaded.stop_ids | {tokenizer.eos_id}
    console.print(f"loaded in {time.perf_counter() - start:.1f} s: {backend.info['mesh']}")
    sampling = Sampling(
        given.temperature, given.top_k, given.top_p, given.min_p, given.repetition_penalty,
        given.seed,
    )  # fmt: skip
    for text in prompts(given, console):
        ids = encode(text, tokenizer, backend, given.max_tokens)
        start = time.perf_counter()
        made, _ = generate(backend, ids, given.max_tokens, sampling)
        seconds = time.perf_counter() - start
        if not given.ignore_eos:
            made = made[: next((i for i, token in enumerate(made) if token in ends), len(made))]
        print(text + tokenizer.decode(made), flush=True)
        console.print(
            f"{len(ids)} tokens read, {given.max_tokens} made in {seconds:.2f} s, "
            f"{given.max_tokens / seconds:.1f} a second"
        )


def main(arguments: Sequence[str] | None = None) -> None:
    """Run, and turn what a user can mend into one message instead of a traceback."""
    given = make_parser().parse_args(arguments)
    console = Console(stderr=True, markup=False, highlight=False, soft_wrap=True)
    with one_message(*USER_ERRORS):
        run(given, console)


if __name__ == "__main__":
    main()
