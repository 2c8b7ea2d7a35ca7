"""Groups and freezing from a config: the bits of plain PyTorch at every stage, and over a resume at another."""

from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import run_over, sha256, trainer_of

import zerotrain
from zerotrain.config.schema import Config, TrainConfig, ZeroGroup
from zerotrain.data import SyntheticTokens
from zerotrain.data.batches import GlobalBatchSampler
from zerotrain.models import GPT
from zerotrain.run.factory import build_engine_of, frozen_steps
from zerotrain.settings import OffloadConfig, PrecisionGroup
from zerotrain.training import warmup_cosine
from zerotrain.training.callbacks.checkpoints import CheckpointPolicy

SAVED, UNFROZEN, NUM_STEPS, NUM_LEAVES = (2, 4), 3, 5, 2
MICRO_BATCH, SEQ_LEN, MAX_NORM = 2, 16, 0.5
SMALL = {"vocab_size": 64, "max_seq_len": SEQ_LEN, "num_layers": 2, "num_heads": 2, "hidden_size": 8}
DATA = {"seq_len": SEQ_LEN, "vocab_size": 64, "num_sequences": 64}
ADAMW = {"lr": 1e-2, "weight_decay": 0.1}
MUON = {"lr": 0.02, "adamw_lr": 1e-2, "fused": False}
GROUPS: dict[str, dict[str, Any]] = {
    "tables": {"match": ["wte.*", "wpe.*"], "lr": 3e-3, "weight_decay": 0.01},
    "first": {"match": "blocks.0.*", "lr": 5e-3},
}
FREEZE = ["wpe.*", "blocks.1.ln_1.*", {"match": ["blocks.0.*", "ln_f.bias"], "until": UNFROZEN}]
"""A table, a norm, and a block with all that Muon has of it."""


@dataclass(frozen=True)
class Job:
    """One run of a config."""

    optimizer: str
    precision: str
    stage: int
    folder: Path
    begun_at: int = 0
    """The step of the checkpoint that it goes on from; 0: it begins anew and saves."""
    later_stage: int | None = None
    """The stage after the first step that it trains."""
    offload: str = "device"

    @property
    def config(self) -> Config:
        target = {"adamw": "torch.optim.AdamW", "muon": "zerotrain.MuonWithAdamW"}[self.optimizer]
        of_optimizer: dict[str, Any] = {"adamw": ADAMW | {"_partial_": True}, "muon": MUON}[self.optimizer]
        return Config(
            model={"_target_": "zerotrain.models.GPT", "freeze": FREEZE, **SMALL},
            data={"_target_": "zerotrain.data.SyntheticTokens", **DATA},
            optimizer={"_target_": target, "groups": GROUPS, **of_optimizer},
            zero=ZeroGroup(stage=self.stage, bucket_mb=0.002 if self.stage % 2 else 25.0, reduction="ordered"),
            precision=PrecisionGroup(self.precision),
            offload=OffloadConfig(optimizer=self.offload),
            train=TrainConfig(max_grad_norm=MAX_NORM, virtual_ranks=NUM_LEAVES, max_steps=NUM_STEPS),
        )

    def in_folder(self, stage: int) -> Path:
        return self.folder / f"{self.optimizer}-{self.precision}-{stage}"


def schedule(step: int, max_steps: int) -> float:
    return warmup_cosine(step, max_steps, warmup_steps=2)


def trained(job: Job) -> str:
    """On each rank: the hash of the weights."""
    world, config, frozen = zerotrain.World.current(torch.device("cpu")), job.config, dict[str, Any]()
    torch.manual_seed(0)
    engine = build_engine_of(config, world, run_dir=job.folder, frozen=frozen)
    dataset = SyntheticTokens(**DATA)
    run_dir = job.folder / f"on-{job}-{world.size}".replace("/", "_") if job.begun_at else job.in_folder(job.stage)
    if world.rank == 0:
        run_dir.mkdir()
    world.sum(torch.zeros(()))
    whole, step = replace(job, stage=2), f"step-{job.begun_at:08d}"
    result = trainer_of(
        engine,
        dataset,
        run_dir,
        schedule=schedule,
        stages={} if job.later_stage is None else {job.begun_at + 1: job.later_stage},
        frozen=frozen_steps(config, frozen, dataset.train, world.size),
        max_steps=NUM_STEPS,
        micro_batch_size=MICRO_BATCH,
        checkpoint=CheckpointPolicy(
            every_steps=None if job.begun_at else SAVED[0],
            at_end=False,
            keep=None,
            resume=[whole.in_folder(2) / "checkpoints" / step] if job.begun_at else [],
        ),
    ).run()
    return str(result["weights_sha256"])


def group_of(name: str) -> str | None:
    return next((group for group, entry in GROUPS.items() if matches(name, entry["match"])), None)


def matches(name: str, patterns: Any) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in ([patterns] if isinstance(patterns, str) else patterns))


