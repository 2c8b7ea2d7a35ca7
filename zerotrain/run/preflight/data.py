"""Checks of the data before any rank starts."""

import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from zerotrain.config.checks import SETS as SETS_OF
from zerotrain.config.schema import Config
from zerotrain.data.reading.inputs import WITH_OUTPUTS, ids_of
from zerotrain.data.reading.items import first_batches, require_next_tokens, require_taken
from zerotrain.errors import ConfigError
from zerotrain.files.printable import printable
from zerotrain.run.factory import build_callbacks, build_collate, build_data, build_validation_sets
from zerotrain.settings import problems_in
from zerotrain.training import Callback
from zerotrain.training.callbacks.early_stopping import EarlyStopping
from zerotrain.training.callbacks.evaluation import in_set, rows_of_set
from zerotrain.training.callbacks.sample import prompts_of
from zerotrain.training.metrics.metric import OF_TRAINING, OF_VALIDATION, Metric, metrics_in

SETS = ("train", "validation")
NO_VALIDATION = "data.validation is empty; give data.validation_fraction=0.1, or leave this out"
NONE = "give null, or data of text"
MIN_SEQUENCES = 1024
"""As many a rank may read in a step though the data has fewer, to learn a few by heart."""


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
    data: Any, sets: Mapping[str, Any], config: Config, model: nn.Module | None = None
) -> dict[str, Callback]:
    """The callbacks; ConfigError where one needs an evaluation that there is not, a metric that an evaluation has not,
    or outputs that the model does not give."""
    callbacks = build_callbacks(config)
    metrics, of_training = metrics_in(callbacks, OF_VALIDATION), metrics_in(callbacks, OF_TRAINING)
    if "loss" in metrics:
        raise ConfigError("callbacks.loss: an evaluation has val_loss already; give the metric another name")
    for name in ("loss", "s"):
        if name in of_training:
            raise ConfigError(f"callbacks.{name}: metrics.jsonl has train_{name} already; give the metric another name")
    if model is not None:
        require_outputs(model, of_training)
    if data is None:
        return callbacks
    followed = {
        f"callbacks.{name}.metric": each.metric for name, each in callbacks.items() if isinstance(each, EarlyStopping)
    }
    if config.checkpoint.best is not None:
        followed["checkpoint.best"] = config.checkpoint.best
    has_validation = has_rows(data.validation)
    if not (has_validation or sets) and (needing := [*followed, *(f"callbacks.{name}" for name in metrics)]):
        raise ConfigError(f"{needing[0]}: needs evaluations, and {NO_VALIDATION}")
    of_each = [f"val_{name}" for name in ("loss", *metrics)]
    known = _with_sources(of_each, data.validation) if has_validation else []
    for name, each in sets.items():
        known += [in_set(metric, name) for metric in _with_sources(of_each, rows_of_set(each))]
    for name, metric in followed.items():
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
