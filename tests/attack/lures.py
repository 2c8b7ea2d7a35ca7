"""Folders that somebody has made who wants code of theirs to run: the table of `test_lures.py`.

In texts CANARY is a file that must not be there afterwards, FOLDER the folder of the lure, and SECRET a variable of the
environment whose value must not be printed.
"""

import pickle
from dataclasses import dataclass, field
from typing import Any

TOUCH = "touch CANARY"
PYTHON = "open('CANARY', 'w').close()\n"
SECRET = "the-users-secret"
GPT = "zerotrain.models.GPT"
HUGGING_FACE = {"_target_": "zerotrain.models.HuggingFaceModel", "vocab_size": 256}
GPT2 = {"model_type": "gpt2", "n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 16, "vocab_size": 256}
GPT2 |= {"bos_token_id": None, "eos_token_id": None}
EVIL_CONFIG = {"model_type": "evil", "auto_map": {"AutoConfig": "model.C", "AutoModelForCausalLM": "model.M"}}
EVIL_TOKENIZER = {"tokenizer_class": "EvilTokenizer", "auto_map": {"AutoTokenizer": ["model.T", "model.T"]}}
PAIR = {"version": "1.0", "added_tokens": [], "model": {"type": "BPE", "vocab": {"a": 0, "b": 1}, "merges": []}}
OTHERS = "other classes can run any code; give --trust-code if"
NEVER = "a reference in a file is never resolved"
OWN_CODE = "has code of its own (model."


class Runs:
    """Runs a command of the shell when it is unpickled."""

    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self) -> Any:
        import os

        return os.system, (self.command,)


def pickled(canary: str) -> bytes:
    return pickle.dumps(Runs(f"touch {canary}"), protocol=2)


PICKLE = b"a pickle that runs a command"
"""Stands for `pickled(CANARY)` in files of a lure."""
ZIPPED = b"the same, as torch.save writes it"
OBJECTS = b"the same, as numpy writes objects"


@dataclass(frozen=True)
class Lure:
    """Somebody's folder."""

    name: str
    said: str = OTHERS
    """In the line of each command that refuses it."""
    model: dict[str, Any] | None = None
    """In place of the model of a run's config."""
    changed: dict[str, Any] = field(default_factory=dict)
    """Other values of that config, by dotted names."""
    files: dict[str, Any] = field(default_factory=dict)
    """Beside it: texts, bytes, or what JSON is made of."""
    codes: dict[str, int] = field(default_factory=dict)
    """Exit codes of commands, where they are not those of `CODES`."""
    says: dict[str, str] = field(default_factory=dict)
    """What is said instead by some commands."""

    def __str__(self) -> str:
        return self.name


CODES = {"generate": 2, "evaluate": 2, "export": 0, "inspect": 0}
"""An export of what is no model of Hugging Face builds nothing, and neither does inspect."""
UNREAD = {"generate": 0}
"""What generate has no use for."""
HUB = {"export": 2}
NO_TOKENIZER = {"generate": "has no tokenizer, so there is no text to generate from"}


def gpt(**arguments: Any) -> dict[str, Any]:
    known = {"vocab_size": 256, "max_seq_len": 16, "num_layers": 1, "num_heads": 2, "hidden_size": 16}
    return {"_target_": GPT, **known, **arguments}


def system(**more: Any) -> dict[str, Any]:
    return {"_target_": "os.system", "command": TOUCH, **more}


