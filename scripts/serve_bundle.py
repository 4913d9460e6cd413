r"""Serves a bundle over HTTP.

The port is open from the start; `/health` says 503 until the model is there, partitioned for the
mesh, compiled, warm, and its golden prompts come out as when it was exported. The chat page is at
`/`, OpenAI's endpoints are under `/v1`, KServe's under `/v2`, metrics at `/metrics`.

Examples:
    scripts/serve llama-1b
    scripts/serve llama-70b --mesh data=1,model=8 --host 0.0.0.0 --api_key secret
    XLA_FLAGS=--xla_force_host_platform_device_count=8 JAX_PLATFORMS=cpu scripts/serve mine
    scripts/launch local --processes 2 --devices_per_process 4 --max_restarts 3 -- \
        scripts/serve llama-70b --mesh data=1,model=8

With several processes, process 0 speaks HTTP. One that dies ends all: start them anew.
"""

import argparse
import json
import logging
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

import spmd
from spmd import launch
from spmd.cli.flags import Parser
from spmd.errors import SpmdError
from spmd.launch.peers import form_last_line
from spmd.launch.restart import begun, exit_code
from spmd.models.fields import of_fields, taken
from spmd.scripts.flags import bundle as bundle_flags
from spmd.scripts.flags import reach
from spmd.scripts.flags.user_errors import ending_on_interrupt, one_message
from spmd.serving.bundle import group
from spmd.serving.bundle.folder import read_manifest
from spmd.serving.bundle.function import BundleError
from spmd.serving.errors import ServingError
from spmd.serving.http import logs
from spmd.serving.http.language import Loaded
from spmd.serving.http.limits import GENERATION_CONFIGS, HttpOptions, ServerOptions
from spmd.serving.http.server import serve
from spmd.serving.http.tools.formats import BY_NAME
from spmd.serving.language_backend import is_language_model
from spmd.serving.load import check_draft, load_model

_LOG = logging.getLogger("serving")

USER_ERRORS = (BundleError, ServingError, SpmdError, OSError)
"""What a user can mend: one message instead of a traceback."""

LIMITS = {
    "max_waiting": "requests that wait for a slot at most; then 429",
    "choices": "completions of one request at most",
    "stops": "stop strings of one request at most",
    "grammar_bytes": "the largest grammar, schemas and tools included",
    "text_threads": "texts that are tokenized at a time, of short and of long ones each",
    "stall_seconds": "after which a call of the model counts as hung",
    **reach.LIMITS,
}
"""Fields of `ServerOptions` that are flags as well."""


def make_parser() -> Parser:
    """The flags."""
    parser = Parser("scripts/serve", __doc__, settings=True)
    bundle_flags.add_flags(parser)
    add = parser.add_argument
    add("--name", help="of the model in requests (default: the bundle's)")
    add(
        "--speculative_model",
        type=Path,
        help="bundle of a smaller model that guesses next tokens where that pays; its "
        "tokenizer, --slots, --max_length, --page and --groups have to be the same",
    )
    add(
        "--adapter",
        action="append",
        default=[],
        metavar="NAME=FOLDER",
        help="a LoRA adapter in PEFT's format, served as a model of this name (repeatable; the "
        "bundle has room for as many as it was exported with --adapters)",
    )
    add(
        "--adapters_from",
        help="folder below which adapters may be loaded while the server runs, by "
        "POST /v1/load_lora_adapter (default: they may not)",
    )
    reach.add_flags(parser, LIMITS)
    of_options = of_fields(add, ServerOptions)
    of_options(
        "--token_budget",
        help="rows of a group in a step that draws tokens and reads prompts; fewer make the times "
        "between tokens shorter, more that to the first token (default: by predicted times)",
    )
    add(
        "--tool_format",
        choices=tuple(BY_NAME),
        help="how the model writes calls of tools (default: as its chat template tells)",
    )
    of_options(
        "--generation_config",
        choices=GENERATION_CONFIGS,
        help="how tokens are drawn where a request does not say: auto takes the model's own",
    )
    add(
        "--override_generation_config",
        default="{}",
        help='JSON of values that count instead of the model\'s own, such as {"temperature": 0.6}',
    )
    return parser


def options(given: argparse.Namespace) -> ServerOptions:
    """How the server is to behave."""
    try:
        changed = dict(json.loads(given.override_generation_config))
    except (ValueError, TypeError) as error:
        example = '{"temperature": 0.6}'
        raise ServingError(f"--override_generation_config: JSON is needed, as {example}") from error
    return reach.options(given, override_generation_config=changed)


def main(arguments: Sequence[str] | None = None) -> None:
    """Serve, and turn what a user can mend into one message instead of a traceback."""
    given = make_parser().parse_args(arguments)
    is_text = given.log_format == "text"
    console = Console(stderr=True, markup=False, highlight=False, soft_wrap=True)

    def load(leader: group.Leader | None) -> Loaded:
        shown, draft = console if is_text else None, None
        if given.speculative_model is not None:
            check_draft(given.bundle, given.speculative_model)
        bundle = bundle_flags.load(given, shown, serves=True)
        if given.speculative_model is not None:
            draft = bundle_flags.load_draft(given, bundle, shown)
        for note in () if is_text else bundle.notes:
            _LOG.info("note: %s", note)
        if leader is not None:
            bundle.told = leader.tell
        adapters = dict(one.partition("=")[::2] for one in given.adapter)
        loaded = load_model(bundle, given.bundle, given.name, draft, adapters)
        begun()
        return loaded

    with launch.stopping_peers(), ending_on_interrupt(), one_message(*USER_ERRORS):
        logs.set_up(given.log_level, given.log_format, replaces=True)
        try:
            reached, limits = taken(HttpOptions, given), options(given)
            # Connections tell who dies; silence counts after a hung call has been seen in /health.
            spmd.initialize(heartbeat_timeout_s=max(60.0, 2 * limits.stall_seconds))
            if not is_text:
                form_last_line(logs.last_line)
            joined = group.join()
            if joined is not None and given.speculative_model is not None:
                raise ServingError(
                    "--speculative_model: leave it out; several processes run one model"
                )
            if isinstance(joined, group.Follower):
                joined.follow(bundle_flags.load(given, serves=True))
            serve(
                lambda: load(joined),
                given.host,
                given.port,
                limits,
                http=reached,
                log_level=given.log_level,
                log_format=given.log_format,
                others=joined,
                apart=joined is None and is_language_model(read_manifest(given.bundle)),
            )
        except USER_ERRORS as error:
            if is_text:
                raise
            _LOG.critical("%s", error)  # the last line is an object, too
            raise SystemExit(exit_code(error, mends=True)) from error


if __name__ == "__main__":
    main()
