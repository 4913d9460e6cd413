"""Serializes JAX functions and modules as portable StableHLO artifacts; counts custom calls."""

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from jax.extend.mlir import serialize_portable_artifact
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import stablehlo

from spmd.errors import FrontendError
from spmd.frontend.importer.contents import named_ops, ops_in
from spmd.frontend.trace import trace


class CustomCalls(NamedTuple):
    """Holds how often each custom call and each composite occurs in a module: name -> count."""

    custom_calls: dict[str, int]
    composites: dict[str, int]


def function_artifact(
    fn: Callable[..., Any], args: Sequence[Any], *, platform: str, names: Sequence[str] = ()
) -> tuple[bytes, Any, CustomCalls]:
    """Traces a JAX function and serializes it; returns (artifact, result structs, call counts).

    `args` are `ShapeDtypeStruct`s, and so are the leaves of the result's pytree. jax lowers for
    `platform`: `cpu`, `cuda` or `tpu`. `names` replace jax's names of the first flat arguments.
    FrontendError: the function has an op that artifacts cannot hold.
    """
    module, out, *_ = trace(fn, args, {}, platform=platform)
    with module.context:
        block = named_ops(module, "func.func")["main"].regions[0].blocks[0]
        for argument, name in zip(block.arguments, names, strict=False):
            argument.set_location(ir.Location.name(f"[{name!r}]"))  # as jax names a part of a tree
    return module_artifact(module), out, calls_of(module)


def module_artifact(module: Any) -> bytes:
    """Returns the bytes of a portable StableHLO artifact of a module.

    Releases of StableHLO up to twelve weeks older can read it. CHLO ops become StableHLO ops or
    composites; marks are kept. FrontendError: the module has an op that artifacts cannot hold.
    """
    try:
        return bytes(serialize_portable_artifact(module, artifact_version(), True))
    except (ir.MLIRError, ValueError, RuntimeError) as error:
        raise FrontendError(
            "the module cannot be written as a portable artifact",
            actual=str(error).strip().replace("\n", " ")[:400],
            required="StableHLO and CHLO",
        ) from error


def artifact_version() -> str:
    """Returns the version of StableHLO whose format artifacts have, such as `1.13.7`."""
    requirement = stablehlo.StablehloCompatibilityRequirement.WEEK_12
    return str(stablehlo.get_version_from_compatibility_requirement(requirement))


def calls_of(module: Any) -> CustomCalls:
    """Counts a module's composites by name, and its custom calls by target, without `Sharding`."""
    custom: Counter[str] = Counter()
    composites: Counter[str] = Counter()
    with module.context:
        for op in ops_in(module.operation):
            if op.name == "stablehlo.custom_call":
                custom[ir.StringAttr(op.attributes["call_target_name"]).value] += 1
            if op.name == "stablehlo.composite":
                composites[ir.StringAttr(op.attributes["name"]).value] += 1
    custom.pop("Sharding", None)
    return CustomCalls(dict(sorted(custom.items())), dict(sorted(composites.items())))
