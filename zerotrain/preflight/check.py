"""Checks before any rank starts: objects and length of a run, and rows of its data."""

import inspect
import math
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from zerotrain.checkpoint.manifest import Manifest
from zerotrain.comm.world import choose_device
from zerotrain.config import compose, words
from zerotrain.config.checks import HYDRA_KEYS, SETS as SETS_OF
from zerotrain.config.schema import Config, SweepConfig
from zerotrain.data import fetch
from zerotrain.data.batches import GlobalBatchSampler
from zerotrain.data.items import first_batches, require_next_tokens, require_taken
from zerotrain.device.kinds import device_of
from zerotrain.engine import ZeroEngine
from zerotrain.engine.options import leaves_per_rank, shard_size_of
from zerotrain.engine.state.from_checkpoint import model_misfits
from zerotrain.engine.state.from_weights import weight_misfits
from zerotrain.engine.step import call_model
from zerotrain.errors import ConfigError
from zerotrain.files.untrusted import MAX_INT, Natural, dotted, is_kind, printable, shown, value_at
from zerotrain.preflight.loss_trial import require_apart, require_config_loss, require_loss_over
from zerotrain.preflight.rehearsal import Links, Rehearsal, Rehearsals
from zerotrain.preflight.room import (
    SMALLER_BATCH,
    SMALLER_MODEL,
    Ranks,
    Room,
    refusing_too_large,
    require_disk,
    require_folder,
)
from zerotrain.run import factory
from zerotrain.settings import problems_in
from zerotrain.sharding.units import model_parameters
from zerotrain.training.callbacks import checkpoints, evaluation, sample, stages
from zerotrain.training.metrics.metric import OF_TRAINING, OF_VALIDATION, Metric, class_dim_of, logits_in, metrics_in
from zerotrain.training.result import in_evaluation

SETS = ("train", "validation")
NO_VALIDATION = "data.validation is empty; give data.validation_fraction=0.1, or leave this out"
NONE = "give null, or data of text"
MIN_SEQUENCES = 1024
"""As many a rank may read in a step though the data has fewer, to learn a few by heart."""
POSITION = (checkpoints.OF_TRAINER, "run", "data")
"""Names of the run's position in its data, in the extra of a checkpoint."""
LARGE_NUMEL = 2**20
"""A step is rehearsed if a micro-batch has this many elements or more."""
SURE = 0.8
"""A run is refused if so much of its rehearsed step has no room: a rehearsal has at most a fifth of bytes too many."""


def dataset_of(config: Config) -> Any:
    """The data; ConfigError where it is no data at all."""
    data, path = factory.build_data(config), config.data.get("_target_")
    for name in SETS:
        if getattr(data, name, None) is None:
            raise ConfigError(
                f"data._target_: got {path}, which makes a {type(data).__name__} with no dataset called {name}; it "
                "must make an object with train and validation, each with len() and [index] for (inputs, labels)"
            )
    return data


def validation_sets_of(data: Any, config: Config) -> dict[str, Any]:
    """The further data that is evaluated; ConfigError where one is no data, has no rows or does not fit the data."""
    sets, problems = factory.build_validation_sets(config), []
    vocab_size, sources = getattr(data, "vocab_size", None), getattr(data.validation, "sources", ())
    for name, extra in sets.items():
        called, size = f"{SETS_OF}.{name}", getattr(extra, "vocab_size", None)
        if any(getattr(extra, part, None) is None for part in SETS):
            problems.append(
                f"{called}: makes a {type(extra).__name__}, which has not the datasets {' and '.join(SETS)}"
            )
        elif not has_rows(extra.validation) and not has_rows(extra.train):
            problems.append(f"{called}: has no rows; give other data, or leave it out")
        elif isinstance(vocab_size, int) and isinstance(size, int) and size != vocab_size:
            problems.append(
                f"{called}.vocab_size={size}, but data.vocab_size={vocab_size}; both must be in the same tokens"
            )
        elif name in sources:
            problems.append(f"{called}: a source of the data is called so too; give it another name")
    if problems:
        raise ConfigError(*problems)
    return sets


