"""What was noted of a store under way: damaged, or of another kind, it is not gone on from."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from zerotrain.data.prepare import NOTES_NAME, Done, StoreWriter
from zerotrain.data.store import TokenStore

DOCUMENTS = [np.full(100 + number, number, "uint8") for number in range(5)]


def begin_store(folder: Path) -> StoreWriter:
    return StoreWriter(folder, np.dtype("uint8"), "made of it")


def write(writer: StoreWriter, documents: list[np.ndarray]) -> None:
    for each in documents:
        writer.start_document()
        writer.write(each)


@pytest.fixture
def noted(tmp_path: Path) -> Path:
    """The folder of a store of which three documents are noted."""
    writer = begin_store(tmp_path)
    write(writer, DOCUMENTS[:3])
    writer.note(0, 17, now=True)
    writer.close()
    return tmp_path


def test_what_was_noted_is_gone_on_from(noted: Path) -> None:
    writer = begin_store(noted)
    assert (writer.done.documents, writer.done.offset, writer.done.tokens) == (3, 17, 303)
    write(writer, DOCUMENTS[3:])
    writer.complete(vocab_size=256, tokenizer=None, with_documents=True)
    store = TokenStore.open(noted)
    assert store.read(0, store.tokens).tolist() == np.concatenate(DOCUMENTS).tolist()


@pytest.mark.parametrize(
    "change",
    [
        {"offset": 18}, {"file": 1}, {"documents": 1}, {"tokens": 100}, {"begins": True}, {"begins": 0},
        {"offset": -17}, {"offset": "17"}, {"offset": 17.0}, {"offset": 10**30}, {"tokens": 10**15}, {"hash": None},
        {"made_of": ["made of it"]}, {"file": None},
    ],
)  # fmt: skip
def test_what_was_changed_since_is_begun_anew(change: dict[str, Any], noted: Path) -> None:
    content = json.loads((noted / NOTES_NAME).read_text())
    (noted / NOTES_NAME).write_text(json.dumps(content | change))
    assert begin_store(noted).done == Done("made of it")


@pytest.mark.parametrize("content", [b"", b"[" * 9999, b"{}", b"3", b"\xff", b'{"made_of": "made of it"}'])
def test_what_is_no_note_is_begun_anew(content: bytes, noted: Path) -> None:
    (noted / NOTES_NAME).write_bytes(content)
    assert begin_store(noted).done == Done("made of it")
