"""Files of data, each made once, and read as commands read them."""

import contextlib
import io
import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from tests.attack.fuzz.common import require_printable
from tests.unit.data.tokenizers_made import saved
from zerotrain.data.files.text_files import read_pieces
from zerotrain.data.preparing.cache import kept_store, sealed_recipe
from zerotrain.data.preparing.tokenizer import TextTokenizer
from zerotrain.data.preparing.writer import StoreWriter
from zerotrain.data.store import scan
from zerotrain.data.store.store import TokenStore, write_index


def make_store(folder: Path) -> None:

    tokens = np.random.default_rng(0).integers(0, 500, 5000).astype("<u2")
    (folder / "000000.bin").write_bytes(tokens[:3000].tobytes())
    (folder / "000001.bin").write_bytes(tokens[3000:].tobytes())
    documents = np.array([0, 10, 700, 2999, 3000, 4200])
    shards = [("000000.bin", 3000), ("000001.bin", 2000)]
    write_index(folder, dtype="uint16", shards=shards, vocab_size=500, documents=documents)


def read_store(folder: Path) -> Any:
    store = TokenStore.open(folder)
    documents = store.documents
    said = store.vocab_size, store.tokenizer, str(store.dtype), store.tokens
    return said, store.read(0, store.tokens).tobytes(), None if documents is None else documents.tolist()


def make_kept(folder: Path) -> None:

    source = folder / "source.txt"
    source.write_bytes(b"to be or not to be\n" * 200)
    kept_store(folder / "kept", [source], "a recipe", _write_store)


def _write_store(folder: Path, sources_sha256: str) -> None:
    make_store(folder)


def read_kept(folder: Path) -> Any:
    """A seal that does not fit has the store made anew."""

    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        sealed_recipe(folder / "kept")
        kept = kept_store(folder / "kept", [folder / "source.txt"], "a recipe", _write_store)
    require_printable(said.getvalue().splitlines())
    return read_store(kept)


def make_begun(folder: Path) -> None:
    """A store that was begun and noted, not completed."""
    writer = _begun(folder)
    _write_documents(writer, 0, 3)
    writer.note(1, 17, now=True)
    writer.close()


def _begun(folder: Path) -> Any:

    return StoreWriter(folder, np.dtype("uint8"), "made of it")


def _write_documents(writer: Any, first: int, last: int) -> None:

    for number in range(first, last):
        writer.start_document()
        writer.write(np.full(100 + number, number, "uint8"))


def read_begun(folder: Path) -> Any:
    """Goes on with it, or begins anew: the store is the same."""
    writer = _begun(folder)
    _write_documents(writer, writer.done.documents, 5)
    writer.complete(vocab_size=256, tokenizer=None, with_documents=True)
    return read_store(folder)


def make_scan(folder: Path) -> None:
    (folder / "store").mkdir()
    make_store(folder / "store")
    (folder / "scan.json").write_text(json.dumps(asdict(scan._extremes(TokenStore.open(folder / "store"), "it"))))


def read_scan(folder: Path) -> Any:

    store = TokenStore.open(folder / "store")
    (folder / "scan.json").rename(folder / f"scan-{scan._key(store)}.json")
    scan.require_known(store, vocab_size=500, source="data.path=store", cache_folder=folder)
    return "known"


def make_jsonl(folder: Path) -> None:
    rows = [{"text": f"row {number}", "id": number, "more": [1, {"a": None}]} for number in range(20)]
    (folder / "texts.jsonl").write_text("\n".join(json.dumps(each) for each in rows) + "\n")


def read_jsonl(folder: Path) -> Any:

    return b"|".join(each.text for each in read_pieces(folder / "texts.jsonl", field="text"))


def make_tokenizer(folder: Path) -> None:
    saved("bytes, GPT-2", folder)


def read_tokenizer(folder: Path) -> Any:
    tokenizer = TextTokenizer(str(folder))
    ids = tokenizer.encode("to be or not to be, that is the question").tolist()
    return tokenizer.vocab_size, tokenizer.end_of_text, ids, tokenizer.decode(ids)
