"""The files beside the weights by which transformers and peft open a folder. Needs the extra hf."""

from pathlib import Path
from typing import Any

import torch

from zerotrain.errors import ConfigError
from zerotrain.files.kept_out import refusal
from zerotrain.files.untrusted import printable
from zerotrain.saved.saved import SavedRun, has_tokenizer


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
        model.generation_config.save_pretrained(folder)


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
    lora.task_type, lora.inference_mode = "CAUSAL_LM", True
    lora.save_pretrained(folder)


def write_tokenizer(folder: Path, run: SavedRun) -> str | None:
    """The tokenizer's files; where it cannot be had, a line that says so."""
    name = run.tokenizer_name or run.require_config().model.get("name_or_path")
    if name is None:
        return None
    if not has_tokenizer(name):
        return f"warning: without a tokenizer: {name} has no file of one"
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(name, trust_remote_code=False)
    except Exception as error:  # transformers raises all kinds for files that it cannot read
        return printable(f"warning: without a tokenizer: {name} has none ({refusal(name, error)})", keep="")
    tokenizer.save_pretrained(folder)
    return None
