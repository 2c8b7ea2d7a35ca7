"""Files of data, each made once, and read as commands read them."""

import contextlib
import gzip
import io
import json
import struct
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import zstandard

from tests.attack.fuzz.common import require_printable
from tests.unit.data.tokenizers_made import saved
from zerotrain.data import prepare
from zerotrain.data.formats import open_files
from zerotrain.data.prepare import StoreWriter, kept_store
from zerotrain.data.store import TokenStore, write_index
from zerotrain.data.text_files import read_pieces, require_no_dataset, require_text
from zerotrain.data.tokenizer import TextTokenizer


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
        kept = kept_store(folder / "kept", [folder / "source.txt"], "a recipe", _write_store)
    require_printable(said.getvalue().splitlines())
    return read_store(kept)


def make_begun(folder: Path) -> None:
    """A store that was begun: two shards are finished."""
    _write_documents(folder)


def _write_documents(folder: Path) -> StoreWriter:
    """Goes on behind the finished shards."""
    with mock.patch.object(prepare, "SHARD_TOKENS", 130):
        writer = StoreWriter(folder, np.dtype("uint8"), "made of it")
        for number in range(writer.resumed_at.file, 5):
            writer.write(np.full(60 + number, number, "uint8"), starts=True)
            writer.note(number + 1, 0, 60 * number)
        return writer


def read_begun(folder: Path) -> Any:
    """Goes on with it, or begins anew: the store is the same."""
    writer = _write_documents(folder)
    with mock.patch.object(prepare, "SHARD_TOKENS", 130):
        writer.complete(vocab_size=256, tokenizer=None)
    return read_store(folder)


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


def make_text(folder: Path) -> None:
    text = "to be or not to be, that is the question\n" * 40
    rows = [f"row {number}: {text[:number]}" for number in range(30)]
    (folder / "text.txt").write_text(text)
    (folder / "text.txt.gz").write_bytes(gzip.compress(text.encode(), mtime=0))
    lines = "".join(json.dumps({"text": row}) + "\n" for row in rows).encode()
    (folder / "rows.jsonl.zst").write_bytes(zstandard.compress(lines))
    pq.write_table(pa.table({"text": rows}), folder / "rows.parquet")


def read_text(folder: Path) -> Any:
    """As `data=text` and `prepare` read them."""
    found = []
    for path in sorted(folder.iterdir()):
        require_text(path, f"data.path={path.name}")
        require_no_dataset(path, "text", f"data.path={path.name}", is_named=True)
        found.append(b"|".join(each.text for each in read_pieces(path, field="text")))
    return found


def make_tokens(folder: Path) -> None:
    tokens = np.random.default_rng(0).integers(0, 500, 400).astype("<u2")
    np.save(folder / "numpy.npy", tokens)
    (folder / "plain.bin").write_bytes(tokens.tobytes())
    header = np.zeros(256, "<i4")
    header[:3] = 20240520, 1, len(tokens)
    (folder / "llm_c.bin").write_bytes(header.tobytes() + tokens.tobytes())
    (folder / "megatron.bin").write_bytes(tokens.tobytes())
    lengths = np.array([100, 200, 100], "<i4")
    index = b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, 8, 3, 4) + lengths.tobytes()
    index += np.array([0, 200, 600], "<i8").tobytes() + np.array([0, 1, 2, 3], "<i8").tobytes()
    (folder / "megatron.idx").write_bytes(index)


def read_tokens(folder: Path) -> Any:
    """As `data=tokens` reads them."""
    found = []
    for name in ("numpy.npy", "plain.bin", "llm_c.bin", "megatron.bin"):
        store = open_files([folder / name], dtype="uint16", vocab_size=500, source=f"data.path={name}")
        documents = store.documents
        found.append(
            (store.tokens, store.read(0, min(store.tokens, 10**6)).tobytes(), documents is None or documents.tolist())
        )
    return found
