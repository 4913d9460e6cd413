"""Continues prompts with a bundle's model, in the terminal.

A prompt is given as an argument, read from a file, a line each, or asked for at the terminal.

Examples:
    scripts/generate llama-1b --prompt "def main(" --max_tokens 60
    scripts/generate llama-70b --mesh model=8 --file prompts.txt --temperature 0
    scripts/generate mine
"""

import argparse
import dataclasses
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.console import Console

from spmd.cli.flags import Parser, Switch
from spmd.errors import SpmdError
from spmd.models.training.data.beginnings import prompt_ids
from spmd.models.training.data.tokenizer import Tokenizer
from spmd.scripts.flags import bundle as bundle_flags
from spmd.scripts.flags.user_errors import ending_on_interrupt, one_message
from spmd.serving.bundle.function import BundleError
from spmd.serving.engine.backend import Backend, Sampling
from spmd.serving.engine.model_backend import generate
from spmd.serving.errors import ApiError, ServingError
from spmd.serving.http.fields import Fields
from spmd.serving.http.protocol import read_sampling
from spmd.serving.load import load_model

USER_ERRORS = (BundleError, ServingError, SpmdError, OSError, UnicodeDecodeError)
"""What a user can mend: one message instead of a traceback."""


PENALTIES = {
    "repetition_penalty": "above 1: tokens that were there are less likely",
    "frequency_penalty": "is subtracted for each time that a token was there",
    "presence_penalty": "is subtracted once for a token that was there",
}


def make_parser() -> Parser:
    """The flags."""
    parser = Parser("scripts/generate", __doc__)
    bundle_flags.add_flags(parser)
    default = Sampling()
    add = parser.add_argument
    add("--prompt", action="append", default=[], help="a text to go on with (repeatable)")
    add("--file", type=Path, help="a prompt a line")
    add("--max_tokens", type=int, default=100, help="to add")
    add("--temperature", type=float, default=0.8, help="0: the likeliest token")
    add("--top_k", type=int, default=default.top_k, help="0: all")
    add("--top_p", type=float, default=default.top_p, help="share of the likeliest tokens")
    add("--min_p", type=float, default=default.min_p, help="least share of the likeliest one's")
    for name, says in PENALTIES.items():
        add(f"--{name}", type=float, default=getattr(default, name), help=says)
    add("--seed", type=int, default=0, help="of the draws")
    add("--ignore_eos", action=Switch, help="go on behind the end of a text")
    return parser


def given_prompts(given: argparse.Namespace) -> list[str]:
    """The texts of --prompt and --file; none if they are to be asked for.

    Raises:
      BundleError: the file cannot be read, or has no line with text.
    """
    if given.file is None:
        return list(given.prompt)
    try:
        lines = given.file.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise BundleError(f"--file: {given.file} is not UTF-8: byte {error.start}") from error
    except OSError as error:
        raise BundleError(f"--file: {given.file}: {error.strerror}") from error
    texts = [text for text in lines if text]
    if not texts:
        raise BundleError(f"--file: {given.file} has no line with text")
    return [*given.prompt, *texts]


def asked_prompts(console: Console) -> Iterator[str]:
    """Texts from the terminal, until its end."""
    while True:
        try:
            text = console.input("> ")
        except (EOFError, KeyboardInterrupt):
            return
        if text:
            yield text


def sampling_of(given: argparse.Namespace) -> Sampling:
    """How tokens are drawn; a `BundleError` for numbers that no request may have."""
    fields = Fields(vars(given))
    try:
        fields.integer("max_tokens", 1, 2**31 - 1)
        seed = fields.integer("seed", 0, 2**32 - 1)
        return dataclasses.replace(read_sampling(fields, Sampling()), seed=seed or 0)
    except ApiError as error:
        raise BundleError(f"--{error.message}") from error


def encode(text: str, tokenizer: Tokenizer, backend: Backend, most: int) -> list[int]:
    """The tokens of a prompt, with what the tokenizer puts before it."""
    ids, _ = prompt_ids(tokenizer, text)
    longest = backend.limits.longest
    room = longest - most
    if not 1 <= len(ids) <= room:
        raise BundleError(
            f"the prompt has {len(ids)} tokens: with --max_tokens {most} there is room for 1 to "
            f"{max(room, 0)} of {longest}"
        )
    return ids


def run(given: argparse.Namespace, console: Console) -> None:
    """Load, and go on with every prompt."""
    sampling = sampling_of(given)
    texts = given_prompts(given)
    start = time.perf_counter()
    loaded = load_model(bundle_flags.load(given, console), given.bundle)
    backend, tokenizer = loaded.backend, loaded.tokenizer
    if backend is None or tokenizer is None:
        raise BundleError(f"{given.bundle} is no language model")
    ends = frozenset() if given.ignore_eos else loaded.stop_ids | {tokenizer.eos_id}
    console.print(f"loaded in {time.perf_counter() - start:.1f} s: {backend.info['mesh']}")
    for text in texts or asked_prompts(console):
        ids = encode(text, tokenizer, backend, given.max_tokens)
        start = time.perf_counter()
        made, _ = generate(backend, ids, given.max_tokens, sampling, ends)
        seconds = time.perf_counter() - start
        ended = made[-1] in ends
        print(text + tokenizer.decode(made[:-1] if ended else made), flush=True)
        console.print(
            f"{len(ids)} tokens read, {len(made)} made in {seconds:.2f} s, "
            f"{len(made) / seconds:.1f} a second"
        )


def main(arguments: Sequence[str] | None = None) -> None:
    """Run, and turn what a user can mend into one message instead of a traceback."""
    given = make_parser().parse_args(arguments)
    console = Console(stderr=True, markup=False, highlight=False, soft_wrap=True)
    with ending_on_interrupt(), one_message(*USER_ERRORS):
        run(given, console)


if __name__ == "__main__":
    main()
