"""What is kept of a text is what is read again, or is made anew with a line that says why."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from zerotrain.data import TextDataset
from zerotrain.data import cache as cache_module

TEXT = "the quick brown fox jumps over the lazy dog\n" * 200
OTHER = TEXT.upper()
"""As long."""


@pytest.fixture
def cache(tmp_path: Path) -> Path:
    return tmp_path / "cache"


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "fox.txt"
    path.write_text(TEXT)
    return path


def dataset(source: Path, cache: Path) -> TextDataset:
    return TextDataset(str(source), seq_len=8, cache_dir=str(cache))


def rewritten(path: Path, content: bytes) -> None:
    """Other content, under the same time of modification."""
    before = path.stat()
    path.write_bytes(content)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


HARMS: dict[str, tuple[Callable[[Path, Path], None], str]] = {
    "truncated": (lambda kept, source: os.truncate(kept, 4000), "it has 4000 bytes, and had 8800 when it was made"),
    "random bytes of the same length and time": (
        lambda kept, source: rewritten(kept, os.urandom(8800)),
        "its bytes are not those that were written",
    ),
    "a source of other text, of the same length and time": (
        lambda kept, source: rewritten(source, OTHER.encode()),
        "the text it was made of has changed",
    ),
    "no seal": (lambda kept, source: kept.with_suffix(".json").unlink(), "nothing beside it says what it holds"),
    "a seal of something else": (
        lambda kept, source: kept.with_suffix(".json").write_text('{"sha256": "a"}'),
        "what it holds cannot be read from ",
    ),
}


@pytest.mark.parametrize("harm", HARMS)
def test_a_kept_file_that_does_not_fit_is_made_anew_with_a_line_that_says_why(source, cache, capfd, harm: str):
    kept = dataset(source, cache).token_file
    do_harm, reason = HARMS[harm]
    do_harm(kept, source)
    again = dataset(source, cache)
    assert again.token_file.read_bytes() == source.read_bytes()
    [line] = capfd.readouterr().err.splitlines()
    assert line.startswith(f"{again.token_file} is made anew: {reason}")
    assert dataset(source, cache).token_file == again.token_file
    assert capfd.readouterr().err == ""


def test_what_was_read_whole_once_is_not_read_again_until_it_was_touched(source, cache, capfd, monkeypatch):
    read: list[Path] = []
    sha256_of = cache_module.sha256_of
    monkeypatch.setattr(cache_module, "sha256_of", lambda files: read.extend(files) or sha256_of(files))
    kept = dataset(source, cache).token_file
    read.clear()
    dataset(source, cache)
    assert read == []
    kept.chmod(0o400)  # a copy of a cache has other times of change too
    dataset(source, cache)
    assert read == [kept, source]
    read.clear()
    dataset(source, cache)
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
        kept = dataset(source, cache).token_file
    finally:
        os.umask(before)
    assert {path.stat().st_mode & 0o777 for path in (kept, kept.with_suffix(".json"))} == {0o600}


def test_what_a_killed_writer_leaves_is_removed_and_what_another_writes_is_left(source, cache, tmp_path):
    program = (
        "import sys, time\nfrom pathlib import Path\nfrom zerotrain.data.cache import kept_file\n"
        "def write(file):\n    file.write(b'half')\n    file.flush()\n    print('writing', flush=True)\n"
        "    time.sleep(600)\n"
        "kept_file(Path(sys.argv[1]), [Path(sys.argv[2])], write)\n"
    )
    arguments = [sys.executable, "-c", program, str(cache / "half.bin"), str(source)]
    writer = subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True)
    try:
        assert writer.stdout.readline() == "writing\n"
        [temporary] = cache.glob("*.tmp")
        cache_module.remove_abandoned(cache)
        assert temporary.exists()
    finally:
        writer.send_signal(signal.SIGKILL)
        writer.wait()
    kept = dataset(source, cache).token_file
    assert {path.name for path in cache.iterdir()} == {kept.name, kept.with_suffix(".json").name}


def test_a_writer_that_fails_leaves_nothing(source, cache):
    def write(file: object) -> None:
        raise OSError("no")

    with pytest.raises(OSError, match="no"):
        cache_module.kept_file(cache / "x.bin", [source], write)
    assert list(cache.iterdir()) == []


def test_a_change_right_after_the_hash_was_taken_is_seen(source, cache):
    """A file system's clock steps: a file written twice within a step has the same time of change."""
    for text in (OTHER, TEXT, OTHER):
        dataset(source, cache)
        rewritten(source, text.encode())
        assert dataset(source, cache).token_file.read_text() == text
