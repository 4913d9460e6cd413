"""What `spmd plan --serve` predicts for loads that one H200 was measured under, and the ratios.

Nothing runs: the engine's scheduler meets each load on a clock of its own. Measured figures are
those of `benchmarks/run loads --slots 256 --max_length 4352` on one H200, in bf16 unless named
otherwise, before drafts were tried with many streams.

Example:
    benchmarks/run serving_plan --rows llama2-7b
"""

from collections.abc import Mapping, Sequence

from benchmarks.tables import print_head, print_line
from spmd.cli.flags import Parser, words
from spmd.serving import planned

MEASURED: Mapping[str, Mapping[str, tuple[float, ...]]] = {
    "llama2-7b": {
        "streams": (5254, 50, 491), "wide": (7464, 154, 2579),
        "long": (64 * 32 / 7.71, 455, 3319), "prefix": (3699, 99, 249),
    },
    "llama2-7b fp8": {
        "streams": (6070, 41, 271), "wide": (9190, 119, 1381),
        "long": (64 * 32 / 5.50, 378, 2220), "prefix": (4153, 67, 150),
    },
    "llama3.2-1b": {
        "streams": (17844, 23, 75), "wide": (28862, 211, 1233),
        "long": (64 * 32 / 1.67, 245, 499), "prefix": (12737, 118, 230),
    },
}  # fmt: skip
"""Model, and quantization if any -> load -> tokens/s and, where known, p50 and p99 of the first
token in ms."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Prints one table."""
    parser = Parser("benchmarks/run serving_plan", __doc__)
    parser.add_argument("--rows", type=words, default=",".join(MEASURED), help="which models")
    heads = ("tokens/s", "first token, p50 ms", "p99 ms")
    print_head(("model", "load", *(f"{head}: predicted / measured" for head in heads)))
    for model in parser.parse_args(arguments).rows:
        for load, measured in MEASURED[model].items():
            name, _, kind = model.partition(" ")
            flags = f"{name} h200:1 --slots 256 --max_length 4352 --traffic {load}"
            flags += f" --quantize {kind or 'none'}"
            (row, *_), _ = planned.plan_serving(planned.make_parser().parse_args(flags.split()))
            found = (row.load.tokens / row.load.seconds, *row.load.figures())
            pairs = zip(found, measured, strict=False)
            cells = [f"{a:,.0f} / {b:,.0f} = {a / b:.2f}" for a, b in pairs]
            print_line((model, load, *cells, *[""] * (3 - len(cells))))
