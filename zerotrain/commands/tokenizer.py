"""Train a tokenizer on text of your own: `zerotrain tokenizer`, with the text's settings as for a run.

The tokenizer is a byte-level BPE as GPT-2's: it has a token for every byte, so no text is unknown to it.
`<|endoftext|>` is its end of text. data.path and data.text_field name the text, as for data=text.

  zerotrain tokenizer data.path=texts --vocab-size 8192 --out tokenizer
  python launch.py data.path=texts data.tokenizer=tokenizer data.vocab_size=null

Reads at most --max-mb of the text, the same share of each file from its beginning.
Exit code 0: the tokenizer is in the folder; 2: a setting is wrong, one line each; 130: Ctrl-C.
"""

import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from zerotrain.commands.frame import exit_code, parser_of
from zerotrain.commands.prepare import text_settings
from zerotrain.errors import ConfigError

END_OF_TEXT = "<|endoftext|>"
MIN_VOCAB_SIZE = 257
"""A token for each byte, and the end of text."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return the exit code."""
    parser = parser_of("tokenizer", __doc__)
    parser.add_argument("settings", nargs="*", metavar="KEY=VALUE", help="as for launch.py")
    parser.add_argument("--out", type=Path, metavar="DIR", required=True, help="a new folder for the tokenizer")
    parser.add_argument("--vocab-size", type=int, metavar="N", default=32_768, help="tokens; 32768 by default")
    parser.add_argument("--max-mb", type=float, metavar="MB", default=1000.0, help="text to read; 1000 by default")
    parser.add_argument("--config-dir", type=Path, metavar="DIR", help="yamls of your own, as for launch.py")
    options = parser.parse_intermixed_args(arguments)

    def train() -> None:
        data = text_settings(options.settings, options.config_dir)
        print(train_tokenizer(data, options.out, options.vocab_size, options.max_mb), flush=True)

    return exit_code(train, when_stopped="stopped by Ctrl-C; nothing was written")


def train_tokenizer(data: dict[str, Any], out: Path, vocab_size: int, max_mb: float) -> str:
    """Train a tokenizer, and write it as transformers reads it.

    Args:
        data: the settings of `zerotrain.data.TextDataset`.
        out: a folder that is not there yet, or empty.
        vocab_size: tokens at most; a short text gives fewer.
        max_mb: MB of the files to read.

    Returns:
        A line about the tokenizer, and one on how to train with it.

    Raises:
        ConfigError: a setting is wrong, the text cannot be read, or a package is missing.
    """
    from zerotrain.data import text_files
    from zerotrain.data.tokenizer import cut_behind_word
    from zerotrain.files.terminal import package

    if vocab_size < MIN_VOCAB_SIZE:
        raise ConfigError(f"--vocab-size: got {vocab_size}; it must be {MIN_VOCAB_SIZE} or more")
    if not max_mb > 0:
        raise ConfigError(f"--max-mb: got {max_mb:g}; it must be above 0")
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"--out: got {out}, where something lies already; give a new folder")

    def texts() -> Iterator[str]:
        share = min(1.0, max_mb * 1e6 / sum(file.stat().st_size for file in sources.files))
        for file in sources.files:
            for piece in text_files.read_pieces(file, field=text_field, cut=cut_behind_word):
                yield piece.text.decode(errors="replace")
                if piece.reached >= share * file.stat().st_size:
                    break

    try:
        transformers = package("transformers", extra="hf", needed_by="zerotrain tokenizer")
        tokenizers = package("tokenizers", extra="hf", needed_by="zerotrain tokenizer")
        text_field = data.get("text_field", "text")
        sources = text_files.find_sources(data.get("path"), text_field=text_field)
        print(sources, flush=True)
        model = tokenizers.Tokenizer(tokenizers.models.BPE())
        model.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
        model.decoder = tokenizers.decoders.ByteLevel()
        trainer = tokenizers.trainers.BpeTrainer(
            vocab_size=vocab_size,
            special_tokens=[END_OF_TEXT],
            initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        )
        model.train_from_iterator(texts(), trainer=trainer)
        transformers.PreTrainedTokenizerFast(tokenizer_object=model, eos_token=END_OF_TEXT).save_pretrained(out)
    except (ValueError, OSError, ImportError) as error:
        raise ConfigError((str(error).splitlines() or [type(error).__name__])[0]) from error
    settings = (f"data.path={data.get('path') or 'null'}", f"data.tokenizer={out}", "data.vocab_size=null")
    return f"{model.get_vocab_size():,} tokens: {out}\ntrain with it: python launch.py {shlex.join(settings)}"
