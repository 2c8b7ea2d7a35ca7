"""Make the tokens of a text once, before a run or for many: `zerotrain prepare`, settings as for a run.

Settings are those of a run, `python launch.py ...`. These count: data.path, data.tokenizer, data.document_end,
data.text_field and data.cache_dir. Without --out the tokens go into the cache, where a run with the same settings
finds them. A run also makes missing tokens itself; this command makes them beforehand, on a machine without a GPU.

  zerotrain prepare data.path=texts data.tokenizer=path/to/tokenizer --out tokens
  python launch.py data=tokens data.path=tokens ...
  zerotrain prepare data=tokenized model=huggingface model.name_or_path=path/to/model data.path=texts

Reads plain text, .jsonl and .parquet, also as .gz and .zst. One process at a time prepares a text; the others wait.
After an interruption or a full disk, the same command continues.
Exit code 0: the tokens are there; 2: a setting is wrong, one line each; 130: Ctrl-C.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from zerotrain.commands.frame import exit_code, parser_of
from zerotrain.commands.train import CONF, composed_config
from zerotrain.errors import ConfigError

TARGET = "zerotrain.data.TextDataset"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return the exit code."""
    parser = parser_of("prepare", __doc__)
    parser.add_argument("settings", nargs="*", metavar="KEY=VALUE", help="as for launch.py")
    parser.add_argument(
        "--out", type=Path, metavar="DIR", help="a folder for the tokens: a new one, or one to continue"
    )
    parser.add_argument("--config-dir", type=Path, metavar="DIR", help="yamls of your own, as for launch.py")
    options = parser.parse_intermixed_args(arguments)
    return exit_code(
        lambda: print(prepare(text_settings(options.settings, options.config_dir), options.out), flush=True),
        when_stopped="stopped by Ctrl-C; the same command goes on",
    )


def prepare(data: dict[str, Any], out: Path | None) -> str:
    """Make the tokens of a text.

    Args:
        data: the settings of `zerotrain.data.TextDataset`.
        out: the folder they are to lie in; None for the cache.

    Returns:
        A line about what was made, and one on how to train on it.

    Raises:
        ConfigError: a setting is wrong, the text cannot be read, or there is no room for it.
    """
    from zerotrain.data.prepare import prepare_in_cache, prepare_in_folder, recipe_of  # imports torch

    try:
        recipe, cache = recipe_of(
            data.get("path"),
            tokenizer=data.get("tokenizer"),
            document_end=data.get("document_end"),
            text_field=data.get("text_field", "text"),
            cache_dir=data.get("cache_dir"),
            out=out,
        )
        store = prepare_in_cache(recipe, cache) if out is None else prepare_in_folder(recipe, out)
    except (ValueError, OSError, ImportError) as error:
        raise ConfigError((str(error).splitlines() or [type(error).__name__])[0]) from error
    documents = store.documents
    summary = (
        f"{store.tokens:,} tokens of {store.dtype.name}, vocab_size {store.vocab_size}, in "
        f"{1 if documents is None else len(documents):,} documents: {store.shards[0].path.parent}"
    )
    if out is None:
        return summary
    return f"{summary}\ntrain on them: python launch.py data=tokens data.path={out} data.vocab_size={store.vocab_size}"


def text_settings(settings: list[str], config_dir: Path | None) -> dict[str, Any]:
    """The `data` of a run with these settings. A ConfigError where one of them is wrong, or the data is no text."""
    if config_dir is not None and not config_dir.is_dir():
        raise ConfigError(f"--config-dir: got {config_dir}; there is no such folder in {Path.cwd()}")
    config = composed_config(settings, [folder for folder in (config_dir, CONF) if folder is not None])
    if config.data.get("_target_") != TARGET:
        raise ConfigError(
            f"data._target_: got {config.data.get('_target_')}, which reads no text; choose data=text or data=tokenized"
        )
    return config.data
