"""What drafts of the text itself gain, by kind of text and number of streams.

Nothing runs: the engine's scheduler draws texts of this repository on a clock of its own, with and
without drafts, on one H200 as `spmd plan --serve` sees it. Words and signs are tokens. Each stream
has the text for itself, in tokens that no other has.

Example:
    benchmarks/run drafts --model llama2-7b --streams 1,64
"""

import dataclasses
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.tables import print_head, print_line
from spmd.cli.flags import Parser, numbers, positive
from spmd.serving import planned
from spmd.serving.simulated import ClientRequest, OfferedLoad, read_load, simulate

TEXTS = {
    "renamed source": (["serving/engine/fairness.py"], "serving/engine/fairness.py"),
    "quoted source": (
        ["examples/serve_module.py", "examples/serve_gpt2.py", "examples/serve_torch.py"],
        "docs/examples_serving.md",
    ),
    "code": (["spmd/mesh/topology.py"], None),
    "prose": (["docs/design.md"], None),
}
"""Name -> files of a prompt, and the file of the answer; None: it is the second half of the first.
The page quotes the programs, and what is written anew has some words replaced."""

RENAMED = {"client": "tenant", "clients": "tenants", "got": "used"}

LONGEST = 1800
"""Tokens of a prompt at most, its last ones; an answer has three quarters of that."""

OTHERS = 1_000_000
"""By so much a stream's tokens are higher than those of the one before."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints one table."""
    parser = Parser("benchmarks/run drafts", __doc__)
    parser.add_argument("--model", default="llama2-7b", help="as of `spmd plan --serve`")
    parser.add_argument("--quantize", default="none", help="its weights")
    parser.add_argument(
        "--drafts", type=positive, default=7, help="of a request in a step, at most"
    )
    parser.add_argument("--streams", type=numbers, default="1,4,16,64", help="how many at once")
    given = parser.parse_args(arguments)
    flags = f"{given.model} h200:1 --slots 256 --max_length 4352 --quantize {given.quantize}"
    plan = planned.make_parser().parse_args([*flags.split(), "--traffic", "streams"])
    (setup,) = planned.setups(plan, read_load("streams"))
    if not setup.limits.pages:
        parser.error(f"{given.model} leaves no room for sequences on one H200; try --quantize fp8")
    print_head(("text", "streams", "tokens", "tried", "right", "tokens/s", "without", "ratio"))
    ids: dict[str, int] = {}
    for name, (asked, answered) in TEXTS.items():
        prompt = [token for file in asked for token in _tokens(file, ids, {})]
        new = RENAMED if answered in asked else {}
        answer = _tokens(answered, ids, new) if answered else prompt[len(prompt) // 2 :]
        prompt = (prompt if answered else prompt[: len(prompt) // 2])[-LONGEST:]
        answer = answer[: LONGEST * 3 // 4]
        for streams in given.streams:
            each = (
                [tuple(token + stream * OTHERS for token in text) for text in (prompt, answer)]
                for stream in range(streams)
            )
            requests = [ClientRequest(asks, len(says), text=says) for asks, says in each]
            found, plain = (
                simulate(
                    OfferedLoad(requests, streams),
                    dataclasses.replace(setup.limits, drafts=count),
                    setup.times,
                )
                for count in (given.drafts, 0)
            )
            speeds = [one.tokens / one.seconds for one in (found, plain)]
            right = f"{found.accepted / found.drafted:.0%}" if found.drafted else "-"
            cells = (name, str(streams), f"{len(answer):,}", f"{found.drafted:,}", right)
            print_line((*cells, *(f"{s:,.0f}" for s in speeds), f"{speeds[0] / speeds[1]:.2f}"))


def _tokens(file: str, ids: dict[str, int], new: Mapping[str, str]) -> list[int]:
    text = (Path(__file__).parents[1] / file).read_text(encoding="utf-8")
    words = (new.get(word, word) for word in re.findall(r"\w+|[^\w\s]|\n", text))
    return [ids.setdefault(word, len(ids)) for word in words]
