"""Files with tensors, each made once, and read as commands read them: checkpoints, weights of others, exports."""

import contextlib
import io
import json
import warnings
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import nn

import zerotrain
from tests.attack.fuzz.common import hashed, require_printable
from tests.ranks.fake_wire import run_threads
from tests.unit.checkpoint.runs import KINDS, build, counted, held, train
from zerotrain.checkpoint.manifest import hash_of
from zerotrain.checkpoint.others.weights import find_weights
from zerotrain.commands import inspection as inspect
from zerotrain.config.schema import Config
from zerotrain.engine.state.from_weights import weight_misfits
from zerotrain.errors import CheckpointError, ConfigError
from zerotrain.saved.saved import ABOUT, opened_or_exported, opened_run

CONFIG = asdict(Config(model={"_target_": "zerotrain.models.MLP"}, data={"_target_": "zerotrain.data.SyntheticTokens"}))
KIND = KINDS["hard parameters, bf16, momentum"]


def make_checkpoint(folder: Path) -> None:
    def save(world: zerotrain.World) -> None:
        engine = build(world, KIND, 2)
        train(engine, 0)
        engine.save(folder, extra={"rows": 9}, config=CONFIG, own={"rank": world.rank})

    folder.rmdir()
    run_threads(save, 2)


def read_checkpoint(folder: Path) -> Any:
    """By inspect, by generate and export, and by an engine."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        code = inspect.show(folder)
        inspect.show_run(folder.parent)
    require_printable(out.getvalue().splitlines())
    if code:
        raise CheckpointError(out.getvalue().splitlines()[-1])
    with opened_run(folder) as run:
        found = {name: hashed(values) for name, values in run.tensors()}

    def load(world: zerotrain.World) -> Any:
        engine = build(world, KIND, 2, seed=1)
        extra = engine.load(folder)
        kept = [(name, role, start, hashed(values)) for name, role, start, values in held(engine)]
        return extra, kept, {name: repr(value) for name, value in counted(engine).items()}

    return found, run_threads(load, 1)[0][0]


def resealed(text: bytes) -> bytes:
    """A manifest with the hash of what it says now."""
    content = json.loads(text)
    if not isinstance(content, dict):
        return text
    content.pop("hash", None)
    canonical = json.dumps(content, sort_keys=True, separators=(",", ":")).encode()
    return json.dumps({**content, "hash": hash_of(canonical)}).encode()


# ---- weights of others


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.first = nn.Linear(8, 4)
        self.second = nn.Linear(4, 8)
        self.register_buffer("count", torch.tensor([3]))
        with torch.no_grad():
            for each in self.parameters():
                each.copy_(torch.randn(each.shape, generator=generator))


def make_safetensors(folder: Path) -> None:
    from safetensors.torch import save_file

    save_file(Two().state_dict(), folder / "model.safetensors", {"format": "pt"})


def make_parts(folder: Path) -> None:
    from safetensors.torch import save_file

    state = Two().state_dict()
    parts = [{name: each for name, each in state.items() if name.startswith(word)} for word in ("first", "second")]
    parts[1]["count"] = state["count"]
    for number, part in enumerate(parts):
        save_file(part, folder / f"model-{number}.safetensors")
    places = {name: f"model-{number}.safetensors" for number, part in enumerate(parts) for name in part}
    index = {"metadata": {"total_size": 999}, "weight_map": places}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))


def make_pt(folder: Path) -> None:
    torch.save({"model": Two().state_dict(), "step": 3}, folder / "pytorch_model.bin")


def make_legacy(folder: Path) -> None:
    torch.save(Two().state_dict(), folder / "pytorch_model.bin", _use_new_zipfile_serialization=False)


def make_dcp(folder: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save({"model": Two().state_dict()}, checkpoint_id=folder, no_dist=True)


def read_weights(folder: Path) -> Any:
    """As `checkpoint.init_from` and `engine.load_weights`: whole, into a model that is known."""
    with contextlib.closing(find_weights(folder)) as weights:
        if misfits := weight_misfits(folder, Two()):
            raise CheckpointError(*misfits[:1])
        found = {}
        for each in weights.tensors:
            values = torch.empty(torch.Size(each.shape).numel(), dtype=each.dtype)
            if values.numel():
                weights.fill(each, 0, values)
            found[each.names[0]] = hashed(values.as_strided(each.shape, each.stride))
        problems = weights.problems(weights.tensors, 0, 1)
    if problems:
        raise CheckpointError("\n".join(problems))
    return found


def safetensors_says(folder: Path) -> Any:
    from safetensors.torch import load_file

    return {name: hashed(each) for name, each in load_file(folder / "model.safetensors").items()}


def pt_says(folder: Path) -> Any:
    content = torch.load(folder / "pytorch_model.bin", weights_only=True)
    return {str(name): hashed(each) for name, each in content["model"].items()}


def dcp_says(folder: Path) -> Any:
    state = {"model": {name: torch.zeros_like(each) for name, each in Two().state_dict().items()}}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(state, checkpoint_id=folder, no_dist=True)
    return {name: hashed(each) for name, each in state["model"].items()}


def read_pretrained(folder: Path) -> Any:
    """As `model=huggingface` reads a folder's index."""
    from zerotrain.models.pretrained import find_weights as of_hub, load_weights

    files = of_hub(str(folder))
    model = Two()
    if files is None or not load_weights(model, files):
        raise ConfigError("it does not fit")
    return {name: hashed(each) for name, each in model.state_dict().items()}


def make_export(folder: Path) -> None:
    make_safetensors(folder)
    said = {"checkpoint": "/x", "step": 3, "form": "the model", "dtype": None, "config_sha256": None, "config": CONFIG}
    (folder / ABOUT).write_text(json.dumps({**said, "data_fingerprint": {"rows": 3}}))


def read_export(folder: Path) -> Any:
    with opened_or_exported(folder) as run:
        said = run.step, run.form, run.data_fingerprint, repr(run.config), run.is_hugging_face, run.tokenizer_name
        return said, {name: hashed(values) for name, values in run.tensors()}
