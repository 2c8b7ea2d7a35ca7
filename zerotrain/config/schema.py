"""The typed schema of a run: every field with its meaning, unit, default, rule, and when it has an effect.

`conf/*.yaml` is merged onto these dataclasses. Settings that an engine gets too, `zero` and `precision`, and the kinds
of rules and effects are in `zerotrain.settings`; rules across fields are in `checks.py`. Imports no torch.
"""

import math
import re
from collections.abc import Callable
from dataclasses import asdict, dataclass, field, fields
from fractions import Fraction
from typing import Any

from zerotrain import settings
from zerotrain.settings import TRUE_OR_FALSE, Effect, Rule, at_least, between, one_of, or_null, positive, setting

# Rules for settings beyond a number or a word: rhythms, schedules of stages, patterns of names, lists.


_UNITS = {"s": ("seconds", 1), "m": ("seconds", 60), "h": ("seconds", 3600)}
_FORM = re.compile(
    r"(?P<count>[1-9]\d{0,8})(?P<time>[smh]?)|(?P<amount>\d{1,15}(\.\d{1,15})?(e\d{1,2})?) ?(?P<of>epoch|token)s?"
)


@dataclass(frozen=True)
class Rhythm:
    """A distance between two times of the same action."""

    number: Fraction
    unit: str
    """steps, seconds, tokens or epochs."""

    @classmethod
    def read(cls, value: Any) -> "Rhythm | None":
        """The rhythm of a setting: 100, "15m", "0.1epoch" or "5e6tokens". None where it is none."""
        if isinstance(value, int) and not isinstance(value, bool) and value > 0:
            return cls(Fraction(value), "steps")
        match = _FORM.fullmatch(value) if isinstance(value, str) else None
        if match is None:
            return None
        if match["of"]:
            amount = Fraction(match["amount"])
            return cls(amount, f"{match['of']}s") if amount else None
        unit, factor = _UNITS.get(match["time"], ("steps", 1))
        return cls(Fraction(match["count"]) * factor, unit)


def rhythm_rule(
    *, times: bool = False, alternatives: str = "", allows: Callable[[Any], bool] = lambda _: False
) -> Rule:
    """A rhythm, or something else.

    Args:
        times: whether a time is one too.
        alternatives, allows: the other values, in words and as a test.
    """
    forms = "a number of steps such as 100, of tokens such as 5e6tokens or of epochs such as 0.1epoch"
    forms += ", a time such as 600s, 15m or 2h" if times else ""

    def holds(value: Any) -> bool:
        rhythm = Rhythm.read(value)
        return allows(value) or (rhythm is not None and (times or rhythm.unit != "seconds"))

    return Rule(f"{forms}{alternatives}", holds)


def listed(value: Any) -> list[Any]:
    """A list as it is, and one of a value alone."""
    return value if isinstance(value, list) else [value]


def _are_texts(value: Any) -> bool:
    """Whether a value is a text, or a list of some, none of them empty."""
    return bool(listed(value)) and all(isinstance(text, str) and text for text in listed(value))


def _is_schedule(value: Any) -> bool:
    """A step may be a text: JSON and `+zero.schedule.500=3` have no other."""
    if not isinstance(value, dict):
        return value is None
    for step, number in value.items():
        is_step = (isinstance(step, int) and not isinstance(step, bool)) or (isinstance(step, str) and step.isdecimal())
        if not is_step or int(step) < 0 or not settings.STAGE.holds(number):
            return False
    return bool(value)


def _is_frozen(entry: Any) -> bool:
    if not isinstance(entry, dict):
        return isinstance(entry, str) and bool(entry)
    rhythm = Rhythm.read(entry.get("until", 1))
    is_until = rhythm is not None and rhythm.unit != "seconds"
    return entry.keys() <= {"match", "until"} and _are_texts(entry.get("match")) and is_until


