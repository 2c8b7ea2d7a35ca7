"""`python -m zerotrain export RUN_OR_CHECKPOINT --out DIR`: what is trained, in the forms of others."""

import math
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from zerotrain.checkpoint.others.safetensors_and_torch import OutTensor, write_safetensors
from zerotrain.commands.export import hugging_face, weights
from zerotrain.commands.export.destination import made, require_apart, require_free
from zerotrain.commands.export.optimizer import require_optimizer, write_optimizer
from zerotrain.commands.frame import TRUST, WEIGHTS, exit_code, is_averaged, parser_of
from zerotrain.errors import ConfigError
from zerotrain.files.kept_out import nothing_imported_from
from zerotrain.files.terminal import code_of
from zerotrain.launching import exits
from zerotrain.launching.exits import ended_in_order
from zerotrain.saved.saved import ADAPTERS, DCP, HUGGING_FACE, MERGED, MODEL, SavedRun, opened_run

EXAMPLES = """\
By default DIR gets model.safetensors, in parts if it is large. For model=huggingface, from_pretrained opens DIR; for
adapters, peft opens it, and with --merge it holds the merged model. RUN is a run (its newest checkpoint is read) or a
checkpoint. The export is verified, and DIR appears when it is complete.

  python -m zerotrain export outputs/2026-11-22/10-00-00 --out exported --dtype bf16
  python -m zerotrain export outputs/2026-11-22/10-00-00/checkpoints/step-00000100 --out exported --optimizer
  python -m zerotrain export outputs/2026-11-22/10-00-00 --out averaged --weights ema
  python -m zerotrain export outputs/2026-11-22/10-00-00 --out dcp --dcp

Exit code 0: it is there; 1: a disk is full or broken; 2: an argument is wrong, --out cannot be written or the
checkpoint is damaged, one line;
130, 143, 129: a signal, and nothing is left.
"""
MB = 10**6


