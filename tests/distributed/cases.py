"""What the distributed tests train: small models, batches by step, and the same training in plain PyTorch.

The reference is one process without our engine: each rank's gradient computed apart, rounded to the wire's precision,
summed in rank order in fp32; torch's own clipping rule, loss scaling and optimizer on fp32 weights.
"""

import functools
import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import zerotrain
from tests.ranks import run_ranks
from tests.unit.engine.parts import sum_by_tree
from zerotrain.comm import collectives as process_groups
from zerotrain.device.memory import give_back_freed
from zerotrain.models import GPT

VOCAB, SEQ_LEN, SEQUENCES = 256, 32, 2
OPTIMIZERS: dict[str, Any] = {
    "adamw": functools.partial(torch.optim.AdamW, lr=1e-2, weight_decay=0.1, fused=True),
    "sgd": functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9),
}


@dataclass(frozen=True)
class Case:
    """One way to train the test's GPT."""

    zero: zerotrain.ZeroConfig
    precision: str = "fp32"
    keep_fp32: str = ""
    """A name pattern of modules, or "" for none."""
    initial_scale: float = 65536.0
    growth_interval: int = 2000
    overflows: tuple[tuple[int, int], ...] = ()
    """(step, rank) whose loss is infinite."""
    max_skipped_steps: int = 20
    num_micro_batches: int = 1
    optimizer: str = "adamw"
    max_grad_norm: float | None = 0.5
    head: Mapping[str, int] = field(default_factory=dict)
    """Arguments of the GPT beside its size."""
    num_steps: int = 2
    """The first makes the optimizer's state, and the second uses it and the weights that came of it."""

    def with_zero(self, **settings: Any) -> "Case":
        return replace(self, zero=replace(self.zero, **settings))

    def keeps(self, name: str) -> bool:
        """Whether the module or parameter of this name stays in fp32."""
        return bool(self.keep_fp32) and fnmatchcase(name, self.keep_fp32)

    def factor(self, step: int, rank: int) -> float:
        """What the loss is multiplied with."""
        return float("inf") if (step, rank) in self.overflows else 1.0


def make_model(**head: int) -> GPT:
    torch.manual_seed(0)
    return GPT(vocab_size=VOCAB, max_seq_len=SEQ_LEN, num_layers=3, num_heads=4, hidden_size=64, **head)


def batch(step: int, num_ranks: int, num_micro_batches: int) -> torch.Tensor:
    """(micro-batches, ranks, SEQUENCES, SEQ_LEN + 1) tokens of one step."""
    generator = torch.Generator().manual_seed(step)
    return torch.randint(0, VOCAB, (num_micro_batches, num_ranks, SEQUENCES, SEQ_LEN + 1), generator=generator)


