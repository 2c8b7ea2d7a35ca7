"""Refuses code that a model or tokenizer of Hugging Face brings in its folder or from the hub.

Calls of transformers pass `trust_remote_code=False`; this module handles the cases that it does not cover, and the
messages.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from zerotrain.files.printable import printable
from zerotrain.files.untrusted import UntrustedFileError, read_json

CONFIGS = ("config.json", "tokenizer_config.json", "adapter_config.json")
MAX_NBYTES = 1 << 26
_KERNELS = ("attn_implementation", "experts_implementation")
_MAX_SHOWN = 200
_MAX_REASON = 600


def require_no_kernels(fields: Any, of: str) -> None:
    """Refuse fields of a model's config by which transformers would fetch compiled code from the hub and run it.

    Raises:
        ValueError: they name a repository with such code.
    """
    for name in _kernels_in(fields):
        raise ValueError(f"{of} asks for code of the hub ({name}), which zerotrain does not run; take that field out")


def refusal(folder: str, error: BaseException) -> str:
    """The first line of what transformers says of a folder; where it lacks code of its own, which it is."""
    # It met a value of another kind, and speaks of its own code.
    if isinstance(error, AttributeError | TypeError) or not isinstance(error, Exception):
        return "a file of it is damaged"
    line = printable((str(error).splitlines() or [type(error).__name__])[0], _MAX_REASON, keep="")
    if "trust_remote_code" not in str(error):
        return line
    named = printable(", ".join(dict.fromkeys(_code_of(folder))), _MAX_SHOWN, keep="")
    return f"it has code of its own{f' ({named})' * bool(named)}, which zerotrain does not run"


@contextmanager
def only_errors() -> Iterator[None]:
    """Without what transformers warns of, which it also does of a folder that it then refuses."""
    from transformers.utils import logging

    before = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    finally:
        logging.set_verbosity(before)


def _kernels_in(fields: Any) -> Iterator[str]:
    """Repositories; an implementation that transformers has itself is named without a slash."""
    for name, value in _items(fields):
        if str(name).strip("_").removesuffix("_internal") in _KERNELS:
            texts = [value, *(each for _, each in _items(value))]
            yield from (each for each in texts if isinstance(each, str) and "/" in each)
        else:
            yield from _kernels_in(value)


def _items(value: Any) -> Any:
    """The items of a dict, a list, or a config of transformers, which may hold other configs."""
    if isinstance(value, list):
        return enumerate(value)
    return (value if isinstance(value, dict) else vars(value) if hasattr(value, "model_type") else {}).items()


def _code_of(folder: str) -> Iterator[str]:
    for name in CONFIGS:
        try:
            auto_map = read_json(Path(folder) / name, dict[str, Any], max_nbytes=MAX_NBYTES).get("auto_map")
        except (OSError, UntrustedFileError):
            continue
        named = auto_map.values() if isinstance(auto_map, dict) else auto_map if isinstance(auto_map, list) else ()
        for each in named:
            yield from (str(one) for one in (each if isinstance(each, list) else [each]) if one is not None)
