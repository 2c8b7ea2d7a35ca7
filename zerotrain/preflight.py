"""All that can be tried of a config before any rank starts."""

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from zerotrain.comm.world import choose_device
from zerotrain.config.schema import Config
from zerotrain.config.words import words_of_config
from zerotrain.data.items import Item, first_items, require_next_tokens
from zerotrain.engine.build import require_plain, require_trainable
from zerotrain.engine.groups.optimizer_factory import SAMPLE_SHAPE, build_optimizer, needing_whole
from zerotrain.engine.one_memory import require_own_memory
from zerotrain.engine.precision.kept_fp32 import dtypes_of
from zerotrain.engine.precision.policy import precision_named
from zerotrain.engine.unit_forward import replace_forwards
from zerotrain.errors import ConfigError
from zerotrain.factory import build, build_on_meta, ended_in, in_group
from zerotrain.sharding.units import cut_units, model_parameters

SETS = ("train", "validation")


def check(config: Config, num_local_ranks: int = 1) -> None:
    """Build what can be built without ranks: the model without memory, the dataset, the optimizer of one element.

    Called once, before any rank starts; it also fills the dataset's cache, so that the ranks find it there.

    Args:
        config: gets what the dataset alone knows: `model.vocab_size`, where it is null.
        num_local_ranks: ranks this machine is to run.

    Raises:
        ConfigError: with every problem found.
    """
    problems: list[str] = []

    def attempt(group: str, attempted: Callable[[], Any]) -> Any:
        """What `attempted` gives; None after a problem."""
        try:
            with words_of_config():
                return attempted()
        except ConfigError as error:
            problems.extend(error.problems)
        except (ValueError, TypeError, LookupError, OSError) as error:
            problems.append(in_group(group, error, getattr(config, group)))
        except SystemExit as ending:
            problems.append(ended_in(group, ending, getattr(config, group)))

    attempt("launch", lambda: choose_device(config.launch.device, num_local_ranks - 1))
    data = attempt("data", lambda: build("data", config.data))
    items = None if data is None else attempt("data", lambda: [first_items(data, name) for name in SETS])
    model = None
    if _take_vocab_size(config, data):
        model = attempt("model", lambda: build_on_meta(config))
    if model is not None:
        attempt("model", lambda: _try_model(model, config))
    if model is not None and items is not None:
        attempt("data", lambda: _require_fit(model, data, items))
    attempt("optimizer", lambda: _try_optimizer(model, config))
    attempt("scheduler", lambda: build("scheduler", config.scheduler)(0, config.train.max_steps))
    if problems:
        raise ConfigError(*dict.fromkeys(problems))  # the model and the optimizer may both stumble over a pattern


def _take_vocab_size(config: Config, data: Any) -> bool:
    """Let `model.vocab_size=null` be as many tokens as the data has; False while nobody knows, since the data could not
    be built."""
    if config.model.get("vocab_size", 0) is None and isinstance(known := getattr(data, "vocab_size", None), int):
        config.model["vocab_size"] = known
    return data is not None or config.model.get("vocab_size", 0) is not None


def _try_model(model: nn.Module, config: Config) -> None:
    """Look whether the switches and the patterns of the config can be followed in a model without memory."""
    try:
        require_plain(model)
        require_own_memory(model)
    except ConfigError as error:
        raise ConfigError(*(f"model: {problem}" for problem in error.problems)) from error
    parameters = model_parameters(model)
    require_trainable(model, parameters)
    dtypes_of(parameters, precision_named(config.precision.name, tuple(config.precision.keep_fp32)))
    replace_forwards(model, units=config.zero.unit_patterns, **config.model_switches)


def _try_optimizer(model: nn.Module | None, config: Config) -> None:
    """Let the optimizer choose what it needs whole of the model without memory, and build it for one tensor of each."""
    factory = build("optimizer", config.optimizer)
    units = [] if model is None else cut_units(model, model_parameters(model), config.zero.unit_patterns, max_numel=1)
    with _optimizers_of_no_compiler():
        names = {"whole matrices"} if model is not None and needing_whole(factory, units) else set()
        for name in names | {"matrices"} if hasattr(factory, "needs_whole") else names or {"matrices"}:
            build_optimizer(factory, [{"params": [torch.zeros(SAMPLE_SHAPE)], "name": name}])


@contextmanager
def _optimizers_of_no_compiler() -> Iterator[None]:
    """Inside, making an optimizer does not import torch's compiler, only to keep it away from what is done there: half
    a second of each start (2026-11-21)."""
    wrapped = torch.optim.Optimizer.add_param_group
    torch.optim.Optimizer.add_param_group = inspect.unwrap(wrapped)  # type: ignore[method-assign]
    try:
        yield
    finally:
        torch.optim.Optimizer.add_param_group = wrapped  # type: ignore[method-assign]


def _require_fit(model: nn.Module, data: Any, items: Sequence[Sequence[Item]]) -> None:
    """Check that the model knows all tokens and positions of the data, where both tell how many there are, and that its
    labels are of the model's kind.

    Args:
        items: the first ones of each of `SETS`.

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
    if isinstance(known, int) and (given := items[0][0][0].shape[-1]) > known:
        problems.append(
            f"data.seq_len={given}, but {kind} knows {known} positions; choose data.seq_len={known} or less or a "
            f"model with more (model.max_seq_len={given}; transformers: +model.config.max_position_embeddings={given})"
        )
    if problems:
        raise ConfigError(*problems)
    if getattr(model, "next_token_labels", False):
        for name, each in zip(SETS, items, strict=True):
            require_next_tokens(each, f"data.{name}", model=kind, vocab_size=getattr(model, "vocab_size", None))
