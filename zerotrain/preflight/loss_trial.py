"""Tries a model's loss on a few rows before any rank starts: it must be the mean that `train.loss_over` says."""

import math
import random
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import torch

from zerotrain.config.schema import Config
from zerotrain.data import fetch
from zerotrain.engine.step import call_model, is_loss, loss_in, require_loss
from zerotrain.errors import ConfigError
from zerotrain.files.untrusted import printable
from zerotrain.run import factory

NUM_TRIED = 8
"""Largest number of rows to try a loss on."""
MOST_NUMEL, MOST_PRODUCTS, MOST_S = 2**25, 10**11, 0.2
"""Limits for a model to try the loss of: its parameters, their product with the elements of a row, and the seconds of a
core for the loss of all rows."""
TOLERANCE = 1e-5
"""By this part of the largest loss tried another may differ from what it should be: sums in fp32 round by a tenth."""


TOLERANCE_IN_DOUBLE = 1e-6
"""The same in double precision: some models compute parts in fp32 all the same."""
SCALE = 4
"""First weights are so small that a token hardly sees another; matrices are made larger by this."""


def require_config_loss(config: Config, model: torch.nn.Module, batches: Mapping[str, Sequence[Any]]) -> bool:
    """Give the model the loss of the config. Returns True; a ValueError where a batch has not what both need.

    Args:
        model: without memory.
        batches: some of each dataset, by its name.
    """
    factory.add_config_loss(config, model)
    if (loss := getattr(model, "config_loss", None)) is not None:
        for name, [batch, *_] in batches.items():
            loss.require_target(model, batch, name)
    return True


def require_loss_over(model: torch.nn.Module, data: Any, batch: Any, config: Config, *, on_host: bool = True) -> None:
    """Check that a model's loss of a batch is the mean that `train.loss_over` says: that of its parts, each by its
    weight. Both are computed here, in evaluation mode, by the model with first weights.

    A plan has no memory for the model: it looks at the shapes of a loss of the config alone.

    It is not tried where each micro-batch is to count alike, with the models of zerotrain (their losses are known), and
    where it cannot be: the model is large, fails on the CPU, or draws random numbers in evaluation mode. If none fits,
    the one the user has named is taken: a small part of a loss may depend on all rows of a batch.

    Args:
        model: without memory.
        batch: of one row to train on.
        on_host: whether the ranks compute on the CPU too.

    Raises:
        ConfigError: it is another mean, or none; the model gives no loss; or its own count is no number.
    """
    loss_over, kind, num_rows = config.train.loss_over, type(model).__name__, len(data.train)
    if has_config_loss := bool(config.target("loss")):
        tried = None if config.plan.only else _try_loss(model, batch, config)
        two = _read_rows(data, config, range(min(2, num_rows)))  # of one row, what is no mean has one number too
        inputs = two if tried else fetch.to_device(two, torch.device("meta"))
        computing: Any = tried[0] if tried else model
        try:
            computing.config_loss.require_scalar(computing, inputs, sure=on_host)
        except ValueError as error:
            raise ConfigError(f"loss: {error}") from error
    if config.plan.only:
        return
    try:
        counted, _ = fetch.weighing_of(loss_over, model)
        weighings = fetch.WEIGHTS | dict([fetch.weighing_of(fetch.AUTO, model)])
        weighings[counted](batch, 1)
    except Exception as error:  # whatever the user's method raises
        raise ConfigError(f"train.loss_over: got {loss_over}; {printable(f'{error}', keep='')}") from error
    is_ours = type(model).__module__.startswith("zerotrain.models.") and getattr(model, "next_token_labels", False)
    if is_ours and counted in (fetch.AUTO, "labels"):
        return
    if not has_config_loss:
        tried = None if counted == "micro_batches" else _try_loss(model, batch, config)
    if tried is None or counted == "micro_batches":
        return
    built, num, output = tried
    if not hasattr(data.validation, "__len__") or len(data.validation):
        require_loss(output, kind)
    if not is_loss(output) or (num := min(num, num_rows)) < 2:
        return
    # Evenly spread rows could all be of one class.
    rows = random.Random(config.seed).sample(range(num_rows), num)
    rows.sort(key=lambda row: fetch.num_labels(_read_rows(data, config, [row]), 1))
    whole, ways = _whole_and_parts(data, config, rows)
    losses = _losses(built, config, [whole, whole, *(part for parts in ways for part, _ in parts)])
    tolerance = max(TOLERANCE, torch.finfo(output.dtype).eps)
    if losses is None or not abs(losses[0] - losses[1]) <= tolerance * abs(losses[0]):
        return
    of_whole, _, *of_parts = losses
    near, problem = tolerance * max(map(abs, filter(math.isfinite, losses))), ""
    for parts in ways:
        of_two, of_parts = of_parts[:2], of_parts[2:]
        means = {name: _mean(of_two, [weigh(*part) for part in parts]) for name, weigh in weighings.items()}
        means[fetch.SUM] = sum(of_two)
        # A step leaves out what weighs nothing, so its loss may be anything.
        if not any(weighings[counted](*part) for part in parts) or abs(means[counted] - of_whole) <= near:
            return
        problem = f"train.loss_over: got {loss_over}; of {len(rows)} rows the loss of {kind} is {of_whole:.7g}, but"
        for fitting in (fetch.MODEL, "labels", "shifted_labels", "rows", fetch.SUM):
            if abs(means.get(fitting, math.nan) - of_whole) <= near:
                raise ConfigError(
                    f"{problem} {means[counted]:.7g} by two parts of them; train.loss_over={fitting} fits"
                )
        problem += f" {means[counted]:.7g} by two parts of them"
    if loss_over == fetch.AUTO:
        raise ConfigError(
            f"{problem}, and labels, shifted_labels, rows and sum fit no better; give {kind} a method "
            f"{fetch.LOSS_COUNT}, which gets a batch as forward does and returns what the loss divides by, or, where "
            "rows act on each other, train.loss_over=micro_batches, labels or rows, whichever is meant"
        )