def _is_group(name: Any, entry: Any) -> bool:
    if entry is None:
        return True
    if not isinstance(name, str) or not isinstance(entry, dict) or not {"params", "name"}.isdisjoint(entry):
        return False
    numbers = [value for value in entry.values() if isinstance(value, float)]
    return len(entry) > 1 and _are_texts(entry.get("match")) and all(map(math.isfinite, numbers))


BEST_OF = Rule(
    "val_loss, val_NAME of a metric, or with /NAME that of a source of data=mix or of one of data.validation_sets",
    lambda value: re.fullmatch(r"val_\w+(/.+)?", value) is not None,
)
INTERFACE = Rule(
    "auto, or the name of a network interface, such as eth0",
    lambda name: isinstance(name, str) and re.fullmatch(r"[\w.@:-]{1,15}", name) is not None,
)
COLLATE = Rule(
    "null, or a function such as {_target_: my_components.pad, _partial_: true}",
    lambda value: value is None or (isinstance(value, dict) and isinstance(value.get("_target_"), str)),
)
VALIDATION_SETS = Rule(
    "null, or data by names of letters, digits, _ and -, such as {docs: {path: docs}}",
    lambda value: (
        value is None
        or (
            isinstance(value, dict)
            and all(re.fullmatch(r"[\w-]+", str(key)) and isinstance(value[key], dict) for key in value)
        )
    ),
)
PROMPTS = Rule(
    "a list of texts such as ['def main','class A'], or null",
    lambda value: value is None or (isinstance(value, list) and _are_texts(value)),
)
EVAL_BATCHES = Rule("1 or more batches, or all", lambda value: value == "all" or (type(value) is int and value >= 1))
SCHEDULE = Rule(
    "steps done and the stage (0 to 3) from there on, such as {0: 2, 500: 3}, or null for zero.stage in all steps",
    _is_schedule,
)
FREEZE = Rule(
    "a list of name patterns such as [*.wte.*] and of entries such as {match: blocks.0.*, until: 100} (steps, "
    "5e6tokens or 0.1epoch), or null",
    lambda value: value is None or (isinstance(value, list) and all(map(_is_frozen, value))),
)
GROUPS = Rule(
    "names, each with patterns and what differs, such as {head: {match: lm_head.*, lr: 1e-4}}, or null",
    lambda value: value is None or (isinstance(value, dict) and all(_is_group(*item) for item in value.items())),
)


OBJECTIVE = Rule(
    "a number of result.json or a metric of an evaluation, such as val_accuracy, or a list of them", _are_texts
)
DIRECTION = Rule(
    "minimize or maximize, or a list with one for each objective",
    lambda value: bool(listed(value)) and all(direction in ("minimize", "maximize") for direction in listed(value)),
)
PRUNER = Rule(
    "a class of optuna.pruners with its arguments, {_target_: ..., argument: ...}",
    lambda value: isinstance(value, dict) and isinstance(value.get("_target_"), str),
)
EVAL_EVERY = rhythm_rule(
    alternatives=", or 0 for only the last", allows=lambda value: type(value) is int and value == 0
)
WEIGHTS = Rule("a file with weights, a folder of Hugging Face or torch's DCP, a checkpoint", bool)
EVERY = rhythm_rule(times=True, alternatives=", or null for never", allows=lambda value: value is None)


VALIDATION_OF_ITS_OWN = ("validation_path", "validation_split")
"""Arguments of data with the data to validate on, in place of a part of the rest."""
VALIDATION_FRACTION = "validation_fraction"
"""The argument with the size of this part."""
EVALUATES = Effect(
    lambda run, _: (
        run.data.get(VALIDATION_FRACTION) != 0 or any(map(run.data.get, (*VALIDATION_OF_ITS_OWN, "validation_sets")))
    ),
    "with data.validation_fraction=0, which leaves nothing to evaluate on",
)
VERIFIES = Effect(lambda run, _: run.train.verify_every > 0, "with train.verify_every=0")
SKIPPING = Effect(lambda run, _: run.train.on_nonfinite == "skip", "with train.on_nonfinite=stop; it has one with skip")


