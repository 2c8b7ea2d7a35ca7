"""Prepares texts in small pieces, in a process of its own: `python prepares.py OPTIONS`, a JSON object.

`path`, `tokenizer` and `cache_dir` are data's of these names; `out` is a folder for the store, in place of the cache;
`shard_tokens` is the writer's; `hangs` says that it sleeps behind the first shard, `slow` that it does so for a moment
before and behind each file gets its name; `small` is false for the pieces that users have.
"""

import json
import os
import resource
import sys
import time
from pathlib import Path
from typing import Any

from zerotrain.data import prepare
from zerotrain.data.prepare import prepare_in_cache, prepare_in_folder, recipe_of


def sleep_at_each_file(before_s: float, behind_s: float) -> None:
    replace = os.replace

    def replace_and_sleep(source: Any, target: Any) -> None:
        time.sleep(before_s)
        replace(source, target)
        time.sleep(behind_s if str(target).endswith(".note") else before_s)

    os.replace = replace_and_sleep


def main() -> None:
    options = json.loads(sys.argv[1])
    out = Path(options["out"]) if "out" in options else None
    if options.get("small", True):
        prepare.REMINDER_S, prepare.BATCH_NBYTES, prepare.PIECE_NBYTES = 0.2, 1 << 15, 0
    prepare.SHARD_TOKENS = options.get("shard_tokens", prepare.SHARD_TOKENS)
    if options.get("hangs"):
        sleep_at_each_file(0.0, 3600.0)
    if options.get("slow"):
        sleep_at_each_file(0.01, 0.01)
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
