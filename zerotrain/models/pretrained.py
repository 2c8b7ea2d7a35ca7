"""Weights of a pretrained model from safetensors files, one tensor in memory at a time, and adapters of peft. Needs the
extra hf."""

import difflib
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Literal, get_args, get_origin, get_type_hints

import torch
from msgspec import Struct
from safetensors import SafetensorError, safe_open
from transformers.utils import cached_file

from zerotrain.files.match import Misfits, StoredTensor, any_kind, match, model_tensors
from zerotrain.files.terminal import package
from zerotrain.files.untrusted import FileName, UntrustedFileError, read_json, require_kind, shown


class _PretrainedIndex(Struct):
    weight_map: dict[str, FileName]


MAX_INDEX_NBYTES = 100_000_000


@contextmanager
def _open_safetensors(path: str) -> Iterator[Any]:
    """A safetensors file; ValueError where it is none, is damaged, or lacks a tensor read from it."""
    try:
        with safe_open(path, framework="pt") as file:
            yield file
    except SafetensorError as error:
        raise ValueError(f"{path} is no safetensors file, or damaged: {shown(str(error))}") from error


@torch.library.custom_op("zerotrain::read_tensor", mutates_args=())
def read_tensor(path: str, name: str) -> torch.Tensor:
    """Tensor `name` of a safetensors file, on the CPU.

    An operation of torch: recorders of a constructor's operations can repeat it.
    """
    with _open_safetensors(path) as file:
        return file.get_tensor(name).clone()


def find_weights(name_or_path: str) -> dict[str, str] | None:
    """Name of each tensor -> its safetensors file. A model of the hub is downloaded first.

    Returns:
        None where the weights are in another format.

    Raises:
        OSError: there are no weights at all.
        ValueError: they are damaged.
    """
    index = _find(name_or_path, "model.safetensors.index.json")
    if index is not None:
        parts = read_json(index, _PretrainedIndex, max_nbytes=MAX_INDEX_NBYTES).weight_map
        paths = {part: _find(name_or_path, part) for part in sorted(set(parts.values()))}
        missing = [part for part, path in paths.items() if path is None]
        if missing:
            raise OSError(f"it lacks {', '.join(map(shown, missing))}")
        return {name: str(paths[part]) for name, part in parts.items()}
    file = _find(name_or_path, "model.safetensors")
    if file is not None:
        with _open_safetensors(file) as opened:
            return dict.fromkeys(opened.keys(), file)
    if not any(_find(name_or_path, name) for name in ("pytorch_model.bin", "pytorch_model.bin.index.json")):
        raise OSError("it holds neither model.safetensors nor pytorch_model.bin")
    return None


def _find(name_or_path: str, file: str) -> str | None:
    return cached_file(name_or_path, file, _raise_exceptions_for_missing_entries=False)


def require_shapes(model: torch.nn.Module, files: Mapping[str, str]) -> None:
    """Compare the shapes of a model's files with the model after changes of its config; it may be on the meta device.
    ValueError where a tensor has another shape than the model's of the same name."""
    if wrong := _matched(model.state_dict(keep_vars=True), files).wrong_shape:
        raise ValueError(
            f"model.config: the weights do not fit the model: {wrong[0]}; leave out the fields that change it"
        )


def load_weights(model: torch.nn.Module, files: Mapping[str, str]) -> bool:
    """Copy tensors from files into the parameters and buffers of the same names. False, and nothing is copied, where
    names or shapes are not exactly those of the model. One name of tied tensors is enough."""
    targets = model.state_dict(keep_vars=True)
    if _matched(targets, files) != Misfits((), (), (), ()):
        return False
    _copy(files, targets)
    return True


@torch.no_grad()
def _copy(files: Mapping[str, str], targets: Mapping[str, torch.Tensor]) -> None:
    for name, path in files.items():
        targets[name].copy_(torch.ops.zerotrain.read_tensor(path, name))


def _matched(targets: Mapping[str, torch.Tensor], files: Mapping[str, str]) -> Misfits:
    tensors = []
    for path in dict.fromkeys(files.values()):
        with _open_safetensors(path) as file:
            for name in (name for name in files if files[name] == path):
                tensors.append(StoredTensor([name], "", None, tuple(file.get_slice(name).get_shape())))
    return match(tensors, model_tensors(targets.items()), kind=any_kind)


# Adapters of peft: its config of settings or of a folder, and their tensors by its names.


SHORT_NAMES = {"rank": "r", "alpha": "lora_alpha", "dropout": "lora_dropout", "targets": "target_modules"}
"""Setting of `model.lora` -> field of peft's LoraConfig. All other fields have one name."""
_NOT_SETTINGS = frozenset(
    ["peft_type", "task_type", "auto_mapping", "peft_version", "base_model_name_or_path", "revision", "inference_mode"]
)
"""Fields of a LoraConfig about where it was made and what for."""
_OF_DATA = ("corda", "eva", "loftq", "lora_ga")
"""Ways to make the first values of adapters out of data, or of a quantized model: peft does it beside a LoraConfig."""
_NOT_OF_LAYERS = ("arrow_config", "kasa_config", "megatron_config", "monteclora_config")
"""Fields that want more than layers: other adapters, changed frozen weights, other layers or a further loss."""
_ADAPTERS = "model.lora.name_or_path"


