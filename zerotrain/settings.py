"""The settings of an engine: each with its meaning, unit, default and rule, and when it has an effect.

A setting is one field: the command line, the check of its value, the warning that it changes nothing here and the
comparison over the ranks all read the field. A new one is a field here, or in `zerotrain.config.schema` if it is no
business of an engine, and the code that uses it.

A module of its own, below comm and the engine, which read it whole, and without torch, hydra and omegaconf: the engine
needs no config, and tab completion no torch.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any


@dataclass(frozen=True)
class Rule:
    """The values that a setting may have."""

    allowed: str
    """Completes the sentence "it must be ..."; None is called null."""
    holds: Callable[[Any], bool]


@dataclass(frozen=True)
class Effect:
    """A condition without which a setting changes nothing."""

    holds: Callable[[Any, int], bool]
    """(the `Config` of a run, how many ranks it has) -> whether the setting has an effect."""
    otherwise: str
    """Completes the sentence "it has no effect ...", with fields of the config in braces."""


@dataclass(frozen=True)
class Setting:
    """The default, rule and effects of a field of settings; its docstring has the meaning."""

    default: Any
    rule: Rule
    effects: tuple[Effect, ...]
    """All of them must hold for the setting to have an effect."""

    def allows(self, value: Any) -> bool:
        """Whether the setting may have this value."""
        try:
            return bool(self.rule.holds(value))
        except (TypeError, ValueError, OverflowError):  # settings made in Python may hold a value of any type
            return False

    def must_be(self, name: str, got: Any, spelled: Callable[[Any], str] = str) -> str:
        """The line that says what the setting must be instead of `got`, with values as the user writes them."""
        allowed = self.rule.allowed.replace("null", spelled(None))
        return f"{name}: got {spelled(got)}; it must be {allowed}; the default is {spelled(self.default)}"


def setting(default: Any, rule: Rule, *effects: Effect) -> Any:
    """A field of a dataclass of settings."""
    metadata = {"setting": Setting(default, rule, effects)}
    if isinstance(default, list):
        return field(default_factory=default.copy, metadata=metadata)
    return field(default=default, metadata=metadata)


def settings_in(group: Any, prefix: str = "") -> Iterator[tuple[str, Setting, Any]]:
    """(dotted name, setting, value) of each setting in a dataclass, and in the dataclasses it holds."""
    for entry in fields(group):
        name, value = f"{prefix}{entry.name}", getattr(group, entry.name)
        if "setting" in entry.metadata:
            yield name, entry.metadata["setting"], value
        elif is_dataclass(value):
            yield from settings_in(value, f"{name}.")


def value_of(run: Any, name: str) -> Any:
    """The value of a setting in a `Config`, by its dotted name; None of one that an open group does not have."""
    group, _, field_name = name.partition(".")
    values = getattr(run, group)
    return values.get(field_name) if isinstance(values, dict) else getattr(values, field_name)


def problems_in(group: Any) -> list[str]:
    """A line for each setting in a dataclass that breaks its rule."""
    return [
        setting.must_be(name, value, _in_python)
        for name, setting, value in settings_in(group)
        if not setting.allows(value)
    ]


def _in_python(value: Any) -> str:
    # Without its quotes the text "3" would look like the number, which is allowed.
    return repr(value) if isinstance(value, str) and value.isdecimal() else str(value)


# ---- what a setting may be


AUTO = "auto"
"""Chosen before the run."""


def one_of(*values: Any) -> Rule:
    """One of a few values."""
    *leading, final = [str(value).lower() for value in values]
    return Rule(" or ".join(filter(None, [", ".join(leading), final])), lambda value: value in values)


def at_least(minimum: int, what: str) -> Rule:
    """A number of things."""
    return Rule(f"{minimum} or more {what}", lambda value: value >= minimum)


def or_auto(rule: Rule) -> Rule:
    """The rule that allows auto beside another rule's values."""
    return Rule(f"{rule.allowed}, or auto", lambda value: value == AUTO or rule.holds(value))


def between(minimum: float, maximum: float, what: str) -> Rule:
    """A number of things that are never more: a count with too many noughts is no wish."""
    return Rule(f"between {minimum} and {maximum} {what}", lambda value: minimum <= value <= maximum)


def positive(what: str) -> Rule:
    """A finite number above 0; true is none."""
    return Rule(what, lambda value: not isinstance(value, bool) and math.isfinite(value) and value > 0)