@dataclass
class ZeroGroup(settings.ZeroConfig):
    """The engine's settings, and the schedule of stages: the training loop changes the stage."""

    stage: Any = setting(2, settings.or_auto(settings.STAGE), settings.SHARES, settings.UNSCHEDULED)
    """0: nothing is sharded; 1: optimizer state; 2: also gradients; 3: also parameters; auto: of the stages that fit by
    their plans those that send least, of these those whose ranks share the update, of these the lowest."""
    schedule: Any = setting(None, SCHEDULE, settings.SHARES)
    """The stage by steps done: {0: 2, 500: 3} trains 500 steps at stage 2 and all further ones at 3. Before its first
    entry `stage` counts. A run that goes on is at the stage of its step."""

    @property
    def stages(self) -> dict[int, int]:
        """Steps done, and the stage from there on; in order, 0 among them."""
        changes = {int(step): int(number) for step, number in (self.schedule or {}).items()}
        return dict(sorted(({0: self.stage} | changes).items()))

    @property
    def has_first(self) -> bool:
        """Whether the schedule has the first stage: `stage` has no effect then."""
        return any(int(step) == 0 for step in self.schedule or ())

    @property
    def stages_given(self) -> str:
        """As on the command line."""
        return f"zero.stage={self.stage}" if self.schedule is None else f"zero.schedule={self.schedule}"

    def of_engine(self, stage: int | None) -> settings.ZeroConfig:
        """The settings of an engine built at a stage; None: at the first."""
        values = {entry.name: getattr(self, entry.name) for entry in fields(settings.ZeroConfig)}
        return settings.ZeroConfig(**values | {"stage": self.stages[0] if stage is None else stage})


@dataclass
class ModelSwitches:
    """Settings of every model, also of the user's own: keys of the group `model` that are no arguments of its class."""

    compile: bool = setting(False, TRUE_OR_FALSE)
    """torch.compile the forward of each unit (see `ZeroConfig.units`), and losses that are modules, in training. Needs
    a C++ compiler; the first step takes half a minute longer."""
    activation_checkpointing: Any = setting(False, settings.or_auto(TRUE_OR_FALSE))
    """Keep of a unit's forward its inputs alone, and compute the rest again in its backward: less memory for about a
    third more compute, and the same bits. auto: chosen as the run starts."""
    freeze: Any = setting(None, FREEZE)
    """Parameters that do not train, by patterns of their names; with `until` they train after so many steps, tokens or
    epochs. The first entry that matches a parameter counts."""


@dataclass
class LossSwitches:
    """Settings of every loss, also of the user's own: keys of the group `loss` that its class does not get."""

    target: str | None = setting(None, or_null(Rule("the name of a part of a batch, such as y or features.y", bool)))
    """The part of a batch that the loss compares the model's outputs with, and that the model does not get, with dots
    where it lies within another. null: `labels`, or the second part of a batch without names."""


@dataclass
class OptimizerSwitches:
    """Settings of every optimizer, also of the user's own: keys of the group `optimizer` that its class does not
    get."""

    groups: Any = setting(None, GROUPS)
    """Groups of parameters with options of their own, such as lr, weight_decay or betas: {NAME: {match: patterns,
    option: value}}. The first group that matches a parameter has it; all else is as without groups, also that vectors
    have no weight decay where a group does not set it."""
    whole_tensor: bool = setting(False, TRUE_OR_FALSE)
    """Ranks gather each tensor for an optimizer whose class does not say that it needs complete tensors: it looks at a
    norm, a factor or the shape of a tensor, and updates each tensor apart from the others."""


