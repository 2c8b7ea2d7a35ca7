"""Rows of a map-style dataset, read and put together to a batch: the same bits in any rank, worker process or thread,
at any time. The random numbers of a row (a crop, a mask, dropped words) are a function of seed, epoch and row: torch's,
Python's and numpy's global generators are seeded so before each `dataset[row]`, and before `collate` by all its rows;
afterwards they are as they were. Two datasets whose rows were read by 1 rank and by 2 gave losses of 5.5496 and 5.5502
in the first step, with random masks from torch's generator (2026-11-22).

These generators belong to the whole process. A thread that seeded them would change the dropout of the model that
computes beside it, so:

* A thread may read a dataset that draws nothing: one that has `rows(indices)`, a list, a `TensorDataset`, and one
  that says so with `draws = False`. `draws` tells.
* All others are read where nothing else draws: in the main thread between two steps, or in processes of their own
  (`data.num_workers`). A dataset may always draw, unless it says that it does not.
* A generator of the dataset's own, such as `self.generator = torch.Generator()` or numpy's `default_rng()`, nobody can
  seed here: the dataset makes one in `__getitem__`, with a seed drawn there from torch's.
"""

import dataclasses
import hashlib
import inspect
import math
import random
import re
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from operator import getitem
from types import FrameType
from typing import Any, ClassVar

import numpy as np
import torch
from torch.utils.data import TensorDataset, default_collate

from zerotrain.data.batches import IGNORED_LABEL, OF_SET, rows_at
from zerotrain.files.suspension import suspended_s
from zerotrain.files.untrusted import listed

# The parts of a micro-batch, any structure of tensors, some of them labels; and its weight in a step.


LABELS = "labels"
WITH_OUTPUTS = "with_outputs"
"""The argument of a model's forward with which it returns (loss, outputs)."""
IDS = ("ids", "input_ids")
"""Names of a language model's inputs in a batch; without names they stand first."""
LOSS_COUNT = "loss_count"
"""The method of a model for the divisor of its mean loss: it gets a batch as the forward does."""
LOSS_OVER = "loss_over"
"""The attribute in which a model may say its `train.loss_over`."""
AUTO, MODEL, SUM = "auto", "model", "sum"
"""`train.loss_over`: what the model says, else `num_labels`; the model's own count; no mean at all."""
_SIGNED = (torch.int8, torch.int16, torch.int32, torch.int64)
_GRID = 2**30
"""A weight that is no whole number is rounded to a part of 1 of this size: sums of such weights over the ranks of a run
are exact, so that they have the same bits in any order."""
Weigh = Callable[[Any, int], float]
"""The weight of a micro-batch in the mean loss of a step, of (batch, its number of rows)."""


def as_inputs(batch: Any) -> Sequence[Any] | Mapping[str, Any]:
    """The model's arguments, as `ZeroEngine.train_step` takes them: a dict or a dataclass gives named arguments,
    a tuple or list positional ones, a named tuple too, and anything else is the only one."""
    if (fields := _fields(batch)) is not None:
        return fields
    return batch if isinstance(batch, Mapping | tuple | list) else (batch,)


def ids_of(batch: Any) -> torch.Tensor | None:
    """The tokens for a language model: the part called `ids` or `input_ids`, or else the first one."""
    return _tensor_at(batch, IDS, 0)


def _tensor_at(batch: Any, names: Sequence[str], place: int) -> torch.Tensor | None:
    """The part of a batch with the first of some names, or else, where parts need no names, the part at a place."""
    inputs, by_name = as_inputs(batch), names_in(batch)
    parts = [by_name[name] for name in names if name in by_name]
    if not isinstance(inputs, Mapping):
        parts += inputs[place : place + 1]
    return parts[0] if parts and isinstance(parts[0], torch.Tensor) else None


def num_tokens_of(batch: Any) -> int:
    """Tokens in the rows of a micro-batch, with their padding; 0 where they are of something else. It looks at shapes
    alone, so it may be asked of a batch on any device."""
    ids = ids_of(batch)
    if ids is None or ids.ndim != 2 or ids.dtype not in (torch.int32, torch.int64):
        return 0
    return ids.numel()