def or_null(rule: Rule, meaning: str = "") -> Rule:
    """The rule that allows null beside another rule's values."""
    return Rule(f"{rule.allowed}, or null{meaning}", lambda value: value is None or rule.holds(value))


def _are_patterns(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(pattern, str) and pattern for pattern in value)


TRUE_OR_FALSE = one_of(True, False)
STAGE = Rule("0, 1, 2 or 3", lambda value: type(value) is int and value in range(4))
STEPS = at_least(1, "steps")
SEQUENCES = Rule("1 or more rows", lambda value: type(value) is int and value >= 1)
VIRTUAL_RANKS = or_null(at_least(1, "virtual ranks"), " for as many as ranks")
CLIPPING = or_null(positive("a number above 0"), " for no clipping")
MIB = positive("a number of MiB above 0")
UNITS = Rule(
    "auto or a list of module name patterns such as [blocks.*]",
    lambda value: value == "auto" or (_are_patterns(value) and bool(value)),
)
HOST = "host"
SHARD_SIZE = Rule(
    "a power of two from 2 to the number of ranks, host for those of a host, or null for all",
    lambda size: size in (None, HOST) or (type(size) is int and size > 1 and size & (size - 1) == 0),
)
KEPT = Rule("a list of name patterns such as ['*norm*']", _are_patterns)
LOSS_SCALE = Rule("a power of two from 1 to 2**32", lambda value: 1 <= value <= 2**32 and math.frexp(value)[0] == 0.5)
TIER = one_of("device", "cpu", "disk")
GRAPHS = one_of("auto", "off")
FOLDER = or_null(Rule("the path of a folder", lambda value: isinstance(value, str) and bool(value)))

# ---- when a setting has an effect

SENT = Effect(lambda _, num_ranks: num_ranks > 1, "with one rank; launch.nproc_per_node=2 starts two")
"""For settings of communication: one rank alone sends nothing."""
SHARES = Effect(lambda _, num_ranks: num_ranks > 1, "on memory with one rank; launch.nproc_per_node=2 starts two")
"""For settings of sharding: the shard of one rank is the whole."""
UNSCHEDULED = Effect(
    lambda run, _: not run.zero.has_first, "with zero.schedule={zero.schedule}, which has the stage from step 0 on"
)
STAGE_3 = Effect(
    lambda run, _: any(stage in (3, AUTO) for stage in run.zero.stages.values()),
    "at {zero.stages_given}; it has one at 3",
)
"""For settings of sharded parameters on their way."""
ACCUMULATES = Effect(
    lambda run, _: run.train.gradient_accumulation_steps > 1,
    "with train.gradient_accumulation_steps={train.gradient_accumulation_steps}; it has one with 2 or more",
)
IN_16_BITS = Effect(
    lambda run, _: run.precision.name in ("bf16", "fp16"),
    "with precision={precision.name}; it has one with bf16 or fp16",
)
IN_FP32 = Effect(
    lambda run, _: run.precision.name == "fp32" and not run.train.deterministic,
    "with precision={precision.name}, or with train.deterministic=true; it has one with fp32 and without",
)
IN_FP8 = Effect(lambda run, _: run.precision.matmul == "fp8", "without precision.matmul=fp8")
IN_FP16 = Effect(lambda run, _: run.precision.name == "fp16", "with precision={precision.name}; it has one with fp16")

OFFLOADS_OPTIMIZER = Effect(
    lambda run, _: run.offload.optimizer != "device", "with offload.optimizer=device; it has one with cpu or disk"
)
OFFLOADS_TO_DISK = Effect(
    lambda run, _: run.offload.uses_disk or AUTO in run.offload.tiers,
    "without offload.optimizer=disk, offload.parameters=disk or offload.activations=disk",
)


def autos_of(run: Any) -> list[str]:
    """The settings of a `Config` that are `auto`, and are chosen as its run starts."""
    tiers = [f"offload.{kind}" for kind in ("optimizer", "parameters", "activations")]
    names = ["zero.stage", "train.micro_batch_size", "model.activation_checkpointing", *tiers]
    return [name for name in names if value_of(run, name) == AUTO]


PLANNED = Effect(
    lambda run, _: run.plan.only or run.plan.compare or bool(autos_of(run)),
    "without plan.only=true, plan.compare=true or a setting that is auto",
)

