"""Which files are text, and which only look so: datasets that would be learnt as they are written."""

import json
import os
from pathlib import Path
from typing import Any

from zerotrain.data.files.text_files import COMPRESSED, beginning, inner_suffix, is_parquet
from zerotrain.data.store.containers import container_of_text

BINARY = "binary"
SNIFFED_NBYTES = 8192
_JSON_NBYTES = 1 << 20
"""Bytes of a .json file in which the first row must end."""
_MIN_NBYTES, _MAX_ZEROS = 512, 0.01
"""Text has no zero bytes, a log that was cut off perhaps some; a token of two bytes has one more often than that."""
_OF_SAVED_DATASET = {"dataset_info.json", "state.json"}
_OF_SAVED_DATASETS = "dataset_dict.json"


def why_left(path: Path) -> str | None:
    """Why a file that was found in a folder is no text; None where it is, or cannot be read, to be reported by name.

    As git decides it: by a zero byte near the beginning, of what is compressed in there. Known kinds of files are told.
    """
    if is_parquet(path) or not os.access(path, os.R_OK):
        return None
    sample = beginning(path, SNIFFED_NBYTES)
    if (found := container_of_text(sample)) is not None:
        return f"{BINARY}: {found.name}; {found.for_text}"
    return BINARY if b"\0" in sample else None


def require_text(path: Path, source: str) -> None:
    """Check that a file, which the user has named, may be text.

    Args:
        source: what the user wrote ("data.path=book.txt").

    Raises:
        ValueError: it is something else, with what to do.
    """
    if is_parquet(path) or not os.access(path, os.R_OK):
        return
    sample = beginning(path, SNIFFED_NBYTES)
    if (found := container_of_text(sample)) is not None:
        verb = "holds" if path.suffix.lower() in COMPRESSED else "is"
        raise ValueError(f"{source} {verb} {found.name}; {found.for_text}")
    if len(sample) >= _MIN_NBYTES and sample.count(0) > _MAX_ZEROS * len(sample):
        raise ValueError(
            f"{source} is binary: of its first {len(sample):,} bytes {sample.count(0):,} are zero; data=tokens reads "
            "tokens, and any bytes as tokens by data.dtype=uint8 data.vocab_size=256"
        )


def require_no_dataset(path: Path, text_field: str, source: str, *, is_named: bool = False) -> None:
    """Check that a file of text is not one of a dataset, of which the brackets and names would be learnt too.

    Args:
        text_field: where the text is in its rows.
        is_named: by the user itself, and not found in a folder.

    Raises:
        ValueError: it is.
    """
    if inner_suffix(path) != ".json" or not os.access(path, os.R_OK):
        return
    if _is_of_saved_dataset(path):
        raise ValueError(
            f"{source}: {path.parent} was written by save_to_disk() of Hugging Face; choose data=huggingface "
            f"data.path={path.parent} data.column={text_field}, or a path without it"
        )
    text = beginning(path, _JSON_NBYTES).decode("utf-8-sig", "replace").lstrip()
    if not text.startswith(("{", "[")):
        return
    row = _first_row(text)
    if isinstance(row, dict) and isinstance(row.get(text_field), str):
        raise ValueError(
            f"{source}: {path} is JSON with its text in the field {text_field!r}; "
            "write each object in a line of its own and call the file .jsonl, or choose data=huggingface; another "
            "data.text_field reads it as it is"
        )
    if is_named and text.startswith("["):
        raise ValueError(
            f"{source} is a JSON array, and its brackets would be trained on; write each object in a line of its own "
            "and call the file .jsonl, or choose data=huggingface"
        )


def _is_of_saved_dataset(path: Path) -> bool:
    folder, name = path.parent, path.name
    if name in _OF_SAVED_DATASET:
        return all((folder / each).exists() for each in _OF_SAVED_DATASET) or (
            name == "dataset_info.json" and any(folder.glob("*.arrow"))
        )
    return name == _OF_SAVED_DATASETS and any(folder.glob("*/dataset_info.json"))


def _first_row(text: str) -> Any:
    """The first object of JSON, of its lines, or of its outermost array."""
    try:
        return json.JSONDecoder().raw_decode(text[1:].lstrip() if text.startswith("[") else text)[0]
    except (ValueError, RecursionError):  # no JSON, or longer than what was read of it
        return None
