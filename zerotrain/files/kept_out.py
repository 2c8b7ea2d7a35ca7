"""Folders from which nothing is imported: who has written a checkpoint may have laid modules beside it."""

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.abc import Loader
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import NoReturn

CHECKPOINTS = "checkpoints"
_INSTALLED = (sys.prefix, sys.base_prefix, str(Path(__file__).parents[1]))
"""Installed code is never kept out, even if it lies inside a run's folder."""


@contextmanager
def nothing_imported_from(*folders: str | os.PathLike[str]) -> Iterator[None]:
    """Inside, a module that lies in one of the folders is refused, unless an installed one has its name.

    Args:
        folders: runs, checkpoints or others; of a checkpoint in a run it is the run's whole folder.
    """
    guard = _Guard([_whole(Path(os.path.realpath(each))) for each in folders])
    places = [place for place, entry in enumerate(sys.path) if guard.keeps_out(entry)]
    guard.left_out = [sys.path.pop(place) for place in reversed(places)][::-1]
    sys.meta_path.insert(0, guard)
    try:
        yield
    finally:
        sys.meta_path.remove(guard)
        for place, entry in zip(places, guard.left_out, strict=True):
            sys.path.insert(place, entry)


def _whole(folder: Path) -> Path:
    """The run's folder of one of its checkpoints, or of all of them; otherwise the folder itself."""
    if folder.name == CHECKPOINTS:
        return folder.parent
    return folder.parent.parent if folder.parent.name == CHECKPOINTS else folder


class _Guard:
    """A finder of modules that finds those which are not to be imported, before others do."""

    def __init__(self, folders: Sequence[Path]) -> None:
        self._folders = folders
        self.left_out: list[str] = []
        """Entries taken out of `sys.path`, which `find_spec` searches too."""

    def keeps_out(self, path: str) -> bool:
        """Whether a file or folder is none to import from."""
        real = Path(os.path.realpath(path))
        return any(map(real.is_relative_to, self._folders)) and not any(map(real.is_relative_to, _INSTALLED))

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """A spec that refuses to load the module; None lets other finders look. Code that only asks whether it exists
        is not refused: torch and transformers ask for many that they can do without."""
        spec = PathFinder.find_spec(name, path, target)
        if spec is None and path is None:
            spec = PathFinder.find_spec(name, self.left_out, target)
        if spec is not None and spec.has_location and spec.origin is not None and self.keeps_out(spec.origin):
            return ModuleSpec(name, _Refusal(spec.origin))
        return None


class _Refusal(Loader):
    """Loads nothing."""

    def __init__(self, path: str) -> None:
        self._path = path

    def exec_module(self, module: ModuleType) -> NoReturn:
        raise ImportError(f"{self._path} lies in the folder of the checkpoint, from which nothing is imported")
