"""Text made into tokens: by zerotrain's prepare, by `datasets.map` of Hugging Face, and by a plain loop."""

import argparse
import json
import resource
import shutil
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import redirect_stderr
from functools import partial
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np

from zerotrain.data.prepare import prepare_in_folder, recipe_of
from zerotrain.data.text_files import find_sources

END = "<|endoftext|>"
PART_NUM_CHARACTERS = 4000
"""Of a document, about a page of the web."""


def add_options(commands: Any) -> None:
    """The options of `prepare`."""
    add = commands.add_parser("prepare", help="text to tokens, beside datasets.map and a plain loop").add_argument
    add("--megabytes", type=float, default=20.0, help="of text: the standard library again and again")
    add("--vocab-size", type=int, default=16384, help="of the tokenizer, a byte-level BPE trained on that text")
    add("--rounds", type=int, default=3, help="times each way is measured, in turn with the others")
    add("--processes", type=int, default=2, help="of datasets.map with several")
    add("--folder", type=Path, default=Path("outputs/bench/prepare"), help="where files are made, and removed again")


def measure(options: argparse.Namespace) -> None:
    """Measure and print a table."""
    folder = options.folder
    folder.mkdir(parents=True, exist_ok=True)
    try:
        texts, tokenizer = folder / "texts.jsonl", folder / "tokenizer"
        num_documents = _write_texts(texts, int(options.megabytes * 1e6))
        _train(texts, tokenizer, options.vocab_size)
        ways: dict[str, Callable[[], int]] = {
            "zerotrain prepare": partial(_prepare, texts, tokenizer, folder / "store"),
            "plain loop": partial(_loop, texts, tokenizer, folder / "loop.bin"),
            "datasets.map, 1 process": partial(_map, texts, tokenizer, folder / "map.bin", 1),
            f"datasets.map, {options.processes} processes": partial(
                _map, texts, tokenizer, folder / "map.bin", options.processes
            ),
        }
        nbytes = texts.stat().st_size
        print(f"{nbytes / 1e6:.1f} MB of jsonl, {num_documents:,} documents, byte-level BPE of {options.vocab_size}")
        import datasets  # noqa: F401  not on the clock

        _loaded(tokenizer)
        taken: dict[str, list[tuple[float, float]]] = {name: [] for name in ways}
        made: dict[str, int] = {}
        for _ in range(options.rounds):
            for name, way in ways.items():
                begun, cpu_begun = time.perf_counter(), _cpu_s()
                made[name] = way()
                taken[name].append((time.perf_counter() - begun, _cpu_s() - cpu_begun))
        print(f"{'':32}{'tokens':>12}{'s':>8}{'tokens/s':>12}{'MB/s':>8}{'CPU s':>8}")
        for name, each in taken.items():
            took, cpu = (statistics.median(column) for column in zip(*each, strict=True))
            print(f"{name:32}{made[name]:12,}{took:8.1f}{made[name] / took:12,.0f}{nbytes / took / 1e6:8.2f}{cpu:8.1f}")
    finally:
        shutil.rmtree(folder)


def _cpu_s() -> float:
    """Of this process and of those it has waited for."""
    usages = [resource.getrusage(whose) for whose in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def _write_texts(path: Path, nbytes: int) -> int:
    """Documents of some thousand characters; return their number."""
    count = written = 0
    with path.open("w") as file:
        while written < nbytes:
            for source in find_sources(None).files:
                text = source.read_text(errors="replace")
                for start in range(0, len(text), PART_NUM_CHARACTERS):
                    if written < nbytes:
                        line = json.dumps({"text": text[start : start + PART_NUM_CHARACTERS]}) + "\n"
                        written += file.write(line)
                        count += 1
    return count


def _documents(texts: Path) -> Iterator[str]:
    with texts.open() as file:
        for line in file:
            yield json.loads(line)["text"]


def _train(texts: Path, folder: Path, vocab_size: int) -> None:
    import tokenizers
    import transformers

    backend = tokenizers.Tokenizer(tokenizers.models.BPE())
    backend.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = tokenizers.trainers.BpeTrainer(vocab_size=vocab_size, special_tokens=[END], show_progress=False)
    backend.train_from_iterator(_documents(texts), trainer)
    transformers.PreTrainedTokenizerFast(tokenizer_object=backend, eos_token=END).save_pretrained(folder)


def _prepare(texts: Path, tokenizer: Path, out: Path) -> int:
    shutil.rmtree(out, ignore_errors=True)
    with redirect_stderr(StringIO()):
        recipe, _ = recipe_of(
            str(texts), tokenizer=str(tokenizer), document_end="eos", text_field="text", cache_dir=None, out=out
        )
        return prepare_in_folder(recipe, out).tokens


def _loaded(tokenizer: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(str(tokenizer))


def _loop(texts: Path, tokenizer: Path, out: Path) -> int:
    """What a script of ten lines does: one document after the other."""
    loaded, count = _loaded(tokenizer), 0
    with out.open("wb") as file:
        for text in _documents(texts):
            ids = [*loaded.encode(text, add_special_tokens=False, verbose=False), loaded.eos_token_id]
            file.write(np.array(ids, np.uint16).tobytes())
            count += len(ids)
    return count


def _map(texts: Path, tokenizer: Path, out: Path, processes: int) -> int:
    """As nanoGPT prepares a corpus: a map over the rows, and then a file of their tokens."""
    import datasets

    datasets.disable_progress_bars()
    datasets.disable_caching()
    cache = out.parent / "datasets"
    loaded = _loaded(tokenizer)

    def tokens_of(rows: dict[str, list[str]]) -> dict[str, list[list[int]]]:
        encoded = loaded(rows["text"], add_special_tokens=False, verbose=False)["input_ids"]
        return {"ids": [[*ids, loaded.eos_token_id] for ids in encoded]}

    rows = datasets.load_dataset("json", data_files=str(texts), split="train", cache_dir=str(cache))
    made = rows.map(tokens_of, batched=True, remove_columns=["text"], num_proc=processes if processes > 1 else None)
    count = 0
    with out.open("wb") as file:
        for batch in made.with_format("numpy").iter(batch_size=1000):
            joined = np.concatenate(list(batch["ids"])).astype(np.uint16)
            file.write(joined.tobytes())
            count += len(joined)
    shutil.rmtree(cache)
    return count
