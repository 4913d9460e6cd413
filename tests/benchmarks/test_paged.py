"""The benchmark of a cache in pages runs, on a small one."""

from __future__ import annotations

import pytest

from benchmarks import paged


@pytest.mark.parametrize("dtype", ["float32", "int8"])
def test_each_case_has_a_row(dtype: str, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = "--slots 3 --context 64 --key_heads 2 --groups 2 --width 16 --page 16 --chunk 20"
    paged.main([*sizes.split(), "--dtype", dtype, "--calls", "2", "--steps", "1"])
    said = capsys.readouterr().out.splitlines()[3:]
    assert [line.split(" | ")[0] for line in said] == ["| pages", "| pages, chunk"]
    wanted = 3 * 64 * 2 * 2 * 16 * (4 if dtype == "float32" else 1.25) / 1e6
    assert said[0].split(" | ")[2] == f"{wanted:.1f}"
