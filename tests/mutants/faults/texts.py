"""In what reads text, makes tokens of it and keeps them."""

from tests.mutants.fault import Fault

CACHE, PREPARE, FILES, KINDS = (
    "data/preparing/cache.py",
    "data/preparing/prepare.py",
    "data/files/text_files.py",
    "data/files/text_kinds.py",
)
CONTAINERS, WRITER, STORE = "data/store/containers.py", "data/preparing/writer.py", "data/store/store.py"
PIECES, END = "data/files/pieces.py", "data/preparing/document_end.py"
OF_CACHE, OF_PREPARE = ("unit/data/preparing/test_cache.py",), ("unit/data/preparing/test_prepare.py",)
OF_FILES, OF_KINDS = ("unit/data/files/test_text_files.py",), ("unit/data/files/test_text_kinds.py",)
OF_WRITER = ("unit/data/preparing/test_writer.py",)

FAULTS = {
    "text-stamped-when-it-was-read": Fault(
        CACHE,
        "        stamp = _stamp(_marks(made) + marks)\n",
        "        stamp = _stamp(_marks([*made, *sources]))\n        marks = _marks(sources)\n",
        "a text that was written to while it was read is sealed as current",
        OF_CACHE,
    ),
    "text-known-by-a-time-anybody-sets": Fault(
        CACHE,
        "state.st_mtime_ns, state.st_ctime_ns, state.st_ino",
        "state.st_mtime_ns, state.st_ino",
        "other text of the same size and time is taken for the old one",
        OF_CACHE,
    ),
    "text-kept-of-what-was-refused": Fault(
        CACHE,
        "            remove_store(folder)\n            raise ValueError(\n",
        "            raise ValueError(\n",
        "tokens of a text that changed lie in a folder that looks complete",
        OF_CACHE,
    ),
    "text-nulls-counted-anew": Fault(
        PREPARE,
        "    if nulls := writer.done.nulls:\n",
        "    if nulls := writer.done.nulls * 0:\n",
        "rows are left out without a word",
        OF_PREPARE,
    ),
    "text-line-of-the-next": Fault(
        FILES,
        "_line_number(path, position - len(line))",
        "_line_number(path, position)",
        "the line that is named is the one behind",
        OF_FILES,
    ),
    "text-case-of-a-name": Fault(
        FILES,
        "    suffix = path.suffix.lower()\n    return",
        "    suffix = path.suffix\n    return",
        "the rows of A.JSONL are learnt with their brackets",
        OF_FILES,
    ),
    "text-of-an-old-archive": Fault(
        CONTAINERS,
        "    if _is_tar(beginning):\n",
        '    if beginning[257:262] == b"ustar":\n',
        "a tar archive without a magic is learnt",
        OF_KINDS,
    ),
    "text-of-a-packed-archive": Fault(
        CONTAINERS,
        "    return _TAR if kind is _GZIP and _is_tar(_unpacked(beginning)) else kind\n",
        "    return kind\n",
        "a .tgz is to be called .gz, and is then learnt",
        OF_KINDS,
    ),
    "text-of-any-json-array": Fault(
        KINDS,
        '    if is_named and text.startswith("["):\n',
        '    if text.startswith("["):\n',
        "source code with a list in a .json file cannot be read",
        OF_KINDS,
    ),
    "text-of-rows-of-json": Fault(
        KINDS,
        "    if isinstance(row, dict) and isinstance(row.get(text_field), str):\n",
        "    if is_named and isinstance(row, dict) and isinstance(row.get(text_field), str):\n",
        "rows of JSON in a folder are learnt with their brackets",
        OF_KINDS,
    ),
    "text-of-any-zero": Fault(
        KINDS,
        "sample.count(0) > _MAX_ZEROS * len(sample)",
        "sample.count(0)",
        "a log that was cut off is refused",
        OF_KINDS,
    ),
    "text-file-read-again": Fault(
        PREPARE,
        "                writer.note(number + at_end, 0 if at_end else last.after or 0)\n",
        "                writer.note(number, 0 if at_end else last.after or 0)\n",
        "killed just behind a file, preparing reads it again, and its tokens stand there twice",
        OF_WRITER,
    ),
    "text-noted-before-the-disk-has-it": Fault(
        WRITER,
        "                os.fsync(written.fileno())\n",
        "",
        "after a power cut preparing goes on behind tokens that the disk never got",
        OF_WRITER,
    ),
    "text-shard-not-on-the-disk": Fault(
        WRITER,
        "                os.fsync(closing.fileno())\n",
        "",
        "after a power cut a store is complete but for its tokens",
        OF_WRITER,
    ),
    "text-index-not-on-the-disk": Fault(
        "files/whole.py",
        "            os.fsync(file.fileno())\n",
        "",
        "after a power cut an index is there, and empty",
        OF_WRITER,
    ),
    "text-name-not-on-the-disk": Fault(
        "files/whole.py",
        "        sync_folder(path.parent)\n",
        "        pass\n",
        "after a power cut a store that was complete has no index",
        OF_WRITER,
    ),
    "text-starts-not-cut-back": Fault(
        WRITER,
        "            os.truncate(self._folder / STARTS_NAME, self.done.documents * 8)\n",
        "            pass\n",
        "documents that were not noted before a kill are there twice",
        (*OF_WRITER, *OF_PREPARE),
    ),
    "text-cut-anywhere": Fault(
        PIECES,
        "            if whole == before + self._tokens(text[after:end]):\n",
        "            if True:\n",
        "a document has other tokens where it is long",
        ("unit/data/files/test_pieces.py", *OF_PREPARE),
    ),
    "text-pieces-that-stay-long": Fault(
        PIECES,
        "        begun, limit = begun + after, PIECE_NBYTES\n",
        "        begun = begun + after\n",
        "behind a stretch that cannot be cut all pieces are as long, and take as much memory",
        ("unit/data/files/test_pieces.py",),
    ),
    "text-end-in-each-piece": Fault(
        END,
        '        return mark[: name == "bos" and starts], mark[: name == "eos" and ends]\n',
        '        return mark[: name == "bos"], mark[: name == "eos"]\n',
        "an end of text stands in the middle of long documents",
        OF_PREPARE,
    ),
}