@dataclass
class DataSwitches:
    """Settings of every dataset, also of the user's own: keys of the group `data` that its class does not get."""

    num_workers: int = setting(0, between(0, 1024, "processes"))
    """Processes of each rank that read the training data ahead; the rows are the same. 0: none."""
    collate_fn: dict[str, Any] | None = setting(None, COLLATE)
    """Makes a batch of a list of items, in place of torch's default_collate: a function with `_partial_: true`, or a
    class whose objects can be called. Each micro-batch is put together apart, so it may pad to its longest item."""
    validation_sets: dict[str, Any] | None = setting(None, VALIDATION_SETS)
    """Further data to evaluate on, by name: each has val_loss/NAME, and `val_loss` stays as it is. One without a
    `_target_` is read as the training data is, with its own arguments in place of those. All its rows count, unless it
    has a validation part of its own."""


LOSS_OVER = ("auto", "labels", "shifted_labels", "rows", "model", "sum", "micro_batches")
"""The things over which the loss of a micro-batch can be the mean."""
LENGTHS = ("max_steps", "num_epochs", "max_tokens")
"""The `train` settings for the length of a run: one of them has a value."""
SWITCHES = {"model": ModelSwitches, "loss": LossSwitches, "data": DataSwitches, "optimizer": OptimizerSwitches}
"""The settings that an open group has beside the arguments of its class."""
SAMPLES = Effect(lambda run, _: run.train.sample_tokens > 0, "with train.sample_tokens=0")


@dataclass
class TrainConfig:
    """The training loop."""

    max_steps: int | None = setting(400, or_null(settings.STEPS, " with num_epochs or max_tokens"))
    """Optimizer steps to run, each on one global batch. A skipped one counts here, but not for the schedule."""
    num_epochs: float | None = setting(None, or_null(positive("a number of epochs above 0")))
    """Length of the run in passes over the training data, in place of `max_steps`; rounded up to whole steps."""
    max_tokens: float | None = setting(None, or_null(positive("a number of tokens above 0")))
    """Length of the run in tokens, such as 1e9, in place of `max_steps`; rounded up to whole steps. Needs data whose
    rows have as many tokens each."""
    micro_batch_size: Any = setting(8, settings.or_auto(settings.SEQUENCES))
    """Rows of one forward and backward; the global batch has micro_batch_size x gradient_accumulation_steps x
    virtual_ranks. auto: chosen as a run starts, with gradient_accumulation_steps; the global batch is as with 1."""
    gradient_accumulation_steps: int = setting(1, at_least(1, "micro-batches"))
    """Micro-batches per virtual rank in one optimizer step."""
    loss_over: str = setting("auto", one_of(*LOSS_OVER))
    """The things that the model's loss is the mean over: a micro-batch weighs as many in a step and in an evaluation as
    it has. labels: those that are not -100, which means ignored in signed whole numbers alone. shifted_labels: likewise
    from the second of each row on. model: the number that the model's method `loss_count` returns for a batch. sum: the
    loss is no mean, and losses are added up. auto: what the model's attribute `loss_over` says, or its `loss_count`, or
    `loss`; else labels that are signed whole numbers, else rows. micro_batches: each counts alike, so that the run
    depends on their size. Parts of a batch are tried before any rank starts."""
    virtual_ranks: int | None = setting(None, settings.VIRTUAL_RANKS)
    """Shares of the global batch, a power of two times the number of ranks: each rank runs as many one after the other,
    and any number of ranks comes to the same weights. null: one for each rank."""
    max_grad_norm: float | None = setting(1.0, settings.CLIPPING)
    """Clip the global L2 norm of the gradient to this; null for no clipping."""
    on_nonfinite: str = setting("skip", one_of("skip", "stop"))
    """When the gradient of a step is inf or nan anywhere on any rank: skip the step on all ranks, or stop the run."""
    max_skipped_steps: int = setting(20, settings.STEPS, SKIPPING)
    """As many steps skipped in a row stop the run."""
    eval_every: Any = setting(100, EVAL_EVERY, EVALUATES)
    """Optimizer steps between evaluations, or tokens or epochs, which become whole steps; there is one before the first
    step and after the last. 0: only the last."""
    eval_batches: Any = setting(16, EVAL_BATCHES, EVALUATES)
    """Batches of 8 rows, or fewer if validation has no more, read in one evaluation: the same rows at any
    batch size and number of ranks. all: the whole validation."""
    log_every: Any = setting(10, rhythm_rule())
    """Optimizer steps between lines of metrics.jsonl, or tokens or epochs, which become whole steps."""
    sample_tokens: int = setting(200, at_least(0, "tokens"))
    """Tokens of text generated at the end of the run, fewer where the text ends; 0 for none. Needs a dataset that can
    decode."""
    sample_prompts: Any = setting(None, PROMPTS, SAMPLES)
    """Texts that are continued at the end of the run; null: the beginning of the validation text. Needs a dataset that
    can encode."""
    deterministic: bool = setting(False, TRUE_OR_FALSE)
    """Let torch use deterministic kernels only, without TF32; slower on GPUs. An operation without one stops the run,
    by name."""
    verify_every: int = setting(0, at_least(0, "steps"))
    """Steps from one verified step to the next; 0: none. There each rank computes the gradient of another rank's rows
    again, and ranks compare the bits of it and of weights that several hold. The run stops before the update if a rank
    computes or remembers wrongly, and names it. On GPUs with `deterministic`."""
    on_corruption: str = setting("stop", one_of("stop", "drop"), VERIFIES)
    """When a rank computes or remembers wrongly: stop the run, which is not started again by itself; or drop the rank's
    host, under `torchrun --nnodes=MIN:MAX`: the other hosts go on from the last checkpoint before it."""
    profile: bool = setting(False, TRUE_OR_FALSE)
    """Write a chrome trace of three steps, after three others, to profile/rank<r>.json of the run folder."""
    memory_snapshot: bool = setting(False, TRUE_OR_FALSE)
    """CUDA: write the allocations of the first six steps, or those before an error, to profile/memory_rank<r>.pickle of
    the run folder."""


