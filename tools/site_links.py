"""A hook of mkdocs: what the documentation links to outside of docs/ becomes a page of the site.

Links are written as the repository has them (`../tests/test_newcomers.py`), and work in an editor
and in a code browser. The site has pages of docs/ only, so the hook

- makes a page of each Markdown file that the navigation names and that lies beside docs/;
- makes a page of each other file of the repository that a page links to, with its text;
- puts the sections of README into a page that the page includes (`--8<-- "README.md:fast"`);
- rewrites the links to them.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from mkdocs.config.defaults import MkDocsConfig
    from mkdocs.structure.files import Files
    from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parent.parent
TOP_PAGES = ("CHANGELOG.md", "CONTRIBUTING.md")
HOME = {"README.md": "index.md"}
SOURCES = "source"
"""Where in the site pages of source files lie."""

_INCLUDED = re.compile(r'(?m)^--8<-- "README\.md:([\w-]+)"$')
_LINK = re.compile(r"(?<=\]\()(?!\w+:|#)([^)#\s]+)(?=[#)])")
_LANGUAGES = {".py": "python", ".sh": "bash", ".md": "markdown", ".toml": "toml", "": "bash"}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds the pages that have no file in docs/."""
    for name in TOP_PAGES:
        files.append(_generated(config, name, (ROOT / name).read_text(encoding="utf-8")))
    texts = {file.src_uri: file.content_string for file in files.documentation_pages()}
    linked = {path for uri, text in texts.items() for path in linked_files(text, uri)}
    for path in sorted(linked):
        files.append(_generated(config, f"{SOURCES}/{path}.md", source_page(path)))
    return files


def on_page_markdown(markdown: str, *, page: Page, **_: Any) -> str:
    """Rewrites the links of a page, with what it includes."""
    return rewrite(with_readme(markdown), page.file.src_uri)


def with_readme(markdown: str) -> str:
    """The text of a page directly under docs/, with the sections of README that it includes."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")

    def section(match: re.Match[str]) -> str:
        _, start, rest = readme.partition(f"<!-- --8<-- [start:{match[1]}] -->\n")
        text, end, _ = rest.partition(f"<!-- --8<-- [end:{match[1]}] -->\n")
        if not (start and end):
            raise ValueError(f"README.md has no section {match[1]}")
        return rewrite(text.rstrip("\n"), "README.md")

    return _INCLUDED.sub(section, markdown)


def rewrite(markdown: str, uri: str) -> str:
    """The text of a page with links as the site has them.

    Example:
      >>> rewrite("[log](../CHANGELOG.md#added)", "design.md")
      '[log](CHANGELOG.md#added)'
    """

    def site_link(match: re.Match[str]) -> str:
        path = _repository_path(match[0], uri)
        if not (ROOT / path).is_file():
            return match[0]  # mkdocs says that nothing is there
        return posixpath.relpath(_page_of(path), posixpath.dirname(uri) or ".")

    return _LINK.sub(site_link, markdown)


def linked_files(markdown: str, uri: str) -> Iterator[str]:
    """Files of the repository that a page links to and that have no page otherwise."""
    for match in _LINK.finditer(markdown):
        path = _repository_path(match[0], uri)
        if (ROOT / path).is_file() and _page_of(path).startswith(f"{SOURCES}/"):
            yield path


def source_page(path: str) -> str:
    """A page with the text of a file."""
    text = (ROOT / path).read_text(encoding="utf-8").rstrip()
    language = _LANGUAGES.get(Path(path).suffix, "text")
    return f"# {path}\n\n~~~~~~{language}\n{text}\n~~~~~~\n"


def _repository_path(link: str, uri: str) -> str:
    """What a link means in the repository; a page lies in docs/, but for those at the top."""
    folder = "" if uri in (*TOP_PAGES, *HOME) else posixpath.join("docs", posixpath.dirname(uri))
    return posixpath.normpath(posixpath.join(folder, link))


def _page_of(path: str) -> str:
    """The site's page, or picture, of a file of the repository."""
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    return path if path in TOP_PAGES else HOME.get(path, f"{SOURCES}/{path}.md")


def _generated(config: MkDocsConfig, uri: str, text: str) -> Any:
    from mkdocs.structure.files import File

    return File.generated(config, uri, content=text)
