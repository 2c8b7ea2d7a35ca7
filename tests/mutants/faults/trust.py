"""What a file may have built, and what is imported for it."""

from tests.mutants.fault import Fault

OF_TRUST = ("unit/run/test_trust.py",)
OF_KEPT_OUT = ("unit/files/test_kept_out.py",)
OF_REMOTE_CODE = ("unit/files/test_remote_code.py",)

FAULTS = {
    "trust-whatever-is-there": Fault(
        "run/trust.py",
        "return isinstance(found, type | FunctionType) and found in _known()",
        "return isinstance(found, type | FunctionType)",
        "a checkpoint has torch.load unpickle a file of its own",
        OF_TRUST,
    ),
    "trust-through-other-modules": Fault(
        "run/trust.py",
        ' or found.__name__.partition(".")[0] not in _PACKAGES:\n',
        ":\n",
        "a name leads through a module of zerotrain into the standard library",
        ("unit/run/test_trust.py::test_a_name_leads_through_our_modules_alone",),
    ),
    "trust-outermost-alone": Fault(
        "run/trust.py",
        "    for name, each in nested(values, group):\n",
        "    for name, each in ((group, values),):\n",
        "an argument of a known class runs a command",
        OF_TRUST,
    ),
    "trust-what-another-setting-names": Fault(
        "run/trust.py",
        "and (name, target) not in own\n",
        "and not own\n",
        "one class named by the user has all others of the file built",
        OF_TRUST,
    ),
    "trust-resolves-a-file": Fault(
        "config/compose.py",
        "OmegaConf.merge(_schema(), literal(values)))",
        "OmegaConf.merge(_schema(), values))",
        "a checkpoint reads the environment of who loads it",
        OF_TRUST,
    ),
    "trust-resolves-an-argument": Fault(
        "run/factory.py",
        "    for name, text in unresolved(values, group):",
        "    for name, text in ():",
        "a text that was meant as such reads the environment",
        OF_TRUST,
    ),
    "kept-out-one-checkpoint-alone": Fault(
        "files/kept_out.py",
        "    return folder.parent.parent if folder.parent.name == CHECKPOINTS else folder\n",
        "    return folder\n",
        "a module in a run's folder is imported for its checkpoint",
        OF_KEPT_OUT,
    ),
    "kept-out-of-the-search-alone": Fault(
        "files/kept_out.py",
        "        if spec is not None and spec.has_location and",
        "        if spec is not None and path is None and spec.has_location and",
        "a module in a run's folder is imported as a part of a folder above it",
        OF_KEPT_OUT,
    ),
    "cache-any-name-of-text": Fault(
        "data/preparing/cache.py",
        "            or _STORE_NAME.fullmatch(folder.name) is None\n",
        '            or not (folder.name.startswith(("text-", "tokens-")) and folder.name.count("-") == 3)\n',
        "a folder of the user's is erased in what a checkpoint names as the cache",
        ("unit/data/preparing/test_cache.py",),
    ),
    "remote-code-asked-for": Fault(
        "data/preparing/tokenizer.py",
        "AutoTokenizer.from_pretrained(name_or_path, trust_remote_code=False)",
        "AutoTokenizer.from_pretrained(name_or_path)",
        "a tokenizer asks on the terminal whether its code may run",
        ("unit/data/preparing/test_tokenizer.py",),
    ),
    "remote-code-of-a-model": Fault(
        "models/huggingface.py",
        "AutoConfig.from_pretrained(name_or_path, trust_remote_code=False)",
        "AutoConfig.from_pretrained(name_or_path)",
        "a model asks on the terminal whether its code may run",
        ("unit/models/test_huggingface.py::test_code_of_a_model_is_not_run_and_nobody_is_asked",),
    ),
    "remote-kernels-within": Fault(
        "files/remote_code.py",
        "            yield from _kernels_in(value)\n",
        "            continue\n",
        "a config of a part of a model fetches compiled code from the hub",
        OF_REMOTE_CODE,
    ),
}