SAVING = Effect(
    lambda run, _: run.checkpoint.every is not None or run.checkpoint.best is not None, "with checkpoint.every=null"
)
STARTING_ANEW = Effect(
    lambda run, _: run.checkpoint.resume in (None, "auto"), "with checkpoint.resume={checkpoint.resume}"
)
STARTING_FROM = Effect(lambda run, _: run.checkpoint.init_from is not None, "without checkpoint.init_from")
MIRRORING = Effect(lambda run, _: run.checkpoint.mirror is not None, "without checkpoint.mirror")
MIRROR = Rule("a URL such as s3://bucket/run", lambda value: "://" in value)


@dataclass
class CheckpointConfig:
    """The checkpoints that a run saves in checkpoints/ of its folder, and the one that it resumes from."""

    every: str | None = setting("15m", EVERY)
    """How often to save while training: after each so many steps, or tokens or epochs, which become whole steps, or
    after the first step that ends so much later."""
    keep: int | None = setting(2, or_null(at_least(1, "checkpoints"), " for all"))
    """As many of the newest stay; older ones are removed when a newer one is on the disk."""
    keep_every: int | None = setting(None, or_null(settings.STEPS), SAVING)
    """Those of each so many steps stay for good, whatever `keep` says."""
    best: str | None = setting(None, or_null(BEST_OF))
    """The loss or metric whose best checkpoint stays too, whatever `keep` says: saved where an evaluation after the
    first step is better than all before it, with a link `best` in checkpoints/ that names it."""
    asynchronous: bool = setting(True, TRUE_OR_FALSE, SAVING)
    """Write beside the training; false: it waits. The checkpoint at a run's end is always waited for."""
    resume: str | None = setting(None, or_null(Rule("auto, a checkpoint, a run's folder", bool)))
    """The checkpoint to resume from. auto: the newest intact one in this run's own folder; the run starts anew if there
    is none. A run's folder: its newest intact one. A checkpoint itself: it must be intact."""
    init_from: str | None = setting(None, or_null(WEIGHTS), STARTING_ANEW)
    """Source of the first weights of a run that does not resume; it takes the weights alone."""
    strict: bool = setting(True, TRUE_OR_FALSE, STARTING_FROM)
    """true: all names and shapes of `init_from` must fit. false: load those that fit, and report the others."""
    save_at_end: bool | None = setting(None, or_null(TRUE_OR_FALSE, " for true but in a sweep"))
    """Save when the last step is done. A run that is told to stop saves in any case."""
    mirror: str | None = setting(None, or_null(MIRROR))
    """A folder that fsspec opens, of this run alone: whole checkpoints are copied there beside the training, for a
    machine that may be lost. resume=auto takes the newest one, here or there. An unreachable mirror stops no run."""
    mirror_keep: int | None = setting(2, or_null(at_least(1, "checkpoints"), " for all"), MIRRORING)
    """As many of the newest stay there."""


