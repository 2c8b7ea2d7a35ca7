"""The rows of docs/results/plan.md: what each plans, and what an engine with real tensors holds."""

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import yaml
from torch import nn
from torch.profiler import profile

from zerotrain.comm.world import World
from zerotrain.config.schema import Config, ModelSwitches
from zerotrain.engine.engine import ZeroEngine
from zerotrain.preflight.rehearsal import Links, Rehearsals, StagePlan, look_at, name_state
from zerotrain.preflight.unreal import LiveMemory
from zerotrain.run.factory import build, build_engine_of

TABLE = Path(__file__).resolve().parents[3] / "docs/results/plan.md"
SLACK, MORE_SLACK, COMPILED_SLACK = 0.03, 0.1, 0.2
"""The plan may say so much more than there is, as a part of it, and nothing less. More where other ranks may be late or
not, and what is sent is held as long; still more where units and losses are compiled, which save less."""
AT_REST = ("parameters", "gradients", "optimizer")


class Convnet(nn.Module):
    """Two convolutions with a batch norm, and a linear layer."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Conv2d(1, 16, 3), nn.BatchNorm2d(16), nn.ReLU(), nn.Conv2d(16, 16, 3))
        self.head = nn.Linear(16, 4)

    def forward(self, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """The mean loss."""
        return nn.functional.cross_entropy(self.head(self.layers(images).mean((2, 3))), labels)


HF: dict[str, Any] = {"_target_": "zerotrain.models.HuggingFaceModel", "vocab_size": 64}
SMALL = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
SMALL |= {"num_key_value_heads": 2, "max_position_embeddings": 64}
OF_GPT = {"max_seq_len": 32, "num_layers": 3, "num_heads": 2}
MODELS: dict[str, dict[str, Any]] = {
    "gpt": {"_target_": "zerotrain.models.GPT", "vocab_size": 64, "hidden_size": 32, **OF_GPT},
    "mlp": {"_target_": "zerotrain.models.MLP", "vocab_size": 64, "hidden_size": 32, "context": 4, "num_layers": 2},
    "llama": HF | {"config": {"model_type": "llama", **SMALL}},
    "lora": HF | {"config": {"model_type": "llama", **SMALL}, "lora": {"rank": 2}},
    "mixtral": HF | {"config": {"model_type": "mixtral", "num_local_experts": 2, **SMALL}},
    "convnet": {"_target_": f"{__name__}.Convnet"},
}
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "adamw": {"_target_": "torch.optim.AdamW", "_partial_": True, "lr": 1e-3, "fused": True},
    "muon": {"_target_": "zerotrain.MuonWithAdamW", "lr": 0.02, "adamw_lr": 0.01},
}


@dataclass(frozen=True, kw_only=True)
class Row:
    """A row of the table."""

    model: str
    ranks: int
    stage: int
    precision: str
    settings: tuple[str, ...] = ()
    measured: int = 0
    planned: int = 0

    @property
    def config(self) -> Config:
        """Its config: small buckets, 4 rows."""
        config = Config(model=asdict(ModelSwitches()) | MODELS[self.model], optimizer=dict(OPTIMIZERS["adamw"]))
        config.zero.bucket_mb, config.train.micro_batch_size, config.precision.name = 0.02, 4, self.precision
        for setting in self.settings:
            name, _, text = setting.partition("=")
            group, _, field = name.partition(".")
            if not field:
                config.optimizer = dict(OPTIMIZERS[text])
            elif isinstance(held := getattr(config, group), dict):
                held[field] = yaml.safe_load(text)
            else:
                setattr(held, field, yaml.safe_load(text))
        return config

    def __str__(self) -> str:
        more = "" if not self.measured else f"{self.planned / self.measured - 1:+.2%}".replace("%", " %")
        cells = (self.model, self.ranks, self.stage, self.precision, " ".join(f"`{each}`" for each in self.settings))
        return f"| {' | '.join(map(str, cells))} | {self.measured:,} | {self.planned:,} | {more} |"


def rows() -> list[Row]:
    """All rows of the table."""
    found = []
    for line in TABLE.read_text().splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if cells[0] in MODELS:
            numbers = [int(cell.replace(",", "")) for cell in (*cells[1:3], *cells[5:7])]
            named = dict(zip(("ranks", "stage", "measured", "planned"), numbers, strict=True))
            settings = tuple(cells[4].replace("`", "").split())
            found.append(Row(model=cells[0], precision=cells[3], settings=settings, **named))
    return found


def batch_of_one(model: str) -> Any:
    """A row that a model takes."""
    if model == "convnet":
        return torch.zeros(1, 1, 24, 24), torch.zeros(1, dtype=torch.int64)
    ids = torch.arange(24)[None] % 60
    return ids, ids


def planned(row: Row, folder: Path) -> StagePlan:
    """The plan of a row, of ranks on one host."""
    return rehearsals(row, folder).plan(row.stage)


def rehearsals(row: Row, folder: Path, *, on_host: bool = True) -> Rehearsals:
    """Those of a row, of ranks on one host. They compute there, or on GPUs that reduce in the same order."""
    factory = build("optimizer", row.config.target("optimizer"))
    links = Links(row.ranks, on_host=on_host, ordered=True)
    return Rehearsals(row.config, links, batch_of_one(row.model), factory, look_at(factory, on_host=on_host), folder)


@dataclass(frozen=True)
class Held:
    """Bytes that one rank holds and sends."""

    at_rest: dict[str, int]
    sent: int
    peak: int


def held(row: Row, world: World, folder: Path) -> Held:
    """The bytes of a row's second step on this rank."""
    config = row.config
    if config.switches("model")["compile"]:
        return _held_when_compiled(row, world, folder)
    with LiveMemory() as live:
        engine = build_engine_of(config, world, row.stage, folder)
        step(engine, row)
        name_state(live, engine)
        live.begin(engine)
        step(engine, row)
    return _held(engine, live.peak_nbytes)


