"""Modules in bytecode that tests wrote themselves, read without another process."""

import functools
import io
from collections.abc import Iterator
from typing import Any

import pytest
from jax.interpreters import mlir
from jaxlib.mlir import ir
from jaxlib.mlir.dialects import stablehlo

from spmd.frontend.importer import module as importer
from spmd.serving.bundle import read as bundles


@functools.cache
def text_of(data: bytes) -> str:
    """As `spmd.frontend.bytecode` prints it."""
    text = io.BytesIO()
    with mlir.make_ir_context() as context:
        module: Any = (
            stablehlo.deserialize_portable_artifact(context, data)
            if b"StableHLO_v" in data[:64]
            else ir.Module.parse(data)
        )
        module.operation.print(
            file=text, binary=True, enable_debug_info=True, print_generic_op_form=True
        )
    return text.getvalue().decode()


@pytest.fixture(scope="module", autouse=True)
def modules_are_read_here() -> Iterator[None]:
    """For the folders that import it: a process guards against damage, and takes seconds."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(bundles, "bytecodes_to_texts", lambda group: [*map(text_of, group)])
        patch.setattr(bundles, "bytecode_to_text", text_of)
        patch.setattr(importer, "bytecode_to_text", text_of)
        yield
