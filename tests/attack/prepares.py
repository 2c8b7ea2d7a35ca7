"""Prepares texts in small pieces, in a process of its own: `python prepares.py OPTIONS`, a JSON object.

`path`, `tokenizer` and `cache_dir` are data's of these names; `out` is a folder for the store, in place of the cache;
`shard_tokens` is the writer's;
`hangs` says that it sleeps once it has noted how far it came; `small` is false for the pieces that users have.
"""

import json
import resource
import sys
import time
from pathlib import Path
from typing import Any

from zerotrain.data import prepare
from zerotrain.data import prepare as lock
from zerotrain.data import prepare as writer
from zerotrain.data.prepare import prepare_in_cache, prepare_in_folder, recipe_of


def cut_small() -> None:
    writer.NOTE_S, lock.REMINDER_S = 0.0, 0.2
    prepare.BATCH_NBYTES, prepare.PIECE_NBYTES = 1 << 15, 0


def hang_after_a_note() -> None:
    note = writer.StoreWriter.note

    def note_and_hang(self: writer.StoreWriter, *given: Any, **more: Any) -> None:
        note(self, *given, **more)
        time.sleep(3600)

    writer.StoreWriter.note = note_and_hang  # type: ignore[method-assign]


def main() -> None:
    options = json.loads(sys.argv[1])
    out = Path(options["out"]) if "out" in options else None
    if options.get("small", True):
        cut_small()
    writer.SHARD_TOKENS = options.get("shard_tokens", writer.SHARD_TOKENS)
    if options.get("hangs"):
        hang_after_a_note()
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    recipe, cache = recipe_of(
        options["path"],
        tokenizer=options.get("tokenizer"),
        document_end=None,
        text_field="text",
        cache_dir=options["cache_dir"],
        out=out,
    )
    documents = (prepare_in_folder(recipe, out) if out else prepare_in_cache(recipe, cache)).documents
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    print(json.dumps({"grown_mb": grown // 1024, "documents": None if documents is None else len(documents)}))


if __name__ == "__main__":
    main()
