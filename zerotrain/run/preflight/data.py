"""Checks of the data, and of the model's loss of it, before any rank starts."""

import inspect
import math
import random
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from operator import itemgetter
from typing import Any

import torch
from torch import nn

from zerotrain.config.checks import SETS as SETS_OF
from zerotrain.config.schema import Config, SweepConfig
from zerotrain.data.fetch import (
    AUTO,
    LOSS_COUNT,
    MODEL,
    WEIGHTS,
    WITH_OUTPUTS,
    as_inputs,
    fetch_rows,
    ids_of,
    names_in,
    num_labels,
    seeded,
    target_of,
    tensors_in,
    to_device,
    weighing_of,
    with_tensors,
    without_targets,
)
from zerotrain.data.items import first_batches, require_next_tokens, require_taken
from zerotrain.engine.step import call_model, is_loss, require_loss
from zerotrain.errors import ConfigError
from zerotrain.files.untrusted import printable
from zerotrain.run.factory import build, build_callbacks, build_collate, build_data, build_validation_sets
from zerotrain.settings import problems_in
from zerotrain.training import Callback
from zerotrain.training.callbacks.early_stopping import EarlyStopping
from zerotrain.training.callbacks.evaluation import in_set, rows_of_set
from zerotrain.training.callbacks.sample import prompts_of
from zerotrain.training.metrics.metric import OF_TRAINING, OF_VALIDATION, Metric, class_dim_of, logits_in, metrics_in
from zerotrain.training.result import in_evaluation

SETS = ("train", "validation")
NO_VALIDATION = "data.validation is empty; give data.validation_fraction=0.1, or leave this out"
NONE = "give null, or data of text"
MIN_SEQUENCES = 1024
"""As many a rank may read in a step though the data has fewer, to learn a few by heart."""
NUM_TRIED = 8
"""Rows of which the loss is tried at most."""
MOST_NUMEL, MOST_PRODUCTS, MOST_S = 2**25, 10**11, 0.2
"""Parameters of a model whose loss is tried at most, products of these with elements of a row, and seconds of a core in
which it is to have computed the loss of all rows once."""
TOLERANCE = 1e-5
"""By this part of the largest loss tried another may differ from what it should be: sums in fp32 round by a tenth."""


def dataset_of(config: Config) -> Any:
    """The data; ConfigError where it is no data at all."""
    data, path = build_data(config), config.data.get("_target_")
    for name in SETS:
        if getattr(data, name, None) is None:
            raise ConfigError(
                f"data._target_: got {path}, which makes a {type(data).__name__} with no dataset called {name}; it "
                "must make an object with train and validation, each with len() and [index] for (inputs, labels)"
            )
    return data


def validation_sets_of(data: Any, config: Config) -> dict[str, Any]:
    """The further data that is evaluated; ConfigError where one is no data, has no rows or does not fit the data."""
    sets, problems = build_validation_sets(config), []
    known, sources = getattr(data, "vocab_size", None), getattr(data.validation, "sources", ())
    for name, each in sets.items():
        called, size = f"{SETS_OF}.{name}", getattr(each, "vocab_size", None)
        if any(getattr(each, part, None) is None for part in SETS):
            problems.append(f"{called}: makes a {type(each).__name__}, which has not the datasets {' and '.join(SETS)}")
        elif not has_rows(each.validation) and not has_rows(each.train):
            problems.append(f"{called}: has no rows; give other data, or leave it out")
        elif isinstance(known, int) and isinstance(size, int) and size != known:
            problems.append(f"{called}.vocab_size={size}, but data.vocab_size={known}; both must be in the same tokens")
        elif name in sources:
            problems.append(f"{called}: a source of the data is called so too; give it another name")
    if problems:
        raise ConfigError(*problems)
    return sets


def first_batches_of(data: Any, sets: Mapping[str, Any], config: Config) -> dict[str, list[Any]]:
    """The first items of each of `SETS` and of further sets, as batches of one, by their names in messages; of no
    validation there are none."""
    named = {f"data.{name}": getattr(data, name) for name in SETS if name == "train" or has_rows(data.validation)}
    named |= {f"{SETS_OF}.{name}": rows_of_set(each) for name, each in sets.items()}
    collate = build_collate(config)
    return {name: first_batches(rows, name, seed=config.seed, collate=collate) for name, rows in named.items()}


def has_rows(dataset: Any) -> bool:
    """Whether there is anything to read, as far as can be told."""
    return not hasattr(dataset, "__len__") or len(dataset) > 0


