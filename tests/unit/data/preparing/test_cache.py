"""What is kept of a text is what is read again, or is made anew with a line that says why."""

import fcntl
import os
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from zerotrain.data import TextDataset
from zerotrain.data import prepare as cache_module

TEXT = "the quick brown fox jumps over the lazy dog\n" * 200
OTHER = TEXT.upper()
"""As long."""


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """One of two files of a text."""
    (tmp_path / "texts").mkdir()
    (tmp_path / "texts/empty line.txt").write_text("\n")
    path = tmp_path / "texts/fox.txt"
    path.write_text(TEXT)
    return path


def store(source: Path, cache: Path) -> Path:
    """The folder with the tokens of the text."""
    dataset = TextDataset(str(source.parent), seq_len=8, cache_dir=str(cache))
    assert dataset.store.read(0, dataset.store.tokens).tobytes() == b"\n" + source.read_bytes()
    return dataset.store.shards[0].path.parent


def rewritten(path: Path, content: bytes) -> None:
    """Other content, under the same time of modification."""
    before = path.stat()
    path.write_bytes(content)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


HARMS: dict[str, tuple[Callable[[Path, Path], None], str]] = {
    "truncated": (
        lambda kept, source: os.truncate(kept / "000000.bin", 4000),
        "it has {less} bytes, and had {nbytes} when it was made",
    ),
    "random bytes of the same length and time": (
        lambda kept, source: rewritten(kept / "000000.bin", os.urandom(8801)),
        "its bytes are not those that were written",
    ),
    "other documents": (
        lambda kept, source: rewritten(kept / "documents.bin", bytes(16)),
        "its bytes are not those that were written",
    ),
    "a source of other text, of the same length and time": (
        lambda kept, source: rewritten(source, OTHER.encode()),
        "the text it was made of has changed",
    ),
    "no index": (lambda kept, source: (kept / "index.json").unlink(), "it has no index.json"),
    "no seal": (lambda kept, source: (kept / "seal.json").unlink(), "nothing in it says what it holds"),
    "a seal of something else": (
        lambda kept, source: (kept / "seal.json").write_text('{"sha256": "a"}'),
        "what it holds cannot be read from seal.json",
    ),
}


@pytest.mark.case("data: Text", "a store or its text is written to", "made anew, with a line that says why")
@pytest.mark.parametrize("harm", HARMS)
def test_a_store_that_does_not_fit_is_made_anew_with_a_line_that_says_why(source, cache, capfd, harm: str):
    kept = store(source, cache)
    nbytes = sum(path.stat().st_size for path in kept.iterdir() if path.name not in ("seal.json", "lock"))
    do_harm, reason = HARMS[harm]
    do_harm(kept, source)
    capfd.readouterr()
    assert store(source, cache) == kept
    line, *_ = capfd.readouterr().err.splitlines()
    assert line == f"{kept} is made anew: {reason.format(nbytes=nbytes, less=nbytes - 4801)}"
    store(source, cache)
    assert capfd.readouterr().err == ""


def test_what_was_read_whole_once_is_not_read_again_until_it_was_touched(source, cache, capfd, monkeypatch):
    read: list[str] = []
    sha256_of = cache_module.sha256_of
    monkeypatch.setattr(
        cache_module, "sha256_of", lambda files: read.extend(file.name for file in files) or sha256_of(files)
    )
    kept = store(source, cache)
    read.clear()
    capfd.readouterr()
    store(source, cache)
    assert read == []
    (kept / "000000.bin").chmod(0o400)  # a copy of a cache has other times of change too
    store(source, cache)
    assert read == ["000000.bin", "documents.bin", "index.json", "empty line.txt", "fox.txt"]
    read.clear()
    store(source, cache)
    assert read == []
    assert capfd.readouterr().err == ""


def test_a_hash_goes_over_all_pieces_of_all_files(tmp_path, monkeypatch):
    monkeypatch.setattr(cache_module, "PIECE_NBYTES", 10)
    content = os.urandom(35)
    path = tmp_path / "file"
    hashes = set()
    for place in range(35):
        path.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
        hashes.add(cache_module.sha256_of([path]))
    path.write_bytes(content)
    assert len(hashes | {cache_module.sha256_of([path])}) == 36
    assert cache_module.sha256_of([path, path]) != cache_module.sha256_of([path])


def test_nobody_else_may_read_what_was_made_of_a_text(source, cache):
    before = os.umask(0)
    try:
        kept = store(source, cache)
    finally:
        os.umask(before)
    assert kept.stat().st_mode & 0o777 == 0o700


