"""In weights to start from that torch itself has written."""

from tests.mutants.fault import Fault

TORCH, DCP, METADATA = (
    "checkpoint/others/torch_file.py",
    "checkpoint/others/dcp_weights.py",
    "checkpoint/others/dcp_metadata.py",
)
TESTS = ("unit/engine/state/sources/test_files_torch.py",)

FAULTS = {
    "start-from-the-memory-not-the-tensor": Fault(
        TORCH,
        " + int(tensor.storage_offset()) * tensor.itemsize",
        "",
        "tensors that share a memory all get what lies first in it",
        TESTS,
    ),
    "start-from-views": Fault(
        TORCH,
        "    return has_place and is_dense(tensor.shape, tensor.stride())\n",
        "    return has_place\n",
        "of a view with gaps what lies in them is read too",
        TESTS,
    ),
    "start-packed-again": Fault(
        TORCH,
        "if told and records.get(place) != told:",
        "if False:",
        "an archive that another tool has packed is read where nothing lies",
        TESTS,
    ),
    "start-header-as-pickle": Fault(
        TORCH,
        ' and file.begin[8:9] != b"{"',
        "",
        "one safetensors file in a thousand is called a pickle",
        TESTS,
    ),
    "start-order-of-bytes": Fault(
        TORCH,
        'any(archive.read(each) != b"little" for each in orders)',
        "False",
        "a file from a machine with the other order of bytes ends the process",
        TESTS,
    ),
    "start-runs-code": Fault(
        METADATA,
        '            self.refused = self.refused or f"{module}.{name}"\n            raise pickle.UnpicklingError\n',
        "            return super().find_class(module, name)\n",
        "whoever has written .metadata has any code run",
        TESTS,
    ),
    "start-leads-away": Fault(
        METADATA,
        "require_kind(info.relative_path, FileName)",
        "info.relative_path",
        "a folder has files elsewhere read",
        TESTS,
    ),
    "start-pieces-over-each-other": Fault(
        METADATA,
        "        if any(_overlap(box, other) for other in near):\n            return False\n",
        "",
        "elements that no piece has stay what was in memory",
        TESTS,
    ),
    "start-piece-from-its-begin": Fault(
        DCP,
        "file.read(byte + first * tensor.dtype.itemsize, tensor.dtype, target)",
        "file.read(byte, tensor.dtype, target)",
        "a rank reads the begin of a piece for what lies in its midst",
        TESTS,
    ),
    "start-pieces-in-another-order": Fault(
        DCP,
        "        if saved.is_contiguous():\n",
        "        if True:\n",
        "a transposed tensor is read as if it were not",
        TESTS,
    ),
    "start-several-models": Fault(
        "engine/state/sources/match.py",
        "if num_names == most]",
        "if num_names == most][:1]",
        "of a model and its moving average one is taken without a word",
        TESTS,
    ),
}
