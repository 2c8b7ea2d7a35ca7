"""The typed schema of a run: every field with its meaning, unit and default.

`conf/*.yaml` is merged onto these dataclasses. Ranges and rules across fields are in `checks.py`.
"""

from dataclasses import dataclass, field
from typing import Any

MODEL_SWITCHES = ("compile", "activation_checkpointing")
"""Settings of every model, also of the user's own, which are no arguments of its class. Both are false by default.

compile: torch.compile the forward of each unit (see `ZeroConfig.units`) in training. Needs a C++ compiler; the first
step takes half a minute longer.
activation_checkpointing: keep of a unit's forward its inputs alone, and compute the rest again in its backward: less
memory for about a third more compute, and the same bits.
"""


@dataclass
class ZeroConfig:
    """How parameters, gradients and optimizer state are sharded (ZeRO, arXiv 1910.02054) and moved."""

    stage: int = 2
    """0: nothing is sharded; 1: optimizer state; 2: also gradients; 3: also parameters."""
    bucket_mb: float = 25.0
    """Largest bucket in MiB (2**20 bytes) of the compute precision; a larger parameter is a bucket of its own. Units
    share one only up to an eighth of the model."""
    overlap: bool = True
    """Run collectives beside compute. False issues the same collectives and waits for each at once."""
    prefetch: int = 1
    """Stage 3: how many units ahead of the running one are gathered. 0 gathers a unit when it is needed."""
    reduction: str = "auto"
    """ordered: all-to-all, then a sum in rank order in fp32 (same bits at any bucket size);
    native: the backend's own reduce-scatter; auto: ordered on gloo, native on NCCL."""
    units: Any = "auto"
    """auto: the repeated blocks of the model; or a list of module name patterns, such as ["blocks.*"]."""
    reshard_after_forward: bool = True
    """Stage 3: free a unit's parameters after its forward and gather them again for its backward."""


@dataclass
class PrecisionConfig:
    """Which precision computes, travels and is kept."""

    name: str = "fp32"
    """fp32; or bf16: bf16 weights, activations and wire, with fp32 master weights, accumulation and reduction; or fp16:
    the same in fp16, with a dynamic loss scale."""
    keep_fp32: list[str] = field(default_factory=list)
    """Name patterns of parameters, or of modules with all in them, that stay in fp32 in bf16 and fp16: in compute, on
    the wire and as master weights. Such as ["*norm*", "*.router"]. A module kept as a whole gets its floating-point
    inputs in fp32, and its outputs are cast back."""
    initial_scale: float = 65536.0
    """fp16: what the loss is multiplied with at first, a power of two. Each overflow halves it and skips the step."""
    growth_interval: int = 2000
    """fp16: steps in a row without overflow after which the scale is doubled."""


@dataclass
class TrainConfig:
    """The training loop."""

    max_steps: int = 400
    """Optimizer steps to run, each on one global batch. A skipped one counts here, but not for the schedule."""
    micro_batch_size: int = 8
    """Sequences per rank in one forward and backward."""
    gradient_accumulation_steps: int = 1
    """Micro-batches per rank in one optimizer step."""
    max_grad_norm: float | None = 1.0
    """Clip the global L2 norm of the gradient to this; null for no clipping."""
    on_nonfinite: str = "skip"
    """When the gradient of a step is inf or nan anywhere on any rank: skip the step on all ranks, or stop the run."""
    max_skipped_steps: int = 20
    """As many steps skipped in a row stop the run."""
    eval_every: int = 100
    """Optimizer steps between evaluations; there is one before the first step and after the last. 0: only the last."""
    eval_batches: int = 16
    """Global batches (as large as those of training, or fewer if validation has no more) read in one evaluation."""
    log_every: int = 10
    """Optimizer steps between lines of metrics.jsonl."""
    sample_tokens: int = 200
    """Tokens of text generated at the end of the run; 0 for none. Needs a dataset that can decode."""
    profile: bool = False
    """Write a chrome trace of three steps, after three others, to profile/rank<r>.json of the run folder."""
    memory_snapshot: bool = False
    """CUDA: write the allocations of the first six steps, or those before an error, to profile/memory_rank<r>.pickle of
    the run folder."""


@dataclass
class LaunchConfig:
    """Where and how the ranks run."""

    nproc_per_node: int | None = None
    """Ranks on this machine; null: the number of GPUs, or 1 where there is none."""
    device: str = "auto"
    """cpu, cuda or auto (cuda where there is one). The backend follows: gloo on cpu, nccl on cuda."""
    threads_per_rank: int | None = None
    """CPU threads of one rank; null: the machine's cores divided by its ranks, at least 1. The bits of a matrix product
    on the CPU depend on it."""
    timeout_s: float = 300.0
    """Seconds a collective may wait for the other ranks before the run is ended."""


@dataclass
class Config:
    """One run. The open groups (model, data, optimizer, scheduler) name a class or function with `_target_`;
    their other keys are its arguments."""

    seed: int = 0
    """Seeds the initial weights, the order of the data and dropout."""
    zero: ZeroConfig = field(default_factory=ZeroConfig)
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    model: dict[str, Any] = field(default_factory=lambda: dict.fromkeys(MODEL_SWITCHES, False))
    """An nn.Module: forward(inputs, labels) returns the mean loss over labels != -100; forward(inputs) the logits.
    Beside the arguments of its class it has the `MODEL_SWITCHES`."""
    data: dict[str, Any] = field(default_factory=dict)
    """An object with map-style datasets `train` and `validation` of (inputs, labels) tensor pairs."""
    optimizer: dict[str, Any] = field(default_factory=dict)
    """An element-wise torch.optim.Optimizer with `_partial_: true`."""
    scheduler: dict[str, Any] = field(default_factory=dict)
    """A function (step, max_steps, ...) -> factor on the learning rate, with `_partial_: true`."""
    train: TrainConfig = field(default_factory=TrainConfig)
    launch: LaunchConfig = field(default_factory=LaunchConfig)

    @property
    def model_target(self) -> dict[str, Any]:
        """The model's class and its arguments, without the switches."""
        return {key: value for key, value in self.model.items() if key not in MODEL_SWITCHES}

    @property
    def model_switches(self) -> dict[str, Any]:
        """The value of each of the `MODEL_SWITCHES`."""
        return {switch: self.model.get(switch, False) for switch in MODEL_SWITCHES}