def require_callbacks_fit(
    data: Any,
    sets: Mapping[str, Any],
    config: Config,
    model: nn.Module | None = None,
    batches: Mapping[str, Sequence[Any]] | None = None,
) -> dict[str, Callback]:
    """The callbacks; ConfigError where one needs an evaluation that there is not, a metric that an evaluation has not,
    outputs that the model does not give, or labels that no batch has."""
    callbacks = build_callbacks(config)
    metrics, of_training = metrics_in(callbacks, OF_VALIDATION), metrics_in(callbacks, OF_TRAINING)
    if "loss" in metrics:
        raise ConfigError("callbacks.loss: an evaluation has val_loss already; give the metric another name")
    for name in ("loss", "s"):
        if name in of_training:
            raise ConfigError(f"callbacks.{name}: metrics.jsonl has train_{name} already; give the metric another name")
    if model is not None:
        require_outputs(model, of_training)
    for where, [first, *_] in (batches or {}).items():
        require_measurable(of_training if where == "data.train" else metrics, where, first, model)
    if data is None:
        return callbacks
    followed = [
        (f"callbacks.{name}.metric", each.metric) for name, each in callbacks.items() if isinstance(each, EarlyStopping)
    ]
    if config.checkpoint.best is not None:
        followed.append(("checkpoint.best", config.checkpoint.best))
    compared = [] if config.sweep.objective == SweepConfig.objective else map(str, config.sweep.objectives)
    followed += [("sweep.objective", metric) for metric in map(in_evaluation, compared) if metric is not None]
    has_validation = has_rows(data.validation)
    if not (has_validation or sets) and (
        needing := [*(name for name, _ in followed), *(f"callbacks.{name}" for name in metrics)]
    ):
        raise ConfigError(f"{needing[0]}: needs evaluations, and {NO_VALIDATION}")
    of_each = [f"val_{name}" for name in ("loss", *metrics)]
    known = _with_sources(of_each, data.validation) if has_validation else []
    for name, each in sets.items():
        known += [in_set(metric, name) for metric in _with_sources(of_each, rows_of_set(each))]
    for name, metric in followed:
        if metric not in known:
            raise ConfigError(f"{name}: got {metric}; an evaluation has {', '.join(known)}")
    return callbacks


def _with_sources(metrics: Sequence[str], rows: Any) -> list[str]:
    """The metrics of an evaluation of some rows, and those of each source."""
    return [*metrics, *(f"{metric}/{source}" for metric in metrics for source in getattr(rows, "sources", ()))]


