"""Checkpoints of one training by each library, for `benchmarks.export` to read."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.engines import ENGINES
from benchmarks.workload import SIZES, Workload

OURS, DCP, WEIGHTS, DEEPSPEED = "ours", "dcp", "dcp-weights", "deepspeed"
"""Names of the folders. WEIGHTS is written together with DCP."""
ENGINE = {OURS: "zero3", DCP: "fsdp2", DEEPSPEED: "deepspeed3"}
NUM_TOKENS = 16


def save(which: str, workload: Workload, folder: str) -> int:
    """On one rank: train one step on a short sequence and save; returns the number of parameters."""
    small = replace(SIZES[workload.size], seq_len=NUM_TOKENS, micro_batch_size=1)
    SIZES["short"] = small
    workload = replace(workload, size="short")
    model = workload.build_model(torch.device("cpu"))
    numel = sum(parameter.numel() for parameter in model.parameters())
    engine: Any = ENGINES[ENGINE[which]].build(model, workload)
    engine.step(workload.micro_batches(0, dist.get_rank(), torch.device("cpu")))
    place = Path(folder) / which
    if which == OURS:
        engine.engine.save(place)
    elif which == DEEPSPEED:
        engine.engine.save_checkpoint(str(place))
    else:
        _save_dcp(engine, place, Path(folder) / WEIGHTS)
    return numel


def _save_dcp(engine: Any, place: Path, weights: Path) -> None:
    """As the recipe of torch has it."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict

    model, optimizer = get_state_dict(engine.model, engine.optimizer)
    dcp.save({"model": model, "optim": optimizer}, checkpoint_id=place)
    dcp.save({"model": model}, checkpoint_id=weights)
