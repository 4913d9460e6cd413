"""The documentation site: where links lead, and that the reference has every public name.

`scripts/check` builds the site strictly, so that a link to nowhere fails there.
"""

import re
from importlib.util import find_spec
from pathlib import Path

import pytest
import yaml

import spmd
from spmd import explain, launch, ops
from tools import site_links

REFERENCE = Path(__file__).parents[2] / "docs" / "reference"


@pytest.mark.parametrize(
    ("page", "link", "wanted"),
    [
        ("design.md", "../CHANGELOG.md", "CHANGELOG.md"),
        ("design.md", "shardy.md", "shardy.md"),
        ("design.md", "../README.md", "index.md"),
        ("benchmarks/bytes.md", "../../CONTRIBUTING.md", "../CONTRIBUTING.md"),
        ("benchmarks/bytes.md", "../design.md", "../design.md"),
        ("benchmarks/bytes.md", "../../tests/conftest.py", "../source/tests/conftest.py.md"),
        ("CHANGELOG.md", "docs/launch.md", "launch.md"),
        ("CHANGELOG.md", "LICENSE", "source/LICENSE.md"),
        ("explain.md", "assets/explain.png", "assets/explain.png"),
        ("README.md", "docs/launch.md", "launch.md"),
        ("design.md", "../tests/gone.py", "../tests/gone.py"),  # mkdocs reports it
    ],
)
def test_links_lead_to_pages_of_the_site(page: str, link: str, wanted: str) -> None:
    text = "See [this]({}#part), or [that](https://example.org/a.md) or [here](#here)."
    assert site_links.rewrite(text.format(link), page) == text.format(wanted)


def test_a_linked_file_gets_a_page_with_its_text() -> None:
    text = "[a](../tests/conftest.py) [b](training.md) [c](../CHANGELOG.md) [d](../gone.py)"
    assert list(site_links.linked_files(text, "design.md")) == ["tests/conftest.py"]
    page = site_links.source_page("tests/conftest.py")
    assert page.startswith("# tests/conftest.py\n\n~~~~~~python\n")
    assert (site_links.ROOT / "tests/conftest.py").read_text().rstrip() in page


def test_a_page_has_the_sections_of_readme_that_it_includes() -> None:
    page = site_links.with_readme('# A\n\n--8<-- "README.md:read-on"\n\nb\n')
    assert page.startswith("# A\n\n| you want to | read |\n")
    assert "(training.md)" in page and "(CONTRIBUTING.md)" in page and "docs/" not in page
    with pytest.raises(ValueError, match="no section gone"):
        site_links.with_readme('--8<-- "README.md:gone"')


def test_readme_names_every_guide() -> None:
    """The navigation has them in groups of at most seven pages."""
    settings = yaml.safe_load((site_links.ROOT / "mkdocs.yml").read_text(encoding="utf-8"))
    (guides,) = (part["Guides"] for part in settings["nav"] if "Guides" in part)
    groups = [pages for group in guides for pages in group.values()]
    assert max(map(len, groups)) <= 7
    table = site_links.with_readme('--8<-- "README.md:read-on"')
    assert [page for pages in groups for page in pages if f"({page})" not in table] == []


def entry(name: str) -> str:
    """What the page names: `spmd.auto` is a module, too, and the module would be shown."""
    return f"{name}.{name.rpartition('.')[2]}" if find_spec(name) else name


def torch_names() -> set[str]:
    """The public names of `spmd.torch`, which cannot be imported everywhere."""
    source = (REFERENCE.parents[1] / "spmd" / "torch" / "__init__.py").read_text(encoding="utf-8")
    listed = source.partition("__all__ = [")[2].partition("]")[0]
    return {f"spmd.torch.{name}" for name in re.findall(r'"(\w+)"', listed)}


def test_the_reference_has_every_public_name() -> None:
    pages = "\n".join(page.read_text(encoding="utf-8") for page in REFERENCE.glob("*.md"))
    entries = {line.split()[1] for line in pages.splitlines() if line.startswith("::: ")}
    codes = {name for name in launch.__all__ if name.startswith("EXIT_")}
    names = {f"spmd.{name}" for name in spmd.__all__ if name not in ("explain", "ops")}
    names |= {f"spmd.explain.{name}" for name in explain.__all__}
    names |= {f"spmd.ops.{name}" for name in ops.__all__}
    names |= {f"spmd.launch.{name}" for name in {*launch.__all__} - codes - {"initialize"}}
    returned = {"spmd.explain.measured.Measured", "spmd.plan.RankedPlan"}
    states = {"spmd.ops.fp8.split", "spmd.ops.fp8.merge"}
    frameworks = {"spmd.nnx.jit", "spmd.eqx.filter_jit", *torch_names()}
    assert entries == {entry(name) for name in names} | returned | states | frameworks
    assert all(f"spmd.launch.{code}" in pages for code in codes)