def require_outputs(model: nn.Module, of_training: Mapping[str, Metric]) -> None:
    """Check that the model gives its outputs beside its loss where a metric of training looks at them."""
    for name, metric in of_training.items():
        if metric.needs_outputs and WITH_OUTPUTS not in inspect.signature(model.forward).parameters:
            raise ConfigError(
                f"callbacks.{name}.of: has {OF_TRAINING}, for which {type(model).__name__}.forward must take "
                f"{WITH_OUTPUTS}=True and return (loss, outputs); it has no such argument: give it one, or leave "
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
        if target_of(batch, metric.target) is None and (metric.target is not None or metric.needs_labels):
            missing, named = metric.target or "labels", ", ".join(_names_of_tensors(batch))
            advice = f"give callbacks.{name}.target=NAME one of these" if named else "give dicts, or pairs of tensors"
            raise ConfigError(
                f"callbacks.{name}: compares outputs with {missing}, and a batch of {where} has "
                f"{named or 'no such part'}; {advice}"
            )
    if model is None or not looking or where == "data.train":
        return
    kind, inputs = type(model).__name__, without_targets(batch, {metric.target for metric in looking.values()})
    try:
        call_model(inspect.signature(model.forward).bind, inputs)
    except TypeError as error:
        raise ConfigError(
            f"callbacks.{next(iter(looking))}: an evaluation calls {kind}.forward without labels for its outputs: "
            f"{error}; give that argument a default, without which the loss is not computed"
        ) from error
    if getattr(model, "next_token_labels", False):
        return
    targets = {name: target_of(batch, metric.target) for name, metric in looking.items() if metric.class_dim is None}
    # One label a row leaves a single dimension for the classes; and a call without values imports torch's compiler.
    unclear = {name: target for name, target in targets.items() if target is not None and target.dim() > 1}
    outputs = None
    if unclear:
        with suppress(Exception), torch.no_grad():  # of a model that computes with values
            outputs = logits_in(call_model(model, to_device(inputs, torch.device("meta"))))
    for name, target in unclear.items():
        try:
            class_dim_of(outputs, target, None)
        except ValueError as error:
            raise ConfigError(f"callbacks.{name}: {error}") from error


def _names_of_tensors(batch: Any) -> Iterator[str]:
    for name, part in names_in(batch).items():
        if isinstance(part, torch.Tensor):
            yield str(name)
        yield from (f"{name}.{inner}" for inner in _names_of_tensors(part))


def require_loss_over(model: nn.Module, data: Any, first: Any, config: Config) -> None:
    """Check that a model's loss of a batch is the mean that `train.loss_over` says: that of its parts, each by its
    weight. Both are computed here, in evaluation mode, by the model with first weights.

    It is not tried where each micro-batch is to count alike, with the models of zerotrain, whose losses are known, and
    where it cannot be: the model is large, fails on the CPU, or draws random numbers in evaluation mode. Nor is one
    refused that the user has named where none fits, as where a small part of a loss depends on all rows of a batch.

    Args:
        model: without memory.
        first: a batch of one row to train on.

    Raises:
        ConfigError: it is another mean, or none; the model gives no loss; or its own count is no number.
    """
    given, kind, num_rows = config.train.loss_over, type(model).__name__, len(data.train)
    try:
        counted, _ = weighing_of(given, model)
        weighings = WEIGHTS | dict([weighing_of(AUTO, model)])
        weighings[counted](first, 1)
    except Exception as error:  # whatever the user's method raises
        raise ConfigError(f"train.loss_over: got {given}; {printable(f'{error}', keep='')}") from error
    is_known = type(model).__module__.startswith("zerotrain.models.") and counted in (AUTO, "labels")
    if is_known or counted == "micro_batches" or (tried := _tried(model, first, config)) is None:
        return
    built, num, output = tried
    if has_rows(data.validation):
        require_loss(output, kind)
    if not is_loss(output) or (num := min(num, num_rows)) < 2:
        return
    # Evenly spread rows could all be of one class.
    rows = random.Random(config.seed).sample(range(num_rows), num)
    rows.sort(key=lambda row: num_labels(_rows_read(data, config, [row]), 1))
    whole, ways = _whole_and_parts(data, config, rows)
    found = _losses(built, config, [whole, whole, *(part for parts in ways for part, _ in parts)])
    tolerance = max(TOLERANCE, torch.finfo(output.dtype).eps)
    if found is None or not abs(found[0] - found[1]) <= tolerance * abs(found[0]):
        return
    of_whole, _, *of_parts = found
    near, said = tolerance * max(map(abs, filter(math.isfinite, found))), ""
    for parts in ways:
        of_two, of_parts = of_parts[:2], of_parts[2:]
        means = {name: _mean(of_two, [weigh(*part) for part in parts]) for name, weigh in weighings.items()}
        # A step leaves out what weighs nothing, so its loss may be anything.
        if not any(weighings[counted](*part) for part in parts) or abs(means[counted] - of_whole) <= near:
            return
        said = f"train.loss_over: got {given}; of {len(rows)} rows the loss of {kind} is {of_whole:.7g}, but"
        for fitting in (MODEL, "labels", "shifted_labels", "rows"):
            if abs(means.get(fitting, math.nan) - of_whole) <= near:
                raise ConfigError(f"{said} {means[counted]:.7g} by two parts of them; train.loss_over={fitting} fits")
        if abs(sum(of_two) - of_whole) <= near:
            raise ConfigError(f"{said} it is the sum of those of two parts; let the model return a mean")
        said += f" {means[counted]:.7g} by two parts of them"
    if given == AUTO:
        raise ConfigError(
            f"{said}, and labels, shifted_labels and rows fit no better; give "
            f"{kind} a method {LOSS_COUNT}, which gets a batch as forward does and returns what the loss divides by, "
            "or, where rows act on each other, train.loss_over=micro_batches, labels or rows, whichever is meant"
        )


def _rows_read(data: Any, config: Config, rows: Sequence[int]) -> Any:
    told: Any = {"seed": config.seed, "epochs": [0] * len(rows), "step": 1}
    return fetch_rows(data.train, rows, **told, collate=build_collate(config))


def _tried(model: nn.Module, first: Any, config: Config) -> tuple[nn.Module, int, Any] | None:
    """(the model with first weights, rows of which its loss can be tried, what it returns for the first batch); None
    where it cannot be called here."""
    numel = sum(each.numel() for each in model.parameters())
    # As if each element of a row met each parameter.
    if numel > MOST_NUMEL or numel * max((each.numel() for each in tensors_in(first)), default=1) > MOST_PRODUCTS:
        return None
    with suppress(Exception), seeded("loss tried", config.seed), torch.no_grad():
        built = build("model", config.model_target).eval()
        for parameter in built.parameters():
            if not parameter.any():  # of zeros, such as those of the last layer, all losses may be the same
                parameter.normal_(std=0.02)
        output = call_model(built, as_inputs(first))  # which may also import, and allocate
        before = time.process_time()
        call_model(built, as_inputs(first))
        return built, int(min(NUM_TRIED, MOST_S / max(time.process_time() - before, 1e-9))), output
    return None


def _whole_and_parts(data: Any, config: Config, rows: Sequence[int]) -> tuple[Any, list[list[tuple[Any, int]]]]:
    """A batch, and (batch, number of rows) of each of its two parts, in one or two ways: read as micro-batches are, so
    that each is padded to its longest; and cut out of the whole, where a collate function may draw other numbers for a
    part, and where the model looks at the padding."""
    num = max(1, len(rows) * 3 // 8)
    whole, sizes = _rows_read(data, config, rows), (num, len(rows) - num)
    read = [_rows_read(data, config, part) for part in (rows[:num], rows[num:])]
    ways = [list(zip(read, sizes, strict=True))]
    if config.data_switches["collate_fn"] and all(each.shape[:1] == (len(rows),) for each in tensors_in(whole)):
        cut = [with_tensors(whole, itemgetter(part)) for part in (slice(num), slice(num, None))]
        ways.append(list(zip(cut, sizes, strict=True)))
    return whole, ways


def _losses(model: nn.Module, config: Config, batches: Sequence[Any]) -> list[float] | None:
    """The loss of each batch; None where they cannot be computed here."""
    with suppress(Exception), seeded("loss tried", config.seed), torch.no_grad():
        losses = [float(call_model(model, as_inputs(batch))) for batch in batches]
        return losses if math.isfinite(losses[0]) else None
    return None


def _mean(losses: Sequence[float], weights: Sequence[float]) -> float:
    """The mean of losses by weights; of a loss that weighs nothing nothing counts."""
    weighed = (loss * weight for loss, weight in zip(losses, weights, strict=True) if weight)
    return sum(weighed) / (sum(weights) or math.nan)


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
    known, given = getattr(model, "vocab_size", None), getattr(data, "vocab_size", None)
    if isinstance(known, int) and isinstance(given, int) and given > known:
        problems.append(
            f"data.vocab_size={given}, but {kind} knows {known} tokens; choose data in the model's own tokens, such as "
            "data=tokenized, or a model with as many"
        )
    known = getattr(model, "max_seq_len", None)
    for name, each in batches.items():
        ids, called = ids_of(each[0]), name if name.startswith(SETS_OF) else "data"
        if not isinstance(known, int) or ids is None or not ids.ndim or (given := ids.shape[-1]) <= known:
            continue
        problems.append(
            f"{called}.seq_len={given}, but {kind} knows {known} positions; choose {called}.seq_len={known} or less "
            f"or a model with more (model.max_seq_len={given}; transformers: "
            f"+model.config.max_position_embeddings={given})"
        )
    if problems:
        raise ConfigError(*dict.fromkeys(problems))
    for name, each in batches.items():
        require_taken(each, name, model)
        if getattr(model, "next_token_labels", False):
            require_next_tokens(each, name, model=kind, vocab_size=getattr(model, "vocab_size", None))


def require_asked_for(data: Any, config: Config) -> None:
    """Check that the data can do what the settings ask of it; ConfigError with every problem found."""
    problems: list[str] = []
    for require in (require_enough, require_prompts):
        try:
            require(data, config)
        except ConfigError as error:
            problems += error.problems
    if problems:
        raise ConfigError(*problems)


def require_prompts(data: Any, config: Config) -> None:
    """Check that the data can encode what samples of text are to begin with."""
    prompts = config.train.sample_prompts
    if not prompts or not config.train.sample_tokens or problems_in(config.train):
        return
    for name in ("encode", "decode"):
        if not callable(getattr(data, name, None)):
            raise ConfigError(f"train.sample_prompts: the data cannot {name} text; {NONE}")
    try:
        prompts_of(data, prompts)
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
            f"train.{name}: got {getattr(train, name)}; a rank would read {per_rank} sequences in a step, and the data "
            f"has {len(data.train)}; train.micro_batch_size x train.gradient_accumulation_steps must be {most} or less"
        )
