"""The parts of an export in the forms of others: weights by name, the optimizer's state, files of Hugging Face."""

from collections.abc import Callable, Iterator
from copy import deepcopy
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from zerotrain.checkpoint.manifest import AVERAGE, DTYPES as SAVED_DTYPES, WEIGHT, SavedParameter
from zerotrain.checkpoint.others.safetensors_and_torch import OutTensor
from zerotrain.checkpoint.tensor_file import chunks
from zerotrain.checkpoint.verification import CheckpointTensors
from zerotrain.errors import ConfigError
from zerotrain.files.kept_out import refusal
from zerotrain.files.untrusted import printable
from zerotrain.saved.saved import SavedRun, has_tokenizer
from zerotrain.saved.text_model import chat_template_of


def trained(saved: CheckpointTensors) -> Iterator[tuple[str, SavedParameter]]:
    """The parameters of the groups, as the manifest has them."""
    for name, parameter in saved.manifest.parameters.items():
        if parameter.trains:
            yield name, parameter


def param_groups(saved: CheckpointTensors, name_of: Callable[[str], str] = str) -> list[dict[str, Any]]:
    """As in a state dict of torch.optim, with names for numbers under "params".

    Args:
        name_of: what others call a parameter.
    """
    groups = []
    for number, group in enumerate(saved.manifest.content["groups"]):
        values = {}
        for name, value in group["hyperparameters"].items():
            if not (isinstance(value, dict) and "object" in value):
                values[name] = _plain(value)
        params = [name_of(name) for name, parameter in trained(saved) if parameter.group == number]
        groups.append({**values, "initial_lr": group["first_lr"], "params": params})
    return groups


def counts_of(parameter: SavedParameter) -> dict[str, Any]:
    """State kept once for a parameter, such as its number of steps; none for one without elements, for which torch's
    optimizers would miss the other state."""
    if parameter.numel == 0:
        return {}
    return {
        name: torch.tensor(value["value"], dtype=SAVED_DTYPES[value["dtype"]]) if isinstance(value, dict) else value
        for name, value in parameter.counts.items()
    }


def roles_of(parameter: SavedParameter) -> Iterator[tuple[str, torch.dtype, tuple[int, ...]]]:
    """(role, dtype, shape) of what is kept of each element of a parameter, or of it as a whole."""
    for role, tensor in parameter.tensors.items():
        if role not in (WEIGHT, AVERAGE):
            yield role, tensor.torch_dtype, parameter.shape if tensor.shape is None else tensor.shape


def write_optimizer(path: Path, saved: CheckpointTensors, name_of: Callable[[str], str] = str) -> None:
    """{"state": {name: {exp_avg, ...}}, "param_groups": [...]} for `torch.load(path, weights_only=True)`.

    torch.save writes the file with room for the tensors and without them; then each is written into its place.

    Args:
        name_of: what others call a parameter, as in the weights beside it.
    """
    state = {}
    with FakeTensorMode():
        for name, parameter in trained(saved):
            tensors = {role: torch.empty(shape, dtype=dtype) for role, dtype, shape in roles_of(parameter)}
            if entries := counts_of(parameter) | tensors:
                state[name_of(name)] = entries
    with torch.serialization.skip_data(materialize_fake_tensors=True):
        torch.save({"state": state, "param_groups": param_groups(saved, name_of)}, path)
    with FakeTensorMode():
        places = torch.load(path, weights_only=True)["state"]
    with open(path, "r+b") as file:
        for name, parameter in trained(saved):
            counts = counts_of(parameter)
            for role, place in places.get(name_of(name), {}).items():
                if isinstance(place, torch.Tensor) and place.numel() > 0:
                    offset = place.untyped_storage()._checkpoint_offset
                    assert offset is not None
                    file.seek(offset)
                    for chunk in chunks(counts[role] if role in counts else saved.of_role(name, role)):
                        file.write(chunk)


def _plain(value: Any) -> Any:
    """A hyperparameter as a number, also where a tensor held it on a device."""
    if isinstance(value, dict):
        return value["value"]
    return tuple(_plain(item) for item in value) if isinstance(value, list) else value


# The files beside the weights by which transformers and peft open a folder. Needs the extra hf.


def lora_of(model: Any) -> Any | None:
    """The config of the adapters; None without."""
    return getattr(model, "peft_config", {}).get("default")


def write_config(folder: Path, model: Any, dtype: torch.dtype) -> None:
    """config.json and generation_config.json of a model of transformers, not of peft's around it."""
    config = model.config
    config.architectures = [type(model).__name__]
    config.dtype = dtype
    config.use_cache = True  # which training had put off
    config.save_pretrained(folder)
    if model.can_generate():
        model.generation_config.use_cache = True
        model.generation_config.to_json_file(folder / "generation_config.json")  # unchecked: it is the user's


def write_adapter_config(folder: Path, run: SavedRun, lora: Any) -> None:
    """adapter_config.json, which names the model that the adapters are for.

    Raises:
        ConfigError: that was made from scratch, and is nowhere else.
    """
    base = run.require_config().model.get("name_or_path")
    if base is None:
        raise ConfigError(
            f"--merge: got false, but the adapters of {run.path} need the model from scratch that they were trained "
            "on; give --merge"
        )
    lora.base_model_name_or_path = str(Path(base).resolve()) if Path(base).is_dir() else base
    lora.inference_mode = True
    lora.save_pretrained(folder)


