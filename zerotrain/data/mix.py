"""Several datasets mixed by weights, of which any row is found by its number.

Position k of a run belongs to a source, as a pattern says that repeats itself: with weights 3 and 1 `a a b a`, over
and over. It is that source's next row, in the source's own order: each has epochs of its own, and all its rows are read
once before any is read twice. So the pattern's number and the place in it tell, without a look at what was read before,
which source, which of its rows, and in which of its epochs.
"""

import hashlib
import math
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from fractions import Fraction
from itertools import accumulate
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from torch.utils.data import Dataset

from zerotrain.data.batches import rows_at
from zerotrain.data.fetch import Fingerprint, draws, fingerprint_of, within

MAX_PERIOD = 100_000
"""Rows of a pattern, at most."""
NEEDED = "{data: {_target_: ...}, weight: 1}"


class Mix:
    """Datasets read in turn, as often as their weights say.

    Args:
        sources: {name: {"data": a dataset with train and validation, "weight": a number}}. Sources of weights 7, 2 and
            1 give 7, 2 and 1 of 10 training rows, whatever their sizes. A source of weight 0 is only evaluated.
        seq_len: tokens of a sequence, where all sources must have as many; None: nothing is compared.
        vocab_size: tokens that all sources have; None: that of the sources.

    Raises:
        ValueError: a source or a weight is none, or the sources do not fit together.

    An epoch of a mix is as many rows as its sources have together.
    """

    def __init__(
        self, sources: Mapping[str, Mapping[str, Any]], *, seq_len: int | None = None, vocab_size: int | None = None
    ) -> None:
        self.sources, weights = _sources(sources)
        for name, data in self.sources.items():
            _require_fit(name, data, seq_len)
        self.vocab_size = _vocab_size(self.sources, vocab_size)
        trained = [name for name in self.sources if weights[name] > 0]
        self.train = MixedRows(
            {name: self.sources[name].train for name in trained}, {name: weights[name] for name in trained}
        )
        self.validation = MixedRows({name: data.validation for name, data in self.sources.items()}, weights)
        first_source = self.sources[trained[0]]
        for name in ("encode", "decode", "end_of_text"):  # a mix without one must not seem to have it
            if hasattr(first_source, name):
                setattr(self, name, getattr(first_source, name))

    def fingerprint(self, like: Mapping[str, Any] | None = None) -> Fingerprint:
        """The fingerprints of all sources, see `zerotrain.data.fetch`."""
        likes = {name: within(like or {}, f"{name}.") for name in self.sources}
        of_each = {name: fingerprint_of(data, like=likes[name]) for name, data in self.sources.items()}
        return {f"{name}.{what}": value for name, fingerprint in of_each.items() for what, value in fingerprint.items()}

    def summary(self) -> str:
        """The share of each source, for a line at the start."""
        shares = self.train.shares
        parts = [f"{shares.get(name, 0):.3g} {name} ({len(data.train):,} rows)" for name, data in self.sources.items()]
        return f"{', '.join(parts)}; {len(self.validation):,} rows to validate"