@dataclass
class LaunchConfig:
    """Placement and start of the ranks."""

    nproc_per_node: int | None = setting(None, or_null(between(1, 1024, "ranks")))
    """Ranks on this machine; null: the number of GPUs, or 1 where there is none."""
    device: str = setting("auto", one_of("auto", "cpu", "cuda"))
    """cpu, cuda or auto (cuda where each rank of this machine gets a GPU of its own, else cpu). The backend follows:
    gloo on cpu, nccl on cuda."""
    threads_per_rank: int | None = setting(None, or_null(between(1, 1024, "threads")))
    """CPU threads of one rank; null: the machine's cores divided by its ranks, at least 1. The bits of a matrix product
    on the CPU depend on it."""
    timeout_s: float = setting(300.0, between(0.001, 31536000, "seconds (a year)"))
    """Seconds a collective may wait for the other ranks before the run is ended; a row of the data must take less."""
    start_timeout_s: float = setting(600.0, between(0.001, 31536000, "seconds (a year)"))
    """Seconds until all ranks have met; machines start at different times."""
    interface: str | None = setting("auto", or_null(INTERFACE))
    """Network interface, such as eth0, by which ranks of several machines send; auto: that which reaches the machine at
    which they meet; null: gloo's and NCCL's choice. Your own GLOO_SOCKET_IFNAME or NCCL_SOCKET_IFNAME comes first."""
    max_restarts: int = setting(0, between(0, 1000, "restarts"))
    """How often the ranks are started again after one has failed or died, each time from the newest checkpoint; after
    two in a row that brought no newer one there is no other. With torchrun: its own --max-restarts."""
    graphs: str = setting("off", settings.GRAPHS)
    """auto: on GPUs steps are recorded as CUDA graphs and replayed, so that no GPU waits for its host; where they
    cannot be, the run says why. The weights keep their bits. off by default until it has been measured on GPUs."""
    overwrite: bool = setting(False, TRUE_OR_FALSE)
    """Run in a folder that holds a completed run, and erase that. One that did not complete needs no leave."""
    exit_code_when_stopped: int | None = setting(None, or_null(between(0, 125, "(an exit code)")))
    """Exit code of a stop by a signal, saved; null: 85 in a job of Slurm or Kubernetes, else 130 for Ctrl-C, or 0."""
    requeue: bool = setting(False, TRUE_OR_FALSE)
    """Slurm: queue the saved job again after SIGUSR1, SIGUSR2, a preemption or the time limit; not where cancelled."""


PLANNING = Effect(lambda run, _: run.plan.only, "without plan.only=true")