def _held_when_compiled(row: Row, world: World, folder: Path) -> Held:
    """Torch compiles nothing within `LiveMemory`: the peak is what torch's allocator tells the profiler."""
    engine = build_engine_of(row.config, world, row.stage, folder)
    for _ in range(2):
        step(engine, row)
    before = engine.memory_bytes()
    with profile(profile_memory=True) as profiled:
        step(engine, row)
    events = [event for event in profiled.profiler.kineto_results.events() if event.name() == "[memory]"]
    now, most = 0, 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        now += event.nbytes()
        most = max(most, now)
    return _held(engine, most + sum(before[kind] for kind in (*AT_REST, "scratch")))


def _held(engine: ZeroEngine, peak: int) -> Held:
    memory = engine.memory_bytes()
    return Held({kind: memory[kind] for kind in AT_REST}, engine.ledger.last_step.sent_nbytes, peak)


def step(engine: ZeroEngine, row: Row) -> None:
    """A step of its batches."""
    train, first = row.config.train, batch_of_one(row.model)
    num = train.gradient_accumulation_steps * len(engine.virtual_ranks)
    rows = tuple(each.repeat(train.micro_batch_size, *[1] * (each.ndim - 1)) for each in first)
    engine.train().train_step([rows] * num)


def busiest(ranks: list[Held]) -> Held:
    """The most that any rank has of each."""
    at_rest = {kind: max(each.at_rest[kind] for each in ranks) for kind in AT_REST}
    return Held(at_rest, max(each.sent for each in ranks), max(each.peak for each in ranks))


def misfits(row: Row, plan: StagePlan, found: Held) -> list[str]:
    """A line for each number of a plan that is not what was found, and the row as it should stand in the table."""
    wrong = [
        f"{kind}: planned {getattr(plan, kind):,} for {nbytes:,}"
        for kind, nbytes in found.at_rest.items()
        if getattr(plan, kind) != nbytes
    ]
    if plan.peak is None or plan.sent is None:
        return [*wrong, f"{row}: {plan.unknown_because}"]
    is_steady = row.ranks == 1 and not row.config.switches("model")["compile"]
    slack = SLACK if is_steady else MORE_SLACK if row.ranks > 1 else COMPILED_SLACK
    if not found.peak <= plan.peak <= found.peak * (1 + slack):
        wrong.append(f"peak: planned {plan.peak:,} for {found.peak:,}")
    if row.ranks > 1 and abs(plan.sent - found.sent) > 0.001 * found.sent + 256:
        wrong.append(f"sent: planned {plan.sent:,} for {found.sent:,}")
    told = ((plan.peak, row.planned), *([(found.peak, row.measured)] if is_steady else ()))
    if any(abs(now - then) > SLACK * then for now, then in told):
        wrong.append("the row says otherwise")
    now = Row(**asdict(row) | {"measured": found.peak, "planned": plan.peak})
    return [str(now), *wrong] if wrong else []