def require_apart(model: torch.nn.Module, data: Any, config: Config) -> None:
    """Check that a model lets no example of a packed row see another: the loss of a row is the mean of those of its
    examples, each alone. Both are computed here in double precision by the model with first weights. A line says where
    that cannot be done. Raises a ConfigError where they differ.

    Args:
        model: without memory.
    """
    if (packed := getattr(data.train, "packed", lambda: None)()) is None:
        return
    (row, alone), kind = packed, type(model).__name__
    losses = None
    if (tried := _try_loss(model, row, config)) is not None:
        for matrix in (parameter for parameter in tried[0].double().parameters() if parameter.dim() > 1):
            matrix.data *= SCALE
        losses = _losses(tried[0], config, [row, *alone])
    if losses is None:
        reason = "it is too large for that, or does not compute in double precision"
        print(f"data.pack=true: whether packed examples stay apart in {kind} was not tried; {reason}", file=sys.stderr)
        return
    of_row, mean = losses[0], _mean(losses[1:], [fetch.num_labels(batch, 1) for batch in alone])
    if not abs(of_row - mean) <= TOLERANCE_IN_DOUBLE * max(1, abs(mean)):
        raise ConfigError(
            f"data.pack: got true, but in {kind} packed examples see each other: the loss of a row is {of_row:.7g}, "
            f"and {mean:.7g} by each example alone; give data.pack=false, or a model that reads position_ids so"
        )


def _read_rows(data: Any, config: Config, rows: Sequence[int]) -> Any:
    sampling: Any = {"seed": config.seed, "epochs": [0] * len(rows), "step": 1}
    return fetch.fetch_rows(data.train, rows, **sampling, collate=factory.build_collate(config))