def write_tokenizer(folder: Path, run: SavedRun) -> str | None:
    """The tokenizer's files, with the template of the chats it was trained on; where these cannot be had, a line that
    says so."""
    config, warning = run.require_config(), None
    name = run.tokenizer_name or config.model.get("name_or_path")
    if name is None:
        return None
    if not has_tokenizer(name):
        return f"warning: without a tokenizer: {name} has no file of one"
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=False)
    except Exception as error:  # transformers raises all kinds for files that it cannot read
        return printable(f"warning: without a tokenizer: {name} has none ({refusal(name, error)})", keep="")
    try:
        if config.data.get("template") is not None and (template := chat_template_of(run)) is not None:
            tokenizer.chat_template = template.text
    except ConfigError as error:
        warning = f"warning: without the template of the chats: {error}"
    tokenizer.save_pretrained(folder)
    return warning


# The weights under the names that others know, as tensors to be written.


IN_MODEL = "model."
"""`HuggingFaceModel` puts this before the names of transformers."""
IN_PEFT = "base_model.model."
"""Peft puts this before them, in its files too."""


def name_of_hugging_face(name: str) -> str:
    """The name of a `HuggingFaceModel`'s parameter in transformers, or of an adapter's in peft."""
    return name.removeprefix(IN_MODEL)


def plain(
    saved: CheckpointTensors, dtype: torch.dtype | None, name_of: Callable[[str], str] = str
) -> dict[str, OutTensor]:
    """All parameters and buffers; of a tied one by its first name, or by what others call that."""
    return {name_of(name): _tensor(saved, name, dtype) for name in saved.names}


def adapters(saved: CheckpointTensors, dtype: torch.dtype | None, model: Any) -> dict[str, OutTensor]:
    """The tensors that peft's model trains, by the names in its files."""
    from zerotrain.models.pretrained import adapter_tensors  # it needs the extra

    own = _saved_names(model)
    return {name: _tensor(saved, own[tensor], dtype) for name, tensor in adapter_tensors(model).items()}


def merged(saved: CheckpointTensors, dtype: torch.dtype | None, model: Any) -> dict[str, OutTensor]:
    """The weights with what peft's model adds to them, by the names of transformers without peft.

    Args:
        model: on the meta device. Its layers get memory one at a time, in which peft merges them.

    Raises:
        ConfigError: peft cannot merge one.
    """
    own, wrappers, tensors = _saved_names(model), dict[str, Any](), dict[str, OutTensor]()
    for name, module in model.named_modules():
        is_inside = any(name.startswith(f"{wrapper}.") for wrapper in wrappers)
        if _is_wrapper(module) and not is_inside:
            wrappers[name] = module
    prefixes = tuple(f"{name}." for name in wrappers)
    has_repeated_layers = model.peft_config["default"].layer_replication is not None
    for name, tensor in model.state_dict(keep_vars=True).items():
        first = own[tensor].removeprefix(IN_MODEL)
        # Another name of a tied tensor is one more tensor where its first is merged, and the other is not.
        is_own = name == first or first.startswith(prefixes) or has_repeated_layers
        if is_own and not name.startswith(prefixes):
            tensors[name.removeprefix(IN_PEFT)] = _tensor(saved, own[tensor], dtype)
    for name, wrapper in wrappers.items():

        def read(part: str, wrapper: Any = wrapper) -> torch.Tensor:
            values = {name: saved.read(own[tensor]) for name, tensor in wrapper.state_dict(keep_vars=True).items()}
            layer = deepcopy(wrapper).to_empty(device="cpu")
            layer.load_state_dict(values)
            return _unloaded(layer, merge=True).state_dict()[part]

        try:  # without memory
            _unloaded(deepcopy(wrapper), merge=True)
        except (RuntimeError, ValueError, NotImplementedError) as error:
            line = printable(str(error).splitlines()[0], keep="")
            raise ConfigError(f"--merge: {line.removesuffix('.')}; leave it out") from error
        for part, tensor in _unloaded(wrapper, merge=False).state_dict(keep_vars=True).items():
            kind = dtype if dtype is not None and tensor.is_floating_point() else saved.names[own[tensor]][0]
            read_part = partial(read, part)
            tensors[f"{name}.{part}".removeprefix(IN_PEFT)] = OutTensor(kind, tuple(tensor.shape), read_part)
    return tensors


def _is_wrapper(module: Any) -> bool:
    return hasattr(module, "base_layer") or hasattr(module, "unload_and_optionally_merge_module")


def _unloaded(wrapper: Any, *, merge: bool) -> torch.nn.Module:
    """The layer inside of one of peft's; ValueError where that is another of peft's."""
    if hasattr(wrapper, "unload_and_optionally_merge_module"):
        layer = wrapper.unload_and_optionally_merge_module(merge=merge, safe_merge=False, adapter_names=None)
    else:
        if merge:
            wrapper.merge()
        layer = wrapper.get_base_layer()
    if _is_wrapper(layer):
        raise ValueError("a layer has adapters and trained tokens at once, which peft does not merge")
    return layer


def _saved_names(model: Any) -> dict[torch.Tensor, str]:
    """The name of each tensor in a checkpoint: of a tied one the first."""
    names: dict[torch.Tensor, str] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        names.setdefault(tensor, f"{IN_MODEL}{name}")
    return names


def _tensor(saved: CheckpointTensors, name: str, dtype: torch.dtype | None) -> OutTensor:
    own, shape = saved.names[name]
    return OutTensor(dtype if dtype is not None and own.is_floating_point else own, shape, lambda: saved.read(name))
