"""A removal of what a dead save has left, killed itself: the next one finishes it."""

import os
from pathlib import Path
from typing import Any

import pytest

from zerotrain.checkpoint import folder
from zerotrain.checkpoint.folder import remove_dead


@pytest.mark.parametrize("num_removed", range(4))
def test_killed_anywhere_the_next_removal_finishes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, num_removed: int
):
    """Its lock was removed among the first: the rest was nobody's, and stayed (`make chaos`, 2026-11-22)."""
    partial = tmp_path / f".step-00000003.partial-{'0' * 16}"
    partial.mkdir()
    for name in ("lock", "rank-00000.safetensors", "described-00001.json", "manifest.json"):
        (partial / name).touch()
    unlink, left = os.unlink, [num_removed]

    def killed(*arguments: Any, **named: Any) -> None:
        if not left[0]:
            raise KeyboardInterrupt
        left[0] -= 1
        unlink(*arguments, **named)

    # The worst order of the names, which a file system may have.
    listed, scanned = os.listdir, os.scandir
    monkeypatch.setattr(folder.os, "listdir", lambda path: sorted(listed(path), key=lambda name: name != "lock"))
    monkeypatch.setattr(folder.shutil.os, "scandir", lambda path: _Sorted(scanned(path)))
    with monkeypatch.context() as patched:
        patched.setattr(os, "unlink", killed)
        with pytest.raises(KeyboardInterrupt):
            remove_dead(tmp_path)
    remove_dead(tmp_path)
    assert listed(tmp_path) == []


class _Sorted:
    """What os.scandir gives, the lock first."""

    def __init__(self, entries: Any) -> None:
        self._entries = entries

    def __enter__(self) -> list[Any]:
        return sorted(self._entries, key=lambda entry: entry.name != "lock")

    def __exit__(self, *_: object) -> None:
        self._entries.close()