def first_batches_of(
    data: Any, sets: Mapping[str, Any], config: Config, ranks: Ranks, room: Room
) -> dict[str, list[Any]]:
    """The first items of each of `SETS` and of further sets, as batches of one, by their names in messages; of no
    validation there are none. A ConfigError where the rows of a step have no room."""
    if isinstance(length := getattr(data.train, "tokens_per_sequence", None), int):
        num_rows = min(len(data.train), config.train.micro_batch_size * config.train.gradient_accumulation_steps)
        nbytes = {"host": float(num_rows * length * torch.int64.itemsize)}
        room.require("data", nbytes, ranks.num_local, f"the {num_rows} rows of a step", SMALLER_BATCH)
    datasets = {f"data.{name}": getattr(data, name) for name in SETS if name == "train" or has_rows(data.validation)}
    datasets |= {f"{SETS_OF}.{name}": evaluation.rows_of_set(extra) for name, extra in sets.items()}
    collate = factory.build_collate(config)
    return {name: first_batches(rows, name, seed=config.seed, collate=collate) for name, rows in datasets.items()}


def has_rows(dataset: Any) -> bool:
    """Whether there is anything to read, as far as can be told."""
    return not hasattr(dataset, "__len__") or len(dataset) > 0


def require_callbacks_fit(
    data: Any,
    sets: Mapping[str, Any],
    config: Config,
    model: nn.Module | None = None,
    batches: Mapping[str, Sequence[Any]] | None = None,
) -> None:
    """Build the callbacks. A ConfigError where one needs evaluations and there are none, a metric no evaluation has,
    outputs the model does not give, or labels no batch has."""
    callbacks = factory.build_callbacks(config)
    metrics, of_training = metrics_in(callbacks, OF_VALIDATION), metrics_in(callbacks, OF_TRAINING)
    if "loss" in metrics:
        raise ConfigError("callbacks.loss: an evaluation has val_loss already; give the metric another name")
    for name in ("loss", "s"):
        if name in of_training:
            raise ConfigError(f"callbacks.{name}: metrics.jsonl has train_{name} already; give the metric another name")
    if model is not None:
        require_outputs(model, of_training)
    for where, [batch, *_] in (batches or {}).items():
        require_measurable(of_training if where == "data.train" else metrics, where, batch, model)
    if data is None:
        return
    followed = []
    if callbacks:
        from zerotrain.training.callbacks.early_stopping import EarlyStopping  # few runs need it

        for name, callback in callbacks.items():
            if isinstance(callback, EarlyStopping):
                followed.append((f"callbacks.{name}.metric", callback.metric))
    if config.checkpoint.best is not None:
        followed.append(("checkpoint.best", config.checkpoint.best))
    if config.sweep.objective != SweepConfig.objective:
        for objective in config.sweep.objectives:
            if (metric := in_evaluation(str(objective))) is not None:
                followed.append(("sweep.objective", metric))
    all_rows = {"": data.validation} if has_rows(data.validation) else {}
    all_rows |= {name: evaluation.rows_of_set(extra) for name, extra in sets.items()}
    needing = [*(name for name, _ in followed), *(f"callbacks.{name}" for name in metrics)]
    if needing and not all_rows:
        raise ConfigError(f"{needing[0]}: needs evaluations, and {NO_VALIDATION}")
    all_metrics = []
    for set_name, rows in all_rows.items():
        names = [f"val_{name}" for name in ("loss", *metrics)]
        names += [f"{name}/{source}" for name in names for source in getattr(rows, "sources", ())]
        all_metrics += [evaluation.in_set(name, set_name) if set_name else name for name in names]
    for name, metric in followed:
        if metric not in all_metrics:
            raise ConfigError(f"{name}: got {metric}; an evaluation has {', '.join(all_metrics)}")


def require_outputs(model: nn.Module, of_training: Mapping[str, Metric]) -> None:
    """Check that the model gives its outputs beside its loss where a metric of training looks at them."""
    for name, metric in of_training.items():
        if metric.needs_outputs and not fetch.gives_outputs(model):
            raise ConfigError(
                f"callbacks.{name}.of: has {OF_TRAINING}, for which {type(model).__name__}.forward must take "
                f"{fetch.WITH_OUTPUTS}=True and return (loss, outputs); it has no such argument: give it one, or leave "
                f"{OF_TRAINING} out"
            )


