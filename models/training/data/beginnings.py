"""What stands before a text: when a model goes on with a prompt, and as it was in training."""

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path

from spmd.models.training.data.tokenizer import FileTokenizer, Tokenizer
from spmd.models.training.errors import DataError


def prompt_ids(tokenizer: Tokenizer, text: str, special: bool = True) -> tuple[list[int], int]:
    """The ids of a text that a model goes on with: at least one.

    Args:
        text: an empty one is the beginning of a document.
        special: whether what the tokenizer itself puts before a text is put there.

    Returns:
        (the ids, how many of them were put before those of the text).
    """
    ids = [int(i) for i in tokenizer.encode_batch([text])[0]]
    before = list(tokenizer.begins) if special else []
    if not ids and not before:  # without a mark of its own, a document begins where one has ended
        before = [tokenizer.eos_id if tokenizer.bos_id is None else tokenizer.bos_id]
    return before + ids, len(before)


@contextlib.contextmanager
def as_trained(folder: Path, trained: Tokenizer) -> Iterator[Path]:
    """A folder's files, the tokenizer of which begins texts as documents of training began.

    Training puts `bos_id` before every document, whatever the tokenizer itself does. Who runs the
    model later does what the tokenizer does: so this is what exports ship.

    Args:
        folder: with a `tokenizer.json`; without a usable one, of the same vocabulary, it is
            returned as it is.
        trained: what made the tokens of training.
    """
    file, bos_id = folder / "tokenizer.json", trained.bos_id
    wanted = () if bos_id is None else (bos_id,)
    try:
        shipped = FileTokenizer(file, eos_id=0)
    except DataError:
        shipped = None
    same = shipped is not None and shipped.vocab_size == trained.vocab_size
    if shipped is None or not same or shipped.begins == wanted:
        yield folder
        return
    with tempfile.TemporaryDirectory() as made:
        for other in folder.iterdir():
            if other.name != file.name:
                (Path(made) / other.name).symlink_to(other.absolute())
        (Path(made) / file.name).write_text(shipped.beginning_with(wanted), encoding="utf-8")
        yield Path(made)
