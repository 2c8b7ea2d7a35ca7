"""Files that were damaged are refused in one line, or read as they were: some of each, with fixed seeds.

`python -m tests.attack.fuzz --mutations 10000` tries more of them.
"""

import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.attack.fuzz.cases import OF_KINDS, TARGETS, Target
from tests.attack.fuzz.trial import REFUSED, tried

NUM_OF_EACH = 18
FOUND: dict[str, tuple[int, ...]] = {
    "manifest.json": (34, 51),
    "manifest.json, its hash made to fit": (184, 253, 543, 1050030),
    "torch.save": (203,),
    "index of Hugging Face": (29, 33, 103, 1020074),
    "index of Hugging Face, by transformers": (29, 33, 34, 51, 135, 140, 151, 189),
    "index.json of a store": (151, 188, 100053, 100059, 1020016),
    "tokenizer.json": (103, 20099, 1001074),
    "job.json": (95, 133),
    ".lock": (43, 81),
    "metrics.jsonl": (33,),
    "export json": (1063,),
    "jsonl": (1001079,),
    "parquet": (10, 1050027),
    "tokens.npy": (4, 11),
    "study.db": (3000004,),
}
"""Seeds at which there was something to mend, beside the first ones."""


@pytest.mark.parametrize("name", TARGETS)
def test_a_damaged_file_is_one_line_or_what_it_was(name: str) -> None:
    seeds = [*range(NUM_OF_EACH // 2), *range(OF_KINDS, OF_KINDS + NUM_OF_EACH // 2), *FOUND.get(name, ())]
    tally = tried(TARGETS[name], seeds)
    assert tally.bad == {}
    assert sum(tally.counts.values()) == len(seeds)


def make(folder: Path) -> None:
    (folder / "file.json").write_text(json.dumps({"step": 3, "name": "x" * 40}))


def believed(folder: Path) -> Any:
    """A reader without a schema."""
    content = json.loads((folder / "file.json").read_bytes())
    return bytearray(content["step"])


def read_whatever_it_says(folder: Path) -> Any:
    return (folder / "file.json").read_bytes()


def bad_of(seeds: Sequence[int], **how: Any) -> str:
    return " ".join(tried(Target(make=make, file="file.json", json=True, **how), seeds).bad.values())


def test_the_trial_sees_what_is_bad() -> None:
    everything = bad_of(range(150), read=believed)
    for sign in ("RecursionError", "JSONDecodeError", "TypeError", "KeyError", "changed, and read"):
        assert sign in everything
    assert "changed, and read" in bad_of(range(3), read=read_whatever_it_says)
    assert "is told as" in bad_of(range(3), read=colours, refusals=(ValueError,))
    assert "in words of Python" in bad_of(range(9), read=passes_on, refusals=(ValueError,))


def colours(folder: Path) -> Any:
    if is_damaged(folder):
        raise ValueError("\x1b[31mred")


def passes_on(folder: Path) -> Any:
    if is_damaged(folder):
        raise ValueError("KeyError: 'step'")


def is_damaged(folder: Path) -> bool:
    return (folder / "file.json").read_bytes() != json.dumps({"step": 3, "name": "x" * 40}).encode()


def takes_memory(folder: Path) -> Any:
    return bytearray(2**31 if is_damaged(folder) else 0)


def ends(folder: Path) -> Any:
    return os._exit(0) if is_damaged(folder) else None


def test_the_trial_sees_memory_that_is_taken_and_what_ends_the_process_and_goes_on() -> None:
    tally = tried(Target(make=make, file="file.json", read=ends), range(5))
    assert tally.bad == dict.fromkeys(range(5), "ended the process")
    assert tally.counts[REFUSED] == 0
    assert "MemoryError" in bad_of(range(3), read=takes_memory)
