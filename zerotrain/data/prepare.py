"""Making a store of tokens of text files: read, cut, tokenised on all cores, written shard by shard."""

import hashlib
import sys
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from zerotrain.data.pieces import PIECE_NBYTES, AnyPlace, Cut, ExactPlace
from zerotrain.data.prepare_writer import StoreWriter
from zerotrain.data.progress import Progress
from zerotrain.data.sources import Sources
from zerotrain.data.text_files import Piece, read_pieces
from zerotrain.data.tokenizer import TextTokenizer

VERSION = 2
"""Counted up when the same files come to be other tokens."""
DOCUMENT_ENDS = ("eos", "bos", "newline", "none")
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
        document_end: what stands between documents, one of `DOCUMENT_ENDS`; None: eos where the tokenizer has one,
            else newline. A newline is put behind a document that does not end with one.
        text_field: of a .jsonl object, or column of a .parquet file.

    Raises:
        ValueError: there is no such end of a document, or the tokenizer has none.
    """

    sources: Sources
    tokenizer: TextTokenizer | None
    document_end: str | None = None
    text_field: str = "text"

    def __post_init__(self) -> None:
        given, tokenizer = self.document_end, self.tokenizer
        if given not in (None, *DOCUMENT_ENDS):
            raise ValueError(f"data.document_end={given} is not known; it must be {', '.join(DOCUMENT_ENDS)} or null")
        if given in ("eos", "bos") and self._mark(given) is None:
            whose = "bytes have" if tokenizer is None else f"the tokenizer of {tokenizer.name} has"
            raise ValueError(f"data.document_end={given}: {whose} no such token; choose newline or none")
        if given == "newline" and not self._has_newline():
            raise ValueError(
                "data.document_end=newline: the tokenizer makes no token of a newline; choose eos, bos or none"
            )

    @property
    def end(self) -> str:
        """What stands between documents."""
        if self.document_end is not None:
            return self.document_end
        if self._mark("eos") is not None:
            return "eos"
        return "newline" if self._has_newline() else "none"

    @property
    def dtype(self) -> np.dtype:
        """Of a token."""
        return np.dtype(np.uint8) if self.tokenizer is None else self.tokenizer.token_dtype

    @property
    def vocab_size(self) -> int:
        """Tokens are below this."""
        return NUM_BYTE_VALUES if self.tokenizer is None else self.tokenizer.vocab_size

    @property
    def fingerprint(self) -> str:
        """Differs where the same files come to be other tokens."""
        tokenizer = None if self.tokenizer is None else self.tokenizer.fingerprint()
        return hashlib.sha256(repr((VERSION, tokenizer, self.end, self.text_field)).encode()).hexdigest()[:16]

    def pieces(self, file: int, offset: int) -> Iterator[tuple[int, Piece]]:
        """The pieces of all documents from a place on, each with the number of its file."""
        cut: Cut = AnyPlace() if self.tokenizer is None else ExactPlace(self.tokenizer.tokens_of)
        for number in range(file, len(self.sources.files)):
            start = offset if number == file else 0
            path = self.sources.files[number]
            for piece in read_pieces(path, field=self.text_field, start=start, cut=cut):
                yield number, piece

    def tokens_of(self, pieces: list[Piece]) -> list[np.ndarray]:
        """The tokens of each piece, with what stands between documents."""
        texts = [piece.text + b"\n" * self._lacks_newline(piece) for piece in pieces]
        if self.tokenizer is None:
            return [np.frombuffer(text, np.uint8) for text in texts]
        encoded = self.tokenizer.encode_batch([text.decode(errors="replace") for text in texts])
        mark = np.array([self._mark(self.end) or 0], self.dtype)
        before = [mark[: self.end == "bos" and piece.starts] for piece in pieces]
        after = [mark[: self.end == "eos" and piece.ends] for piece in pieces]
        return [np.concatenate(each) for each in zip(before, encoded, after, strict=True)]

    def _lacks_newline(self, piece: Piece) -> bool:
        return self.end == "newline" and piece.ends and not piece.text.endswith(b"\n")

    def _mark(self, end: str) -> int | None:
        if self.tokenizer is None or end not in ("eos", "bos"):
            return None
        return self.tokenizer.end_of_text if end == "eos" else self.tokenizer.beginning_of_text

    def _has_newline(self) -> bool:
        return self.tokenizer is None or self.tokenizer.tokens_of("a\n") != self.tokenizer.tokens_of("a")


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
    if not writer.done.tokens:
        raise ValueError(f"{sources.path} holds no text; give a file, folder or pattern with at least one document")


def _encoded(recipe: Recipe, file: int, offset: int) -> Iterator[tuple[list[tuple[int, Piece]], list[np.ndarray]]]:
    """Batches of pieces with their tokens, in order; the next ones are tokenised meanwhile."""
    waiting: deque[tuple[list[tuple[int, Piece]], Future[list[np.ndarray]]]] = deque()
    with ThreadPoolExecutor(_BATCHES_UNDER_WAY) as pool:
        for batch in _batches(recipe.pieces(file, offset)):
            _warn_of_long_pieces(recipe, batch)
            waiting.append((batch, pool.submit(recipe.tokens_of, [piece for _, piece in batch])))
            if len(waiting) > _BATCHES_UNDER_WAY:
                pieces, future = waiting.popleft()
                yield pieces, future.result()
        for pieces, future in waiting:
            yield pieces, future.result()


def _warn_of_long_pieces(recipe: Recipe, batch: list[tuple[int, Piece]]) -> None:
    """Before the memory is taken, which may end the process without a word."""
    for number, piece in batch:
        mb = len(piece.text) / 1e6
        if len(piece.text) > _WARNED_NBYTES and recipe.tokenizer is not None:
            print(
                f"{recipe.sources.files[number]}: {mb:.0f} MB hold no place where a cut would change no token; they "
                f"are tokenised at once, which takes about {mb * 0.15:.0f} GB of memory",
                file=sys.stderr,
                flush=True,
            )


def _batches(pieces: Iterator[tuple[int, Piece]]) -> Iterator[list[tuple[int, Piece]]]:
    batch: list[tuple[int, Piece]] = []
    nbytes = 0
    for number, piece in pieces:
        batch.append((number, piece))
        nbytes += len(piece.text)
        if nbytes >= BATCH_NBYTES - PIECE_NBYTES or len(batch) == _MAX_PIECES:
            yield batch
            batch, nbytes = [], 0
    if batch:
        yield batch