def require_measurable(metrics: Mapping[str, Metric], where: str, batch: Any, model: nn.Module | None) -> None:
    """Check that a batch has what metrics compare the outputs with, and that an evaluation gets outputs of one meaning.

    Args:
        where: the dataset that `batch` is of.
        model: without memory; None: unknown.
    """
    looking = {name: metric for name, metric in metrics.items() if metric.needs_outputs}
    for name, metric in looking.items():
        if fetch.target_of(batch, metric.target) is None and (metric.target is not None or metric.needs_labels):
            missing, names = metric.target or "labels", ", ".join(fetch.names_of_tensors(batch))
            advice = f"give callbacks.{name}.target=NAME one of these" if names else "give dicts, or pairs of tensors"
            raise ConfigError(
                f"callbacks.{name}: compares outputs with {missing}, and a batch of {where} has "
                f"{names or 'no such part'}; {advice}"
            )
    if model is None or not looking or where == "data.train":
        return
    kind, inputs = type(model).__name__, fetch.without_targets(batch, {metric.target for metric in looking.values()})
    try:
        if not fetch.gives_outputs(model):
            call_model(inspect.signature(model.forward).bind, inputs)
    except TypeError as error:
        raise ConfigError(
            f"callbacks.{next(iter(looking))}: an evaluation calls {kind}.forward without labels for its outputs: "
            f"{error}; give that argument a default, without which the loss is not computed"
        ) from error
    if getattr(model, "next_token_labels", False):
        return
    outputs = None
    for name, metric in looking.items():
        target = fetch.target_of(batch, metric.target)
        # One label a row leaves a single dimension for the classes; and a call without values imports torch's compiler.
        if metric.class_dim is not None or target is None or target.dim() <= 1:
            continue
        if outputs is None:
            with suppress(Exception), torch.no_grad():  # the model may compute with values
                outputs = logits_in(call_model(model, fetch.to_device(inputs, torch.device("meta"))))
        try:
            class_dim_of(outputs, target, None)
        except ValueError as error:
            raise ConfigError(f"callbacks.{name}: {error}") from error


def require_fit(model: nn.Module, data: Any, batches: Mapping[str, Sequence[Any]]) -> None:
    """Check that the model takes the items, knows all tokens and positions of the data, where both tell how many there
    are, and that its labels are of the model's kind.

    Args:
        batches: see `first_batches_of`.

    Raises:
        ConfigError: with the tokens or positions it does not know.
        ValueError: the labels are of another kind.
    """
    problems, kind = [], type(model).__name__
    vocab_size, num_tokens = getattr(model, "vocab_size", None), getattr(data, "vocab_size", None)
    if isinstance(vocab_size, int) and isinstance(num_tokens, int) and num_tokens > vocab_size:
        problems.append(
            f"data.vocab_size={num_tokens}, but {kind} knows {vocab_size} tokens; choose data in the model's own "
            "tokens, such as data=tokenized, another data.tokenizer, or a model with as many"
        )
    max_seq_len = getattr(model, "max_seq_len", None)
    for name, set_batches in batches.items():
        ids, called = fetch.ids_of(set_batches[0]), name if name.startswith(SETS_OF) else "data"
        if not isinstance(max_seq_len, int) or ids is None or not ids.ndim or (seq_len := ids.shape[-1]) <= max_seq_len:
            continue
        problems.append(
            f"{called}.seq_len={seq_len}, but {kind} knows {max_seq_len} positions; choose "
            f"{called}.seq_len={max_seq_len} or less or a model with more (model.max_seq_len={seq_len}; transformers: "
            f"+model.config.max_position_embeddings={seq_len})"
        )
    if problems:
        raise ConfigError(*dict.fromkeys(problems))
    for name, set_batches in batches.items():
        require_taken(set_batches, name, model)
        loss = getattr(model, "config_loss", None)
        if getattr(model, "next_token_labels", False) and (loss is None or loss.compares):
            require_next_tokens(set_batches, name, model=kind, vocab_size=getattr(model, "vocab_size", None))


