"""A document that is cut into pieces gives the tokens it gives whole."""

import io
import json
import random
from pathlib import Path

import pytest

from tests.unit.data.tokenizers_made import KINDS, made, sample
from zerotrain.data import tokenizer as pieces
from zerotrain.data.tokenizer import ExactPlace, TextTokenizer, cut_text

SMALL_NBYTES = 700
"""Of a piece: thousands of cuts."""


def noise(num: int) -> str:
    """Letters, marks, spaces and line ends of all sorts, in any order."""
    drawn = random.Random(0)
    parts = ["a", "Word", "7", "12345", " ", "  ", "\n", "\r\n", "\t", ".", "'s", "'", '"', "é", "e\u0301", "字", "。"]
    parts += ["▁", "\u3000", "\u00a0", "\u200b", "🙂", "ﬁ", "-", "_", "<|endoftext|>", "\x00", "word ", " the", "ab, "]
    return "".join(drawn.choices(parts, k=num))


TEXTS = {
    "prose with lines": sample()[:12_000],
    "one line": sample()[:12_000].replace("\n", " "),
    "lines that end in CR LF": sample()[:8_000].replace("\n", "\r\n"),
    "a line of data without spaces": '{"a":[1,2,3],"bc":"x-y"},' * 300,
    "Chinese without spaces": "我们今天去公园散步\uff0c看到很多花。孩子们都很高兴、大家笑了\uff0c" * 150,
    "nothing but a letter": "a" * 3000,
    "nothing but spaces and line ends": " \n  \n\n " * 300,
    "noise": noise(3000),
}


@pytest.fixture(scope="module", params=KINDS)
def tokens_of(request):
    tokenizer = made(request.param)
    return lambda text: tokenizer.encode(text, add_special_tokens=False).ids


@pytest.mark.case(
    "data: Text",
    "a long line or document, with byte-level BPE, Metaspace, Llama 2's, Unigram and WordPiece tokenizers",
    "tokenised in pieces of at most 64 kB, with the tokens of one piece",
)
@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.thinned(3)
def test_the_pieces_of_a_document_have_the_tokens_of_the_whole(text: str, tokens_of, monkeypatch):
    monkeypatch.setattr(pieces, "PIECE_NBYTES", SMALL_NBYTES)
    document = TEXTS[text].encode()
    cut = list(cut_text(io.BytesIO(document).read, ExactPlace(tokens_of)))
    tokens = [token for piece, _ in cut for token in tokens_of(piece.decode(errors="replace"))]
    assert tokens == tokens_of(TEXTS[text])


def test_what_is_no_utf8_is_the_same_in_pieces_and_whole(tokens_of, monkeypatch):
    monkeypatch.setattr(pieces, "PIECE_NBYTES", SMALL_NBYTES)
    drawn = random.Random(1)
    document = b"".join(drawn.choices([b"word ", b"a b", b"\xff", b"\xe3\x80", b"\xc3\xa9", b".\n", b"\x80x"], k=3000))
    cut = list(cut_text(io.BytesIO(document).read, ExactPlace(tokens_of)))
    tokens = [token for piece, _ in cut for token in tokens_of(piece.decode(errors="replace"))]
    assert tokens == tokens_of(document.decode(errors="replace"))


@pytest.mark.parametrize("text", ["prose with lines", "one line"])
def test_long_text_with_words_is_cut_small(text: str, tokens_of, monkeypatch):
    monkeypatch.setattr(pieces, "PIECE_NBYTES", SMALL_NBYTES)
    document = TEXTS[text].encode()
    cut = list(cut_text(io.BytesIO(document).read, ExactPlace(tokens_of)))
    assert max(len(piece) for piece, _ in cut) <= 4 * SMALL_NBYTES


def test_behind_a_stretch_that_cannot_be_cut_pieces_are_short_again() -> None:
    def between_words(text: bytes, low: int, high: int) -> tuple[int, int] | None:
        place = text.rfind(b" ", low + 1, high)
        return None if place < 0 else (place, place)

    text = b"a" * 300_000 + b" word" * 100_000
    lengths = [len(piece) for piece, _ in pieces.cut_text(io.BytesIO(text).read, between_words)]
    assert sum(lengths) == len(text)
    assert lengths[0] >= 300_000
    assert max(lengths[1:]) <= pieces.PIECE_NBYTES


# A tokenizer of Hugging Face that comes with code: what transformers would ask on a terminal is answered no.


pytest.importorskip("transformers")


@pytest.mark.parametrize("auto_map", [{"AutoTokenizer": ["laid.Laid", "laid.Laid"]}, ["laid.Laid", None]])
def test_code_of_a_tokenizer_is_not_run_and_nobody_is_asked(auto_map, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    canary = tmp_path / "canary"
    (tmp_path / "laid.py").write_text(f"open({str(canary)!r}, 'w').close()\nclass Laid: pass\n")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"auto_map": auto_map}))
    with pytest.raises(ValueError, match=r"it has code of its own \(laid\.Laid\), which zerotrain does not run"):
        TextTokenizer(str(tmp_path))
    assert not canary.exists()