def tokens_known(model: Any) -> int | None:
    """How many tokens a language model knows; None of a model that is none, or does not say."""
    vocab_size = getattr(model, "vocab_size", None)
    return vocab_size if getattr(model, "next_token_labels", False) and isinstance(vocab_size, int) else None


def unknown_token(batch: Any, vocab_size: int) -> tuple[int, int] | None:
    """(the number of its item, the token) of one that a language model does not know, of a batch of rows of tokens in
    the host's memory; None where it knows all."""
    for part, may_be_ignored in ((ids_of(batch), False), (labels_of(batch), True)):
        if part is None or part.dtype not in (torch.int32, torch.int64) or not part.ndim or not part.numel():
            continue
        smallest, largest = part.aminmax()
        if smallest >= 0 and largest < vocab_size:  # a tenth of the time of what follows
            continue
        outside = (part < 0) | (part >= vocab_size)
        places = (outside & (part != IGNORED_LABEL) if may_be_ignored else outside).nonzero()
        if len(places):
            return int(places[0][0]), int(part[tuple(places[0])])
    return None


def labels_of(batch: Any) -> torch.Tensor | None:
    """The labels of a micro-batch: the part called `labels`, or else the second one; None where that is no
    tensor."""
    return _tensor_at(batch, (LABELS,), 1)


def target_of(batch: Any, path: str | None) -> torch.Tensor | None:
    """The tensor to compare outputs with in a metric: the part of a batch at a dotted path of names, such as
    "features.y", or `labels_of` without a path; None where there is no tensor."""
    if path is None:
        return labels_of(batch)
    value = batch
    for name in path.split("."):
        value = names_in(value).get(name)
    return value if isinstance(value, torch.Tensor) else None


def names_in(value: Any) -> Mapping[str, Any]:
    """The named parts of a dict, a dataclass or a named tuple."""
    if (fields := _fields(value)) is not None:
        return fields
    return value if isinstance(value, Mapping) else value._asdict() if hasattr(value, "_fields") else {}


def names_of_tensors(batch: Any) -> Iterator[str]:
    """The dotted path of names to each tensor of a batch that has one."""
    for name, part in names_in(batch).items():
        if isinstance(part, torch.Tensor):
            yield str(name)
        yield from (f"{name}.{inner}" for inner in names_of_tensors(part))


def gives_outputs(model: Any) -> bool:
    """Whether a model can return its outputs beside its loss."""
    return WITH_OUTPUTS in inspect.signature(model.forward).parameters


def without_targets(batch: Any, paths: Iterable[str | None]) -> Sequence[Any] | Mapping[str, Any]:
    """The model's arguments without the tensors of `target_of` for each path."""
    inputs, target_paths = as_inputs(batch), [path or LABELS for path in paths]
    if isinstance(inputs, Mapping):
        for path in target_paths:
            inputs = _remove_path(inputs, path.split("."))
        return inputs
    names = getattr(inputs, "_fields", ())
    left_out = {names.index(path) if path in names else 1 for path in target_paths}
    return [part for place, part in enumerate(inputs) if place not in left_out or not isinstance(part, torch.Tensor)]


def _remove_path(parts: Mapping[str, Any], path: Sequence[str]) -> Mapping[str, Any]:
    head, *rest = path
    if rest and isinstance(inner := parts.get(head), Mapping):
        return {**parts, head: _remove_path(inner, rest)}
    return {name: value for name, value in parts.items() if rest or name != head}


def is_signed(labels: torch.Tensor) -> bool:
    """Whether labels are signed whole numbers, of which -100 means ignored; in others it is a label, or cannot be."""
    return labels.dtype in _SIGNED


def is_counted(labels: torch.Tensor) -> torch.Tensor:
    """For each label whether it counts, since it is not ignored; bool, of the same shape."""
    return labels != IGNORED_LABEL if is_signed(labels) else torch.ones_like(labels, dtype=torch.bool)


