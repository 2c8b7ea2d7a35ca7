"""What is noted, and what an index names, lies on the disk by then: a power cut leaves no hole in a store."""

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from zerotrain.data.prepare import Recipe, StoreWriter, forget_notes, write_store
from zerotrain.data.store import TokenStore
from zerotrain.data.text_files import find_sources


class Disk:
    """Knows how much of each file a power cut would leave, and looks at what a file tells when it gets its name."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._kept: dict[int, int] = {}
        self._names_kept: set[Path] = set()
        self.named: list[str] = []
        self._fsync, self._replace = os.fsync, os.replace
        monkeypatch.setattr(os, "fsync", self.fsync)
        monkeypatch.setattr(os, "replace", self.replace)

    def fsync(self, descriptor: int) -> None:
        self._fsync(descriptor)
        status, path = os.fstat(descriptor), Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        self._kept[status.st_ino] = status.st_size
        if path.is_dir():
            self._names_kept |= set(path.iterdir())

    def replace(self, source: Path, target: Path) -> None:
        assert self._of(source) == os.path.getsize(source)
        said, folder = json.loads(Path(source).read_text()) if target.suffix == ".json" else {}, target.parent
        if target.name == "preparing.json":
            self.require(folder / "starts.part", 8 * said["documents"])
            for number in range(-(-said["tokens"] // 100)):
                self.require(folder / f"{number:06}.bin", 2 * min(100, said["tokens"] - 100 * number))
        if target.name == "index.json":
            self.require(folder / said["documents"], 8 * said["num_documents"])
            assert self.has_named(folder / said["documents"])
            for shard in said["shards"]:
                self.require(folder / shard["name"], 2 * shard["tokens"])
        self._replace(source, target)
        self._names_kept.discard(target)
        self.named.append(target.name)

    def require(self, path: Path, nbytes: int) -> None:
        assert self._of(path) >= nbytes, path

    def has_named(self, path: Path) -> bool:
        return path in self._names_kept

    def _of(self, path: Path) -> int:
        return self._kept.get(os.stat(path).st_ino, 0)


@pytest.mark.parametrize("num_notes", [0, 3])
def test_whatever_is_told_of_tokens_lies_on_the_disk_by_then(tmp_path: Path, monkeypatch, num_notes: int):
    """Without these fsyncs no test failed: a power cut left an index of tokens that the disk never got."""
    monkeypatch.setattr("zerotrain.data.prepare.SHARD_TOKENS", 100)
    disk = Disk(monkeypatch)
    writer = StoreWriter(tmp_path, np.dtype(np.uint16), "made of this")
    tokens = np.arange(130)
    for number in range(4):
        writer.start_document()
        writer.write(tokens)
        if number < num_notes:
            writer.note(number, 0, now=True)
    writer.complete(vocab_size=130, tokenizer=None, with_documents=True)
    assert disk.named == [*["preparing.json"] * num_notes, "documents.bin", "index.json"]
    assert disk.has_named(tmp_path / "index.json")
    forget_notes(tmp_path)
    store = TokenStore.open(tmp_path)
    assert store.read(0, store.tokens).tolist() == [*range(130)] * 4
    assert store.documents is not None
    assert store.documents.tolist() == [0, 130, 260, 390]


@pytest.mark.parametrize("name", ["000000.bin", "000001.bin", "starts.part"])
@pytest.mark.parametrize("harm", ["cut", "gone"])
def test_where_less_lies_there_than_was_noted_all_is_made_anew(name: str, harm: str, tmp_path: Path, monkeypatch):
    """Cut short, a file would be filled up with zeros."""
    monkeypatch.setattr("zerotrain.data.prepare.SHARD_TOKENS", 100)
    writer = StoreWriter(tmp_path, np.dtype(np.uint16), "made of this")
    for number in range(2):
        writer.start_document()
        writer.write(np.arange(65))
        writer.note(number + 1, 0, now=True)
    writer.close()
    again = StoreWriter(tmp_path, np.dtype(np.uint16), "made of this")
    assert (again.done.file, again.done.tokens, again.done.documents) == (2, 130, 2)
    again.close()
    if harm == "gone":
        (tmp_path / name).unlink()
    else:
        os.truncate(tmp_path / name, (tmp_path / name).stat().st_size - 1)
    anew = StoreWriter(tmp_path, np.dtype(np.uint16), "made of this")
    assert (anew.done.file, anew.done.tokens, anew.done.documents) == (0, 0, 0)
    anew.close()
    assert [path.stat().st_size for path in tmp_path.iterdir()] == [0]


class Killed(BaseException):
    """What no code catches."""


@pytest.mark.parametrize("end", ["newline", "none"])
def test_killed_behind_any_piece_it_goes_on_with_the_next_and_reads_none_twice(tmp_path: Path, monkeypatch, end: str):
    """Killed just behind a file it read that file again, and its tokens stood there twice."""
    texts = tmp_path / "texts"
    texts.mkdir()
    for name, text in {"a.txt": "a" * 70, "b.jsonl": '{"text": "bee"}\n\n{"text": "b"}\n', "c.txt": "c" * 70}.items():
        (texts / name).write_text(text)
    monkeypatch.setattr("zerotrain.data.tokenizer.PIECE_NBYTES", 32)
    monkeypatch.setattr("zerotrain.data.prepare._MAX_PIECES", 1)
    monkeypatch.setattr("zerotrain.data.prepare.NOTE_S", 0.0)
    recipe = Recipe(find_sources(str(texts)), None, end)
    places: list[Any] = [(number, piece.after) for number, piece in recipe.pieces(0, 0)]
    # Behind the last piece of a file stands the next file; a place in it where one may not go on is left out.
    starts = [(0, 0)] + [(number + (after is None), after or 0) for number, after in places]
    assert len(starts) == 9
    wanted = tmp_path / "wanted"
    wanted.mkdir()
    write_store(recipe, wanted, "sources")
    tokens_of, pieces, begun = Recipe.tokens_of, Recipe.pieces, []

    def pieces_from(self: Recipe, file: int, offset: int) -> Any:
        begun.append((file, offset))
        return pieces(self, file, offset)

    monkeypatch.setattr(Recipe, "pieces", pieces_from)
    for killed_at in range(len(places)):
        left = [killed_at]

        def tokens_or_end(self: Recipe, batch: Any, left: list[int] = left) -> Any:
            left[0] -= 1
            if left[0] < 0:
                raise Killed
            return tokens_of(self, batch)

        out = tmp_path / f"killed at {killed_at}"
        out.mkdir()
        with monkeypatch.context() as patch:
            patch.setattr(Recipe, "tokens_of", tokens_or_end)
            with pytest.raises(Killed):
                write_store(recipe, out, "sources")
        write_store(recipe, out, "sources")
        assert begun[-1] == starts[killed_at]
        for name in ("000000.bin", "documents.bin", "index.json"):
            assert (out / name).read_bytes() == (wanted / name).read_bytes()
