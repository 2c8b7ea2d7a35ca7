"""What leaves a checkpoint for others."""

from tests.mutants.fault import Fault

OF_EXPORT = ("unit/export/test_export.py",)
OF_HUGGING_FACE = ("unit/export/test_hugging_face.py",)
OF_CHARACTERS = ("distributed/test_after_a_run.py::test_characters_come_whole_and_what_is_none_comes_too",)

OF_EVALUATE = ("unit/test_evaluate.py",)

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
        "        return source(self._room)\n",
        "        return source(None)\n",
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
    "evaluate-adds-up-by-rank": Fault(
        "training/evaluation.py",
        "            parts[number] = ",
        "            parts[world.rank] += ",
        "the last bits of the validation loss tell the number of ranks",
        ("unit/training/test_evaluation.py",),
    ),
    "evaluate-draws-anew": Fault(
        "evaluating.py",
        "        torch.manual_seed(config.seed)  # for",
        "        # for",
        "buffers that are not saved are others than the run's",
        OF_EVALUATE,
    ),
    "evaluate-of-other-data-in-silence": Fault(
        "exported.py",
        '        found = self.said["data_fingerprint"]\n',
        "        found = None\n",
        "a loss of data that has changed is taken for the run's",
        OF_EVALUATE,
    ),
    "generate-shows-halves-of-characters": Fault(
        "generate.py",
        'if not whole.endswith("\\ufffd") or',
        "if True or",
        "a character of several tokens comes as several signs of damage",
        OF_CHARACTERS,
    ),
}