def _try_loss(model: torch.nn.Module, batch: Any, config: Config) -> tuple[torch.nn.Module, int, Any] | None:
    """(the model with first weights, rows of which its loss can be tried, what it returns for the first batch); None
    where it cannot be called here."""
    numel = sum(parameter.numel() for parameter in model.parameters())
    # As if each element of a row met each parameter.
    if (
        numel > MOST_NUMEL
        or numel * max((tensor.numel() for tensor in fetch.tensors_in(batch)), default=1) > MOST_PRODUCTS
    ):
        return None
    built = None
    with suppress(Exception), fetch.seeded("loss tried", config.seed), torch.no_grad():
        built = factory.build("model", config.target("model")).eval()
        factory.add_config_loss(config, built)
        for parameter in built.parameters():
            if not parameter.any():  # of zeros, such as those of the last layer, all losses may be the same
                parameter.normal_(std=0.02)
        output = loss_in(call_model(built, fetch.as_inputs(batch)))  # the first call may import, and allocates
        start_s = time.process_time()
        call_model(built, fetch.as_inputs(batch))
        return built, int(min(NUM_TRIED, MOST_S / max(time.process_time() - start_s, 1e-9))), output
    if built is not None and config.precision.name == "fp32":
        _require_single(built, batch)
    return None


@torch.no_grad()
def _require_single(model: torch.nn.Module, batch: Any) -> None:
    """Refuse a batch with parts in float64, as numpy makes them, if the model takes it with these in float32 alone."""
    inputs = fetch.as_inputs(batch)
    parts = inputs.items() if isinstance(inputs, Mapping) else enumerate(inputs)
    doubles = [str(name) for name, part in parts if getattr(part, "dtype", None) is torch.float64]
    single = fetch.with_tensors(batch, lambda tensor: tensor.float() if tensor.dtype is torch.float64 else tensor)
    try:
        call_model(model, fetch.as_inputs(single))
    except Exception:  # of the user's model: it is not for this
        return
    if doubles:
        names = printable(", ".join(doubles), 200, keep="")
        problem = f"data.train[0]: part {names} is float64, and {type(model).__name__} computes in float32"
        raise ConfigError(f"{problem}; make it float32 in the dataset, such as by .float()")


def _whole_and_parts(data: Any, config: Config, rows: Sequence[int]) -> tuple[Any, list[list[tuple[Any, int]]]]:
    """A batch, and (batch, number of rows) of each of its two parts, in one or two ways: read as micro-batches are,
    each padded to its longest; and cut out of the whole, since a collate function may draw other numbers for a part and
    the model may look at the padding."""
    num = max(1, len(rows) * 3 // 8)
    whole, sizes = _read_rows(data, config, rows), (num, len(rows) - num)
    read = [_read_rows(data, config, part) for part in (rows[:num], rows[num:])]
    ways = [list(zip(read, sizes, strict=True))]
    if config.switches("data")["collate_fn"] and all(
        tensor.shape[:1] == (len(rows),) for tensor in fetch.tensors_in(whole)
    ):
        cut = [
            fetch.with_tensors(whole, lambda tensor: tensor[:num]),
            fetch.with_tensors(whole, lambda tensor: tensor[num:]),
        ]
        ways.append(list(zip(cut, sizes, strict=True)))
    return whole, ways


def _losses(model: torch.nn.Module, config: Config, batches: Sequence[Any]) -> list[float] | None:
    """The loss of each batch; None where they cannot be computed here."""
    with suppress(Exception), fetch.seeded("loss tried", config.seed), torch.no_grad():
        losses = [float(loss_in(call_model(model, fetch.as_inputs(batch)))) for batch in batches]
        return losses if math.isfinite(losses[0]) else None
    return None


def _mean(losses: Sequence[float], weights: Sequence[float]) -> float:
    """The mean of losses by weights. A loss without weight does not count: it may be nan."""
    weighed = (loss * weight for loss, weight in zip(losses, weights, strict=True) if weight)
    return sum(weighed) / (sum(weights) or math.nan)
