"""Folders of jobs, as runs leave them."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from zerotrain.training.result import RunResult

CONFIG: dict[str, Any] = {
    "seed": 0,
    "zero": {"stage": 2, "bucket_mb": 25.0},
    "model": {"_target_": "zerotrain.models.GPT", "num_layers": 4},
    "optimizer": {"lr": 0.003, "betas": [0.9, 0.95]},
    "callbacks": {},
    "checkpoint": {"resume": None},
}
MEMORY = {
    "parameters": 100, "gradients": 50, "optimizer": 200, "offloaded": 0, "scratch": 7, "peak": 5000,
    "theory": {"parameters": 100, "gradients": 50, "optimizer": 200, "offloaded": 0},
}  # fmt: skip


def write_job(
    folder: Path,
    overrides: Sequence[str] = (),
    *,
    losses: Sequence[Any] = (5.0, 4.0, 3.0),
    given: Sequence[str] | None = None,
    **fields: Any,
) -> Path:
    """A completed job, unless `fields` of its result say otherwise.

    Args:
        overrides: in its config, and on its command line.
        losses: of steps 0, 10, 20, ..., of training and of validation; None is what JSON has for nan.
        given: the command line, if it is another one.
    """
    folder.mkdir(parents=True)
    config = json.loads(json.dumps(CONFIG))
    for override in overrides:
        name, _, value = override.partition("=")
        group, _, last = name.rpartition(".")
        (config[group] if group else config)[last] = value_of(value)
    (folder / "config.yaml").write_text(in_yaml(config))
    lines = []
    for place, loss in enumerate(losses):
        step = 10 * place
        lines.append({"step": step, "train_loss": loss, "tokens": 100 * step, "train_s": 0.5 * step})
        lines.append({"step": step, "val_loss": loss})
    (folder / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    told = {
        "status": "completed", "overrides": list(overrides if given is None else given), "steps": 20,
        "final_val_loss": 3.0, "final_train_loss": 3.0, "tokens_per_s": 1000.0, "step_ms_median": 100.0,
        "data_wait_ms": 2.0, "memory_bytes": MEMORY, "comm_bytes_per_step": {"sent": 300, "theory": 300},
        "weights_sha256": "a" * 64, "config_hash": "b" * 16,
    }  # fmt: skip
    RunResult(**{"world_size": 2} | told | fields).write(folder)
    return folder


def write_result(folder: Path, job: int, **fields: Any) -> None:
    """The result of a completed job of two ranks in the folder of its number, unless `fields` say otherwise."""
    path = folder / str(job)
    path.mkdir()
    result = {
        "status": "completed",
        "final_val_loss": 2.5,
        "final_train_loss": 2.4,
        "weights_sha256": "a" * 64,
        "overrides": ["launch.nproc_per_node=2", f"zero.stage={job}"],
        **fields,
    }
    RunResult(**{"world_size": 2} | result).write(path)


def value_of(text: str) -> Any:
    """The value of an override."""
    try:
        return json.loads(text)
    except ValueError:
        return text.strip("'")


def in_yaml(config: dict[str, Any]) -> str:
    """As OmegaConf writes it; a library takes 20 ms for each."""
    lines = []
    for name, value in config.items():
        inner = value.items() if isinstance(value, dict) else ()
        lines += [f"{name}:", *(f"  {each}: {json.dumps(of)}" for each, of in inner)] if inner else [f"{name}: {value}"]
    return "".join(f"{line}\n" for line in lines)


def refused(folder: Path, overrides: list[str], error: str) -> Path:
    """A job that never started: there is its result alone."""
    folder.mkdir(parents=True)
    RunResult(world_size=0, overrides=overrides, error=error).write(folder)
    return folder


def journal(folder: Path, *events: dict[str, Any]) -> None:
    """The journal of a sweep."""
    common = {"hash": "c" * 16, "overrides": [], "pid": 1, "host": "h", "time": 1.0, "status": None, "error": None}
    common["final_val_loss"] = None
    (folder / "sweep.jsonl").write_text("".join(json.dumps(common | event) + "\n" for event in events))