def count_labels(labels: torch.Tensor) -> int:
    """The number of labels that count. It waits for a GPU, if they are on one."""
    return int(is_counted(labels).sum())


def num_labels(batch: Any, num_rows: int) -> int:
    """The labels of a micro-batch that count, or its rows where labels are no signed whole numbers, or there are none.
    Call it before the batch is copied to a GPU: there it would wait for the device.
    """
    labels = labels_of(batch)
    return num_rows if labels is None or not is_signed(labels) else count_labels(labels)


def _count_labels_from(start: int, batch: Any, num_rows: int) -> int:
    """The labels that count of each row, from one on."""
    labels = labels_of(batch)
    return num_rows if labels is None else count_labels(labels[:, start:] if labels.dim() > 1 else labels)


WEIGHTS: dict[str, Weigh] = {
    AUTO: num_labels,
    "labels": partial(_count_labels_from, 0),
    "shifted_labels": partial(_count_labels_from, 1),
    "rows": lambda _, num_rows: num_rows,
    "micro_batches": lambda *_: 1,
    SUM: lambda *_: 1,
}
"""By `train.loss_over`. Call them before a batch is copied to a GPU. The losses of `SUM` are added up as they are."""


def weighing_of(loss_over: str, model: Any) -> tuple[str, Weigh]:
    """(name of the count, function for it) for a setting and a model.

    Raises:
        ValueError: the model is to count, and cannot, or says something that there is not.
    """
    count, kind = getattr(model, LOSS_COUNT, None), type(model).__name__
    if loss_over == AUTO:
        loss_over = getattr(model, LOSS_OVER, MODEL if callable(count) else AUTO)
    if loss_over in WEIGHTS:
        return loss_over, WEIGHTS[loss_over]
    if loss_over != MODEL:
        raise ValueError(f"{kind}.{LOSS_OVER} is {loss_over!r}; it must be one of {', '.join([*WEIGHTS, MODEL])}")
    if not callable(count):
        raise ValueError(
            f"{kind} has no method {LOSS_COUNT}, which gets a batch as {kind}.forward does and returns what the mean "
            f"loss divides by; the others are {', '.join(WEIGHTS)}"
        )
    return MODEL, partial(_count_by_model, count)


def _count_by_model(count: Callable[..., Any], batch: Any, _: int) -> float:
    inputs = as_inputs(batch)
    counted = float(count(**inputs) if isinstance(inputs, Mapping) else count(*inputs))
    if not 0 <= counted < math.inf:
        raise ValueError(f"{LOSS_COUNT} returned {counted} for a batch; it must be a number from 0 on")
    return round(counted * _GRID) / _GRID


def to_device(batch: Any, device: torch.device, *, non_blocking: bool = False) -> Any:
    """The same batch with its tensors on a device. A mapping of whatever class comes out as a dict."""
    return with_tensors(batch, lambda tensor: tensor.to(device, non_blocking=non_blocking))


