"""Converts MLIR bytecode to MLIR text in a child process.

On damaged bytes MLIR's bytecode reader aborts its process, reads out of bounds, or never ends, so a
child runs it. This process parses the text that the child prints; that parser reports errors.
"""

import contextlib
import io
import math
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from typing import Any

MAGIC = b"ML\xefR"  # the first bytes of MLIR bytecode and of portable artifacts

_ARTIFACT = b"StableHLO_v"
_SECONDS = 20.0
_SECONDS_PER_MEGABYTE = 1.0  # of the processor; how long that takes depends on what else runs
_MEMORY = 4 << 30
_MEMORY_PER_BYTE = 64


class BytecodeError(ValueError):
    """Raised for bytes that MLIR cannot read as a module."""


def bytecode_to_text(data: bytes) -> str:
    """Returns the MLIR text of a module in bytecode or of an artifact, or raises BytecodeError."""
    return bytecodes_to_texts([data])[0]


def bytecodes_to_texts(modules: Sequence[bytes]) -> list[str]:
    """Returns each module's MLIR text, all read by one child process; or raises BytecodeError."""
    # `-P` and the own path of this file: the reader imports this installation, and nothing from the
    # current folder. A crash shows as a negative return code, the number of the signal.
    limit = _SECONDS + _SECONDS_PER_MEGABYTE * sum(map(len, modules)) / 2**20
    reader = subprocess.run(
        [sys.executable, "-P", os.path.abspath(__file__), str(math.ceil(limit))],
        input=b"".join(_framed(data) for data in modules),
        capture_output=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), "JAX_PLATFORMS": "cpu"},
    )
    if reader.returncode < 0:
        ended = signal.Signals(-reader.returncode).name
        if ended == "SIGXCPU":
            raise BytecodeError(f"MLIR is still reading it after {limit:.0f} seconds")
        raise BytecodeError(f"MLIR ends with {ended} on it")
    if reader.returncode:
        raise BytecodeError(reader.stderr.decode(errors="replace").strip()[-400:])
    return [text.decode() for text in _frames(reader.stdout)]


def _framed(data: bytes) -> bytes:
    return len(data).to_bytes(8, "little") + data


def _frames(data: bytes) -> Iterator[bytes]:
    start = 0
    while start < len(data):
        stop = start + 8 + int.from_bytes(data[start : start + 8], "little")
        yield data[start + 8 : stop]
        start = stop


def main() -> None:
    """Runs in the child process: reads modules as bytecode from stdin, writes texts to stdout."""
    data = sys.stdin.buffer.read()
    with contextlib.suppress(ImportError):  # not on every system
        import resource

        memory, seconds = _MEMORY + _MEMORY_PER_BYTE * len(data), int(sys.argv[1])
        for what, limit in ((resource.RLIMIT_AS, memory), (resource.RLIMIT_CPU, seconds)):
            resource.setrlimit(what, (limit, resource.getrlimit(what)[1]))
    # As `jax.interpreters.mlir.make_ir_context` does it; importing jax takes four times as long.
    from jaxlib.mlir import ir
    from jaxlib.mlir._mlir_libs import _jax_mlir_ext
    from jaxlib.mlir.dialects import chlo, mhlo, mpmd, sdy, stablehlo

    registry = ir.DialectRegistry()
    _jax_mlir_ext.register_dialects(registry)  # func and others of MLIR itself
    for part in _frames(data):
        with ir.Context() as context:
            context.append_dialect_registry(registry)
            context.load_all_available_dialects()
            mhlo.register_mhlo_dialect(context)
            for dialect in (chlo, mpmd, sdy, stablehlo):
                dialect.register_dialect(context)
            try:
                if _ARTIFACT in part[:64]:
                    module: Any = stablehlo.deserialize_portable_artifact(context, part)
                else:
                    module = ir.Module.parse(part)
            except (ir.MLIRError, ValueError) as error:
                sys.exit(str(error))
            text = io.BytesIO()
            module.operation.print(
                file=text, binary=True, enable_debug_info=True, print_generic_op_form=True
            )
            sys.stdout.buffer.write(_framed(text.getvalue()))


if __name__ == "__main__":
    main()