def micro_batches(tokens: torch.Tensor, rank: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [(each[rank, :, :-1], each[rank, :, 1:]) for each in tokens]


def place() -> tuple[int, int]:
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def post_no_receives() -> None:
    """From now on this rank's engines do as those of more ranks than post receives for each other: gathers and ordered
    reductions are gloo's own collectives, and not sends and receives."""
    process_groups.MAX_RANKS_OF_EXCHANGE = 1


def build(case: Case, model: nn.Module | None = None) -> zerotrain.ZeroEngine:
    return zerotrain.build_engine(
        model or make_model(**case.head),
        optimizer=OPTIMIZERS[case.optimizer],
        zero=case.zero,
        precision=zerotrain.PrecisionConfig(
            case.precision, [case.keep_fp32] if case.keep_fp32 else [], case.initial_scale, case.growth_interval
        ),
        max_grad_norm=case.max_grad_norm,
        max_skipped_steps=case.max_skipped_steps,
        decay_all=False,  # two groups, as in runs from a config
    )


def be_late(engine: zerotrain.ZeroEngine, kinds: tuple[str, ...], delay_s: float) -> None:
    """Let this rank sleep before it issues a collective of these kinds: gather, reduction, exchange, comparison."""
    journal = engine.collectives.journal
    on_time = journal.note

    def late(kind: str, name: str) -> None:
        if kind in kinds:
            time.sleep(delay_s)
        on_time(kind, name)

    journal.note = late


def train(case: Case, device: str = "cpu") -> zerotrain.ZeroEngine:
    """On each rank: train as the case says."""
    rank, size = place()
    engine = build(case, make_model(**case.head).to(device))
    for step in range(case.num_steps):
        engine.train_step(micro_batches(batch(step, size, case.num_micro_batches).to(device), rank))
    return engine


def train_and_hash(case: Case) -> str:
    """On each rank: the hash of the weights after training as the case says."""
    return train(case).weights_sha256()


StagesOf = Callable[[int], Sequence[int]]
"""The stages of cases that are numbered."""


def three_stages(number: int) -> tuple[int, ...]:
    """Stages 1 and 2 issue the same collectives: cases that are numbered have them in turns."""
    return 0, 1 + number % 2, 3


def two_stages(number: int) -> tuple[int, ...]:
    """Parameters are sharded at 3 alone: cases have the others in turns."""
    return number % 3, 3


def others_than(stages_of: StagesOf) -> StagesOf:
    """Those that are left."""
    return lambda number: [stage for stage in range(4) if stage not in stages_of(number)]


def over(values: list[Any], fn: Any) -> list[Any]:
    """On each rank: `fn` of each value, one after another in the same processes."""
    return [fn(value) for value in values]


def run_over(values: list[Any], fn: Any, size: int) -> list[list[Any]]:
    """What `fn(value)` returned on each rank, for each value. One start of the ranks for all: it takes a second."""
    by_rank = run_ranks(over, size, values, fn) if size > 1 else [over(values, fn)]
    return [list(each) for each in zip(*by_rank, strict=True)]


Answers = Callable[[Any], list[list[Any]]]


def answers_of(values: Mapping[Any, Sequence[Any]], once: Any) -> Answers:
    """`answers(fn)` is what each of two ranks returned for each value of a function: one start of them for all."""
    jobs = [(fn, value) for fn in values for value in values[fn]]
    results = once(jobs[0][0].__module__, lambda: run_over(jobs, call, 2))
    return lambda wanted: [by_rank for (fn, _), by_rank in zip(jobs, results, strict=True) if fn is wanted]


def call(job: tuple[Callable[[Any], Any], Any]) -> Any:
    fn, value = job
    return fn(value)


def hashes_over_ranks(cases: list[Case], size: int) -> list[str]:
    """The hash of each case, on which all ranks agree."""
    by_case = run_over(cases, train_and_hash, size)
    assert all(len(set(by_rank)) == 1 for by_rank in by_case)
    return [by_rank[0] for by_rank in by_case]


def reference_weights(case: Case, num_ranks: int, device: str = "cpu") -> dict[str, torch.Tensor]:
    """Name -> fp32 weight after the same training in plain PyTorch, in one process."""
    torch.set_num_threads(1)
    return reference_run(case, num_ranks, device)[0]


def reference_run(case: Case, num_ranks: int, device: str = "cpu") -> tuple[dict[str, torch.Tensor], list[float]]:
    """The weights of `reference_weights`, and the loss scale of each step: 1.0 but in fp16."""
    model = make_model(**case.head).to(device)
    compute = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[case.precision]
    weights = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    model.to(compute)
    for name, module in model.named_modules():
        if case.keeps(name):
            module.float().forward = functools.partial(forward_in_fp32, type(module).forward, module, compute)
    copy_into(model, weights)
    wire = {name: parameter.dtype for name, parameter in model.named_parameters()}
    scaler = torch.amp.GradScaler(
        device,
        init_scale=case.initial_scale,
        growth_interval=case.growth_interval,
        enabled=case.precision == "fp16",
    )
    scales = []
    matrices = {"params": [weight for weight in weights.values() if weight.ndim >= 2]}
    others = {"params": [weight for weight in weights.values() if weight.ndim < 2], "weight_decay": 0.0}
    optimizer = OPTIMIZERS[case.optimizer]([matrices, others])
    for step in range(case.num_steps):
        tokens = batch(step, num_ranks, case.num_micro_batches).to(device)
        gradients: dict[str, list[list[torch.Tensor]]] = {name: [] for name in weights}  # of each rank and micro-batch
        for rank in range(num_ranks):
            for index, inputs in enumerate(micro_batches(tokens, rank)):
                model.zero_grad()
                loss = model(*inputs) * case.factor(step, rank)
                scaler.scale(loss * (1 / case.num_micro_batches)).backward()
                for name, parameter in model.named_parameters():
                    gradients[name] += [[]] if index == 0 else []
                    gradients[name][-1].append(parameter.grad.float())
        for name, weight in weights.items():
            weight.grad = reduced(case, gradients[name], wire[name])
        scaler.unscale_(optimizer)
        norm = torch.cat([weight.grad.double().flatten() for weight in weights.values()]).norm()
        limit = float("inf") if case.max_grad_norm is None else case.max_grad_norm
        for weight in weights.values():
            weight.grad *= torch.clamp(limit / (norm + 1e-6), max=1.0).float()
        scales.append(scaler.get_scale())
        scaler.step(optimizer)
        scaler.update()
        copy_into(model, weights)
    return weights, scales


def reduced(case: Case, gradients: list[list[torch.Tensor]], wire: torch.dtype) -> torch.Tensor:
    """The gradient of a step, from those of each rank and micro-batch."""
    if case.zero.accumulate == "reduced":
        means = [(sum_by_tree(ranks) / len(ranks)).to(wire).float() for ranks in zip(*gradients, strict=True)]
        return functools.reduce(torch.add, means).to(wire).float()
    sent = torch.float32 if case.zero.reduction == "fp32" else wire
    leaves = [functools.reduce(torch.add, micro_batches).to(sent).float() for micro_batches in gradients]
    return (sum_by_tree(leaves) / len(leaves)).to(wire).float()


def copy_into(model: nn.Module, weights: dict[str, torch.Tensor]) -> None:
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(weights[name])


def forward_in_fp32(forward: Any, module: nn.Module, compute: torch.dtype, inputs: torch.Tensor) -> torch.Tensor:
    return forward(module, inputs.float()).to(compute)


def sha256(weights: dict[str, torch.Tensor]) -> str:
    """Over the bytes of the weights in name order."""
    digest = hashlib.sha256()
    for name in sorted(weights):
        digest.update(weights[name].numpy().tobytes())
    return digest.hexdigest()


def memory_nbytes(name: str) -> int:
    """VmRSS: what this process has in memory; VmHWM: the most it had since the last `reset_peak`."""
    [line] = [line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(f"{name}:")]
    return int(line.split()[1]) * 1024


def reset_peak() -> int:
    """Bytes in use now, from which the peak begins to count anew; without what training keeps for its next step."""
    give_back_freed()
    Path("/proc/self/clear_refs").write_text("5")
    return memory_nbytes("VmHWM")


def trainer_of(engine: zerotrain.ZeroEngine, dataset: Any, run_dir: Path, **settings: Any) -> Any:
    """A Trainer without evaluations on the way or output, where `settings` do not say otherwise."""
    from rich.console import Console

    from zerotrain.training import Trainer, constant  # takes each rank a moment

    usual = {
        "world": engine.world, "schedule": constant, "seed": 0, "micro_batch_size": 2, "gradient_accumulation_steps": 1,
        "eval_every": 0, "eval_batches": 1, "log_every": 1, "sample_tokens": 0, "console": Console(quiet=True),
        "run_facts": {"stage": engine.options.zero.stage, "overrides": [], "config_hash": ""},
    }  # fmt: skip
    return Trainer(engine=engine, dataset=dataset, run_dir=run_dir, **usual | settings)
