"""Small tokenizers of every kind, trained on a text of this repository, as folders that transformers reads."""

from pathlib import Path
from typing import Any

import pytest

REPOSITORY = Path(__file__).resolve().parents[3]
LLAMA_3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
VOCAB_SIZE = 600
END = "<|endoftext|>"


def sample() -> str:
    pages = [
        *sorted((REPOSITORY / "docs/design").glob("*.md")),
        *sorted((REPOSITORY / "docs/reference/cases").glob("*.md")),
    ]
    return "".join(page.read_text() for page in pages)


def made(kind: str) -> Any:
    """A tokenizer of a kind, of the package tokenizers."""
    tokenizers = pytest.importorskip("tokenizers")
    models, normalizers, pre = tokenizers.models, tokenizers.normalizers, tokenizers.pre_tokenizers
    trainers, alphabet = tokenizers.trainers, pre.ByteLevel.alphabet()
    bpe = trainers.BpeTrainer(
        vocab_size=VOCAB_SIZE, special_tokens=[END], initial_alphabet=alphabet, show_progress=False
    )
    one_space = normalizers.Replace(tokenizers.Regex(r"\s+"), " ")
    split = pre.Split(tokenizers.Regex(LLAMA_3), "isolated")
    plain_bpe = trainers.BpeTrainer(vocab_size=VOCAB_SIZE, special_tokens=["<unk>", END], show_progress=False)
    kinds = {
        "bytes, GPT-2": (models.BPE(), None, pre.ByteLevel(add_prefix_space=False), bpe),
        "bytes, a space before": (models.BPE(), None, pre.ByteLevel(add_prefix_space=True), bpe),
        "bytes, Llama 3": (
            models.BPE(ignore_merges=True),
            None,
            pre.Sequence([split, pre.ByteLevel(add_prefix_space=False, use_regex=False)]),
            bpe,
        ),
        "bytes, words merged": (models.BPE(), None, pre.ByteLevel(add_prefix_space=False, use_regex=False), bpe),
        # Trained on words, as Llama 2 was, and then without a pre-tokenizer, as it is used.
        "Llama 2": (models.BPE(unk_token="<unk>"), None, pre.Metaspace(prepend_scheme="always"), plain_bpe),
        "Metaspace first": (models.BPE(unk_token="<unk>"), None, pre.Metaspace(prepend_scheme="first"), plain_bpe),
        "Metaspace always": (models.BPE(unk_token="<unk>"), None, pre.Metaspace(prepend_scheme="always"), plain_bpe),
        "Unigram": (
            models.Unigram(),
            normalizers.Sequence([normalizers.NFKC(), one_space, normalizers.Strip()]),
            pre.Metaspace(prepend_scheme="always"),
            trainers.UnigramTrainer(
                vocab_size=VOCAB_SIZE, special_tokens=["<unk>", END], unk_token="<unk>", show_progress=False
            ),
        ),
        "WordPiece": (
            models.WordPiece(unk_token="[UNK]"),
            normalizers.BertNormalizer(),
            pre.BertPreTokenizer(),
            trainers.WordPieceTrainer(vocab_size=VOCAB_SIZE, special_tokens=["[UNK]"], show_progress=False),
        ),
    }  # fmt: skip
    model, normalizer, pre_tokenizer, trainer = kinds[kind]
    tokenizer = tokenizers.Tokenizer(model)
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    if pre_tokenizer is not None:
        tokenizer.pre_tokenizer = pre_tokenizer
    # Of whole lines a tokenizer without words learns tokens with spaces in them.
    tokenizer.train_from_iterator(sample().split("\n\n"), trainer)
    if kind == "Llama 2":
        tokenizer.pre_tokenizer = None
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    return tokenizer


KINDS = (
    "bytes, GPT-2",
    "bytes, a space before",
    "bytes, Llama 3",
    "bytes, words merged",
    "Llama 2",
    "Metaspace first",
    "Metaspace always",
    "Unigram",
    "WordPiece",
)


def saved(kind: str, folder: Path, **special: str) -> str:
    """A folder with a tokenizer of a kind.

    Args:
        special: such as `eos_token`.
    """
    transformers = pytest.importorskip("transformers")
    transformers.PreTrainedTokenizerFast(tokenizer_object=made(kind), **special).save_pretrained(folder)
    return str(folder)
