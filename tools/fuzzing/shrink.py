"""Makes a failing case small: tries simpler cases as long as they fail in the same way."""

import re
import time
from collections.abc import Callable, Iterator

from tools.fuzzing.cases import Arg, Case, Line, types_of, without_dead_lines


def shrink(case: Case, fails: Callable[[Case], bool], seconds: float = 60.0) -> Case:
    """The smallest case found in the given time for which `fails` still holds."""
    end = time.monotonic() + seconds
    progress = True
    while progress:
        progress = False
        for simpler in simplifications(case):
            if time.monotonic() > end:
                return case
            if size(simpler) < size(case) and fails(simpler):
                case, progress = simpler, True
                break
    return case


def size(case: Case) -> tuple[int, ...]:
    """What is to become smaller, most important first."""
    specs = [arg.spec for arg in case.args] + list(case.out_specs)
    devices = 1
    for _, n in case.mesh:
        devices *= n
    return (
        case.gradient + len(case.lines),
        len(case.results),
        len(case.args),
        sum(spec is not None for spec in specs),
        sum(e is not None for spec in specs if spec for e in spec),
        len(case.mesh),
        devices,
    )


def simplifications(case: Case) -> Iterator[Case]:
    """Cases that are a step simpler, the boldest first."""
    if case.gradient:
        yield case._replace(gradient=False)
    for result, spec in zip(case.results, case.out_specs, strict=True):
        if len(case.results) > 1:
            yield without_dead_lines(case._replace(results=(result,), out_specs=(spec,)))
    for line in case.lines:
        if line.type is not None:
            yield without_dead_lines(case._replace(results=(line.target,), out_specs=(None,)))
    for number in reversed(range(len(case.lines))):
        yield from _without_line(case, number)
    yield from _fewer_specs(case)
    yield from _smaller_meshes(case)


def _without_line(case: Case, number: int) -> Iterator[Case]:
    """A line's value becomes an argument, or an operand of it of the same type."""
    line, types = case.lines[number], types_of(case)
    rest = case.lines[:number] + case.lines[number + 1 :]
    if line.type is None:
        return
    arg = Arg(line.target, line.type)
    yield without_dead_lines(case._replace(lines=rest, args=(*case.args, arg)))
    for name in line.reads:
        if types.get(name) == line.type:
            yield without_dead_lines(
                case._replace(
                    lines=tuple(_renamed(other, line.target, name) for other in rest),
                    results=tuple(name if r == line.target else r for r in case.results),
                )
            )


def _renamed(line: Line, old: str, new: str) -> Line:
    if old not in line.reads:
        return line
    reads = tuple(dict.fromkeys(new if r == old else r for r in line.reads))
    return line._replace(text=re.sub(rf"\b{old}\b", new, line.text), reads=reads)


def _fewer_specs(case: Case) -> Iterator[Case]:
    for i, arg in enumerate(case.args):
        for spec in _simpler_specs(arg.spec):
            args = (*case.args[:i], arg._replace(spec=spec), *case.args[i + 1 :])
            yield case._replace(args=args)
    for i, out in enumerate(case.out_specs):
        for spec in _simpler_specs(out):
            yield case._replace(out_specs=(*case.out_specs[:i], spec, *case.out_specs[i + 1 :]))


def _simpler_specs(spec: object) -> Iterator[object]:
    if not isinstance(spec, tuple):
        return
    yield None
    for d, entry in enumerate(spec):
        if entry is not None:
            yield (*spec[:d], None, *spec[d + 1 :])


def _smaller_meshes(case: Case) -> Iterator[Case]:
    used = repr([arg.spec for arg in case.args] + list(case.out_specs))
    used += "".join(line.text for line in case.lines if "mark(" in line.text)
    for i, (name, n) in enumerate(case.mesh):
        if f"'{name}'" not in used and len(case.mesh) > 1:
            yield case._replace(mesh=case.mesh[:i] + case.mesh[i + 1 :])
        if n % 2 == 0 and n > 2:
            yield case._replace(mesh=(*case.mesh[:i], (name, 2), *case.mesh[i + 1 :]))
