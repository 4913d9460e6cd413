"""Marked modules that are not functions of `cases_marked`: texts, training steps, the corpus.

`CASES` is all of both.
"""

import dataclasses
import re
import textwrap
from collections.abc import Callable
from typing import NamedTuple

import jax

import spmd
from benchmarks.corpus.program import mark as mark_words
from benchmarks.corpus.programs import PROGRAMS
from benchmarks.llama_step import argument_types, train_step
from benchmarks.shardy import marked_text
from spmd.models.llama import sharding
from spmd.models.llama.named import named_config
from tests.ir.dialect.cases_marked import MARKED, MESH, TOPOLOGY, Marked
from tests.programs import llama_optimizer


class Given(NamedTuple):
    """A module that something else makes, as text."""

    name: str
    make: Callable[[], str]
    mesh: spmd.Mesh = MESH

    def text(self) -> str:
        return self.make()


Case = Marked | Given


# Modules as other tools write them: with axes on open dims, sub-axes, and marks on results.


def module(body: str) -> Callable[[], str]:
    """A module around a function's text; `S` stands for a sharding on the mesh of `MESH`."""
    text = re.sub(r"S(\[.*?\])", r"#sdy.sharding<@mesh, \1>", body)
    mesh = '  sdy.mesh @mesh = <["data"=4, "model"=2]>'
    return lambda: f"module {{\n{mesh}\n{textwrap.dedent(text)}\n}}"


OPEN_WITH_AXES = """
func.func @main(%x: tensor<16x16xf32> {sdy.sharding = S[{"data", ?}, {?}]},
                %y: tensor<16x16xf32> {sdy.sharding = S[{"data", "model"}, {}]})
    -> tensor<16x16xf32> {
  %0 = stablehlo.sine %x : tensor<16x16xf32>
  %1 = stablehlo.add %0, %y : tensor<16x16xf32>
  return %1 : tensor<16x16xf32>
}"""
SUB_AXIS = """
func.func @main(%x: tensor<16x16xf32>) -> tensor<4x4x16xf32> {
  %0 = stablehlo.sine %x : tensor<16x16xf32>
  %1 = sdy.sharding_constraint %0
    <@mesh, [{"data":(1)2}, {"data":(2)2, "model"}]> : tensor<16x16xf32>
  %2 = stablehlo.tanh %1 : tensor<16x16xf32>
  %3 = stablehlo.reshape %2 : (tensor<16x16xf32>) -> tensor<4x4x16xf32>
  %4 = stablehlo.add %3, %3 : tensor<4x4x16xf32>
  return %4 : tensor<4x4x16xf32>
}"""
RESULTS = """
func.func @main(%x: tensor<16x16xf32>, %y: tensor<16x16xf32>)
    -> (tensor<16x16xf32> {sdy.sharding = S[{"data"}, {"model"}]},
        tensor<16x16xf32> {sdy.sharding = S[{?}, {"data", ?}]}) {
  %0 = stablehlo.sine %x : tensor<16x16xf32>
  %1 = stablehlo.exponential %y : tensor<16x16xf32>
  return %0, %1 : tensor<16x16xf32>, tensor<16x16xf32>
}"""
TWO_MARKS = """
func.func @main(%x: tensor<16x16xf32>) -> tensor<16x16xf32> {
  %0 = stablehlo.sine %x : tensor<16x16xf32>
  %1 = sdy.sharding_constraint %0 <@mesh, [{"data"}, {}]> : tensor<16x16xf32>
  %2 = sdy.sharding_constraint %1 <@mesh, [{}, {"data"}]> : tensor<16x16xf32>
  %3 = stablehlo.tanh %2 : tensor<16x16xf32>
  return %3 : tensor<16x16xf32>
}"""
IF = """
func.func @main(%x: tensor<16x16xf32> {sdy.sharding = S[{"data", ?}, {?}]}, %y: tensor<16x16xf32>,
                %flag: tensor<i1>) -> tensor<16x16xf32> {
  %0 = "stablehlo.if"(%flag) ({
    %1 = stablehlo.sine %x : tensor<16x16xf32>
    stablehlo.return %1 : tensor<16x16xf32>
  }, {
    %2 = stablehlo.tanh %y : tensor<16x16xf32>
    stablehlo.return %2 : tensor<16x16xf32>
  }) : (tensor<i1>) -> tensor<16x16xf32>
  %3 = stablehlo.negate %0 : tensor<16x16xf32>
  return %3 : tensor<16x16xf32>
}"""


# Whole training steps.


def llama(scan: bool, optimizer: str) -> Callable[[], str]:
    """The tiny Llama's training step, marked by the default tables."""

    def make() -> str:
        config = dataclasses.replace(named_config("tiny"), scan_layers=scan, attention="einsum")
        chosen = llama_optimizer(optimizer)
        step = train_step(config, chosen, sharding.activation_marks(MESH, config))
        jitted = spmd.jit(step, mesh=MESH, donate_argnums=(0, 1))
        types = argument_types(config, chosen, MESH, (8, 16))
        return marked_text(jitted.request(*types, topology=TOPOLOGY))

    return make


def from_corpus(name: str) -> Given:
    """A program that nobody wrote for this compiler."""

    def make() -> str:
        program = next(p for p in PROGRAMS if p.name == name)
        made = program.make()
        types = [jax.eval_shape(lambda a: a, a) for a in made.args]
        marked = [mark_words(a, word, MESH) for a, word in zip(types, made.specs, strict=True)]
        return marked_text(spmd.jit(made.fn, mesh=MESH).request(*marked, topology=TOPOLOGY))

    return Given(f"corpus.{name}", make)


FROM_CORPUS = (
    "vision.resnet", "vision.unet", "sequence.experts", "sequence.lstm", "sequence.state_space",
    "equinox.attention", "transforms.remat", "transforms.per_example", "numerics.control_flow",
    "optax.lamb",
)  # fmt: skip

MODULES = (
    Given("module.open_with_axes", module(OPEN_WITH_AXES)),
    Given("module.sub_axis", module(SUB_AXIS)),
    Given("module.results", module(RESULTS)),
    Given("module.two_marks", module(TWO_MARKS)),
    Given("module.if", module(IF)),
    Given("llama.scanned_adamw", llama(True, "adamw")),
    Given("llama.unrolled_adafactor", llama(False, "adafactor")),
    *map(from_corpus, FROM_CORPUS),
)

CASES: tuple[Case, ...] = (*MARKED, *MODULES)

LONG = ("llama.", "corpus.vision.", "corpus.equinox.", "corpus.sequence.lstm", "corpus.optax.")
"""What the names of modules begin with that take seconds to plan."""