def with_tensors(batch: Any, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """The same batch with another tensor in the place of each. A mapping of whatever class comes out as a dict."""
    if isinstance(batch, torch.Tensor):
        return change(batch)
    if isinstance(batch, Mapping):
        return {key: with_tensors(value, change) for key, value in batch.items()}
    if isinstance(batch, tuple | list):
        parts = [with_tensors(part, change) for part in batch]
        return type(batch)(*parts) if hasattr(batch, "_fields") else type(batch)(parts)
    if (fields := _fields(batch)) is not None:
        return dataclasses.replace(batch, **with_tensors(fields, change))
    return batch


def tensors_in(batch: Any) -> list[torch.Tensor]:
    """All tensors of a batch."""
    tensors: list[torch.Tensor] = []
    with_tensors(batch, lambda tensor: tensors.append(tensor) or tensor)  # type: ignore[func-returns-value]
    return tensors


def _fields(batch: Any) -> dict[str, Any] | None:
    """The fields of a dataclass; None of another object."""
    if not dataclasses.is_dataclass(batch) or isinstance(batch, type):
        return None
    return {field.name: getattr(batch, field.name) for field in dataclasses.fields(batch)}


Collate = Callable[[list[Any]], Any]
"""Makes a batch of items."""
_NUM_ROWS_SHOWN = 8
_MARGIN_S = 10.0
"""A row is given up so long before other ranks give up this one, or a quarter of what they wait: its name is the cause,
and not that a rank did not answer."""
_STOP_GRACE_S = 10.0
"""A row may take so long, and so long after the run was told to stop: the launcher may end the run soon."""
LOOK_S = 1.0
"""The time between two looks at the place of a reader, by the thread behind it."""


class RowError(RuntimeError):
    """Unreadable rows; the original exception is its cause.

    Args:
        message: one line that names the dataset, the rows, their epochs and the step.
    """


class StopTimeoutError(TimeoutError):
    """Cause of a `RowError`: the row was given up since the run is to stop."""


class RowPlace:
    """The row that a reader is at. Another thread or process, which waits for it, sees whether it gets on.

    Args:
        timeout_s: how long the other ranks wait for this one; a row must take less.
        values: memory for 4 numbers of float64, which is shared with another process; None: memory of this one.
    """

    stop_s: ClassVar[float] = math.inf
    """When this process was told to stop, by `time.monotonic()`."""

    def __init__(self, timeout_s: float, values: torch.Tensor | None = None) -> None:
        self._timeout_s, self._limit_s = timeout_s, timeout_s - min(_MARGIN_S, timeout_s / 4)
        self.look_s = min(LOOK_S, self._limit_s / 4)
        self._values = torch.zeros(4, dtype=torch.float64) if values is None else values

    def begin(self, row: int = -1, epoch: int = -1, step: int = 0) -> None:
        """A row, or something else for the micro-batch, begins."""
        self._values.numpy()[:] = time.monotonic(), row, epoch, step

    def end(self) -> None:
        """The reader has nothing to do."""
        self._values[0] = 0.0

    def overdue(self) -> TimeoutError | None:
        """The reason why the reader is not waited for any longer; None where it gets on."""
        since_s, now_s = float(self._values[0]), time.monotonic()
        if not since_s:
            return None
        busy_s = now_s - since_s - suspended_s(since_s)
        delay = f"it did not end within {busy_s:.0f} s"
        if busy_s >= self._limit_s:
            return TimeoutError(
                f"{delay}, where ranks wait {self._timeout_s:g} s for each other; give launch.timeout_s=... more if it "
                "may take that long"
            )
        if min(busy_s, now_s - self.stop_s) >= _STOP_GRACE_S:
            return StopTimeoutError(f"{delay}, and the run was told to stop")
        return None

    def __str__(self) -> str:
        row, epoch, step = map(int, self._values[1:])
        if row >= 0:
            return place_of("data.train", [row], [epoch], step)
        return f"data.train: the rows of step {step}" if step else "data.train: the first rows of a process"


PLACE: ContextVar[RowPlace | None] = ContextVar("place", default=None)
"""`fetch_rows` notes there what it reads; each thread has its own."""


@contextmanager
def in_time(timeout_s: float) -> Iterator[None]:
    """In here this thread reads rows itself, and gives up one that takes too long: a `RowError` whose cause is a
    TimeoutError. A signal interrupts it, so this holds for the main thread alone, and for code that a signal can
    interrupt.

    Args:
        timeout_s: as of `RowPlace`.
    """
    place, over, thread = RowPlace(timeout_s), threading.Event(), threading.current_thread()
    if thread is not threading.main_thread():
        yield
        return

    def interrupt(signum: int, frame: FrameType | None) -> None:
        if reason := place.overdue():
            place.end()
            raise reason
        if callable(previous_handler):
            previous_handler(signum, frame)

    def watch() -> None:
        while not over.wait(place.look_s):
            if place.overdue():
                signal.pthread_kill(thread.ident or 0, signal.SIGALRM)

    previous_handler, token = signal.signal(signal.SIGALRM, interrupt), PLACE.set(place)
    watching = threading.Thread(target=watch, name="zerotrain-data-watch", daemon=True)
    watching.start()
    try:
        yield
    finally:
        PLACE.reset(token)
        over.set()
        watching.join()
        if signal.getsignal(signal.SIGALRM) is interrupt:  # and not one that the dataset has set meanwhile
            signal.signal(signal.SIGALRM, previous_handler)


def fetch_rows(
    dataset: Any,
    rows: Sequence[int],
    *,
    seed: int,
    epochs: Sequence[int],
    step: int,
    collate: Collate | None = None,
    name: str = "data.train",
    vocab_size: int | None = None,
) -> Any:
    """Read one micro-batch.

    One call makes one micro-batch, not a step's: a collate function that pads does so no further than it must, and a
    batch of any structure need never be cut.

    Args:
        dataset: map-style. If it has `rows(indices) -> batch` and there is no `collate`, that is called once, with
            `rows`, and returns the batch. Else `dataset[row]` for each.
        rows: which items, at least one; the batch has them in this order.
        seed: of the run, at least 0.
        epochs: of each row: an item is read again in each epoch, and draws other random numbers. 0 in validation.
        step: number of the global batch, from 1; for messages alone.
        collate: makes a batch of a list of items; None: torch's `default_collate`.
        name: of the dataset, for messages.
        vocab_size: tokens that a language model knows, which is to be given the batch; None: nothing is looked for.

    Returns:
        The batch: in whatever structure, tensors with a first dimension of len(rows).

    Raises:
        RowError: the dataset or collate raised an exception, which is its cause; or a token is not known.
    """
    if collate is None and hasattr(dataset, "rows"):
        batch = _naming_rows(name, rows, epochs, step, "cannot be read", lambda: dataset.rows(list(rows)))
    else:
        with _restoring_generators(draws(dataset, collate)) as seed_by:
            items = []
            for row, epoch in zip(rows, epochs, strict=True):
                seed_by("row", seed, epoch, row)
                items.append(_naming_rows(name, [row], [epoch], step, "cannot be read", partial(getitem, dataset, row)))
            seed_by("batch", seed, *epochs, *rows)
            put_together = partial(collate or default_collate, items)
            batch = _naming_rows(name, rows, epochs, step, "cannot be collated into a batch", put_together)
    if vocab_size is not None and (unknown := unknown_token(batch, vocab_size)) is not None:
        item, token = unknown
        at = slice(item, item + 1) if item < len(rows) else slice(None)
        problem = f"ValueError: the token {token} is not among the model's, 0 to {vocab_size - 1}"
        raise RowError(f"{place_of(name, rows[at], epochs[at], step)} cannot be trained on: {problem}")
    if (place := PLACE.get()) is not None:
        place.end()
    return batch


def draws(dataset: Any, collate: Collate | None = None) -> bool:
    """Whether random numbers may be drawn while rows are read: a dataset may unless it says `draws = False`. Else a
    thread may read rows while the main thread computes, with the same bits for both."""
    reads_whole = collate is None and hasattr(dataset, "rows")
    plain = isinstance(dataset, list | tuple | TensorDataset)
    of_items = not reads_whole and bool(getattr(dataset, "draws", not plain))
    return of_items or (collate is not None and bool(getattr(collate, "draws", True)))


@contextmanager
def seeded(*place: object) -> Iterator[None]:
    """Inside, the global generators are seeded by a place; afterwards they are as they were."""
    with _restoring_generators(True) as seed_by:
        seed_by(*place)
        yield


def _naming_rows(
    name: str, rows: Sequence[int], epochs: Sequence[int], step: int, what: str, read: Callable[[], Any]
) -> Any:
    """Return the result of a call of a user's class. A context manager would let the StopIteration of that class
    through, which ends a step of several micro-batches behind the first of them."""
    if (place := PLACE.get()) is not None:
        place.begin(*(rows[0], epochs[0]) if len(rows) == 1 else (-1, -1), step)
    try:
        return read()
    except (Exception, SystemExit) as error:  # whatever a user's class raises
        place_text = place_of(name, rows, epochs, step)
        raise RowError(f"{place_text} {what}: {type(error).__name__}: {error}") from error


def place_of(name: str, rows: Sequence[int], epochs: Sequence[int], step: int) -> str:
    """Some rows in words: "data.train: row 3 (epoch 0, step 7)"."""
    which = f"row {rows[0]}" if len(rows) == 1 else f"rows {listed([*map(str, rows)], _NUM_ROWS_SHOWN)}"
    when = f"epoch {epochs[0]}" if len(set(epochs)) == 1 else f"epochs {listed([*map(str, epochs)], _NUM_ROWS_SHOWN)}"
    return f"{name}: {which} ({when}, step {step})"


@contextmanager
def _restoring_generators(are_used: bool) -> Iterator[Callable[..., None]]:
    """Yields `seed_by`, or a function without effect; afterwards the global generators are as they were."""
    if not are_used:
        yield lambda *_: None
        return
    states = torch.get_rng_state(), random.getstate(), np.random.get_state()
    try:
        yield seed_by
    finally:
        torch.set_rng_state(states[0])
        random.setstate(states[1])
        np.random.set_state(states[2])


def seed_by(*place: object) -> None:
    """Seed the global generators by some numbers and words."""
    digest = hashlib.sha256(" ".join(map(str, place)).encode()).digest()
    torch.default_generator.manual_seed(int.from_bytes(digest[:8]))  # torch.manual_seed also seeds GPUs
    random.seed(digest[8:16])
    np.random.seed(np.frombuffer(digest[16:24], dtype=np.uint32))


# The identity of a dataset, in a few numbers and texts: ranks compare it, and a resumed run.


Fingerprint = dict[str, int | str]
_NUM_ORDERED = 1000
"""First rows of an order of the dataset's own, such as that of a mix, which its weights change."""
_NUM_SPREAD = 1000
_CHEAP_S, _MAX_S = 0.25, 1.0
"""All rows of a dataset are read where that takes so little, and `_NUM_SPREAD` of more, or as many as take `_MAX_S`."""
_MAX_NUM_ROWS = 100_000
"""A larger number in a file is no reason to read more rows."""
_FIRST = ", half of them the first of a run"
"""Follows the number of rows to train on where these are not all."""
_NUM_ROWS = re.compile(rf"\w{{16}} of (\d{{1,9}}) rows({_FIRST})?")


def fingerprint_of(
    data: Any,
    seed: int = 0,
    validation_sets: Mapping[str, Any] | None = None,
    like: Mapping[str, Any] | None = None,
) -> Fingerprint:
    """Equal where the rows of `data.train` and `data.validation` are equal, as far as can be told without reading all.

    Args:
        data: its own `fingerprint()` is taken where it has one. Else items are read: all of each dataset where that is
            cheap, or else a thousand at most, evenly spread; of `data.train` half of them are those that a run with
            this seed reads first.
        seed: of the run; the random numbers of an item follow from it.
        validation_sets: further data by name, whose fingerprints are in it too, behind `OF_SET` and the name.
        like: the fingerprint to compare with: as many items are read as were for it. How many are cheap depends on the
            machine.

    Raises:
        RowError: an item could not be read.
    """
    fingerprint = _fingerprint(data, seed, "data", like or {})
    for name, extra in (validation_sets or {}).items():
        of_set = _fingerprint(extra, seed, f"data.validation_sets.{name}", within(like or {}, f"{OF_SET}{name}."))
        fingerprint |= {f"{OF_SET}{name}.{what}": value for what, value in of_set.items()}
    return fingerprint


def within(fingerprint: Mapping[str, Any], prefix: str) -> Fingerprint:
    """The part of a fingerprint whose names begin so, without that beginning."""
    return {name.removeprefix(prefix): value for name, value in fingerprint.items() if name.startswith(prefix)}


def _fingerprint(data: Any, seed: int, called: str, like: Mapping[str, Any]) -> Fingerprint:
    values: Fingerprint = {"rows": len(data.train), "validation_rows": len(data.validation)}
    if (order := getattr(data.train, "order", None)) is not None:
        first_rows, _ = order(np.arange(_NUM_ORDERED), seed=seed)
        values["order"] = hashlib.sha256(first_rows.astype("<i8").tobytes()).hexdigest()[:16]
    if callable(getattr(data, "fingerprint", None)):
        of_data = data.fingerprint(like) if getattr(data.train, "sources", None) else data.fingerprint()
        # A user's wrapper may have other rows than the dataset itself knows of.
        return {str(name): value for name, value in of_data.items()} | values
    for name in ("train", "validation"):
        if len(dataset := getattr(data, name)):
            key = f"items_of_{name}"
            is_trained = name == "train"
            values[key] = _hash_items(dataset, seed, f"{called}.{name}", str(like.get(key, "")), is_trained=is_trained)
    return values


def _hash_items(dataset: Any, seed: int, name: str, like: str, *, is_trained: bool) -> str:
    """The hash of some items, and how many they are. Those to train on include the ones that a run reads first."""
    length, hashes, costs_s = len(dataset), dict[int, str](), list[float]()
    rows = sorted({0, length // 2, length - 1})
    for row in rows:
        started_s = time.perf_counter()
        hashes[row] = _hash_item(dataset, row, seed, name)
        costs_s.append(time.perf_counter() - started_s)
    if _hash_item(dataset, 0, seed, name) != hashes[0]:
        return "never the same"
    cost_s, number = sorted(costs_s)[len(costs_s) // 2], _NUM_ROWS.fullmatch(like)
    num_wanted = int(number[1]) if number else max(_CHEAP_S / cost_s, min(_NUM_SPREAD, _MAX_S / cost_s), len(rows))
    num_rows = int(min(num_wanted, length, _MAX_NUM_ROWS))
    how_many = f" of {num_rows} rows"
    first_rows: list[int] = []
    if num_rows < length and is_trained and (number is None or number[2]):
        positions, order = np.arange(max(num_rows // 2, 1)), getattr(dataset, "order", None)
        first_rows = (
            rows_at(positions, seed=seed, num_rows=length) if order is None else order(positions, seed=seed)[0]
        ).tolist()
        how_many += _FIRST
    num_spread = num_rows - len(first_rows)
    rows = first_rows + [index * (length - 1) // max(num_spread - 1, 1) for index in range(num_spread)]
    for row in rows:
        if row not in hashes:
            hashes[row] = _hash_item(dataset, row, seed, name)
    return hashlib.sha256("".join(hashes[row] for row in rows).encode()).hexdigest()[:16] + how_many


def _hash_item(dataset: Any, row: int, seed: int, name: str) -> str:
    item = fetch_rows(dataset, [row], seed=seed, epochs=[0], step=1, collate=lambda items: items[0], name=name)
    digest = hashlib.sha256()
    _add_value(digest, item)
    return digest.hexdigest()


def _add_value(digest: Any, value: Any) -> None:
    """Hash numbers, texts, tensors and arrays in whatever structure; of other objects the type alone."""
    if isinstance(value, torch.Tensor):
        digest.update(f"{value.dtype} {tuple(value.shape)} ".encode())
        digest.update(value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes())
    elif isinstance(value, np.ndarray) and value.dtype != object:
        digest.update(f"{value.dtype} {value.shape} ".encode() + value.tobytes())
    elif isinstance(value, str | bytes | int | float | complex | np.generic | None):
        digest.update(f"{type(value).__name__} {value!r} ".encode())
    elif isinstance(value, Mapping):
        for key, part in value.items():
            digest.update(f"{key!r}: ".encode())
            _add_value(digest, part)
    elif isinstance(value, tuple | list):
        digest.update(f"{len(value)} ".encode())
        for part in value:
            _add_value(digest, part)
    elif isinstance(fields := as_inputs(value), Mapping):
        _add_value(digest, fields)
    else:
        digest.update(type(value).__name__.encode())