class MixedRows(Dataset[Any]):
    """The rows of several datasets, one dataset behind the other, and the order in which they are mixed.

    Args:
        sources: map-style, at least one.
        weights: of each, above 0 where rows are mixed.
    """

    def __init__(self, sources: Mapping[str, Any], weights: Mapping[str, float]) -> None:
        self.sources, self.weights = dict(sources), dict(weights)
        self._names, self._datasets = list(self.sources), list(self.sources.values())
        self._starts = [0, *accumulate(len(dataset) for dataset in self._datasets)]
        tokens = {getattr(dataset, "tokens_per_sequence", None) for dataset in self._datasets}
        self.tokens_per_sequence: int | None = tokens.pop() if len(tokens) == 1 else None
        """Labels in the loss of each item, where all sources have the same number."""
        self.draws = any(map(draws, self._datasets))
        counts = parts_of(list(self.weights.values()))
        self._counts, (self._source_at, self._number_at) = np.array(counts), pattern(counts)
        self.shares: dict[str, float] = dict(zip(self.sources, (self._counts / sum(counts)).tolist(), strict=True))
        """The part of the rows from each source."""

    def times_read(self, num_rows: int) -> dict[str, float]:
        """How often the rows of each source are read where so many rows are."""
        lengths = map(len, self._datasets)
        return {
            name: num_rows * share / length for (name, share), length in zip(self.shares.items(), lengths, strict=True)
        }

    def __len__(self) -> int:
        return self._starts[-1]

    def __getitem__(self, row: int) -> Any:
        """Read a row.

        Raises:
            IndexError: there is no such row.
        """
        _, dataset, number = self.source_of(row)
        return dataset[number]

    def source_of(self, row: int) -> tuple[str, Any, int]:
        """The name of the source of a row, its dataset, and the row's number there.

        Raises:
            IndexError: there is no such row.
        """
        if not 0 <= row < len(self):
            raise IndexError(f"row {row} of {len(self)}")
        source = bisect_right(self._starts, row) - 1
        return self._names[source], self._datasets[source], row - self._starts[source]

    def order(self, positions: ArrayLike, *, seed: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The rows at some positions of a run.

        Args:
            positions: at least 0, of any shape and in any order.
            seed: of the run.

        Returns:
            (rows, in which epoch of its source each is read), int64 of the same shape.
        """
        patterns, places = np.divmod(np.asarray(positions, dtype=np.int64), len(self._source_at))
        which = self._source_at[places]
        numbers = patterns * self._counts[which] + self._number_at[places]  # rows of the source that were read before
        rows, epochs = np.empty_like(numbers), np.empty_like(numbers)
        for source in np.unique(which).tolist():
            mask = which == source
            num_rows = len(self._datasets[source])
            # The order of a source follows from its name: another source beside it changes nothing.
            source_seed = int.from_bytes(hashlib.sha256(f"{seed} {self._names[source]}".encode()).digest()[:8])
            rows[mask] = self._starts[source] + rows_at(numbers[mask], seed=source_seed, num_rows=num_rows)
            epochs[mask] = numbers[mask] // num_rows
        return rows, epochs


def parts_of(weights: Sequence[float]) -> list[int]:
    """How many rows of each source there are in a pattern: exactly as the weights say, as decimal numbers; where that
    took a pattern of more than `MAX_PERIOD` rows, as nearly as one of so many can.

    Raises:
        ValueError: a weight that is not 0 is too small for that.
    """
    exact = [Fraction(str(weight)) for weight in weights]
    common = math.lcm(*(weight.denominator for weight in exact))
    counts = [int(weight * common) for weight in exact]
    divisor = math.gcd(*counts) or 1
    counts = [count // divisor for count in counts]
    if sum(counts) <= MAX_PERIOD:
        return counts
    shares = [weight * MAX_PERIOD / sum(exact) for weight in exact]
    counts = [int(share) for share in shares]
    by_remainder = sorted(range(len(shares)), key=lambda index: counts[index] - shares[index])
    for index in by_remainder[: MAX_PERIOD - sum(counts)]:
        counts[index] += 1
    for weight, count in zip(weights, counts, strict=True):
        if weight and not count:
            raise ValueError(
                f"data.sources: the weight {weight} is too small beside the others, less than one row in {MAX_PERIOD}; "
                "give a larger one, or 0"
            )
    return counts


def pattern(counts: Sequence[int]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """(source, how many rows of this source come before) at each place of a pattern: each source spread evenly over it.

    Any n rows from the start of a pattern hold n * s rows of a source of share s, give or take (1 + S * s) / 2, with
    `S` sources.
    """
    sources = np.repeat(np.arange(len(counts)), counts)
    numbers = np.concatenate([np.arange(count) for count in counts])
    evenly = np.argsort((numbers + 0.5) / np.array(counts)[sources], kind="stable")
    return sources[evenly], numbers[evenly]


def _sources(sources: Any) -> tuple[dict[str, Any], dict[str, float]]:
    """The datasets and their weights. A ValueError where one of them is none."""
    if not isinstance(sources, Mapping) or not sources:
        raise ValueError(f"data.sources={sources} names no source; give {{name: {NEEDED}, ...}}")
    weights: dict[str, float] = {}
    for name, source in sources.items():
        field = f"data.sources.{name}"
        if not isinstance(source, Mapping) or source.get("data") is None:
            other_names = ", ".join(str(other) for other in sources if other != name) or "none"
            raise ValueError(f"{field} has no data; a source is {NEEDED}, and the other sources are: {other_names}")
        for key in source.keys() - {"data", "weight"}:
            raise ValueError(f"{field}.{key}: a source has no such setting; it is {NEEDED}")
        weight = source.get("weight")
        if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 <= weight < math.inf:
            raise ValueError(f"{field}.weight: got {weight}; it must be a number that is at least 0")
        weights[str(name)] = weight
    if not any(weights.values()):
        raise ValueError("data.sources: all weights are 0; at least one must be above 0")
    return {str(name): source["data"] for name, source in sources.items()}, weights


def _require_fit(name: str, data: Any, seq_len: int | None) -> None:
    for set_name in ("train", "validation"):
        dataset = getattr(data, set_name, None)
        if dataset is None:
            raise ValueError(f"data.sources.{name}.data: {type(data).__name__} has no dataset called {set_name}")
        if not hasattr(dataset, "__len__") or not len(dataset):
            raise ValueError(f"data.sources.{name}.data.{set_name} is empty or has no length; each source needs a row")
    if getattr(data.train, "order", None) is not None and not hasattr(data.train, "sources"):
        raise ValueError(f"data.sources.{name}.data.group_by_length=true has no effect in a mix; leave it out")
    source_len = getattr(data.train, "seq_len", seq_len)
    if seq_len is not None and source_len != seq_len:
        raise ValueError(
            f"data.sources.{name}.data.seq_len={source_len}, but data.seq_len={seq_len}; all sources need the same: "
            "${data.seq_len}"
        )


def _vocab_size(sources: Mapping[str, Any], vocab_size: int | None) -> int | None:
    """The common size of all sources. A ValueError where they differ."""
    sizes = {} if vocab_size is None else {"data.vocab_size": vocab_size}
    for name, data in sources.items():
        if isinstance(size := getattr(data, "vocab_size", None), int):
            sizes[f"data.sources.{name}.data.vocab_size"] = size
    if len(set(sizes.values())) > 1:
        settings = ", ".join(f"{field}={size}" for field, size in sizes.items())
        raise ValueError(f"{settings} differ; all sources must be in the same tokens: ${{data.vocab_size}}")
    return next(iter(sizes.values()), None)