@dataclass(frozen=True, kw_only=True)
class Asked:
    """The options of the command."""

    out: Path
    dtype: str | None
    merge: bool
    optimizer: bool
    weights: str
    dcp: bool
    shard_mb: float
    overwrite: bool
    trust_code: bool


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return the exit code."""
    parser = parser_of("export", __doc__, EXAMPLES)
    parser.add_argument("path", type=Path, metavar="RUN_OR_CHECKPOINT")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="the folder to make")
    parser.add_argument("--dtype", metavar="NAME", help="dtype of all floating-point weights: fp32, bf16 or fp16")
    parser.add_argument("--merge", action="store_true", help="add the adapters to the weights")
    parser.add_argument("--optimizer", action="store_true", help="optimizer.pt too, for torch.optim")
    parser.add_argument("--weights", **WEIGHTS)
    parser.add_argument("--dcp", action="store_true", help="a folder of torch.distributed.checkpoint instead")
    parser.add_argument(
        "--shard-mb", type=float, default=5000.0, metavar="MB", help="largest size of a file, default 5000"
    )
    parser.add_argument("--overwrite", action="store_true", help="replace an earlier export")
    parser.add_argument("--trust-code", **TRUST)
    given = vars(parser.parse_args(arguments))

    def work() -> int:
        try:
            with ended_in_order():
                for line in export(given.pop("path"), Asked(**given)):
                    print(line, flush=True)
        except SystemExit as ending:
            print("stopped by a signal; nothing is left", file=sys.stderr)
            return code_of(ending)
        return exits.COMPLETED

    return exit_code(work, when_stopped="stopped by Ctrl-C; nothing is left")


def export(path: str | os.PathLike[str], asked: Asked) -> Iterator[str]:
    """Write what was asked for; lines to show.

    Raises:
        ConfigError: an option is wrong.
        CheckpointError: there is no such checkpoint, it is not what was written, or the disk fails.
    """
    dtype = weights.parse_dtype(asked.dtype)
    if not (math.isfinite(asked.shard_mb) and asked.shard_mb > 0):
        raise ConfigError(f"--shard-mb: got {asked.shard_mb}; it must be a number of megabytes above 0")
    if asked.dcp and (asked.merge or asked.optimizer or asked.dtype):
        raise ConfigError(
            "--dcp: writes weights and optimizer state as they are; leave out --merge, --optimizer, --dtype"
        )
    if (averaged := is_averaged(asked.weights)) and (asked.dcp or asked.optimizer):
        other = "--dcp" if asked.dcp else "--optimizer"
        raise ConfigError(f"{other}: the optimizer's state is that of the trained weights; leave out --weights ema")
    out = Path(os.path.realpath(asked.out)) if asked.out.name in ("", "..") else asked.out.absolute()
    require_free(out, overwrite=asked.overwrite)
    with nothing_imported_from(path), opened_run(path, trust_code=asked.trust_code, averaged=averaged) as run:
        require_apart(out, run.path, _read_beside(run))
        if asked.optimizer or asked.dcp:
            require_optimizer(run.saved)
        # Of transformers, or peft's around it; its folder may be gone.
        model: Any = run.on_meta().model if run.is_hugging_face and not asked.dcp else None
        if asked.merge and (model is None or hugging_face.lora_of(model) is None):
            raise ConfigError(f"--merge: {run.path} has no adapters to merge; leave it out")
        if asked.merge and asked.optimizer:
            raise ConfigError(
                "--optimizer: its state is that of the adapters, which a merged model does not have; leave it out"
            )
        with made(out, _about(run, asked), overwrite=asked.overwrite) as folder:
            if asked.dcp:
                from zerotrain.commands.export.dcp import write_dcp  # what it imports takes a second

                write_dcp(folder, run.saved)
            else:
                yield from _write_weights(folder, run, asked, dtype, model)
            if asked.optimizer:
                name_of = str if model is None else weights.name_of_hugging_face
                write_optimizer(folder / "optimizer.pt", run.saved, name_of)
    nbytes = sum(file.stat().st_size for file in out.rglob("*") if file.is_file())
    what = "the average of weights of " * averaged
    yield f"{out}: {what}step {run.step} of {run.path}, {nbytes / MB:.1f} MB"


def _read_beside(run: SavedRun) -> list[Path]:
    """The folders that an export reads beside a checkpoint: of a model of Hugging Face, and of a tokenizer."""
    of_model = run.require_config().model.get("name_or_path") if run.is_hugging_face else None
    return [
        Path(name).absolute() for name in (of_model, run.tokenizer_name) if name is not None and Path(name).is_dir()
    ]


def _write_weights(folder: Path, run: SavedRun, asked: Asked, dtype: torch.dtype | None, model: Any) -> Iterator[str]:
    tensors = weights.plain(run.saved, dtype)
    stem = "model"
    if model is not None:
        lora = hugging_face.lora_of(model)
        if lora is None:
            tensors = weights.plain(run.saved, dtype, weights.name_of_hugging_face)
        elif asked.merge:
            scaled = {"scaling": lora.lora_alpha / lora.r, "fan_in_fan_out": lora.fan_in_fan_out}
            tensors = weights.merged(run.saved, dtype, scaled)
            model = model.get_base_model()
        else:
            tensors, stem = weights.adapters(run.saved, dtype), "adapter_model"
            hugging_face.write_adapter_config(folder, run, lora)
        if stem == "model":
            hugging_face.write_config(folder, model, _common_dtype(tensors))
        if (warning := hugging_face.write_tokenizer(folder, run)) is not None:
            yield warning
    write_safetensors(folder, tensors, max_nbytes=int(asked.shard_mb * MB), stem=stem)


def _common_dtype(tensors: Mapping[str, OutTensor]) -> torch.dtype:
    """That in which transformers is to open the model: the widest of its weights."""
    found = {tensor.dtype for tensor in tensors.values() if tensor.dtype.is_floating_point}
    return max(found, key=lambda dtype: dtype.itemsize, default=torch.float32)


def _about(run: SavedRun, asked: Asked) -> dict[str, Any]:
    return {
        "checkpoint": str(run.path),
        "step": run.step,
        "form": _form(run, asked),
        "dtype": asked.dtype,
        "weights": asked.weights,
        "config_sha256": run.saved.manifest.content["config_sha256"],
        "config": run.saved.manifest.content["config"],
        "data_fingerprint": run.data_fingerprint,
    }


def _form(run: SavedRun, asked: Asked) -> str:
    if asked.dcp:
        return DCP
    if not run.is_hugging_face:
        return MODEL
    if asked.merge:
        return MERGED
    has_adapters = any(weights.is_of_adapter(name) for name in run.saved.names)
    return ADAPTERS if has_adapters else HUGGING_FACE