def require_weights_fit(model: nn.Module, config: Config, goes_on_from: Manifest | None) -> None:
    """Check that the weights that a run begins with fit its model, as far as names and shapes tell.

    Args:
        model: without memory.
        goes_on_from: of the checkpoint that is tried first.

    Raises:
        ConfigError: with a line for each kind of misfit.
    """
    checkpoint = config.checkpoint
    setting, lines = "checkpoint.resume", list[str]()
    if goes_on_from is not None:
        lines = model_misfits(goes_on_from, model_parameters(model))
        models = value_at(goes_on_from.content["config"], "model"), config.model
        saved, own = (dotted({"model": settings}) for settings in models)
        others = [f"{name}={shown(saved[name])}" for name in own if None is not own[name] != saved.get(name, own[name])]
        if lines and others:
            lines.insert(0, f"the checkpoint was trained with {', '.join(others)}; give that, or another checkpoint")
    elif checkpoint.init_from is not None and checkpoint.strict:
        setting, lines = "checkpoint.init_from", weight_misfits(checkpoint.init_from, model)
    if lines:
        raise ConfigError(*(f"{setting}: {line}" for line in lines))


def require_prompts(data: Any, config: Config) -> None:
    """Check that the data can encode what samples of text are to begin with."""
    prompts = config.train.sample_prompts
    if not prompts or not config.train.sample_tokens or problems_in(config.train):
        return
    for name in ("encode", "decode"):
        if not callable(getattr(data, name, None)):
            raise ConfigError(f"train.sample_prompts: the data cannot {name} text; {NONE}")
    try:
        sample.prompts_of(data, prompts)
    except Exception as error:  # of the user's encode
        why = printable(f"{error}", keep="") or type(error).__name__
        raise ConfigError(f"train.sample_prompts: {why}; give other texts, or null") from error


def require_enough(data: Any, config: Config) -> None:
    """Check that a step does not read the data many times over: all that a rank reads in it lies in memory at once."""
    train, most = config.train, max(len(data.train), MIN_SEQUENCES)
    per_rank = train.micro_batch_size * train.gradient_accumulation_steps
    if per_rank > most:
        name = "micro_batch_size" if train.micro_batch_size > most else "gradient_accumulation_steps"
        raise ConfigError(
            f"train.{name}: got {getattr(train, name)}; a rank would read {per_rank} rows in a step, and the data "
            f"has {len(data.train)}; train.micro_batch_size x train.gradient_accumulation_steps must be {most} or less"
        )


def require_same_rows(config: Config, data: Any, fingerprint: Mapping[str, Any], position: Mapping[str, Any]) -> None:
    """Check that a run that goes on reads the rows of the saved one, at its position; the ranks do too. A ValueError
    with what differs."""
    sampler = partial(GlobalBatchSampler, micro_batch_size=1, num_micro_batches=1, rank=0, num_ranks=1)
    sampler(num_sequences=len(data.train), seed=config.seed, fingerprint=fingerprint).load_state_dict(position)


# The length of a run in steps, from its epochs or tokens.


def take_max_steps(config: Config, data: Any, num_ranks: int, goes_on_from: Manifest | None) -> None:
    """Set `train.max_steps=null` to the steps of `train.num_epochs` or `train.max_tokens`, rounded up. A run going on
    with batches of another size gets as many more as the rest of its sequences need.

    Args:
        data: of the run.
        num_ranks: of all machines.
        goes_on_from: of the checkpoint that is tried first.

    Raises:
        ConfigError: the data does not tell, the checkpoint is further than the run is to go, or there is no end.
    """
    train = config.train
    if train.max_steps is not None or problems_in(train):
        return
    # From the decimals in the config: 1.1 times 1000 is 1100, and not a little more.
    if train.num_epochs is not None:
        num_sequences = Fraction(str(train.num_epochs)) * len(data.train)
    elif train.max_tokens is not None:
        others = "train.num_epochs or train.max_steps"
        num_tokens = factory.tokens_per_sequence(length_given(config), data.train, others)
        num_sequences = Fraction(str(train.max_tokens)) / num_tokens
    else:  # nothing says how long it is
        return
    batch_size = factory.batch_size_of(config, num_ranks)
    step = num_read = 0
    if goes_on_from is not None:
        step = goes_on_from.step
        # The extra of a user's own loop may be anything; the ranks refuse to go on from it.
        entry = value_at(goes_on_from.content["extra"], *POSITION, "rows_consumed")
        num_read = int(entry) if is_kind(entry, Natural) else step * batch_size
    num_steps = math.ceil((num_sequences - num_read) / batch_size)
    if num_steps < 0:
        raise ConfigError(
            f"{length_given(config)}: is {math.ceil(num_sequences):,} rows, and the checkpoint to go on from has "
            f"been trained on {num_read:,}; give more"
        )
    if step + num_steps > MAX_INT:
        raise ConfigError(f"{length_given(config)}: is more steps than anybody can count, 2**63 or more; give fewer")
    train.max_steps = step + num_steps


