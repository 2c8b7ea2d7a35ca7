"""TokenFiles: tokens of any tokenizer, in the files that people have."""

from pathlib import Path

from zerotrain.data.preparing.cache import cache_folder
from zerotrain.data.store.facts import describe_tokens, fingerprint_tokens
from zerotrain.data.store.formats import open_files
from zerotrain.data.store.scan import require_known
from zerotrain.data.store.store import TokenStore
from zerotrain.data.store.token_paths import TokenPaths, find_token_paths
from zerotrain.data.store.windows import split, whole


class TokenFiles:
    """Files of tokens (see `zerotrain.data.store.formats`), or a store of them (see `zerotrain.data.store.store`).

    Args:
        path: a file, a folder or a glob pattern, see `zerotrain.data.store.token_paths`.
        seq_len: tokens of a sequence.
        vocab_size: tokens the model knows; every token in the files must be below. None for as many as the store says
            it has.
        dtype: of a token in files that do not say it themselves: uint8, uint16, uint32 or uint64.
        validation_path: validation tokens, named as `path`. Without it, and without files in `path` that are called
            `val`, they are split off.
        validation_fraction: part split off for validation where it has no files of its own, between 0 and 1; 0: none.
        cache_dir: where it is kept what has been found in the files; None for `$XDG_CACHE_HOME/zerotrain` or
            `~/.cache/zerotrain`.

    Raises:
        FileNotFoundError: a file is not there.
        OSError: a file cannot be read.
        ValueError: a file is empty, damaged, too short, of another format or holds a token that is too large, is for
            training and validation, or an argument is out of range.
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
        if seq_len < 1:
            raise ValueError(f"data.seq_len={seq_len} is too small; it must be at least 1")
        source = f"data.path={path}"
        found = find_token_paths(path, source)
        store = _open(found.train, dtype=dtype, vocab_size=vocab_size, source=source)
        self.vocab_size = _vocab_size(vocab_size, store, source)
        kept_in = cache_folder(cache_dir)
        require_known(store, vocab_size=self.vocab_size, source=source, cache_folder=kept_in)
        name, files = _validation_files(validation_path, found, source)
        if not files:
            self.train, self.validation = self._parts = split(
                store,
                seq_len=seq_len,
                vocab_size=self.vocab_size,
                validation_fraction=validation_fraction,
                source=source,
            )
            return
        validation = _open(files, dtype=dtype, vocab_size=vocab_size, source=name)
        _require_apart(store, validation, name)
        require_known(validation, vocab_size=self.vocab_size, source=name, cache_folder=kept_in)
        self.train, self.validation = self._parts = (
            whole(store, seq_len=seq_len, vocab_size=self.vocab_size, source=source),
            whole(validation, seq_len=seq_len, vocab_size=self.vocab_size, source=name),
        )

    def summary(self) -> str:
        """One line: files, tokens, rows, what is unused, validation rows."""
        return describe_tokens(*self._parts)  # which a user may have wrapped

    def fingerprint(self) -> dict[str, int | str]:
        """Values that are equal on machines with equal data, see `fingerprint_tokens`.

        Raises:
            OSError: a file cannot be read.
        """
        return fingerprint_tokens(*self._parts)


def _open(files: tuple[Path, ...], *, dtype: str, vocab_size: int | None, source: str) -> TokenStore:
    if files[0].is_dir():
        return TokenStore.open(files[0])
    return open_files(files, dtype=dtype, vocab_size=vocab_size, source=source)


def _vocab_size(given: int | None, store: TokenStore, source: str) -> int:
    known = store.vocab_size if given is None else given
    if known is None:
        raise ValueError(
            f"data.vocab_size=null takes the size from a store, and {source} is no store; give that of the tokenizer"
        )
    return known


def _validation_files(given: str | None, found: TokenPaths, source: str) -> tuple[str, tuple[Path, ...]]:
    """(name of the validation files in messages, the files); no files if validation is to be split off."""
    if given is not None:
        name = f"data.validation_path={given}"
        named = find_token_paths(given, name)
        return name, named.validation or named.train
    if len(found.validation) == 1:
        return f"data.validation_path={found.validation[0]}", found.validation
    return f"{source} (its files called val)", found.validation


def _require_apart(train: TokenStore, validation: TokenStore, name: str) -> None:
    """Check that no file is read for both."""
    places = {(status.st_dev, status.st_ino) for status in (shard.path.stat() for shard in train.shards)}
    for shard in validation.shards:
        status = shard.path.stat()
        if (status.st_dev, status.st_ino) in places:
            raise ValueError(
                f"{name} reads {shard.path}, which data.path reads too: validation would be training; give other "
                "files, or null to split validation off data.path"
            )
