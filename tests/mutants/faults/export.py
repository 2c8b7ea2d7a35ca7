"""What leaves a checkpoint for others."""

from tests.mutants.fault import Fault

OF_EXPORT = ("unit/export/test_export.py",)
OF_HUGGING_FACE = ("unit/export/test_hugging_face.py",)
OF_CHARACTERS = ("distributed/test_after_a_run.py::test_characters_come_whole_and_what_is_none_comes_too",)

FAULTS = {
    "export-in-the-order-of-memory": Fault(
        "checkpoint/whole.py",
        'flat.as_strided(parameter["shape"], parameter["stride"]).contiguous()',
        'flat.view(parameter["shape"])',
        "a transposed parameter leaves with its elements in another order",
        OF_EXPORT,
    ),
    "export-replaces-anything": Fault(
        "export/destination.py",
        "    if out.is_symlink() or not (out / ABOUT).is_file():\n",
        "    if out.is_symlink():\n",
        "--overwrite erases a folder of the user's",
        OF_EXPORT,
    ),
    "export-dcp-holds-all": Fault(
        "export/dcp.py",
        "            self._written.untyped_storage().resize_(0)\n",
        "            pass\n",
        "an export to DCP takes as much memory as the whole checkpoint",
        OF_EXPORT,
    ),
    "export-merge-not-scaled": Fault(
        "export/weights.py",
        ' * lora["scaling"]',
        "",
        "merged weights are others than those that were trained",
        OF_HUGGING_FACE,
    ),
    "export-counts-lost": Fault(
        "export/optimizer.py",
        "return counts_of(parameter) | tensors",
        "return tensors",
        "the optimizer begins to count its steps anew",
        OF_EXPORT,
    ),
    "generate-shows-halves-of-characters": Fault(
        "generate.py",
        'if not whole.endswith("\\ufffd") or',
        "if True or",
        "a character of several tokens comes as several signs of damage",
        OF_CHARACTERS,
    ),
}
