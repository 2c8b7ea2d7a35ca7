"""What leaves a checkpoint for others."""

from tests.mutants.fault import Fault

OF_EXPORT = ("unit/commands/export/test_export.py",)
OF_OVERWRITE = ("unit/commands/export/test_overwrite.py",)
OF_HUGGING_FACE = ("unit/commands/export/test_hugging_face.py",)
OF_CHARACTERS = ("distributed/test_after_a_run.py::test_characters_come_whole_and_what_is_none_comes_too",)
OF_OUTPUT = ("unit/files/test_terminal.py",)
OF_EVALUATE = ("unit/commands/test_evaluate.py",)
OF_READING = ("unit/checkpoint/test_held.py",)

FAULTS = {
    "export-in-the-order-of-memory": Fault(
        "checkpoint/whole.py",
        'flat.as_strided(parameter["shape"], parameter["stride"]).contiguous()',
        'flat.view(parameter["shape"])',
        "a transposed parameter leaves with its elements in another order",
        OF_EXPORT,
    ),
    "export-replaces-anything": Fault(
        "commands/export/destination.py",
        "            if not (path in folders if",
        "            if False and not (path in folders if",
        "--overwrite erases files of the user's beside an export",
        OF_OVERWRITE,
    ),
    "export-follows-links": Fault(
        "commands/export/destination.py",
        " and stat.S_ISREG(mode)):",
        "):",
        "--overwrite takes a user's link or folder for a file that it has written",
        OF_OVERWRITE,
    ),
    "export-looks-once": Fault(
        "commands/export/destination.py",
        "            replaced = _files_of_export(old, shown=out)",
        "            replaced = [path for path in old.rglob('*') if path.is_file()]",
        "--overwrite erases what came while it wrote",
        OF_OVERWRITE,
    ),
    "export-into-its-run": Fault(
        "commands/export/destination.py",
        "    real = Path(os.path.realpath(path))\n    found = map(_identity, (real, *real.parents))",
        "    found = map(_identity, (path, *path.parents))",
        "by a link or `..` an export comes to lie in the run that it is of",
        OF_OVERWRITE,
    ),
    "export-not-on-the-disk": Fault(
        "commands/export/destination.py",
        "            sync_file(path)\n",
        "",
        "after a power cut an optimizer.pt of zeros lies in an export that looks whole",
        OF_EXPORT,
    ),
    "export-cut-off-by-a-signal": Fault(
        "commands/export/command.py",
        "        with ended_in_order():\n",
        "        if True:\n",
        "SIGTERM leaves half an export beside the place of a whole one",
        ("unit/commands/export/test_signals.py",),
    ),
    "export-full-disk-by-torch": Fault(
        "commands/export/destination.py",
        "    if _IN_TORCHS_WRITER not in str(error):\n        return None\n",
        "    return None\n",
        "a full disk is a traceback out of torch",
        OF_EXPORT,
    ),
    "export-without-a-tokenizer-on-a-full-disk": Fault(
        "commands/export/destination.py",
        "    if told := re.search",
        "    if told := None and re.search",
        "a full disk is a traceback out of the tokenizers",
        OF_HUGGING_FACE,
    ),
    "export-optimizer-by-other-names": Fault(
        "commands/export/command.py",
        "name_of = str if model is None else weights.name_of_hugging_face",
        "name_of = str",
        "optimizer.pt names parameters that the model beside it does not have",
        OF_HUGGING_FACE,
    ),
    "export-in-the-narrower-dtype": Fault(
        "commands/export/command.py",
        "    return max(found, key=",
        "    return min(found, key=",
        "transformers rounds a model of two dtypes when it opens it",
        OF_HUGGING_FACE,
    ),
    "export-dcp-holds-all": Fault(
        "commands/export/dcp.py",
        "        return source(self._room)\n",
        "        return source(None)\n",
        "an export to DCP takes as much memory as the whole checkpoint",
        OF_EXPORT,
    ),
    "export-merge-not-scaled": Fault(
        "commands/export/weights.py",
        ' * lora["scaling"]',
        "",
        "merged weights are others than those that were trained",
        OF_HUGGING_FACE,
    ),
    "export-counts-lost": Fault(
        "commands/export/optimizer.py",
        "return counts_of(parameter) | tensors",
        "return tensors",
        "the optimizer begins to count its steps anew",
        OF_EXPORT,
    ),
    "output-lost-in-silence": Fault(
        "files/terminal.py",
        "                self.problem = self.problem or error.strerror\n",
        "                pass\n",
        "what a command prints onto a full disk is lost, and its exit code is 0",
        OF_OUTPUT,
    ),
    "output-lost-at-the-end": Fault(
        "files/terminal.py",
        "    sys.stdout.flush()\n    problem",
        "    problem",
        "the last lines of a command are lost on a full disk, and its exit code is 0",
        OF_OUTPUT,
    ),
    "output-without-a-reader-ends-all": Fault(
        "files/terminal.py",
        "            elif self._ends_with_reader:\n",
        "            else:\n",
        "a run ends when nobody reads its output any more",
        OF_OUTPUT,
    ),
    "evaluate-adds-up-by-rank": Fault(
        "training/metrics/states.py",
        "        for [of_one] in kept[LOSS]:\n",
        "        for [of_one] in sorted(kept[LOSS], key=lambda each: float(each[0][1])):\n",
        "the last bits of the validation loss are not those of the micro-batches in their order",
        ("unit/training/callbacks/test_evaluation.py",),
    ),
    "evaluate-of-what-is-removed": Fault(
        "checkpoint/kept.py",
        "                if (descriptor := _locked(path / MANIFEST, shared=False)) is None:\n",
        "                if (descriptor := os.open(path / MANIFEST, os.O_RDONLY)) is None:\n",
        "a run that saves often removes the checkpoint that is being evaluated",
        OF_READING,
    ),
    "evaluate-draws-anew": Fault(
        "run/evaluating.py",
        "        torch.manual_seed(config.seed)  # for",
        "        # for",
        "buffers that are not saved are others than the run's",
        OF_EVALUATE,
    ),
    "evaluate-of-other-data-in-silence": Fault(
        "run/exported.py",
        'str(said["form"]), said["data_fingerprint"]',
        'str(said["form"]), None',
        "a loss of data that has changed is taken for the run's",
        OF_EVALUATE,
    ),
    "generate-shows-halves-of-characters": Fault(
        "commands/generate.py",
        'if not whole.endswith("\\ufffd") or',
        "if True or",
        "a character of several tokens comes as several signs of damage",
        OF_CHARACTERS,
    ),
}