CALLBACKS = Lure(
    "callbacks, which a run alone has",
    changed={"callbacks": {"a": system(), "b": {"_target_": "canary_on_import.B"}}},
    codes={"generate": 0, "evaluate": 0},
)
RUNS = (
    Lure("a command of the shell", model=system()),
    CALLBACKS,
    Lure("by another module's os", model={**system(), "_target_": "zerotrain.inspect.os.system"}),
    Lure("a file opened for writing", model={"_target_": "builtins.open", "file": "CANARY", "mode": "w"}),
    Lure(
        "a pickle by torch.load",
        model={"_target_": "torch.load", "f": "FOLDER/evil.pt", "weights_only": False},
        files={"evil.pt": PICKLE},
    ),
    Lure("a module in the folder", model={"_target_": "model.Evil"}, files={"model.py": PYTHON}),
    Lure("a module that is installed, and does something when imported", model={"_target_": "canary_on_import.Model"}),
    Lure("the same as a module of its package", model={"_target_": "zerotrain.models.canary_on_import.Model"}),
    Lure("instantiate of hydra", model={"_target_": "hydra.utils.instantiate", "config": system()}),
    Lure("an argument of a model", model=gpt(dropout=system())),
    Lure("positional arguments", model=gpt(_args_=[system()])),
    Lure("an argument that is not recursive", model=gpt(dropout=system(), _recursive_=False)),
    Lure("layers of torch around it", model={"_target_": "torch.nn.Sequential", "_args_": [system()]}),
    Lure("the data", changed={"data": system()}),
    Lure("an argument of the data", changed={"data.seq_len": system()}, codes=UNREAD),
    Lure("what makes batches", changed={"data.collate_fn": system(_partial_=True)}, codes=UNREAD),
    Lure("the optimizer", changed={"optimizer": system(_partial_=True)}, codes=UNREAD),
    Lure("an argument of the optimizer", changed={"optimizer.lr": system()}, codes=UNREAD),
    Lure("the schedule", changed={"scheduler": system(_partial_=True)}, codes=UNREAD),
    Lure("a name that is a list", model={"_target_": ["os.system"], "command": TOUCH}),
    Lure("a name with escapes", model={"_target_": "os.\x1b]0;x\x07\n\u202esystem", "command": TOUCH}),
    Lure("a name of a million characters", model={"_target_": "os." * 300_000, "command": TOUCH}),
    Lure("a name that is resolved", model={"_target_": "${oc.env:SECRET}", "command": TOUCH}),
    Lure("a variable as an argument", NEVER, model=gpt(dropout="${oc.env:SECRET}")),
    Lure("a variable behind backslashes", NEVER, model=gpt(dropout="\\\\\\${oc.env:SECRET}")),
    Lure("a variable in a list", NEVER, changed={"data.path": ["x${oc.env:SECRET}"]}, codes=UNREAD),
    Lure("a variable in place of a group", "model is a str", changed={"model": "${oc.env:SECRET}"}, codes=HUB),
    Lure("a variable in place of a number", "${oc.env:SECRET}", changed={"seed": "${oc.env:SECRET}"}, codes=HUB),
    Lure("a variable as a device", "${oc.env:SECRET}", changed={"launch.device": "${oc.env:SECRET}"}, codes=HUB),
    Lure(
        "a layer that cannot be",
        "must be divisible",
        model={"_target_": "torch.nn.MultiheadAttention", "embed_dim": 3, "num_heads": 2},
    ),
    Lure("a partial in place of a model", "", model=gpt(_partial_=True)),
    Lure("a model without a class", "", model={"vocab_size": 3}),
    Lure(
        "a model of Hugging Face with code",
        OWN_CODE,
        model={**HUGGING_FACE, "name_or_path": "FOLDER"},
        files={"config_.json": EVIL_CONFIG, "config.json": EVIL_CONFIG, "model.py": PYTHON},
        codes=HUB,
    ),
    Lure(
        "code of the hub in the fields of a model",
        "asks for code of the hub (evil/kernel)",
        model={**HUGGING_FACE, "config": {**GPT2, "_attn_implementation": "evil/kernel"}},
        codes=HUB,
    ),
    Lure(
        "the folder of a tokenizer with code",
        OWN_CODE,
        changed={"data.tokenizer": "FOLDER"},
        files={"tokenizer_config.json": EVIL_TOKENIZER, "model.py": PYTHON},
    ),
    Lure(
        "data that are a pickle",
        "is a damaged .npy file",
        changed={
            "data": {"_target_": "zerotrain.data.TokenFiles", "path": "FOLDER/x.npy", "seq_len": 16, "vocab_size": 256}
        },
        files={"x.npy": OBJECTS},
        says=NO_TOKENIZER,
    ),
)
"""Checkpoints, with hashes that fit; those of `EXPORTS` as exported folders. More names: unit/saved/test_trust.py."""

EXPORTS = ("a command of the shell", "a file opened for writing", "a module in the folder", "an argument of a model")
EXPORTS += ("the data", "what makes batches", "the optimizer", "a name that is resolved", "a variable as an argument")
EXPORTS += ("a variable in place of a number", "the folder of a tokenizer with code", "a name with escapes")

