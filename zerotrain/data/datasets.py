"""The datasets of tokens: of text files, and of files of tokens."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from zerotrain.data.batches import require_at_least
from zerotrain.data.formats import TokenPaths, find_token_paths, open_files, place_on_disk
from zerotrain.data.prepare import NUM_BYTE_VALUES, prepare_in_cache, recipe_of
from zerotrain.data.store import TokenStore
from zerotrain.data.windows import TokenWindows, describe_tokens, fingerprint_tokens, split, whole


class _TokenDataset:
    """The common part of datasets of stores of tokens."""

    _parts: tuple[TokenWindows, TokenWindows]
    """Training and validation as they were made: a user may have wrapped them."""
    _num_files: int | None = None
    """Files of text behind the tokens; None: there is no text, and the files of the tokens are counted."""

    def summary(self) -> str:
        """One line: files, tokens, rows, the unused part, validation rows."""
        return describe_tokens(*self._parts, self._num_files)

    def fingerprint(self) -> dict[str, int | str]:
        """Values that are equal on machines with equal data, see `fingerprint_tokens`.

        Raises:
            OSError: a file cannot be read.
        """
        return fingerprint_tokens(*self._parts)


class TextDataset(_TokenDataset):
    """Text, one token a byte or as a tokenizer cuts it; its documents one behind the other, files in sorted order.

    A single file of bytes is read where it lies. Other text becomes a store of tokens in `cache_dir`, under a name that
    has hashes of the files' paths, sizes and modification times, and of what is made of them: a change of any of
    these makes a new one. A store that is damaged, or holds other text than the files, is made anew, with a line on
    stderr that says why.

    Args:
        path: a file, a folder, a glob pattern, or None for the standard library of the running Python
            (see `zerotrain.data.text_files.find_sources`).
        seq_len: tokens of a sequence.
        vocab_size: tokens the model knows, at least those of the tokenizer, or 256 of bytes; None for just as many as
            the tokenizer has.
        tokenizer: a folder with a Hugging Face tokenizer, or the name of one on the hub; None for bytes.
        document_end: the mark between documents: "eos" or "bos" of the tokenizer, "newline" where a document does
            not end with one, or "none"; None for eos where the tokenizer has one, else newline. A file of plain text is
            a document, and so are a line of .jsonl and a row of .parquet.
        text_field: where the text is in an object of .jsonl, or the column in a .parquet file.
        validation_fraction: part of the text kept for validation, between 0 and 1; 0: none.
        cache_dir: where stores are kept; None for `$XDG_CACHE_HOME/zerotrain` or `~/.cache/zerotrain`.

    Raises:
        FileNotFoundError: `path` names nothing.
        ImportError: a tokenizer is asked for, and transformers is not installed; or files need a package that is not.
        ValueError: there is no such tokenizer, the text is empty or too short, a file is broken, an argument is out of
            range, or the cache cannot be written.
    """

    def __init__(
        self,
        path: str | None = None,
        *,
        seq_len: int,
        vocab_size: int | None = NUM_BYTE_VALUES,
        tokenizer: str | None = None,
        document_end: str | None = None,
        text_field: str = "text",
        validation_fraction: float = 0.1,
        cache_dir: str | None = None,
    ) -> None:
        require_at_least("seq_len", seq_len, 1)
        if tokenizer is None and vocab_size is None:
            raise ValueError(
                "data.vocab_size=null takes the size from the tokenizer, and data.tokenizer=null; give data.tokenizer, "
                "a folder with one, or choose data=text, which reads bytes"
            )
        recipe, cache = recipe_of(
            path, tokenizer=tokenizer, document_end=document_end, text_field=text_field, cache_dir=cache_dir
        )
        self.tokenizer, self._num_files = recipe.tokenizer, len(recipe.sources.files)
        self.end_of_text = None if self.tokenizer is None else self.tokenizer.end_of_text
        """The token at the end of a text; None of bytes, and of a tokenizer without one."""
        needed, needing = NUM_BYTE_VALUES, "bytes of text need"
        if self.tokenizer is not None:
            needed, needing = self.tokenizer.vocab_size, f"the tokenizer of {tokenizer} needs"
        self.vocab_size = needed if vocab_size is None else vocab_size
        if self.vocab_size < needed:
            raise ValueError(f"data.vocab_size={vocab_size} is too small; {needing} {needed}")
        self.store, source = prepare_in_cache(recipe, cache), recipe.sources.path
        self.train, self.validation = self._parts = split(
            self.store, seq_len=seq_len, vocab_size=self.vocab_size, fraction=validation_fraction, source=source
        )

    def fingerprint(self) -> dict[str, int | str]:
        """As of all datasets of tokens, with the tokenizer."""
        return super().fingerprint() | {"tokenizer": self.store.tokenizer or "bytes"}

    def encode(self, text: str) -> torch.Tensor:
        """Text to tokens: (num_tokens,) int64."""
        if self.tokenizer is not None:
            return torch.from_numpy(self.tokenizer.encode(text).astype(np.int64))
        return torch.tensor(list(text.encode()), dtype=torch.int64)

    def decode(self, ids: torch.Tensor | Sequence[int]) -> str:
        """Tokens to text; invalid UTF-8, as of a generated or cut character, becomes U+FFFD."""
        values = ids.tolist() if isinstance(ids, torch.Tensor) else ids
        if self.tokenizer is not None:
            return self.tokenizer.decode(values)
        return bytes(value for value in values if value < NUM_BYTE_VALUES).decode(errors="replace")


# TokenFiles: tokens of any tokenizer, in files of people's own.


class TokenFiles(_TokenDataset):
    """Files of tokens (see `zerotrain.data.formats`), or a store of them (see `zerotrain.data.store`).

    Args:
        path: a file, a folder or a glob pattern, see `zerotrain.data.formats`.
        seq_len: tokens of a sequence.
        vocab_size: tokens the model knows; a row with a token that is not below is refused when it is read. None for
            as many as the store says it has.
        dtype: of a token in files that do not say it themselves: uint8, uint16, uint32 or uint64.
        validation_path: validation tokens, named as `path`. Without it, and without files in `path` that are called
            `val`, they are split off.
        validation_fraction: part split off for validation where it has no files of its own, between 0 and 1; 0: none.
        cache_dir: of no effect; the settings of older runs have it.

    Raises:
        FileNotFoundError: a file is not there.
        OSError: a file cannot be read.
        ValueError: a file is empty, damaged, too short or of another format, is for training and validation, or an
            argument is out of range.
    """

    def __init__(
        self,
        path: str,
        *,
        seq_len: int,
        vocab_size: int | None,
        dtype: str = "uint16",
        validation_path: str | None = None,
        validation_fraction: float = 0.1,
        cache_dir: str | None = None,
    ) -> None:
        require_at_least("seq_len", seq_len, 1)
        source = f"data.path={path}"
        paths = find_token_paths(path, source)
        store = _open(paths.train, dtype=dtype, vocab_size=vocab_size, source=source)
        known_size = store.vocab_size if vocab_size is None else vocab_size
        if known_size is None:
            raise ValueError(
                f"data.vocab_size=null takes the size from a store, and {source} is no store; give that of the "
                "tokenizer"
            )
        self.vocab_size = known_size
        name, files = _validation_files(validation_path, paths, source)
        if not files:
            self.train, self.validation = self._parts = split(
                store, seq_len=seq_len, vocab_size=self.vocab_size, fraction=validation_fraction, source=source
            )
            return
        validation = _open(files, dtype=dtype, vocab_size=vocab_size, source=name)
        _require_apart(store, validation, name)
        self.train, self.validation = self._parts = (
            whole(store, seq_len=seq_len, vocab_size=self.vocab_size, source=source),
            whole(validation, seq_len=seq_len, vocab_size=self.vocab_size, source=name),
        )


def _open(files: tuple[Path, ...], *, dtype: str, vocab_size: int | None, source: str) -> TokenStore:
    if files[0].is_dir():
        return TokenStore.open(files[0])
    return open_files(files, dtype=dtype, vocab_size=vocab_size, source=source)


def _validation_files(validation_path: str | None, paths: TokenPaths, source: str) -> tuple[str, tuple[Path, ...]]:
    """(name of the validation files in messages, the files); no files if validation is to be split off."""
    if validation_path is not None:
        name = f"data.validation_path={validation_path}"
        own_paths = find_token_paths(validation_path, name)
        return name, own_paths.validation or own_paths.train
    if len(paths.validation) == 1:
        return f"data.validation_path={paths.validation[0]}", paths.validation
    return f"{source} (its files called val)", paths.validation


def _require_apart(train: TokenStore, validation: TokenStore, name: str) -> None:
    """Refuse the same file for training and validation."""
    places = {place_on_disk(shard.path.stat()) for shard in train.shards}
    for shard in validation.shards:
        if place_on_disk(shard.path.stat()) in places:
            raise ValueError(
                f"{name} reads {shard.path}, which data.path reads too: validation would be training; give other "
                "files, or null to split validation off data.path"
            )
