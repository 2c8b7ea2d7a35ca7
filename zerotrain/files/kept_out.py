"""Code of others that is kept out: modules beside a checkpoint, and code in folders of Hugging Face or on its hub."""

import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.abc import Loader
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path
from types import ModuleType
from typing import Any, NoReturn

from zerotrain.files.untrusted import UntrustedFileError, printable, read_json

CHECKPOINTS = "checkpoints"
_INSTALLED = (sys.prefix, sys.base_prefix, str(Path(__file__).parents[1]))
"""Installed code is never kept out, even if it lies inside a run's folder."""


@contextmanager
def nothing_imported_from(*folders: str | os.PathLike[str]) -> Iterator[None]:
    """Inside, a module in one of the folders is refused, unless an installed one has its name.

    Args:
        folders: runs, checkpoints or others; of a checkpoint in a run it is the run's whole folder.
    """
    guard = _Guard([_run_folder(Path(os.path.realpath(folder))) for folder in folders])
    places = [place for place, entry in enumerate(sys.path) if guard.keeps_out(entry)]
    guard.left_out = [sys.path.pop(place) for place in reversed(places)][::-1]
    sys.meta_path.insert(0, guard)
    try:
        yield
    finally:
        sys.meta_path.remove(guard)
        for place, entry in zip(places, guard.left_out, strict=True):
            sys.path.insert(place, entry)


def _run_folder(folder: Path) -> Path:
    """The run's folder of one of its checkpoints, or of all of them; otherwise the folder itself."""
    if folder.name == CHECKPOINTS:
        return folder.parent
    return folder.parent.parent if folder.parent.name == CHECKPOINTS else folder


class _Guard:
    """A finder of modules. It finds the refused ones before other finders do."""

    def __init__(self, folders: Sequence[Path]) -> None:
        self._folders = folders
        self.left_out: list[str] = []
        """Entries taken out of `sys.path`. `find_spec` searches them too."""

    def keeps_out(self, path: str) -> bool:
        """Whether a file or folder is none to import from."""
        real = Path(os.path.realpath(path))
        return any(map(real.is_relative_to, self._folders)) and not any(map(real.is_relative_to, _INSTALLED))

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """A spec that refuses to load the module; None lets other finders look. A mere question whether it exists
        is not refused: torch and transformers ask for many optional modules."""
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


# Code in the folder of a model or tokenizer of Hugging Face, or from the hub, is refused.
#
# Calls of transformers pass `trust_remote_code=False`; the functions below handle the other cases, and the messages.


CONFIGS = ("config.json", "tokenizer_config.json", "adapter_config.json")
MAX_NBYTES = 1 << 26
_KERNELS = ("attn_implementation", "experts_implementation")
_MAX_SHOWN = 200
_MAX_REASON = 600


def require_no_kernels(fields: Any, subject: str) -> None:
    """Refuse fields of a model's config by which transformers would fetch compiled code from the hub and run it.

    Raises:
        ValueError: they name a repository with such code.
    """
    for name in _kernels_in(fields):
        raise ValueError(
            f"{subject} asks for code of the hub ({name}), which zerotrain does not run; take that field out"
        )


def refusal(folder: str, error: BaseException) -> str:
    """The first line of transformers' error on a folder; if the folder needs code of its own, the name of that."""
    # It met a value of another kind, and speaks of its own code.
    if isinstance(error, AttributeError | TypeError) or not isinstance(error, Exception):
        return "a file of it is damaged"
    line = printable((str(error).splitlines() or [type(error).__name__])[0], _MAX_REASON, keep="")
    if "trust_remote_code" not in str(error):
        return line
    code = printable(", ".join(dict.fromkeys(_code_of(folder))), _MAX_SHOWN, keep="")
    names = f" ({code})" if code else ""
    return f"it has code of its own{names}, which zerotrain does not run"


@contextmanager
def only_errors() -> Iterator[None]:
    """Inside, transformers prints no warnings. It would warn of a folder before it refuses it."""
    from transformers.utils import logging

    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)


def _kernels_in(fields: Any) -> Iterator[str]:
    """Names of repositories. An implementation of transformers' own has no slash in its name."""
    for name, value in _items(fields):
        if str(name).strip("_").removesuffix("_internal") in _KERNELS:
            texts = [value, *(item for _, item in _items(value))]
            yield from (text for text in texts if isinstance(text, str) and "/" in text)
        else:
            yield from _kernels_in(value)


def _items(value: Any) -> Any:
    """The items of a dict, a list, or a config of transformers. A config may hold others."""
    if isinstance(value, list):
        return enumerate(value)
    return (value if isinstance(value, dict) else vars(value) if hasattr(value, "model_type") else {}).items()


def _code_of(folder: str) -> Iterator[str]:
    for name in CONFIGS:
        try:
            auto_map = read_json(Path(folder) / name, dict[str, Any], max_nbytes=MAX_NBYTES).get("auto_map")
        except (OSError, UntrustedFileError):
            continue
        entries = auto_map.values() if isinstance(auto_map, dict) else auto_map if isinstance(auto_map, list) else ()
        for entry in entries:
            yield from (str(one) for one in (entry if isinstance(entry, list) else [entry]) if one is not None)