# ---- the settings


@dataclass
class ZeroConfig:
    """How parameters, gradients and optimizer state are sharded (ZeRO, arXiv 1910.02054) and moved."""

    stage: int = setting(2, STAGE, SHARES, UNSCHEDULED)
    """0: nothing is sharded; 1: optimizer state; 2: also gradients; 3: also parameters."""
    bucket_mb: Any = setting("auto", or_auto(MIB))
    """Largest bucket in MiB (2**20 bytes) of the compute precision; a larger parameter is a bucket of its own, and
    a rest of a sixteenth or less goes with its neighbour. Units share one only up to an eighth of the model. auto: on
    GPUs as much as the largest unit, up to 512, since each bucket costs launches; else 25."""
    overlap: bool = setting(True, TRUE_OR_FALSE, SENT)
    """Run collectives beside compute. False issues the same collectives and waits for each at once."""
    prefetch: int = setting(1, at_least(0, "units"), STAGE_3)
    """Stage 3: how many units ahead of the running one are gathered. 0 gathers a unit when it is needed."""
    reduction: str = setting("auto", one_of("auto", "ordered", "native", "fp32"), SENT)
    """ordered: all-to-all, then a sum by one tree in fp32 (same bits at any bucket size); native: the backend's own
    reduce-scatter; fp32: the same of gradients widened to fp32, in bf16 and fp16 twice the bytes; auto: ordered on
    gloo, native on NCCL."""
    accumulate: str = setting("local", one_of("local", "reduced"), ACCUMULATES)
    """How the micro-batches of a step are summed. local: a sum on each rank (in 16 bits an fp32 one of the whole
    model), reduced once. reduced: each is reduced, and its mean over ranks added to an fp32 shard; as many times the
    gradients' bytes as there are micro-batches, and other bits."""
    units: Any = setting("auto", UNITS)
    """auto: the repeated blocks of the model; or a list of module name patterns, such as ["blocks.*"]."""
    reshard_after_forward: bool = setting(True, TRUE_OR_FALSE, STAGE_3)
    """Stage 3: free a unit's parameters after its forward and gather them again for its backward."""
    compiled_update: bool = setting(False, TRUE_OR_FALSE)
    """Update with AdamW in one compiled pass that widens the gradient, clips it, updates and rounds the weight: other
    bits than torch's AdamW, the same at every stage, and in 16 bits a third less memory traffic. Needs a C++ compiler;
    the first step takes longer."""
    shard_size: Any = setting(None, SHARD_SIZE, SENT)
    """So many neighbouring ranks hold sharded parameters once, a power of two that divides the ranks; host: those of
    one host. Gradients are added among these ranks first, and only sums go to the others: as many times fewer bytes
    between hosts, with the same bits. Gradients and optimizer state stay sharded over all ranks. null: all ranks."""

    @property
    def unit_patterns(self) -> list[str] | None:
        """Patterns of module names; None: the repeated blocks."""
        return None if self.units == "auto" else list(self.units)


@dataclass
class PrecisionConfig:
    """The precision that computes, travels and is kept."""

    name: str = setting("fp32", one_of("fp32", "bf16", "fp16"))
    """fp32; or bf16: bf16 weights, activations and wire, with fp32 master weights, accumulation and reduction; or fp16:
    the same in fp16, with a dynamic loss scale."""
    keep_fp32: list[str] = setting([], KEPT, IN_16_BITS)
    """Name patterns of parameters, or of modules with all in them, that stay in fp32 in bf16 and fp16: in compute, on
    the wire and as master weights. Such as ["*norm*", "*.router"]. A module kept as a whole gets its floating-point
    inputs in fp32, and its outputs are cast back."""
    initial_scale: float = setting(65536.0, LOSS_SCALE, IN_FP16)
    """fp16: what the loss is multiplied with at first, a power of two. Each overflow halves it and skips the step."""
    growth_interval: int = setting(2000, STEPS, IN_FP16)
    """fp16: steps in a row without overflow after which the scale is doubled."""
    state: str = setting("fp32", one_of("fp32", "bf16"))
    """The optimizer's state between updates: fp32; or bf16, in half of the memory. Updates compute in fp32, and round
    the state up or down by chance, in the same way on every rank and at every stage."""
    matmul: str | None = setting(None, or_null(one_of("fp8")), IN_16_BITS)
    """fp8: linear layers in the units multiply matrices in fp8, with a scale of each matrix; weights, gradients and
    what is sent stay as they are. Needs torchao, and Ada, Hopper or later GPUs; a CPU emulates it, slowly."""
    fp8_modules: list[str] = setting(["*"], KEPT, IN_FP8)
    """Name patterns of the layers that do, such as ["*.mlp.*"]. Sizes must be multiples of 16."""
    fp8_min_size: int = setting(16, at_least(1, "rows and columns"), IN_FP8)
    """The smaller size of a layer that does: below some thousands a GPU takes longer to scale than it gains."""