MODELS = (
    Lure("a config with code", OWN_CODE, files={"config.json": EVIL_CONFIG, "model.py": PYTHON}),
    Lure(
        "compiled code of the hub",
        "asks for code of the hub (evil/kernel)",
        files={"config.json": {**GPT2, "attn_implementation": "evil/kernel"}, "model.safetensors": b""},
    ),
    Lure("weights that are a pickle", "", files={"config.json": GPT2, "pytorch_model.bin": PICKLE}),
    Lure("weights that are a pickle in a zip", "", files={"config.json": GPT2, "pytorch_model.bin": ZIPPED}),
    Lure("a config that is deep", "", files={"config.json": '{"a":' * 100_000}),
)
"""Folders of Hugging Face with a model."""

ADAPTERS = (
    Lure(
        "a module by the name of Megatron's",
        "",
        files={
            "adapter_config.json": {"peft_type": "LORA", "base_model_name_or_path": "FOLDER/base", "r": 2}
            | {"megatron_config": {"a": 1}, "megatron_core": "canary_on_import", "target_modules": ["c_attn"]},
            "base/config.json": GPT2,
        },
    ),
    Lure(
        "a base with code",
        OWN_CODE,
        files={
            "adapter_config.json": {"peft_type": "LORA", "base_model_name_or_path": "FOLDER/base"},
            "base/config.json": EVIL_CONFIG,
            "base/model.py": PYTHON,
        },
    ),
)

TOKENIZERS = (
    Lure("a tokenizer with code", OWN_CODE, files={"tokenizer_config.json": EVIL_TOKENIZER, "model.py": PYTHON}),
    Lure(
        "a tokenizer of which one class is known",
        "",
        files={
            "tokenizer_config.json": {"tokenizer_class": "BertTokenizer", "auto_map": "model.T"},
            "model.py": PYTHON,
        },
    ),
    Lure("a tokenizer that is a pickle", "", files={"vocab.pkl": PICKLE, "tokenizer_config.json": {}}),
)

WEIGHTS = (
    Lure("a pickle", "", files={"w.pt": PICKLE}),
    Lure("a pickle in a zip", "", files={"w.pt": ZIPPED}),
    Lure("a folder with a pickle", "", files={"w.pt/pytorch_model.bin": ZIPPED}),
    Lure("the metadata of DCP", "making such an object may run any code", files={"w.pt/.metadata": PICKLE}),
)
"""What `checkpoint.init_from` names."""

DATA = (
    (Lure("tokens that are objects", "", files={"x.npy": OBJECTS}), ("data=tokens", "data.path=FOLDER/x.npy")),
    (Lure("tokens that are a pickle", "", files={"x.npy": PICKLE}), ("data=tokens", "data.path=FOLDER/x.npy")),
    (Lure("a store that is a pickle", "", files={"index.json": PICKLE}), ("data=tokens", "data.path=FOLDER")),
    (
        Lure("a store that leads away", "", files={"index.json": {"format": 1, "shards": [{"file": "../../x"}]}}),
        ("data=tokens", "data.path=FOLDER"),
    ),
    (Lure("a table that is a pickle", "", files={"x.parquet": PICKLE}), ("data=text", "data.path=FOLDER/x.parquet")),
    (Lure("lines that are deep", "", files={"x.jsonl": "[" * 100_000}), ("data=text", "data.path=FOLDER/x.jsonl")),
    (Lure("text that torch.save wrote", "", files={"x.txt": ZIPPED}), ("data=text", "data.path=FOLDER/x.txt")),
    (
        Lure("a dataset of another's with a script", "", files={"lure.py": PYTHON, "dataset_infos.json": {}}),
        ("data=huggingface", "data.path=FOLDER"),
    ),
    (
        Lure(
            "a saved dataset whose table is a pickle",
            "",
            files={
                "x.arrow": PICKLE,
                "state.json": {"_data_files": [{"filename": "x.arrow"}], "_fingerprint": "a", "_format_type": None}
                | {"_format_columns": None, "_format_kwargs": {}, "_output_all_columns": False, "_split": "train"},
                "dataset_info.json": {"features": {"tokens": {"dtype": "os.system", "_type": "Value"}}},
            },
        ),
        ("data=huggingface", "data.path=FOLDER"),
    ),
)
"""Folders and files of data, and the settings that name them."""