@dataclass
class PlanConfig:
    """A plan of a run, before it or in its place: what it would hold and send, at each stage."""

    only: bool = setting(False, TRUE_OR_FALSE)
    """Start no rank and train nothing: print what each rank would hold and send at each stage, write plan.json into the
    run's folder, and end with exit code 0 if `zero.stage` fits, or 3 if it does not."""
    compare: bool = setting(False, TRUE_OR_FALSE)
    """Show the plan of a run under what is measured, in its table and result.json; a setting that is auto does too."""
    num_ranks: int | None = setting(None, or_null(between(1, 2**17, "ranks")), PLANNING)
    """Ranks that are planned for, on all machines; null: those that `launch` would start."""
    num_hosts: int | None = setting(None, or_null(between(1, 2**17, "machines")), PLANNING)
    """Machines that these ranks are on, as many on each; null: each has as many as `launch` starts on this one."""
    memory_gb: float | None = setting(None, or_null(positive("a number of GB (1e9 bytes) above 0")), settings.PLANNED)
    """Memory of a rank; null: that of its GPU, or on the CPU its share of what is free on this machine."""


@dataclass
class SweepConfig:
    """The jobs of a sweep (`-m`) as a whole. None of these makes a run another one."""

    again: str = setting("failed", one_of("failed", "all", "none"))
    """When jobs run anew that lie in the sweep's folder already, with equal settings. failed: those that failed or
    diverged; completed ones are taken as they are, stopped and killed ones go on. all: every one, each in a new folder.
    none: no failed one either."""
    diverged: str = setting("report", one_of("report", "fail"))
    """fail: a job whose loss is no number lets the sweep end with exit code 1, as a failed one does."""
    max_failures_in_a_row: int = setting(5, at_least(0, "jobs"))
    """As many jobs that fail one after the other end the sweep: its machine is broken, or its code. Jobs that are
    refused for a setting do not count. 0: the sweep never ends so."""
    output: str | None = setting(None, or_null(one_of("full", "summary"), " for summary with more than 4 jobs"))
    """summary: what jobs print goes to job.log in their folders, and a line here tells when one begins or ends. full:
    all of it comes here too."""
    jobs: int | None = setting(None, or_null(between(1, 1024, "jobs")))
    """Jobs at a time on one machine, each with GPUs or CPU cores of its own; more wait. null: `n_jobs` of
    hydra/launcher=joblib, else as many as the launcher starts, which then share all devices."""
    objective: Any = setting("final_val_loss", OBJECTIVE)
    """The value that tells the best job, and that a sweeper gets: a number of result.json, with dots where it lies
    within an object, such as comm_bytes_per_step.sent, or a metric of the last evaluation, such as val_accuracy. A list
    is for a sweeper of several objectives; the first tells the best job."""
    direction: Any = setting("minimize", DIRECTION)
    """minimize or maximize the objective; a list has one for each."""
    pruner: Any = setting(None, or_null(PRUNER, " for none"))
    """Ends a job that is worse than the others by then, with hydra/sweeper=optuna: a class of optuna.pruners and its
    arguments, which is told the objective after each evaluation. The job saves, and counts as pruned."""

    @property
    def objectives(self) -> list[str]:
        """The objectives, the first one first."""
        return listed(self.objective)

    @property
    def directions(self) -> list[str]:
        """The direction of each objective; one alone counts for all."""
        directions = listed(self.direction)
        return directions * len(self.objectives) if len(directions) == 1 else directions