@dataclass
class PrecisionGroup(PrecisionConfig):
    """The same of a run, with what is a matter of its processes."""

    tf32: bool = setting(False, TRUE_OR_FALSE, IN_FP32)
    """fp32: on GPUs multiply matrices in TF32, which rounds what goes in to 10 bits of mantissa: several times faster,
    with other bits. Everything else stays in fp32."""


@dataclass
class OffloadConfig:
    """The state that lies off the device while nothing is computed with it. The weights keep their bits."""

    optimizer: str = setting("device", TIER)
    """The optimizer's state, and master weights that are kept apart: device; cpu: the host's memory; disk: a file in
    `path`. Fetched bucket by bucket for the update, and stored behind it."""
    parameters: str = setting("device", TIER, STAGE_3)
    """Stage 3: this rank's part of the weights, fetched for each gather, and stored after each update."""
    activations: str = setting("device", TIER)
    """The tier for tensors that a unit's forward saves for its backward (with activation checkpointing the unit's
    inputs), in memories of 64 KiB or more; they are fetched one unit ahead of the backward. cpu; disk: a file in `path`
    that grows with the first steps."""
    keep: float = setting(0.0, between(0, 1, "of the optimizer's state"), OFFLOADS_OPTIMIZER)
    """How much of the optimizer's state stays on the device, in whole buckets, those of the model's end first."""
    update: str = setting("device", one_of("device", "host"), OFFLOADS_OPTIMIZER)
    """The processor that runs the optimizer. host: on the CPU, with less to move between GPU and host, and other bits
    than without offloading."""
    path: str | None = setting(None, FOLDER, OFFLOADS_TO_DISK)
    """The folder whose disk is used; what is there needs no cleaning up, however a run ends. null: the run's folder."""

    @property
    def uses_disk(self) -> bool:
        """Whether anything goes to a disk."""
        return "disk" in self.tiers

    @property
    def tiers(self) -> tuple[str, str, str]:
        """Those of the optimizer's state, of parameters and of activations."""
        return self.optimizer, self.parameters, self.activations


@dataclass
class OffloadGroup(OffloadConfig):
    """The same of a run, for which it may be chosen where the optimizer's state and the weights lie."""

    optimizer: str = setting("device", or_auto(TIER))
    """The optimizer's state, and master weights that are kept apart: device; cpu: the host's memory; disk: a file in
    `path`. Fetched bucket by bucket for the update, and stored behind it. auto: chosen as the run starts."""
    parameters: str = setting("device", or_auto(TIER), STAGE_3)
    """Stage 3: this rank's part of the weights, fetched for each gather, and stored after each update. auto: chosen as
    the run starts."""
    activations: str = setting("device", or_auto(TIER))
    """The tier for tensors that a unit's forward saves for its backward (with activation checkpointing the unit's
    inputs), in memories of 64 KiB or more; they are fetched one unit ahead of the backward. cpu; disk: a file in `path`
    that grows with the first steps. auto: chosen as the run starts."""


@dataclass
class EngineConfig:
    """All that an engine is told, by the names that `zerotrain.build_engine` knows it by."""

    zero: ZeroConfig = field(default_factory=ZeroConfig)
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    offload: OffloadConfig = field(default_factory=OffloadConfig)
    max_grad_norm: float | None = setting(None, CLIPPING)
    """See `zerotrain.build_engine`."""
    max_skipped_steps: int = setting(20, STEPS)
    """See `zerotrain.build_engine`."""
    virtual_ranks: int | None = setting(None, VIRTUAL_RANKS)
    """See `zerotrain.build_engine`."""
    graphs: str = setting("off", GRAPHS)
    """See `zerotrain.build_engine`."""
