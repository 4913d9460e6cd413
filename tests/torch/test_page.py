"""docs/pytorch.md works as it stands."""

import pytest

pytest.importorskip("spmd.torch", reason="needs torch and torchax: .[torch]", exc_type=ImportError)

from tests.greedy import plan_all_greedily
from tests.markdown import ROOT
from tests.test_docs import read, show

pytestmark = pytest.mark.exact_plans

PAGE = ROOT / "docs" / "pytorch.md"


@pytest.mark.thorough
@pytest.mark.slow("it plans what the page prints, a step of a module of PyTorch")
def test_the_page_runs(tmp_path, monkeypatch, capsys, request):
    monkeypatch.chdir(tmp_path)
    names, printed = {"__name__": "__main__"}, ""
    for block in read(PAGE):
        if block.language == "python":
            exec(compile("\n" * (block.line - 1) + block.text, str(PAGE), "exec"), names)
            printed = capsys.readouterr().out.rstrip() + "\n"
            printed = printed.replace(f"{ROOT}/", "")  # where an op was traced
        elif block.note == "prints":
            if request.config.getoption("--update-golden"):
                show(PAGE, block, printed)
            else:
                assert printed == block.text, "--update-golden writes what is printed now"
            plan_all_greedily(monkeypatch)  # the first program alone prints its plan
