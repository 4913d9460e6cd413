"""`manifest.json`: how a manifest is written, and how it is read, every member checked.

Nothing here is code, and nothing is run: names are looked up in tables, paths stay in the folder.
docs/bundle.md describes every member.
"""

from __future__ import annotations

import dataclasses
import math
import re
from typing import Any

from models.placement import Entry
from serving.bundle.checked import Checked
from serving.bundle.function import ROLES, BundleError
from serving.bundle.manifest import (
    PLATFORMS,
    STORED_AS,
    Argument,
    Entrypoint,
    Filled,
    Leaf,
    Manifest,
    Shape,
    StoredFile,
    Symbol,
)
from serving.bundle.manifest_checks import NAME, check, check_fill, check_name, check_symbol

FORMAT = "spmd-bundle"
SCHEMA = 1


def to_json(manifest: Manifest) -> dict[str, Any]:
    """What the file holds."""
    content = dataclasses.asdict(
        dataclasses.replace(manifest, state=tuple(map(_with_plain_fill, manifest.state)))
    )
    if not manifest.symbols:  # programs that know of none read such bundles, too
        del content["symbols"]
    return {"format": FORMAT, "schema": SCHEMA, **content}


def _with_plain_fill(leaf: Filled) -> Filled:
    finite = math.isfinite(leaf.fill)
    return leaf if finite else dataclasses.replace(leaf, fill=str(leaf.fill))  # type: ignore[arg-type]


def from_json(content: Checked) -> Manifest:
    """The manifest that a file holds.

    Raises:
      BundleError: another format or schema, a member that is missing, unknown or of another type,
        or members that contradict each other.
    """
    if content["format"].plain() != FORMAT:
        raise BundleError(f"{content.where} is no manifest of a bundle: its format is not {FORMAT}")
    schema = content["schema"].plain()
    if schema != SCHEMA:
        raise BundleError(
            f"{content.where} has schema {schema!r:.40} and this program knows {SCHEMA}; load it "
            "with the version that wrote it, or export it again"
        )
    content.only("format", "schema", *(f.name for f in dataclasses.fields(Manifest)))
    quantization = content["quantization"]
    manifest = Manifest(
        name=content["name"].text(),
        producer={k: v.text() for k, v in content["producer"].items()},
        primary=content["primary"].text(),
        functions={k: _entrypoint(k, v) for k, v in content["functions"].items()},
        weights=tuple(map(_leaf, content["weights"])),
        state=tuple(map(_filled, content["state"])),
        specs={k: tuple(map(_entry, v)) for k, v in content["specs"].items()},
        contract={k: v.plain() for k, v in content["contract"].items()},
        goldens=tuple({k: v.plain() for k, v in g.items()} for g in content["goldens"]),
        quantization=None
        if quantization.value is None
        else {k: v.plain() for k, v in quantization.items()},
        tokenizer=tuple(v.text() for v in content["tokenizer"]),
        files={_path(k, content.where): _stored_file(v) for k, v in content["files"].items()},
        symbols={k: _symbol(k, v) for k, v in content["symbols"].items()}
        if "symbols" in content
        else {},
    )
    check(manifest, content.where)
    return manifest


def _entrypoint(name: str, content: Checked) -> Entrypoint:
    content.only(*(f.name for f in dataclasses.fields(Entrypoint)))
    if content["name"].text() != name:
        raise BundleError(f"{content.where} calls itself {content['name'].text()[:60]!r}")
    modules = {}
    for platform, file in content["modules"].items():
        Checked(platform, f"{content.where}: modules").one_of(*PLATFORMS)
        modules[platform] = _path(file.text(), file.where)
    return Entrypoint(
        name=check_name(name, content.where),
        tags={k: _tag(v) for k, v in content["tags"].items()},
        modules=modules,
        arguments=tuple(map(_argument, content["arguments"])),
        outputs=tuple(map(_leaf, content["outputs"])),
        tree=content["tree"].plain(),
        custom_calls={k: v.count() for k, v in content["custom_calls"].items()},
        composites={k: v.count() for k, v in content["composites"].items()},
    )


def _tag(content: Checked) -> int | str:
    return content.text() if isinstance(content.value, str) else content.count()


def _argument(content: Checked) -> Argument:
    content.only("name", "role", "leaves")
    role: Any = content["role"].one_of(*ROLES)
    return Argument(content["name"].text(), role, tuple(map(_leaf, content["leaves"])))


def _leaf(content: Checked) -> Leaf:
    content.only("path", "shape", "dtype")
    return Leaf(*_array(content))


def _filled(content: Checked) -> Filled:
    content.only("path", "shape", "dtype", "fill")
    leaf = Filled(*_array(content), content["fill"].number())
    check_fill(leaf)
    return leaf


def _array(content: Checked) -> tuple[str, Shape, str]:
    shape = tuple(
        size.text() if isinstance(size.value, str) else size.count() for size in content["shape"]
    )
    return content["path"].text(), shape, content["dtype"].one_of(*STORED_AS)


def _symbol(name: str, content: Checked) -> Symbol:
    content.only(*(f.name for f in dataclasses.fields(Symbol)))
    most = content["at_most"]
    symbol = Symbol(
        content["at_least"].count(),
        None if most.value is None else most.count(),
        content["multiple_of"].count(),
    )
    check_symbol(name, symbol, content.where)
    return symbol


def _entry(content: Checked) -> Entry:
    if content.value is None:
        return None
    if isinstance(content.value, list):
        return tuple(name.text() for name in content)
    return content.text()


def _stored_file(content: Checked) -> StoredFile:
    content.only("size", "sha256")
    digest = content["sha256"].text()
    if not re.fullmatch(r"[0-9a-f]{64}", digest):
        raise BundleError(f"{content.where}: sha256 is no SHA-256")
    return StoredFile(content["size"].count(), digest)


def _path(path: str, where: str) -> str:
    """A path below the folder: names joined by `/`, none of which leads elsewhere."""
    parts = path.split("/")
    if len(parts) > 8 or any(not NAME.fullmatch(part) for part in parts):
        raise BundleError(f"{where} names the file {path[:100]!r}, which is no path in the folder")
    return path
