"""`python -m benchmarks.plans`: what each tool says of its memory before a run, beside what it then holds.

Ranks on this machine train small models in bf16 with AdamW, by each tool as its tutorial has it. What a rank holds is
counted alike for all: the bytes that torch's allocator has given out since before the model was built, when they are
most in the second step, as torch's profiler tells. The forecasts:

- zerotrain: its plan of that stage.
- DeepSpeed: `estimate_zero2_model_states_mem_needs` and `estimate_zero3_...`, which know of no activations.
- FSDP2: torch's `FSDPMemTracker`, around steps of the sharded model with fake tensors and fake ranks.
"""

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.profiler import profile

from benchmarks.engines.plain import adamw
from benchmarks.errors import BenchmarkError
from benchmarks.report import markdown
from benchmarks.rounds import REPOSITORY, machine
from tests.ranks.processes import RankError, run_ranks
from zerotrain.comm.world import World
from zerotrain.config.schema import Config, ModelSwitches
from zerotrain.preflight.rehearsal import Links, Rehearsals, look_at
from zerotrain.run.factory import build, build_engine_of

NUM_STEPS = 2
ROWS, TOKENS, VOCAB = 4, 128, 8192


class Convnet(nn.Module):
    """Some convolutions with batch norms, and a linear layer: 6 M parameters."""

    def __init__(self) -> None:
        super().__init__()
        widths = [1, 256, 512, 512]
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Conv2d(a, b, 3, padding=1), nn.BatchNorm2d(b), nn.ReLU(), nn.MaxPool2d(2))
            for a, b in pairwise(widths)
        )
        self.head = nn.Linear(widths[-1] * 16, 256)

    def forward(self, images: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        """The mean loss of (N, 1, 32, 32) images."""
        for block in self.blocks:
            images = block(images)
        return nn.functional.cross_entropy(self.head(images.flatten(1)).float(), labels)


_HF: dict[str, Any] = {"_target_": "zerotrain.models.HuggingFaceModel", "vocab_size": VOCAB}
_SIZE: dict[str, Any] = {"hidden_size": 384, "num_hidden_layers": 6, "num_attention_heads": 6, "num_key_value_heads": 2}
_SIZE |= {"intermediate_size": 1024, "max_position_embeddings": 256}
_GPT = {"max_seq_len": 256, "num_layers": 6, "num_heads": 6, "hidden_size": 384}
MODELS: dict[str, dict[str, Any]] = {
    "GPT": {"_target_": "zerotrain.models.GPT", "vocab_size": VOCAB, **_GPT},
    "GPT, small": {"_target_": "zerotrain.models.GPT", "vocab_size": 512, **_GPT, "num_layers": 4, "hidden_size": 192},
    "Llama": _HF | {"config": {"model_type": "llama", **_SIZE}},
    "Mixtral": _HF | {"config": {"model_type": "mixtral", "num_local_experts": 4, **_SIZE}},
    "Llama, LoRA": _HF | {"config": {"model_type": "llama", **_SIZE}, "lora": {"rank": 8}},
    "convnet": {"_target_": f"{__name__}.Convnet"},
}
ADAMW = {"_target_": "torch.optim.AdamW", "_partial_": True, "lr": 3e-4, "fused": True}


def config_of(model: str) -> Config:
    """The config of a run with a model."""
    config = Config(model=asdict(ModelSwitches()) | MODELS[model], optimizer=dict(ADAMW))
    config.train.micro_batch_size, config.precision.name = ROWS, "bf16"
    return config


def batch_of(model: str, rows: int = ROWS) -> tuple[torch.Tensor, torch.Tensor]:
    """Inputs and labels."""
    if model == "convnet":
        return torch.ones(rows, 1, 32, 32), torch.zeros(rows, dtype=torch.int64)
    ids = torch.arange(TOKENS).repeat(rows, 1)
    return ids, ids


# ---- what a rank holds: each of these is a step of a tool's


def _ours(model: str, stage: int) -> Callable[[], object]:
    world = World.current(torch.device("cpu"))
    engine = build_engine_of(config_of(model), world, stage)
    batch = batch_of(model)
    return lambda: engine.train().train_step([batch])


def _deepspeed(model: str, stage: int) -> Callable[[], object]:
    import deepspeed

    module = build("model", config_of(model).target("model"))
    engine, *_ = deepspeed.initialize(
        model=module,
        optimizer=adamw([each for each in module.parameters() if each.requires_grad]),
        dist_init_required=False,
        config={
            "train_micro_batch_size_per_gpu": ROWS,
            "zero_optimization": {
                "stage": stage,
                "contiguous_gradients": True,
                "overlap_comm": True,
                "reduce_scatter": True,
            },
            "gradient_clipping": 1.0,
            "bf16": {"enabled": True},
            "steps_per_print": 1_000_000,
        },
    )
    inputs, labels = batch_of(model)
    inputs = inputs.bfloat16() if inputs.is_floating_point() else inputs

    def step() -> None:
        engine.backward(engine(inputs, labels))
        engine.step()

    return step


def _sharded(model: str, stage: int, mesh: DeviceMesh) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model under FSDP2, and its optimizer."""
    module: nn.Module = build("model", config_of(model).target("model"))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    shard = partial(fully_shard, mesh=mesh, reshard_after_forward=stage == 3, mp_policy=policy)
    blocks = max((each for each in module.modules() if isinstance(each, nn.ModuleList)), key=_numel)
    for block in blocks:
        shard(block)
    shard(module)
    return module, adamw([each for each in module.parameters() if each.requires_grad])


def _numel(module: nn.Module) -> int:
    return sum(each.numel() for each in module.parameters())


def _trained(module: nn.Module, optimizer: torch.optim.Optimizer, batch: tuple[torch.Tensor, ...]) -> None:
    loss = module(*batch)
    loss.backward()
    nn.utils.clip_grad_norm_(module.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()


def _fsdp2(model: str, stage: int) -> Callable[[], object]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return partial(_trained, *_sharded(model, stage, mesh), batch_of(model))


STEPS = {"zerotrain": _ours, "DeepSpeed": _deepspeed, "FSDP2": _fsdp2}


def held(tool: str, model: str, stage: int) -> int:
    """On one rank: the most bytes in the second step."""
    with profile(profile_memory=True) as profiled:
        step = STEPS[tool](model, stage)
        for number in range(NUM_STEPS):
            with torch.profiler.record_function(f"step {number}"):
                step()
    found = sorted(
        _all_of(profiled.profiler.kineto_results.experimental_event_tree()), key=lambda each: each.start_time_ns
    )
    [began_ns] = [each.start_time_ns for each in found if each.name == f"step {NUM_STEPS - 1}"]
    living: dict[int, int] = {}
    now = most = 0
    for event in found:
        if event.tag == torch._C._profiler._EventType.Allocation:
            told = event.extra_fields
            # The profiler sees no memory that another thread frees; it is gone when its address is given out again.
            now -= living.pop(told.ptr, 0)
            if told.alloc_size > 0:
                living[told.ptr] = told.alloc_size
                now += told.alloc_size
            most = max(most, now) if event.start_time_ns >= began_ns else now
    return most


def _all_of(events: Iterable[Any]) -> Iterator[Any]:
    """These, and what began within them."""
    for event in events:
        yield event
        yield from _all_of(event.children)


# ---- what is said before


def _our_plan(model: str, stage: int, num_ranks: int) -> int:
    config = config_of(model)
    optimizer = build("optimizer", config.target("optimizer"))
    links = Links(num_ranks, on_host=True, ordered=True)
    seen = look_at(optimizer, on_host=True)
    plan = Rehearsals(config, links, batch_of(model, 1), optimizer, seen, Path(tempfile.gettempdir())).plan(stage)
    if plan.peak is None:
        raise RuntimeError(f"{plan.unknown_because} cannot be followed")
    return plan.peak


def _deepspeed_estimate(model: str, stage: int, num_ranks: int) -> int:
    from deepspeed.runtime.zero.stage3 import estimate_zero3_model_states_mem_needs
    from deepspeed.runtime.zero.stage_1_and_2 import estimate_zero2_model_states_mem_needs

    module: nn.Module = build("model", config_of(model).target("model"))
    if stage == 2:
        return int(estimate_zero2_model_states_mem_needs(_numel(module), num_ranks, cpu_offload=False)[1])
    layer = max(sum(each.numel() for each in part.parameters(recurse=False)) for part in module.modules())
    told = estimate_zero3_model_states_mem_needs(
        _numel(module), layer, num_ranks, cpu_offload=False, cpu_offload_params=False
    )
    return int(told[1])


def _tracked(model: str, stage: int, num_ranks: int) -> int:
    from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=num_ranks)
    try:
        mesh = init_device_mesh("cpu", (num_ranks,))
        with FakeTensorMode():
            module, optimizer = _sharded(model, stage, mesh)
            batch = batch_of(model)
            tracker = FSDPMemTracker(module, optimizer)
            tracker.track_inputs(batch)
            for _ in range(2):  # the first makes the optimizer's state
                with tracker:
                    _trained(module, optimizer, batch)
                tracker.reset_mod_stats()
            with tracker:
                _trained(module, optimizer, batch)
            peak = tracker.get_tracker_snapshot("peak")
            return max(int(each["Total"]) for each in peak.values())
    finally:
        dist.destroy_process_group()


SAID = {"zerotrain": _our_plan, "DeepSpeed": _deepspeed_estimate, "FSDP2": _tracked}


def said(tool: str, model: str, stage: int, num_ranks: int) -> int:
    """The forecast, in a process of its own: each tool leaves something behind.

    Raises:
        BenchmarkError: there is none.
    """
    code = f"from benchmarks.plans import SAID; print(SAID[{tool!r}]({model!r}, {stage}, {num_ranks}))"
    done = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, check=False)
    if done.returncode:
        raise BenchmarkError(done.stderr.strip().splitlines()[-1])
    return int(done.stdout.splitlines()[-1])


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a table: a row for each model, stage and tool."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.plans", description=__doc__)
    parser.add_argument("--models", default="GPT,Llama,LoRA,Mixtral,convnet")
    parser.add_argument("--tools", default=",".join(STEPS))
    parser.add_argument("--stages", default="2,3")
    parser.add_argument("--ranks", type=int, default=2)
    options = parser.parse_args(arguments)
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    rows = [["model", "stage", "tool", "said, MB", "held, MB", "said / held"]]
    names = [
        next(name for name in MODELS if each in (name, name.split(", ")[-1])) for each in options.models.split(",")
    ]
    for model in names:
        for stage in map(int, options.stages.split(",")):
            for tool in options.tools.split(","):
                told = _or_why(partial(said, tool, model, stage, options.ranks))
                most = _or_why(lambda: max(run_ranks(held, options.ranks, tool, model, stage, timeout_s=300.0)))  # noqa: B023
                both = isinstance(told, int) and isinstance(most, int)
                ratio = f"{told / most:.2f}" if both else ""  # type: ignore[operator]
                rows.append([model, str(stage), tool, _in_mb(told), _in_mb(most), ratio])
                print(*rows[-1], flush=True)
    print(f"\n{options.ranks} ranks, {machine()}, torch {torch.__version__}\n\n{markdown(rows)}")


def _or_why(ask: Callable[[], int]) -> int | str:
    """The number, or the last line of what went wrong."""
    try:
        return ask()
    except (RankError, BenchmarkError) as error:
        return str(error).strip().splitlines()[-1]


def _in_mb(nbytes: int | str) -> str:
    return nbytes if isinstance(nbytes, str) else f"{nbytes / 1e6:.1f}"


if __name__ == "__main__":
    main()