def length_given(config: Config) -> str:
    """The setting from which the number of steps follows, with its value."""
    name = "max_tokens" if config.train.num_epochs is None else "num_epochs"
    return f"train.{name}={words.word(getattr(config.train, name))}"


# A config, tried as far as one process can before any rank starts.


@dataclass
class ConfigTrial:
    """Tries parts of a config one after the other, and notes what is wrong with each. It knows the machine, the folder
    and the checkpoint that the run starts with."""

    config: Config
    ranks: Ranks
    run_dir: Path | None
    goes_on_from: Manifest | None
    device: torch.device | None = None
    """The device of the ranks; None: there is none, or it is not known yet."""
    room: Room = field(default_factory=lambda: Room(math.inf, math.inf))
    problems: list[str] = field(default_factory=list)

    def __call__(self, group: str, attempted: Callable[..., Any], *needed: Any, **options: Any) -> Any:
        """The result of a call; None after a problem, or where something that it needs is None.

        Args:
            group: of the settings to name in an error without a name.
        """
        if any(argument is None for argument in needed):
            return None
        values = getattr(self.config, group)
        try:
            with words.words_of_config():
                return attempted(*needed, **options)
        except ConfigError as error:
            self.problems += [f"{error.about}: {line}" if error.about else line for line in error.problems]
        except fetch.RowError as error:
            # The error of the user's class or function, and its place in the user's code.
            cause = error.__cause__ if isinstance(error.__cause__, Exception) else error
            if _lacks_memory(cause):
                self.problems.append(_too_large("data", cause))
            else:
                *_, frame = traceback.extract_tb(cause.__traceback__)
                self.problems.append(f"{str(error).splitlines()[0]} ({frame.filename}, line {frame.lineno})")
        except (ValueError, TypeError, LookupError, OSError) as error:
            self.problems.append(factory.in_group(group, error, values))
        except (MemoryError, RuntimeError) as error:
            if not _lacks_memory(error):
                raise
            self.problems.append(_too_large(group, error))
        except SystemExit as ending:
            self.problems.append(factory.ended_in(group, ending, values))
        return None


