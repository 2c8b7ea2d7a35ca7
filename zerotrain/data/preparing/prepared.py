"""The tokens of text files: where they are kept, and made if they are not there."""

import errno
import hashlib
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from zerotrain.data.files.sources import find_sources
from zerotrain.data.files.text_files import is_plain
from zerotrain.data.preparing.cache import cache_folder, kept_store, remove_abandoned, sealed_recipe, store_name
from zerotrain.data.preparing.lock import LOCK_NAME
from zerotrain.data.preparing.prepare import Recipe, write_store
from zerotrain.data.preparing.tokenizer import TextTokenizer
from zerotrain.data.store.shards import Shard
from zerotrain.data.store.store import TokenStore


def recipe_of(
    path: str | None,
    *,
    tokenizer: str | None,
    document_end: str | None,
    text_field: str,
    cache_dir: str | None,
    out: Path | None = None,
) -> tuple[Recipe, Path]:
    """How the files of `path` become tokens, and the folder in which those are kept; see `TextDataset`.

    Args:
        out: a folder that is written to, in place of the cache: nothing is read from there.

    Raises: as `TextDataset`.
    """
    cache = cache_folder(cache_dir)
    made = None if tokenizer is None else TextTokenizer(tokenizer)
    sources = find_sources(path, without=[cache, *([] if out is None else [out])], text_field=text_field)
    return Recipe(sources, made, document_end, text_field), cache


def prepared(recipe: Recipe, cache: Path) -> TokenStore:
    """The tokens of a recipe's files: those of a single file of bytes where it lies, others from a store in the cache,
    made if it is not there yet.

    Raises:
        ValueError: the cache cannot take the store; or as of `write_store`.
    """
    sources, files = recipe.sources, recipe.sources.files
    if recipe.tokenizer is None and len(files) == 1 and is_plain(files[0]) and not sources.leaves_data:
        return TokenStore([Shard(files[0], files[0].stat().st_size)], recipe.dtype, vocab_size=recipe.vocab_size)
    with naming_setting("data.cache_dir", cache):
        store = TokenStore.open(
            kept_store(_folder_in(cache, recipe), files, recipe.fingerprint, partial(_write, recipe))
        )
    store.sources = files
    return store


def prepared_in(recipe: Recipe, folder: Path) -> TokenStore:
    """The tokens of a recipe's files, in a folder of their own.

    Raises:
        ValueError: the folder holds something else or cannot take them; or as of `write_store`.
    """
    with naming_setting("--out", folder):
        names = set() if not folder.exists() else {each.name for each in folder.iterdir()}
        if names and LOCK_NAME not in names:
            raise ValueError(f"--out={folder} holds other files; give a folder that is empty, or that is not there yet")
        if sealed_recipe(folder) not in (recipe.fingerprint, None):
            raise ValueError(f"--out={folder} holds tokens that were made with other settings; give another folder")
        write = partial(_write, recipe)
        return TokenStore.open(kept_store(folder, recipe.sources.files, recipe.fingerprint, write, private=False))


def _folder_in(cache: Path, recipe: Recipe) -> Path:
    kind, files = "text" if recipe.tokenizer is None else "tokens", recipe.sources.files
    paths = _hash("\n".join(str(file.absolute()) for file in files))
    states = _hash("\n".join(f"{each.st_size} {each.st_mtime_ns}" for each in map(Path.stat, files)))
    name = store_name(kind, paths, states, recipe.fingerprint)
    remove_abandoned(cache, superseded=store_name(kind, paths, "", recipe.fingerprint), keep=name)
    return cache / name


@contextmanager
def naming_setting(setting: str, folder: Path) -> Iterator[None]:
    """Inside, an error of writing to a folder names the setting it was given by.

    Raises:
        ValueError: the folder cannot be written, or its disk is full.
    """
    try:
        yield
    except OSError as error:
        if error.filename is None or not _is_in(Path(os.fsdecode(error.filename)), folder):
            raise
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise ValueError(
                f"{setting}={folder} has no room for the prepared text ({error.strerror}); what is done is kept, and "
                "the same command goes on: make room, or give another folder"
            ) from error
        raise ValueError(
            f"{setting}={folder} cannot take the prepared text ({error}); give a folder that can be written"
        ) from error


def _is_in(path: Path, folder: Path) -> bool:
    """Whether an error with this path is one of the folder: in it, or on the way to it."""
    path, folder = path.absolute(), folder.absolute()
    return path.is_relative_to(folder) or folder.is_relative_to(path)


def _write(recipe: Recipe, folder: Path, made_of: str) -> None:
    if (len(recipe.sources.files) > 1 or recipe.sources.leaves_data) and not recipe.sources.is_default:
        print(recipe.sources, file=sys.stderr, flush=True)
    write_store(recipe, folder, made_of)


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode(errors="surrogateescape")).hexdigest()[:16]