@dataclass
class Config:
    """One run. The open groups (model, loss, data, optimizer, scheduler) name a class or function with `_target_`;
    their other keys are its arguments. So does each entry of `callbacks`."""

    seed: int = setting(0, Rule("between 0 and 2**63 - 1", lambda seed: 0 <= seed < 2**63))
    """Seeds the initial weights, the order of the data and dropout."""
    zero: ZeroGroup = field(default_factory=ZeroGroup)
    precision: settings.PrecisionGroup = field(default_factory=settings.PrecisionGroup)
    offload: settings.OffloadGroup = field(default_factory=settings.OffloadGroup)
    model: dict[str, Any] = field(default_factory=lambda: asdict(ModelSwitches()))
    """An nn.Module: forward(inputs, labels) returns the mean loss over labels != -100; forward(inputs) the logits.
    Beside the arguments of its class it has the `ModelSwitches`."""
    loss: dict[str, Any] = field(default_factory=lambda: asdict(LossSwitches()))
    """The loss of a model whose forward returns outputs: a loss of torch, called as loss(outputs, target), or a
    function, called as loss(outputs, batch). Without a `_target_` the model returns its loss. Beside the arguments of
    its class it has the `LossSwitches`."""
    data: dict[str, Any] = field(default_factory=lambda: asdict(DataSwitches()))
    """An object with map-style datasets `train` and `validation`, of whatever the model takes: see `zerotrain.data`.
    Beside the arguments of its class it has the `DataSwitches`."""
    optimizer: dict[str, Any] = field(default_factory=lambda: asdict(OptimizerSwitches()))
    """An element-wise torch.optim.Optimizer with `_partial_: true`. Beside the arguments of its class it has the
    `OptimizerSwitches`."""
    scheduler: dict[str, Any] = field(default_factory=dict)
    """A function (step, max_steps, ...) -> factor on the learning rate, with `_partial_: true`."""
    callbacks: dict[str, Any] = field(default_factory=dict)
    """Each a `zerotrain.training.Callback` by a name of the user's, called in this order; null for none."""
    train: TrainConfig = field(default_factory=TrainConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    launch: LaunchConfig = field(default_factory=LaunchConfig)
    plan: PlanConfig = field(default_factory=PlanConfig)
    sweep: SweepConfig = field(default_factory=SweepConfig)

    @property
    def callback_targets(self) -> dict[str, Any]:
        """The callbacks without null ones, by name."""
        return {name: values for name, values in self.callbacks.items() if values is not None}

    def target(self, group: str) -> dict[str, Any]:
        """The class that an open group names and its arguments, without the `SWITCHES`."""
        switches = asdict(SWITCHES[group]()) if group in SWITCHES else {}
        return {key: value for key, value in getattr(self, group).items() if key not in switches}

    def switches(self, group: str) -> dict[str, Any]:
        """The value of each of the `SWITCHES` of an open group."""
        return {key: getattr(self, group).get(key, default) for key, default in asdict(SWITCHES[group]()).items()}

    @property
    def frozen(self) -> list[tuple[list[str], Any]]:
        """The patterns of each entry of `model.freeze`, and until when it holds; None: in all steps."""
        entries = [
            entry if isinstance(entry, dict) else {"match": entry} for entry in self.switches("model")["freeze"] or ()
        ]
        return [(listed(entry["match"]), entry.get("until")) for entry in entries]

    @property
    def optimizer_groups(self) -> list[dict[str, Any]] | None:
        """`optimizer.groups` as `build_engine` takes them; None: there are none."""
        groups = {name: entry for name, entry in (self.optimizer.get("groups") or {}).items() if entry is not None}
        return [
            {"params": listed(entry["match"]), "name": name}
            | {key: value for key, value in entry.items() if key != "match"}
            for name, entry in groups.items()
        ] or None

    @property
    def validation_set_targets(self) -> dict[str, dict[str, Any]]:
        """The class of each of `data.validation_sets` and its arguments: without a class of its own that of the data,
        with those arguments but for what the data is validated on."""
        of_validation = (VALIDATION_FRACTION, *VALIDATION_OF_ITS_OWN)
        shared = {key: value for key, value in self.target("data").items() if key not in of_validation}
        sets: Any = self.switches("data")["validation_sets"]
        return {
            str(name): values if "_target_" in values else shared | values
            for name, values in (sets if VALIDATION_SETS.holds(sets) and sets else {}).items()
        }
