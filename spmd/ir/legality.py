"""What must hold of a program after each stage, seen in one walk over its ops.

A failure is a bug of the stage that made the program, never the user's fault. That programs compute
the right values is for tests, and MLIR's own verifier reads what is emitted.
"""

from collections.abc import Sequence
from typing import NoReturn

from spmd.errors import LegalityError
from spmd.ir.program import Body, Op, Program, Region, Value
from spmd.ir.text import format_op
from spmd.ir.types import TensorType, types_text

_DIALECTS = ("stablehlo", "chlo", "spmd")
_PREDICATE = TensorType((), "i1")


def check_program(
    program: Program, stage: str = "program", ends: Sequence[Sequence[TensorType]] = ()
) -> None:
    """Raises LegalityError, which names the op, if a program is not as its stage must leave it.

    `stage` is `program` for a global program, `local` or `optimized` for a local one. `ends` is a
    pair, the types that the arguments and that the results must have; if empty, any will do.
    """
    walk = _Walk(program.types, stage)
    walk.region(program.body)
    have = (walk.of(program.body.args), walk.of(program.body.results))
    for what, types, wanted in zip(("arguments", "results"), have, ends, strict=False):
        if types != tuple(wanted):
            walk.fail(f"its {what} are {types_text(types)} instead of {types_text(wanted)}")


class _Walk:
    """Visits ops in order, with the values that are defined so far and that an op may read.

    `defined` only grows, so that a number is never used twice, not even in two regions that don't
    see each other. `visible` shrinks again when a region ends:

      %1 = while %0 { cond(%2): %3 = compare %2; body(%4): %5 = add %4 }

                       defined          visible
      in the condition 0 2 3            0 2 3
      in the body      0 2 3 4 5        0 4 5          reading %3 here is an error
      behind the loop  0 1 2 3 4 5      0 1

    A loop's own results are defined only after its regions: a body that reads %1 is refused.
    """

    def __init__(self, types: Sequence[TensorType], stage: str) -> None:
        self.types, self.stage = types, stage
        self.defined, self.visible = set[Value](), set[Value]()

    def fail(self, problem: str, op: Op | None = None) -> NoReturn:
        raise LegalityError(
            f"stage {self.stage} broke its contract: {problem}",
            op=format_op(op) if op else None,
            source=op.loc.source if op else None,
            fix="this is a bug in spmd: please report it, with the program",
        )

    def of(self, values: Sequence[Value]) -> tuple[TensorType, ...]:
        return tuple([self.types[v] for v in values])

    def region(self, region: Region, owner: Op | None = None, is_manual: bool = False) -> None:
        """Checks a region of op `owner` and all inside; its values are visible only meanwhile."""
        self.define(region.args, owner)
        for op in region.ops:
            self.read(op.operands, op)
            self.belongs(op, is_manual)
            for body in op.kind.attrs.values():
                if isinstance(body, Body):  # a closed program of its own
                    _Walk(body.types, self.stage).region(body.region, op)
            for inner in op.regions:
                self.region(inner, op, is_manual or op.kind.about.region == "manual")
            self.define(op.results, op)
            self.fits(op)
        self.read(region.results, owner)
        self.visible.difference_update(region.args, *(op.results for op in region.ops))

    def define(self, values: Sequence[Value], op: Op | None) -> None:
        for value in values:
            if value in self.defined:
                self.fail(f"%{value} is defined twice", op)
            self.defined.add(value)
        self.visible.update(values)

    def read(self, values: Sequence[Value], op: Op | None) -> None:
        for value in values:
            if value not in self.visible:
                where = "outside its region" if value in self.defined else "but not defined yet"
                self.fail(f"%{value} is read {where}", op)

    def belongs(self, op: Op, is_manual: bool) -> None:
        """Fails if an op's dialect, stage, region (`is_manual`: a manual one) or axes are wrong."""
        about, is_whole = op.kind.about, self.stage == "program"
        if op.name.partition(".")[0] not in _DIALECTS:
            self.fail(f"its dialect is none of {_DIALECTS}", op)
        if is_whole and (about.is_local or (about.is_manual and not is_manual)):
            self.fail("an op of one device's program outside any manual region", op)
        if not is_whole and about.is_global:
            self.fail("an op of the whole program in one device's program", op)
        if op.collective and "axes" not in op.kind.attrs:
            self.fail("a collective without axes", op)

    def fits(self, op: Op) -> None:
        """Raises LegalityError if the types of the op's values and regions do not fit its kind."""
        kind, about = op.kind, op.kind.about
        operands, results = kind.operands, kind.results
        inside: list[tuple[TensorType, ...]] = []  # what each region takes and gives
        if about.region == "loop":  # what it carries goes in, through both regions, and out
            results, inside = operands, [operands, (_PREDICATE,), operands, operands]
        elif about.region == "branches":
            selector = TensorType((), about.selector)
            count = 2 if selector == _PREDICATE else max(1, len(op.regions))
            operands, inside = (selector,), [(), results] * count
        elif about.region == "manual":
            operands, inside = (), [(), results]
        ends = [values for region in op.regions for values in (region.args, region.results)]
        for values, types, wanted in (
            (op.operands, kind.operands, operands),
            (op.results, kind.results, results),
        ):
            if not self.of(values) == types == wanted:
                have = f"{types_text(self.of(values))}, in its kind {types_text(types)},"
                self.fail(f"its operands or results are {have} instead of {types_text(wanted)}", op)
        if (have_inside := [self.of(values) for values in ends]) != inside:
            have, want = (" ".join(map(types_text, each)) for each in (have_inside, inside))
            self.fail(f"its regions take and give {have or 'nothing'} instead of {want}", op)
