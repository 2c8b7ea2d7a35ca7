"""A plan against a real engine: states to the byte, and the peak of its tensors."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import nn

from zerotrain.comm.ranks.world import World
from zerotrain.config.schema import Config, ModelSwitches
from zerotrain.engine.engine import ZeroEngine
from zerotrain.planning.live import LiveMemory
from zerotrain.planning.optimizer import look_at
from zerotrain.planning.rehearsal import StagePlan, name_state, rehearse
from zerotrain.planning.wire import Links
from zerotrain.run.factory import build, build_engine_of
from zerotrain.testing.ranks import run_ranks

SLACK = 0.03
"""The plan may say so much more than there is, as a part of it, and nothing less."""
HF: dict[str, Any] = {"_target_": "zerotrain.models.HuggingFaceModel", "vocab_size": 64}
SMALL = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
SMALL |= {"num_key_value_heads": 2, "max_position_embeddings": 64}


class Convnet(nn.Module):
    """Two convolutions with a batch norm, and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 8, 3))
        self.head = nn.Linear(8, 4)

    def forward(self, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """The mean loss."""
        return nn.functional.cross_entropy(self.head(self.layers(images).mean((2, 3))), labels)


MODELS: dict[str, dict[str, Any]] = {
    "gpt": {
        "_target_": "zerotrain.models.GPT",
        "vocab_size": 64,
        "max_seq_len": 32,
        "num_layers": 3,
        "num_heads": 2,
        "hidden_size": 32,
    },
    "llama": HF | {"config": {"model_type": "llama", **SMALL}},
    "lora": HF | {"config": {"model_type": "llama", **SMALL}, "lora": {"rank": 2}},
    "mixtral": HF | {"config": {"model_type": "mixtral", "num_local_experts": 2, **SMALL}},
    "convnet": {"_target_": f"{__name__}.Convnet"},
}
ADAMW = {"_target_": "torch.optim.AdamW", "_partial_": True, "lr": 1e-3, "fused": True}


def config_of(model: str, **changed: Any) -> Config:
    """Small buckets, 4 rows."""
    config = Config(model=asdict(ModelSwitches()) | MODELS[model], optimizer=dict(ADAMW))
    config.zero.bucket_mb, config.train.micro_batch_size = 0.02, 4
    for name, value in changed.items():
        group, field = name.split("__")
        if isinstance(held := getattr(config, group), dict):
            held[field] = value
        else:
            setattr(held, field, value)
    return config


def row_of(model: str) -> Any:
    """A batch of one."""
    if model == "convnet":
        return torch.zeros(1, 1, 12, 12), torch.zeros(1, dtype=torch.int64)
    ids = torch.arange(24)[None] % 60
    return ids, ids


def planned(config: Config, stage: int, model: str, num_ranks: int, folder: Path) -> StagePlan:
    """The plan of a stage, of ranks on one host."""
    factory = build("optimizer", config.optimizer_target)
    links = Links(num_ranks, num_ranks, on_host=True, ordered=True, shared_memory=True)
    return rehearse(config, stage, links, row_of(model), factory, look_at(factory, on_host=True), folder)


def step(engine: ZeroEngine, config: Config, model: str) -> None:
    """One step of real values."""
    first = row_of(model)
    num = config.train.gradient_accumulation_steps * len(engine.virtual_ranks)
    rows = tuple(each.repeat(config.train.micro_batch_size, *[1] * (each.ndim - 1)) for each in first)
    engine.train().train_step([rows] * num)


def held_by_rank(world: World, cases: list[tuple[str, Config, int]]) -> list[tuple[dict[str, Any], int, int]]:
    """(bytes at rest, bytes sent in a step, peak of the tensors) of each case, on this rank."""
    found = []
    for model, config, stage in cases:
        with LiveMemory() as live:
            engine = build_engine_of(config, world, stage)
            step(engine, config, model)
            name_state(live, engine)
            live.begin(engine)
            step(engine, config, model)
        found.append((engine.memory_bytes(), engine.ledger.last_step.sent_nbytes, live.peak_nbytes))
        del engine
    return found


CASES = [
    (model, config_of(model, precision__name=precision, model__activation_checkpointing=recompute), stage)
    for model, recompute in (("gpt", False), ("gpt", True), ("llama", False), ("lora", True), ("convnet", False))
    for stage in range(4)
    for precision in ("fp32", "bf16")
    if model == "gpt" or stage in (1, 3)
]
CASES += [
    ("gpt", config_of("gpt", train__gradient_accumulation_steps=3, precision__name="bf16"), 2),
    ("gpt", config_of("gpt", train__gradient_accumulation_steps=2, zero__accumulate="reduced"), 3),
    ("gpt", config_of("gpt", optimizer__fused=False), 1),
    ("llama", config_of("llama", zero__prefetch=2, zero__reshard_after_forward=False), 3),
]


def require_planned(cases: list[Any], found: list[Any], num_ranks: int, folder: Path) -> None:
    """Compare all cases; the message names those that differ."""
    wrong = []
    for (model, config, stage), (held, sent, peak) in zip(cases, found, strict=True):
        plan = planned(config, stage, model, num_ranks, folder)
        called = f"{model} {config.precision.name} stage {stage} {config.model_switches}: "
        for kind in ("parameters", "gradients", "optimizer"):
            if getattr(plan, kind) != held[kind]:
                wrong.append(f"{called}{kind} {getattr(plan, kind)} for {held[kind]}")
        if plan.peak is None or not peak <= plan.peak <= peak * (1 + SLACK):
            wrong.append(f"{called}peak {plan.peak} for {peak}, {plan.unknown_because}")
        if num_ranks > 1 and (plan.sent is None or abs(plan.sent - sent) > 0.001 * sent + 256):
            wrong.append(f"{called}sent {plan.sent} for {sent}")
    assert not wrong, "\n".join(wrong)


def test_a_plan_is_what_one_rank_holds_at_most(tmp_path: Path):
    world = World(0, 1, 0, torch.device("cpu"))

    require_planned(CASES, held_by_rank(world, CASES), 1, tmp_path)


FEW = [
    *[each for each in CASES if each[0] in ("gpt", "llama")][::3],
    ("gpt", config_of("gpt", train__virtual_ranks=8, precision__name="bf16"), 2),
    (
        "gpt",
        config_of("gpt", optimizer___target_="zerotrain.MuonWithAdamW", optimizer__lr=0.02, optimizer__adamw_lr=0.01),
        3,
    ),
]
for _, config, _ in FEW[-1:]:
    del config.optimizer["_partial_"]


def _on_a_rank() -> list[tuple[dict[str, Any], int, int]]:
    return held_by_rank(World.current(torch.device("cpu")), FEW)


def test_a_plan_is_what_the_busiest_of_two_ranks_holds_and_sends(tmp_path: Path):
    found = run_ranks(_on_a_rank, 2)

    busiest = [
        (
            {kind: max(held[kind] for held, _, _ in ranks) for kind in ("parameters", "gradients", "optimizer")},
            max(sent for _, sent, _ in ranks),
            max(peak for _, _, peak in ranks),
        )
        for ranks in zip(*found, strict=True)
    ]
    require_planned(FEW, busiest, 2, tmp_path)


def test_an_operation_that_asks_for_values_is_named_and_the_states_are_planned(tmp_path: Path):
    plan = planned(config_of("mixtral"), 3, "mixtral", 2, tmp_path)

    numel = sum(each.numel() for each in build("model", config_of("mixtral").model_target).parameters())
    assert numel * 4 <= 2 * plan.parameters <= numel * 4 * 1.1
    assert plan.optimizer == 2 * plan.parameters
    assert (plan.activations, plan.peak, plan.sent) == (None, None, None)
    assert plan.unknown_because is not None
    assert plan.unknown_because.startswith("aten.")


def test_the_average_of_the_weights_is_planned(tmp_path: Path):
    average = {"ema": {"_target_": "zerotrain.training.callbacks.ema.EMA"}}
    without = planned(config_of("gpt"), 1, "gpt", 2, tmp_path)
    plan = planned(config_of("gpt", callbacks__ema=average["ema"]), 1, "gpt", 2, tmp_path)

    assert plan.optimizer == without.optimizer + without.parameters // 2
    assert plan.peak is not None
    assert without.peak is not None
    assert plan.peak == without.peak + without.parameters // 2
