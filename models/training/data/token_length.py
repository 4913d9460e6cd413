"""How much text one token stands for at most, so that a text's length bounds its number of tokens.

There is such a bound where every byte is in some token, as with byte-level BPE, and with BPE that
falls back to bytes. There is none where unknown characters become one token or none, where blanks
are dropped, or where a token takes the blanks beside it.
"""

from typing import Any

NFC = 4
"""By what factor it makes a text shorter at most, rounded up: U+1FBE, U+0308 and U+0341, which are
seven bytes, become U+0390, which is two."""

SPLITS = ("ByteLevel", "Split", "Digits", "Metaspace")


def longest_token(spec: Any) -> int | None:
    """How many bytes of UTF-8 one token stands for at most.

    Args:
        spec: the content of a `tokenizer.json`, as the library writes it.

    Returns:
        None if no bound is known.
    """
    model, added = spec["model"], spec.get("added_tokens") or []
    splits = _parts(spec.get("pre_tokenizer"), "pretokenizers")
    factor = 1
    for step in _parts(spec.get("normalizer"), "normalizers"):
        if step["type"] == "NFC":
            factor = NFC
        elif step["type"] != "Prepend":
            # What is put into the place of something has to be at least as long.
            pattern = step.get("pattern", {}).get("String")
            if step["type"] != "Replace" or pattern is None:
                return None
            if len(step["content"].encode()) < len(pattern.encode()):
                return None
    is_bounded = (
        model.get("type") == "BPE"
        and _knows_all_bytes(model, splits)
        and all(step["type"] in SPLITS and step.get("behavior") != "Removed" for step in splits)
        and not any(token["lstrip"] or token["rstrip"] for token in added)
    )
    if not is_bounded:
        return None
    # The vocabulary has some bytes in other letters, such as U+2581 for a blank; none is shorter.
    texts = [*model["vocab"], *(token["content"] for token in added)]
    return factor * max(len(text.encode("utf-8", "surrogatepass")) for text in texts)


def _knows_all_bytes(model: Any, splits: list[Any]) -> bool:
    vocabulary = model["vocab"]
    if any(step["type"] == "ByteLevel" for step in splits):
        from tokenizers.pre_tokenizers import ByteLevel

        return all(letter in vocabulary for letter in ByteLevel.alphabet())
    fallback = (f"<0x{byte:02X}>" for byte in range(256))
    return bool(model.get("byte_fallback")) and all(token in vocabulary for token in fallback)


def _parts(stage: Any, name: str) -> list[Any]:
    """The parts of a stage: of all sequences in it, or itself."""
    if stage is None:
        return []
    if stage["type"] != "Sequence":
        return [stage]
    return [part for one in stage[name] for part in _parts(one, name)]
