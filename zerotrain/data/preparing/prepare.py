"""Making a store of tokens of text files: read, cut, tokenised on all cores, written shard by shard."""

import hashlib
import sys
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from zerotrain.data.files.pieces import PIECE_NBYTES, AnyPlace, Cut, ExactPlace
from zerotrain.data.files.sources import Sources
from zerotrain.data.files.text_files import TextPiece, read_pieces
from zerotrain.data.preparing.document_end import DocumentEnd
from zerotrain.data.preparing.progress import Progress
from zerotrain.data.preparing.tokenizer import TextTokenizer
from zerotrain.data.preparing.writer import StoreWriter

VERSION = 2
"""Counted up when the same files come to be other tokens."""
NUM_BYTE_VALUES = 256
BATCH_NBYTES = 1 << 20
"""Tokenised together: a tokenizer takes about 150 bytes of memory for each."""
_BATCHES_UNDER_WAY = 2
_MAX_PIECES = 4096
_WARNED_NBYTES = 1 << 24


@dataclass(frozen=True)
class Recipe:
    """How files become a row of tokens.

    Args:
        tokenizer: None for bytes.
        document_end: what stands between documents, as `DocumentEnd` takes it.
        text_field: of a .jsonl object, or column of a .parquet file.

    Raises:
        ValueError: there is no such end of a document, or the tokenizer has none.
    """

    sources: Sources
    tokenizer: TextTokenizer | None
    document_end: str | None = None
    text_field: str = "text"

    def __post_init__(self) -> None:
        _ = self.ending  # which may be refused

    @cached_property
    def ending(self) -> DocumentEnd:
        """The mark between documents."""
        return DocumentEnd(self.tokenizer, self.document_end)

    @property
    def dtype(self) -> np.dtype:
        """Dtype of a token."""
        return np.dtype(np.uint8) if self.tokenizer is None else self.tokenizer.token_dtype

    @property
    def vocab_size(self) -> int:
        """Tokens are below this."""
        return NUM_BYTE_VALUES if self.tokenizer is None else self.tokenizer.vocab_size

    @property
    def fingerprint(self) -> str:
        """Differs where the same files come to be other tokens."""
        tokenizer = None if self.tokenizer is None else self.tokenizer.fingerprint()
        return hashlib.sha256(repr((VERSION, tokenizer, self.ending.name, self.text_field)).encode()).hexdigest()[:16]

    def pieces(self, file: int, offset: int) -> Iterator[tuple[int, TextPiece]]:
        """The pieces of all documents from a place on, each with the number of its file."""
        cut: Cut = AnyPlace() if self.tokenizer is None else ExactPlace(self.tokenizer.tokens_of)
        for number in range(file, len(self.sources.files)):
            start = offset if number == file else 0
            path = self.sources.files[number]
            for piece in read_pieces(path, field=self.text_field, start=start, cut=cut):
                yield number, piece

    def tokens_of(self, pieces: list[TextPiece]) -> list[np.ndarray]:
        """The tokens of each piece, with what stands between documents."""
        lack_line = [
            piece.ends and not piece.text.endswith(b"\n") and self.ending.name == "newline" for piece in pieces
        ]
        texts = [piece.text + b"\n" * lacks for piece, lacks in zip(pieces, lack_line, strict=True)]
        if self.tokenizer is None:
            return [np.frombuffer(text, np.uint8) for text in texts]
        encoded = self.tokenizer.encode_batch([text.decode(errors="replace") for text in texts])
        marks = [self.ending.marks(starts=piece.starts, ends=piece.ends) for piece in pieces]
        return [np.concatenate([before, each, after]) for each, (before, after) in zip(encoded, marks, strict=True)]


def write_store(recipe: Recipe, folder: Path, made_of: str) -> None:
    """Write the tokens of a recipe's files to a folder, going on with what an earlier call has left there.

    Args:
        folder: is there, and nobody else writes to it.
        made_of: a hash of the contents of the files.

    Raises:
        OSError: the folder cannot be written (`filename` names something in it), or a file not be read.
        ValueError: a file is broken or has no text where the recipe says.
        ImportError: a package that reads a kind of file is not installed.
    """
    sources, made_of = recipe.sources, f"{recipe.fingerprint} {made_of}"
    with closing(StoreWriter(folder, recipe.dtype, made_of)) as writer, Progress(sources.nbytes) as progress:
        sizes = [file.stat().st_size for file in sources.files]
        before = np.concatenate([[0], np.cumsum(sizes)])
        progress.start(int(before[writer.done.file]) + (writer.done.offset if writer.done.file < len(sizes) else 0))
        for batch, encoded in _encoded(recipe, writer.done.file, writer.done.offset):
            for (_, piece), tokens in zip(batch, encoded, strict=True):
                if piece.is_null:
                    writer.done.nulls += 1
                    continue
                if piece.starts:
                    writer.start_document()
                writer.write(tokens)
            number, last = batch[-1]
            if last.after is not None or last.ends:
                at_end = last.after is None
                writer.note(number + at_end, 0 if at_end else last.after or 0)
            progress.reached(int(before[number]) + last.reached, writer.done.tokens)
        writer.note(len(sources.files), 0, now=True)
        if writer.done.tokens:
            writer.complete(
                vocab_size=recipe.vocab_size,
                tokenizer=None if recipe.tokenizer is None else recipe.tokenizer.fingerprint(),
                with_documents=writer.done.documents > 1,
            )
    if nulls := writer.done.nulls:
        print(f"{sources.path}: leaves out {nulls:,} rows whose text is null", file=sys.stderr, flush=True)
    if not writer.done.tokens:
        raise ValueError(f"{sources.path} holds no text; give a file, folder or pattern with at least one document")


def _encoded(recipe: Recipe, file: int, offset: int) -> Iterator[tuple[list[tuple[int, TextPiece]], list[np.ndarray]]]:
    """Batches of pieces with their tokens, in order; the next ones are tokenised meanwhile."""
    waiting: deque[tuple[list[tuple[int, TextPiece]], Future[list[np.ndarray]]]] = deque()
    with ThreadPoolExecutor(_BATCHES_UNDER_WAY) as pool:
        for batch in _batches(recipe.pieces(file, offset)):
            _warn_of_long_pieces(recipe, batch)
            waiting.append((batch, pool.submit(recipe.tokens_of, [piece for _, piece in batch])))
            if len(waiting) > _BATCHES_UNDER_WAY:
                pieces, future = waiting.popleft()
                yield pieces, future.result()
        for pieces, future in waiting:
            yield pieces, future.result()


def _warn_of_long_pieces(recipe: Recipe, batch: list[tuple[int, TextPiece]]) -> None:
    """Before the memory is taken, which may end the process without a word."""
    for number, piece in batch:
        mb = len(piece.text) / 1e6
        if len(piece.text) > _WARNED_NBYTES and recipe.tokenizer is not None:
            print(
                f"{recipe.sources.files[number]}: {mb:.0f} MB cannot be cut without changing a token; they are "
                f"tokenised at once, which takes about {mb * 0.15:.0f} GB of memory",
                file=sys.stderr,
                flush=True,
            )


def _batches(pieces: Iterator[tuple[int, TextPiece]]) -> Iterator[list[tuple[int, TextPiece]]]:
    batch: list[tuple[int, TextPiece]] = []
    nbytes = 0
    for number, piece in pieces:
        batch.append((number, piece))
        nbytes += len(piece.text)
        if nbytes >= BATCH_NBYTES - PIECE_NBYTES or len(batch) == _MAX_PIECES:
            yield batch
            batch, nbytes = [], 0
    if batch:
        yield batch