def optimizers_of(job: Job, weights: dict[str, torch.Tensor]) -> list[torch.optim.Optimizer]:
    """With a group for each parameter: the options that a few lines say."""
    rates = {"adamw": (1e-2, 0.1), "muon": (1e-2, 0.1)}[job.optimizer]
    described: dict[bool, list[dict[str, Any]]] = {False: [], True: []}
    for name, weight in weights.items():
        for_muon = job.optimizer == "muon" and name.startswith("blocks.") and weight.ndim == 2
        entry = {} if group_of(name) is None else GROUPS[str(group_of(name))]
        lr = entry.get("lr", 0.02 if for_muon else rates[0])
        decay = entry.get("weight_decay", 0.0 if weight.ndim < 2 else rates[1])
        described[for_muon].append({"params": [weight], "lr": lr, "weight_decay": decay})
    betas = (0.9, 0.999) if job.optimizer == "adamw" else (0.9, 0.95)
    made: list[torch.optim.Optimizer] = [torch.optim.AdamW(described[False], betas=betas, fused=False)]
    if described[True]:
        made.append(torch.optim.Muon(described[True], momentum=0.95))
    return made


def expected(job: Job) -> str:
    """The hash after the same training in plain PyTorch: what is frozen has requires_grad=False, and no gradient."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model, dtype = GPT(**SMALL), getattr(torch, {"fp32": "float32", "bf16": "bfloat16"}[job.precision])
    weights = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    until = {name: frozen_until(name) for name in weights}
    for name in weights:
        if until[name] > 0:
            weights[name] = weights[name].to(dtype).float()  # of what is frozen the rank keeps what it computes with
    model.to(dtype)
    optimizers, dataset = optimizers_of(job, weights), SyntheticTokens(**DATA)
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    rates = [group["lr"] for group in groups]
    batches = [iter(sampler(rank, NUM_LEAVES)) for rank in range(NUM_LEAVES)]
    for step in range(NUM_STEPS):
        trains = {name: step >= until[name] for name in weights}
        sums = {name: torch.zeros_like(weight) for name, weight in weights.items() if trains[name]}
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(trains[name])
            with torch.no_grad():
                parameter.copy_(weights[name])
        for rows in map(next, batches):
            ids, labels = (torch.stack(each) for each in zip(*(dataset.train[row] for row in rows), strict=True))
            model.zero_grad()
            model(ids, labels).backward()
            for name, parameter in model.named_parameters():
                assert (parameter.grad is not None) == trains[name]
                if trains[name]:
                    sums[name] += parameter.grad.float()
        mean = {name: (total / NUM_LEAVES).to(dtype).float() for name, total in sums.items()}
        norm = torch.cat([each.double().flatten() for each in mean.values()]).norm()
        coefficient = torch.clamp(MAX_NORM / (norm + 1e-6), max=1.0).float()
        for name, weight in weights.items():
            weight.grad = mean[name] * coefficient if trains[name] else None
        for group, rate in zip(groups, rates, strict=True):
            group["lr"] = rate * schedule(step, NUM_STEPS)
        for optimizer in optimizers:
            optimizer.step()
    return sha256(weights)


def frozen_until(name: str) -> int:
    for entry in FREEZE:
        patterns, until = (entry["match"], entry["until"]) if isinstance(entry, dict) else (entry, NUM_STEPS)
        if matches(name, patterns):
            return until
    return 0


def sampler(rank: int, num_ranks: int) -> GlobalBatchSampler:
    return GlobalBatchSampler(
        num_sequences=len(SyntheticTokens(**DATA).train),
        micro_batch_size=MICRO_BATCH,
        num_micro_batches=1,
        rank=rank,
        num_ranks=num_ranks,
        seed=0,
    )


KINDS = (("adamw", "fp32"), ("adamw", "bf16"), ("muon", "fp32"), ("muon", "bf16"))


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[Job, list[str]]]:
    """Runs of two ranks that never stop, at stages 2 and 3, and 0 and 1 in turns; each saves before the unfreezing, and
    after it."""
    folder = tmp_path_factory.mktemp("whole")
    places = [(kind, stage) for number, kind in enumerate(KINDS) for stage in (number % 2, 2, 3)]
    jobs = [Job(*kind, stage, folder) for kind, stage in places]
    return folder, dict(zip(jobs, run_over(jobs, trained, 2), strict=True))


@pytest.mark.case(
    "parameters",
    "`optimizer.groups`, and `model.freeze` with `until`; AdamW, Muon; clipping, a schedule",
    "the bits of plain PyTorch, where what is frozen has no gradient; in bf16 it is rounded once",
)
def test_groups_and_freezing_until_a_step_give_the_bits_of_plain_pytorch_at_every_stage(whole: Any) -> None:
    wrong = [job for job, by_rank in whole[1].items() if set(by_rank) != {expected(job)}]
    assert not wrong


@pytest.mark.case(
    "parameters",
    "... resumed before `until` and after it, at another stage and number of ranks, which changes too; offloaded",
    "the same bits",
)
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_run_goes_on_over_the_unfreezing_at_another_stage_and_number_of_ranks(whole: Any, num_ranks: int) -> None:
    folder, runs = whole
    places = ((3, SAVED[0]), (0, SAVED[1]), (1, SAVED[0]), (3, SAVED[1]))
    more: list[dict[str, Any]] = [{}, {"later_stage": 3}, {"offload": "cpu"}, {"later_stage": 0, "offload": "cpu"}]
    jobs = [
        Job(*kind, stage, folder, begun_at, **how)
        for kind, (stage, begun_at), how in zip(KINDS, places, more[:: 1 if num_ranks == 1 else -1], strict=True)
    ]
    wanted = [runs[Job(job.optimizer, job.precision, 2, folder)][0] for job in jobs]
    assert [by_rank[0] for by_rank in run_over(jobs, trained, num_ranks)] == wanted