def begun(cache: Path, name: str, *, days_old: float) -> Path:
    """A store that somebody has begun."""
    folder = cache / name
    folder.mkdir(parents=True)
    for file in ("lock", "000000.bin", "preparing.json"):
        (folder / file).write_text("{}")
    changed_s = time.time() - days_old * 86400
    os.utime(folder, (changed_s, changed_s))
    return folder


@pytest.mark.case("data: Text", "unfinished work of killed processes", "continued, or removed once it is of no use")
def test_what_was_begun_and_is_of_no_use_any_more_is_removed(source, cache):
    kept = store(source, cache)
    paths, recipe = kept.name.split("-")[1:3]
    of_changed = begun(cache, f"text-{paths}-{recipe}-{'0' * 16}", days_old=0)
    of_long_ago = begun(cache, f"tokens-{'1' * 16}-{recipe}-{'0' * 16}", days_old=8)
    of_yesterday = begun(cache, f"tokens-{'2' * 16}-{recipe}-{'0' * 16}", days_old=1)
    not_ours = {begun(cache, name, days_old=99) for name in ("my own", "text-2026-11-23")}
    under_way = begun(cache, f"text-{paths}-{recipe}-{'3' * 16}", days_old=0)
    with (under_way / "lock").open() as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        store(source, cache)
        assert set(cache.iterdir()) == {kept, of_yesterday, *not_ours, under_way}
    store(source, cache)
    assert not of_changed.exists()
    assert not of_long_ago.exists()
    assert set(cache.iterdir()) == {kept, of_yesterday, *not_ours}


def test_a_change_right_after_the_hash_was_taken_is_seen(source, cache):
    """A file system's clock steps: a file written twice within a step has the same time of change."""
    for text in (OTHER, TEXT, OTHER):
        store(source, cache)
        rewritten(source, text.encode())
        store(source, cache)


def grown(path: Path) -> None:
    with path.open("a") as file:
        file.write("more\n")


def replaced(path: Path) -> None:
    other, before = path.with_suffix(".new"), path.stat()
    other.write_text(OTHER)
    os.utime(other, ns=(before.st_atime_ns, before.st_mtime_ns))
    os.replace(other, path)


CHANGES: dict[str, Callable[[Path], object]] = {
    "grown": grown,
    "cut short": lambda path: os.truncate(path, 440),
    "removed": lambda path: path.unlink(),
    "replaced by a file of the same size and time": replaced,
    "rewritten with the same size and time": lambda path: rewritten(path, OTHER.encode()),
}
MOMENTS = ("before the hash", "behind the hash", "before the seal")


@pytest.mark.parametrize("moment", MOMENTS)
@pytest.mark.parametrize("change", CHANGES)
def test_a_text_that_changes_while_it_is_prepared_is_never_taken_for_current(
    source, cache, capfd, monkeypatch, change: str, moment: str
):
    """The stamp was taken behind the writing: it was the changed file's, and fitted ever after."""
    sha256_of = cache_module.sha256_of

    def meanwhile(files):
        reads_text = files[-1] == source
        if reads_text and moment == "before the hash":
            CHANGES[change](source)
        digest = sha256_of(files)
        if moment == ("behind the hash" if reads_text else "before the seal"):
            CHANGES[change](source)
        return digest

    with monkeypatch.context() as patch:
        patch.setattr(cache_module, "sha256_of", meanwhile)
        with pytest.raises(ValueError, match=f"data.path: {source} was written to while it was read; .* again") as told:
            store(source, cache)
    assert "\n" not in str(told.value)
    if change == "removed":
        source.write_text(OTHER)
    [left] = cache.iterdir()
    assert not {"seal.json", "index.json"} & {path.name for path in left.iterdir()}
    store(source, cache)  # which holds it against the file as it is
    capfd.readouterr()
    store(source, cache)
    assert capfd.readouterr().err == ""


def test_a_store_of_another_recipe_is_made_anew(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    written = []

    def write(folder: Path, made_of: str) -> None:
        written.append(folder)
        (folder / "000000.bin").write_bytes(source.read_bytes())
        (folder / "index.json").write_text("{}")

    for recipe in ("one", "one", "another", "another"):
        cache_module.kept_store(tmp_path / "store", [source], recipe, write)
    assert len(written) == 2
    assert "is made anew: it was made with other settings" in capsys.readouterr().err