def add_adapters(model: Any, settings: Mapping[str, Any], task_type: str | None, heads: Sequence[str]) -> Any:
    """Peft's model around one of transformers, of which adapters are trained, and modules of `heads`.

    Args:
        settings: the argument `lora` of `HuggingFaceModel`, complete.
        task_type: of a LoraConfig.

    Raises:
        ValueError: peft refuses them, or the folder that they name has no adapters for this model.
    """
    peft: Any = package("peft", extra="hf", needed_by="model.lora")
    folder = settings["name_or_path"]
    if folder is None:
        for name, field in SHORT_NAMES.items():
            if field in settings:
                raise ValueError(f"model.lora.{field}: zerotrain calls it model.lora.{name}")
        fields = {SHORT_NAMES.get(name, name): value for name, value in settings.items() if name != "name_or_path"}
        if fields["target_modules"] is None and not fields.get("target_parameters"):
            fields["target_modules"] = "all-linear"
        is_transposed = any(type(module).__name__ == "Conv1D" for module in model.modules())  # GPT-2's linear layers
        fields = {"fan_in_fan_out": is_transposed} | fields
    else:
        fields = _read_fields(folder)
    fields = _typed(fields, peft.LoraConfig)
    if folder is None:
        fields["modules_to_save"] = list(dict.fromkeys([*(fields.get("modules_to_save") or ()), *heads])) or None
        modules = [name for name, _ in model.named_modules()]
        for field in ("target_modules", "modules_to_save"):
            ends = fields[field] if isinstance(fields[field], list) else []
            for end in (end for end in ends if not any(f".{name}".endswith(f".{end}") for name in modules)):
                hint = _near(end, modules)
                raise ValueError(f"model.lora.{_setting(field)}: no module of the model is called {end}{hint}")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)  # peft still calls what transformers has renamed
            adapted = peft.get_peft_model(model, peft.LoraConfig(task_type=task_type, **fields))
    except (ValueError, TypeError, NotImplementedError) as error:
        raise ValueError(f"model.lora: {str(error).splitlines()[0]}") from error
    if folder is not None:
        _load_adapters(adapted, folder)
    return adapted


def adapter_tensors(adapted: Any, *, with_embeddings: bool = False) -> dict[str, torch.Tensor]:
    """The tensors of a model of peft that its files hold, by the names that they have there."""
    from peft import get_peft_model_state_dict

    state = adapted.state_dict(keep_vars=True)
    return dict(get_peft_model_state_dict(adapted, state_dict=state, save_embedding_layers=with_embeddings))


def _read_fields(folder: str) -> dict[str, Any]:
    try:
        file = _find(folder, "adapter_config.json")
        if file is None:
            raise OSError("it holds no adapter_config.json")
        fields: dict[str, Any] = read_json(file, dict[str, Any], max_nbytes=MAX_INDEX_NBYTES)
    except (OSError, UntrustedFileError) as error:
        raise ValueError(f"{_ADAPTERS}={folder} is no folder of adapters of peft: {shown(str(error))}") from error
    if fields.get("peft_type") != "LORA":
        raise ValueError(f"{_ADAPTERS}={folder}: its peft_type is {shown(str(fields.get('peft_type')))}, not LORA")
    return {name: value for name, value in fields.items() if name not in _NOT_SETTINGS}


def _load_adapters(adapted: Any, folder: str) -> None:
    if (file := _find(folder, "adapter_model.safetensors")) is None:
        raise ValueError(f"{_ADAPTERS}={folder} holds no adapter_model.safetensors")
    with _open_safetensors(file) as opened:
        files = dict.fromkeys(opened.keys(), file)
    targets = adapter_tensors(adapted, with_embeddings=any(name.endswith(".base_layer.weight") for name in files))
    if problems := _matched(targets, files).problems():
        raise ValueError(f"{_ADAPTERS}={folder} does not fit the model: {problems[0]}")
    if torch.get_default_device().type != "meta":
        _copy(files, targets)


def _typed(fields: Mapping[str, Any], kind: type) -> dict[str, Any]:
    """Fields of a LoraConfig, each of its type, which peft does not check."""
    hints = get_type_hints(kind) | {"lora_alpha": float, "init_lora_weights": bool | str}
    typed = {}
    for name, value in fields.items():
        if name not in hints or name in _NOT_SETTINGS:
            known = [*SHORT_NAMES, *(hints.keys() - SHORT_NAMES.values() - _NOT_SETTINGS)]
            raise ValueError(f"model.lora.{name}: LoraConfig of peft has no such field{_near(name, known)}")
        try:
            # These two are of types that msgspec does not know.
            typed[name] = value if name in ("loftq_config", "velora_config") else require_kind(value, hints[name])
        except UntrustedFileError as error:
            choices = get_args(hints[name]) if get_origin(hints[name]) is Literal else ()
            why = f"got {shown(str(value))}; it must be one of {', '.join(choices)}" if choices else error
            raise ValueError(f"model.lora.{_setting(name)}: {why}") from None
    for name in (name for name in _NOT_OF_LAYERS if typed.get(name) is not None):
        raise ValueError(f"model.lora.{name}: needs more than adapters in layers, which alone train here; leave it out")
    if typed.get("init_lora_weights") in _OF_DATA:
        raise ValueError(
            f"model.lora.init_lora_weights={typed['init_lora_weights']} needs more than the model; make the adapters "
            f"with peft, save them, and give their folder as {_ADAPTERS}"
        )
    return typed


def _setting(field: str) -> str:
    return next((setting for setting, name in SHORT_NAMES.items() if name == field), field)


def _near(name: str, names: Sequence[str]) -> str:
    leaves = dict.fromkeys(name.rpartition(".")[2] for name in names)
    near = difflib.get_close_matches(name, leaves, n=3)
    return f"; did you mean {' or '.join(near)}?" if near else ""
