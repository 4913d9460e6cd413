"""All benchmark programs, in the order of the table."""

import re

from benchmarks.programs.llama_serving import llama_serving_programs
from benchmarks.programs.llama_training import llama_training_programs
from benchmarks.programs.moe import moe_programs
from benchmarks.programs.program import Program
from benchmarks.programs.recommender import recommender_programs
from benchmarks.programs.remat import remat_programs
from benchmarks.programs.reshards import reshard_programs
from benchmarks.programs.resnet import resnet_programs


def programs(only: str = "") -> list[Program]:
    """Those whose name the regular expression finds something in."""
    everything = [
        *llama_training_programs(),
        *llama_serving_programs(),
        *moe_programs(),
        *resnet_programs(),
        *recommender_programs(),
        *remat_programs(),
        *reshard_programs(),
    ]
    return [program for program in everything if re.search(only, program.name)]
