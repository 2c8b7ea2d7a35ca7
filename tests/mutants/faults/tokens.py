"""In what reads files of tokens, and cuts and splits them."""

from tests.mutants.fault import Fault

SHARDS, STORE, ROWS, SPLIT = "data/store/shards.py", "data/store/store.py", "data/store/rows.py", "data/store/split.py"
WINDOWS, FORMATS, GUESS, SCAN = (
    "data/store/windows.py",
    "data/store/formats.py",
    "data/store/guess.py",
    "data/store/scan.py",
)
PATHS, TOKENS, FACTS = "data/store/token_paths.py", "data/tokens.py", "data/store/facts.py"
OF_STORE, OF_WINDOWS = (f"unit/data/store/{test}.py" for test in ("test_store", "test_windows"))
OF_STORE, OF_WINDOWS, OF_TOKENS = (OF_STORE,), (OF_WINDOWS,), ("unit/data/test_tokens.py",)

FAULTS = {
    "tokens-of-a-changed-file": Fault(
        SHARDS,
        "            self._require_unchanged(shard, offset)\n        return tokens\n",
        "            pass\n        return tokens\n",
        "a file that is written to in mid-run is read on",
        OF_STORE,
    ),
    "tokens-closed-under-a-reader": Fault(
        SHARDS,
        "        file = self._file(shard, offset)  # kept by name: another thread may put it away before fstat\n"
        "        then, now = self._states[shard], _state(os.fstat(file.descriptor))\n",
        "        then, now = self._states[shard], _state(os.fstat(self._file(shard, offset).descriptor))\n",
        "a thread asks about a descriptor that another has closed",
        OF_STORE,
    ),
    "tokens-behind-the-header": Fault(
        SHARDS,
        "        position = self.shards[shard].first_byte + offset * self.dtype.itemsize\n",
        "        position = offset * self.dtype.itemsize\n",
        "a header is read as tokens",
        (*OF_STORE, *OF_TOKENS),
    ),
    "tokens-of-a-path-outside": Fault(
        STORE,
        "class _ShardEntry(TypedDict):\n    name: FileName",
        "class _ShardEntry(TypedDict):\n    name: str",
        "an index names files outside of its folder",
        OF_STORE,
    ),
    "tokens-index-not-last": Fault(
        STORE,
        "    for name, tokens in shards:\n        _require_size(",
        "    for name, tokens in ():\n        _require_size(",
        "an index is written of shards that are not whole",
        OF_STORE,
    ),
    "tokens-documents-of-any-size": Fault(
        STORE,
        '            num_documents = index.get("num_documents", _nbytes(file) // DOCUMENT_NBYTES)\n',
        "            num_documents = _nbytes(file) // DOCUMENT_NBYTES\n",
        "a list of documents that was cut short is another split",
        OF_STORE,
    ),
    "tokens-documents-cut-since": Fault(
        STORE,
        '    _require_size(file, num_documents * DOCUMENT_NBYTES, f"{num_documents} documents")\n    documents = np',
        "    documents = np",
        "a list of documents that is cut short while it is used is another split",
        OF_STORE,
    ),
    "tokens-rows-too-far-apart": Fault(
        ROWS,
        "(indices - first_rows[runs]) * self._seq_len\n",
        "(indices - first_rows[runs]) * (self._seq_len + 1)\n",
        "a token between two rows is lost",
        OF_WINDOWS,
    ),
    "tokens-of-one-run-more": Fault(
        ROWS,
        'last_runs = np.searchsorted(run_ends, last_tokens, side="right")',
        'last_runs = np.searchsorted(run_ends, last_tokens, side="left")',
        "the label of a row is read at the wrong end of a document",
        OF_WINDOWS,
    ),
    "tokens-on-both-sides": Fault(
        SPLIT,
        "    starts = borders[:-1] * seq_len + np.arange(2 * num_pairs)\n",
        "    starts = borders[:-1] * seq_len\n",
        "the last label of training is the first token of validation",
        OF_WINDOWS,
    ),
    "tokens-split-by-place": Fault(
        SPLIT,
        "    mixed = (mixed ^ (mixed >> np.uint64(27))) * _MIX[1]\n    mixed ^= mixed >> np.uint64(31)\n",
        "    mixed -= mixed[0]\n",
        "where a document goes depends on the piece it is looked at in",
        OF_WINDOWS,
    ),
    "tokens-unequal-documents": Fault(
        SPLIT,
        "    return (train, validation) if is_near and",
        "    return (train, validation) if",
        "one document of nearly everything is validation",
        OF_WINDOWS,
    ),
    "tokens-labels-share-memory": Fault(
        WINDOWS,
        'part.astype(np.int64, order="C") for part in (tokens[:, :-1], tokens[:, 1:])',
        "part for part in (lambda all: (all[:, :-1], all[:, 1:]))(tokens.astype(np.int64))",
        "who masks labels changes the ids",
        OF_WINDOWS,
    ),
    "tokens-header-of-any-count": Fault(
        FORMATS,
        "    if nbytes != needed or tokens < 1:\n",
        "    if tokens < 1:\n",
        "a shard that was cut short is read as whole",
        OF_TOKENS,
    ),
    "tokens-documents-not-moved": Fault(
        FORMATS,
        "    return np.concatenate([start + offset for",
        "    return np.concatenate([start for",
        "documents of the second file start in the first",
        OF_TOKENS,
    ),
    "tokens-half-of-their-size": Fault(
        GUESS,
        "        if dtype.itemsize < np.dtype(wider).itemsize and _is_of(wider, sample):\n",
        "        if False:\n",
        "uint32 tokens are learnt as uint16",
        OF_TOKENS,
    ),
    "tokens-of-any-text": Fault(
        GUESS,
        "    if _is_text(sample):\n",
        "    if False:\n",
        "text is learnt as tokens",
        OF_TOKENS,
    ),
    "tokens-looked-at-in-part": Fault(
        SCAN,
        "    starts = range(0, store.tokens, PIECE_TOKENS)\n",
        "    starts = range(0, min(store.tokens, PIECE_TOKENS), PIECE_TOKENS)\n",
        "an unknown token is found hours into a run",
        OF_TOKENS,
    ),
    "tokens-known-of-another-file": Fault(
        SCAN,
        "marks = (status.st_size, *times, ",
        "marks = (status.st_size, ",
        "what was found in a file counts for the one written over it",
        OF_TOKENS,
    ),
    "tokens-known-by-a-time-anybody-sets": Fault(
        SCAN,
        "times = status.st_mtime_ns, status.st_ctime_ns ",
        "times = status.st_mtime_ns, 0 ",
        "what was found in a file counts for the one written over it, where a copy sets its time",
        OF_TOKENS,
    ),
    "tokens-read-through-each-link": Fault(
        PATHS,
        "        by_place.setdefault((status.st_dev, status.st_ino), file)\n",
        "        by_place[status.st_dev, len(by_place)] = file\n",
        "a file with a link to it is learnt twice",
        OF_TOKENS,
    ),
    "tokens-validated-are-trained": Fault(
        TOKENS,
        "        _require_apart(store, validation, name)\n",
        "",
        "validation is training",
        OF_TOKENS,
    ),
    "tokens-alike-at-their-start": Fault(
        FACTS,
        "            hashed.update(_ends(shard, shard.tokens * store.dtype.itemsize))\n",
        "",
        "ranks with other tokens of the same number do not notice",
        OF_TOKENS,
    ),
}
