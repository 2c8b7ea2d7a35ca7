"""In how files are read that somebody else may have written."""

from tests.mutants.fault import Fault

SCHEMA, TORCH, METADATA = (
    "checkpoint/manifest_schema.py",
    "checkpoint/others/torch_file.py",
    "checkpoint/others/dcp_metadata.py",
)
FORGED, HOSTILE = ("unit/checkpoint/test_forged.py",), ("unit/checkpoint/test_hostile_weights.py",)

FAULTS = {
    "reading-bytes-of-two": Fault(
        SCHEMA,
        "if file == other_file and byte < end:",
        "if False:",
        "two tensors are read out of the same bytes",
        FORGED,
    ),
    "reading-behind-the-end": Fault(
        SCHEMA, " or end > sizes[file]", "", "a tensor lies where the file has ended", FORGED
    ),
    "reading-elements-in-no-file": Fault(
        SCHEMA,
        "        if done != numel:\n",
        "        if False:\n",
        "a manifest that lacks the last elements of a tensor is verified",
        FORGED,
    ),
    "reading-strides-with-gaps": Fault(
        SCHEMA,
        "if len(stride) != len(shape) or not is_dense(shape, stride):",
        "if len(stride) != len(shape):",
        "strides out of a manifest lead out of the memory",
        FORGED,
    ),
    "reading-leads-away": Fault(
        SCHEMA, "    name: FileName\n", "    name: str\n", "a manifest has files of other folders read", FORGED
    ),
    "reading-state-of-another-kind": Fault(
        "engine/checkpoints.py",
        "        require_alike(folder, manifest, self._held.holdings)\n",
        "",
        "what is missing is found when half of the engine is loaded",
        FORGED,
    ),
    "reading-prints-names-as-they-are": Fault(
        "commands/inspection.py",
        'printable(line, MAX_LINE, keep="")',
        "line",
        "a name in a checkpoint's folder colours the terminal",
        FORGED,
    ),
    "reading-lengths-of-any-size": Fault(
        "checkpoint/others/safetensors_file.py",
        "    shape: Shape\n",
        "    shape: list[Natural]\n",
        "lengths that torch cannot have end in its own words",
        HOSTILE,
    ),
    "reading-index-leads-away": Fault(
        "checkpoint/others/weights.py",
        "dict[str, FileName]",
        "dict[str, str]",
        "an index has files of other folders read",
        HOSTILE,
    ),
    "reading-memory-by-a-number": Fault(
        METADATA,
        "class _Unpickler(pickle._Unpickler):",
        "class _Unpickler(pickle.Unpickler):",
        "a number in a pickle of ten bytes takes 32 GB",
        HOSTILE,
    ),
    "reading-notes-that-were-changed": Fault(
        "data/preparing/writer.py",
        '            if notes.get("hash") != _hash_of(done):\n                return None\n',
        "",
        "text is left out where what was noted of it was damaged",
        ("unit/data/preparing/test_prepare_notes.py",),
    ),
}