def check(
    config: Config,
    num_local_ranks: int = 1,
    num_ranks: int = 1,
    goes_on_from: Manifest | None = None,
    run_dir: Path | None = None,
    like: Mapping[str, Any] | None = None,
) -> fetch.Fingerprint:
    """Build what can be built without ranks: the dataset, the model without memory, and the run's engine around it.

    Called once, before any rank starts; it also fills the dataset's cache, where the ranks find it.

    Args:
        config: gets the dataset's `model.vocab_size` if that is null, and `train.max_steps` likewise.
        num_local_ranks: ranks this machine is to run.
        num_ranks: of all machines.
        goes_on_from: of the checkpoint that is tried first.
        run_dir: may not be there yet.
        like: see `fingerprint_of`.

    Returns:
        The fingerprint of the data, for the ranks to compare theirs with.

    Raises:
        ConfigError: with every problem found.
    """
    ranks = Ranks(num_ranks, num_local_ranks)
    attempt = ConfigTrial(config, ranks, run_dir, goes_on_from)
    attempt.device = device = attempt("launch", choose_device, config.launch.device, num_local_ranks - 1)
    virtual_ranks = config.train.virtual_ranks
    leaves = attempt("train", partial(leaves_per_rank, virtual_ranks, num_ranks, config.zero.accumulate))
    hosts = [rank // num_local_ranks for rank in range(num_ranks)]
    shard_size = None
    if not problems_in(config.zero):
        shard_size = attempt("zero", partial(shard_size_of, config.zero.shard_size, num_ranks, hosts))
    data = attempt("data", dataset_of, config)
    if not config.plan.only:  # a plan tells itself what does not fit
        attempt.room = Room.of_machine(device, num_local_ranks)
    if config.model.get("vocab_size", 0) is None and isinstance(size := getattr(data, "vocab_size", None), int):
        config.model["vocab_size"] = size
    model = None
    # Without the data nobody knows how many tokens the model is to have.
    if data is not None or config.model.get("vocab_size", 0) is not None:
        with refusing_too_large(config, ranks, attempt.room):
            model = attempt("model", factory.build_on_meta, config)
    sets = attempt("data", validation_sets_of, data, config)
    batches = attempt("data", first_batches_of, data, sets, config, ranks, attempt.room)
    can_lose = attempt("loss", require_config_loss, config, model, batches)
    frozen = attempt("model", factory.freeze, config, model)
    attempt("checkpoint", require_weights_fit, model, config, goes_on_from=goes_on_from)
    if model is not None:
        attempt("optimizer", factory.require_groups, config, model_parameters(model))
    attempt("data", require_fit, None if batches and not can_lose else model, data, batches)
    fingerprint = row = None
    if batches is not None:
        position = None if goes_on_from is None else value_at(goes_on_from.content["extra"], *POSITION)
        # A user's own loop has a position of another form, and the ranks refuse it.
        position = position if isinstance(saved := value_at(position, "fingerprint"), dict) else None
        fingerprint = attempt("data", fetch.fingerprint_of, data, config.seed, sets, like=like or (position and saved))
        attempt("data", require_same_rows, config, data, fingerprint, position)
        row = batches["data.train"][0]
        attempt("train", require_enough, data, config)
        attempt("train", require_prompts, data, config)
        attempt("train", take_max_steps, config, data, num_ranks, goes_on_from=goes_on_from)
        attempt("train", factory.require_rhythms, config, data.train, num_ranks)
        attempt("model", factory.frozen_steps, config, frozen or {}, data.train, num_ranks)
    attempt("offload", require_folder, config, run_dir=run_dir)
    attempt("scheduler", _naming_the_argument, "scheduler", factory.try_schedule, config)
    attempt("callbacks", partial(require_callbacks_fit, data, sets or {}, config, model, batches))
    # Virtual ranks that the ranks cannot share would hide what else is wrong with the engine.
    sound = replace(config, train=replace(config.train, virtual_ranks=virtual_ranks if leaves else None))
    sound.zero = replace(config.zero, shard_size=shard_size if config.zero.shard_size else None)
    _rehearse(attempt, sound, None if frozen is None else model, row)
    if frozen is not None and not attempt.problems:
        on_host = device is None or device_of(device).is_host
        attempt("train", partial(require_loss_over, on_host=on_host), model, data, row, config)
        if not config.plan.only:
            attempt("data", require_apart, model, data, config)
    if attempt.problems:
        raise ConfigError(*dict.fromkeys(attempt.problems))  # several parts may stumble over one pattern
    return fingerprint or {}


def _rehearse(attempt: ConfigTrial, config: Config, model: nn.Module | None, row: Any) -> None:
    """Build the run's engine without memory, which says what it cannot train, and look whether it has room.

    Args:
        model: without memory, frozen in part; None: there is none.
        row: a batch of one; None: there is none.
    """
    ranks, device, run_dir = attempt.ranks, attempt.device, attempt.run_dir
    on_host = device is None or device_of(device).is_host
    tried_on = device if on_host else None  # on a GPU the ranks try it: this process leaves none of its memory there

    def try_optimizer(device: torch.device | None) -> Any:
        tried = partial(factory.try_optimizer, device=device)
        return attempt("optimizer", _naming_the_argument, "optimizer", tried, config)

    maker = try_optimizer(None)
    if model is None or any(map(problems_in, (config.zero, config.precision, config.offload, config.train))):
        try_optimizer(tried_on)
        return
    rehearsals = Rehearsals.of_run(config, Links.of_run(config, ranks.num_ranks, on_host=on_host), row, maker, run_dir)
    stages_by_step, step = stages.stages_from(attempt.goes_on_from, config.zero.stages)
    later = [stage for start, stage in stages_by_step.items() if step < start < (config.train.max_steps or 0)]
    first, *others = dict.fromkeys([stages.stage_at(stages_by_step, step), *later])
    largest = min([first, *others])  # a step is rehearsed at this stage: it shards least

    def rehearse(stage: int, model: nn.Module | None = None) -> ZeroEngine | None:
        try:
            with rehearsals.at(stage, model) as rehearsal:
                at_rest: dict[str, int] = {}
                with suppress(Exception):  # an optimizer may work on GPUs alone, or nowhere: its probe says so
                    at_rest = rehearsal.at_rest_nbytes()
                if at_rest and not attempt.problems and not config.plan.only:
                    require_disk(config, run_dir, at_rest["disk"], ranks)
                    require_memory(rehearsal, at_rest, config, row if stage == largest else None, ranks, attempt.room)
                return rehearsal.engine
        except RuntimeError as error:
            if _lacks_memory(error):
                raise
            return None  # it computes with values while it is built, and the ranks find out

    engine = attempt("model", rehearse, first, model)
    if engine is None:
        try_optimizer(tried_on)
        return
    if maker is not None:
        attempt("optimizer", partial(factory.require_optimizer, engine, tried_on, attempt.goes_on_from))
    for stage in others if not attempt.problems and not config.plan.only else ():
        attempt("model", rehearse, stage)


def require_memory(
    rehearsal: Rehearsal, at_rest: Mapping[str, int], config: Config, row: Any, ranks: Ranks, room: Room
) -> None:
    """Make sure that this machine has memory for what its ranks keep at once, and for a step of large micro-batches.

    Args:
        at_rest: bytes by place, see `Rehearsal.at_rest_nbytes`.
        row: a batch of one; None: there is none.

    Raises:
        ConfigError: there is not.
    """
    engine, num_rows = rehearsal.engine, config.train.micro_batch_size
    subject = f"weights, gradients and optimizer state at stage {engine.options.zero.stage}"
    room.require("model", room.split(at_rest["device"], at_rest["cpu"]), ranks.num_local, subject, SMALLER_MODEL)
    tensors = [] if row is None else list(fetch.tensors_in(row))
    is_large = sum(tensor.numel() for tensor in tensors) * num_rows >= LARGE_NUMEL
    if is_large and all(tensor.shape[:1] == (1,) for tensor in tensors):
        plan = rehearsal.plan()
        nbytes = room.split(SURE * (plan.peak or 0), SURE * plan.host)
        subject = f"a step with micro-batches of {num_rows} rows"
        room.require("train.micro_batch_size", nbytes, ranks.num_local, subject, SMALLER_BATCH)


def prepare_data(config: Config) -> None:
    """Make the data in the cache of this machine; ConfigError where it cannot be made."""
    with words.words_of_config():
        validation_sets_of(dataset_of(config), config)


def _naming_the_argument(group: str, attempted: Callable[[Config], Any], config: Config) -> Any:
    """Call a function with the config. Its error names an argument of the group if there is none without it."""
    try:
        return attempted(config)
    except (ConfigError, ValueError, TypeError, LookupError) as error:
        values = getattr(config, group)
        line = error.problems[0] if isinstance(error, ConfigError) else factory.in_group(group, error, values)
        for name in values.keys() - HYDRA_KEYS if line.startswith(f"{group}: ") else ():
            without: Any = {group: {key: value for key, value in values.items() if key != name}}
            try:
                attempted(replace(config, **without))
            except Exception:  # a user's class may need the argument
                continue
            reason = line.removeprefix(f"{group}: ")
            raise ConfigError(f"{group}.{name}: got {words.word(values[name])}; {reason}") from error
        raise


def _lacks_memory(error: Exception) -> bool:
    return isinstance(error, MemoryError) or any(
        sign in str(error) for sign in ("allocate memory", factory.TOO_LARGE_A_TENSOR)
    )


def _too_large(group: str, error: Exception) -> str:
    return f"{group}: needs more memory than there is: {compose.first_paragraph(error)}; choose smaller values"
