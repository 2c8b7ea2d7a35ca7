"""Finds a rank that computes wrongly: ranks compute leaves of each other again, and compare digests.

[Note: verification] A leaf is a function of weights, rows, seed and virtual rank ([Note: leaves] in
`buckets/gradient.py`), so another rank comes to the same bits. Before a verified step each rank computes a leaf of
another rank, as a step does, and discards it. In the step each rank notes digests of its own leaves. Before the update
all ranks exchange digests in one message: of these leaves, of all weights and optimizer state with replicas, and of
what gathers have brought, beside the shards of the owners. If leaves differ, all ranks compute the one in doubt again,
twice. A rank with several results is wrong, and so is one with another result than most of those with one.
"""

import socket
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache, partial
from typing import Any, NamedTuple

import torch
from torch.utils._pytree import tree_leaves, tree_map_only

from zerotrain.device.kinds import device_of
from zerotrain.engine.buckets.bucket import Bucket, TrainedBucket
from zerotrain.engine.engine import ZeroEngine
from zerotrain.engine.graphs import Calls, no_seed
from zerotrain.engine.step import MicroBatch, Weight
from zerotrain.errors import CorruptionError

# Digests: two sums over the bits of a tensor, by which ranks compare what they hold.
#
# For the words w[0], w[1], ... of a tensor a digest is (sum of w[i], sum of i * w[i]) modulo 2**64. If one word is
# wrong by d, the first sum is wrong by d and the second by i * d: two digests tell the place of one wrong word. A
# digest of a part, moved to its place, can be added to those of the other parts.


_WORDS = {1: torch.int8, 2: torch.int16, 4: torch.int32}
_CHUNK = 2**18
"""Words widened at a time."""


@cache
def _places(device: torch.device) -> torch.Tensor:
    return torch.arange(_CHUNK, device=device)


Digest = tuple[int, int]
"""On the host, as whole numbers of 64 bits with a sign."""


def sum_of(digests: Iterable[Digest]) -> Digest:
    """The digest of a tensor by those of its parts, each at its place."""
    first, second = (_signed(sum(numbers)) for numbers in zip(*digests, strict=True))
    return first, second


def word_nbytes(itemsize: int) -> int:
    """Bytes of a word of elements of so many bytes."""
    return min(itemsize, max(_WORDS))


@torch.no_grad()
def digest(values: torch.Tensor, start: int = 0) -> torch.Tensor:
    """(2,) int64, on the device of the values.

    Args:
        values: of any shape.
        start: place of its first element in a larger tensor.
    """
    words = values.detach().contiguous().view(-1).view(_WORDS[word_nbytes(values.itemsize)])
    first = start * values.itemsize // word_nbytes(values.itemsize)
    sums = torch.zeros(2, dtype=torch.int64, device=values.device)
    places = _places(values.device)
    for place in range(0, words.numel(), _CHUNK):
        chunk = words[place : place + _CHUNK].to(torch.int64)
        total = chunk.sum()
        sums[0] += total
        sums[1] += (chunk * places[: len(chunk)]).sum() + (first + place) * total
    return sums


def wrong_element(first: Sequence[int], second: Sequence[int], itemsize: int) -> int | None:
    """The place of the one element in which two tensors differ, by their digests; None: they differ in several."""
    difference, moment = (_signed(one - other) for one, other in zip(first, second, strict=True))
    if difference == 0 or abs(difference) >= 2**32 or moment % difference or moment // difference < 0:
        return None
    return moment // difference * word_nbytes(itemsize) // itemsize


def _signed(number: int) -> int:
    """The number of 64 bits with a sign that it is modulo 2**64."""
    return (number + 2**63) % 2**64 - 2**63


# The comparison of the ranks.

_NUM_MORE = 2
"""Computations by each rank of a leaf in doubt."""


class Leaf(NamedTuple):
    """All that a virtual rank's gradient follows from, beside weights and seed."""

    virtual_rank: int
    micro_batches: Sequence[MicroBatch]
    weights: Sequence[Weight] | None


@dataclass(frozen=True)
class Corruption:
    """A disagreement of ranks about bits that they must have alike."""

    step: int
    """The step in which it was found. Nothing of it was kept."""
    what: str
    """Such as gradient, or weights."""
    parameter: str
    element: int | None
    """Place in the parameter's memory; None: several elements differ."""
    ranks: tuple[int, ...]
    """The ranks in the wrong; none if two disagree and nothing tells which."""
    places: tuple[str, ...]
    """The same with host and device, for people."""
    evidence: str

    def describe(self) -> str:
        """One sentence for the user."""
        element = "several elements" if self.element is None else f"element {self.element}"
        place = f"{self.what} of {self.parameter}, {element}, in step {self.step}"
        named = " and ".join(self.places)
        who = f"{named} computes or remembers wrongly" if named else "the ranks do not compute the same"
        return f"{who}: {place}: {self.evidence}; the step was dropped"


@dataclass(frozen=True)
class Replica:
    """A tensor along a bucket that several ranks hold alike."""

    what: str
    bucket: Bucket
    itemsize: int
    sums: torch.Tensor
    """Its digest, from the bucket's start."""
    owned: torch.Tensor | None = None
    """Digest of what this rank's own range of it must be. None: no rank owns a range."""
    stride: int = 1
    """The ranks with the same have so many from one to the next."""

    @property
    def digests(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Both, for the message."""
        return self.sums, torch.zeros_like(self.sums) if self.owned is None else self.owned


@dataclass(frozen=True)
class Turns:
    """The turns in which a rank computes leaves of the others: one of another rank in each verified step."""

    every: int
    """Steps from one verified step to the next."""
    rank: int
    size: int
    leaves: int
    """Virtual ranks of each rank."""

    def distance(self, step: int) -> int:
        """Ranks from one to the rank whose leaf it computes in a step, from 1. A single rank computes its own."""
        return 1 + step // self.every % (self.size - 1) if self.size > 1 else 0

    def virtual_ranks(self, step: int) -> list[int]:
        """The leaf for this rank, one in a list; [] if the step is not verified."""
        if step % self.every:
            return []
        rank = (self.rank + self.distance(step)) % self.size
        return [rank * self.leaves + step // self.every % self.leaves]


class Verification:
    """Compares the ranks of an engine in some of its steps.

    Args:
        every: steps from one verified step to the next.
    """

    num_steps = 0
    """Verified so far, without a difference."""
    last_step = 0
    """The last of them, or the step that the training began at."""

    def __init__(self, engine: ZeroEngine, every: int) -> None:
        self._engine, self._world = engine, engine.world
        self.turns = Turns(every, engine.world.rank, engine.world.size, len(engine.virtual_ranks))
        self._noted: dict[Bucket, list[torch.Tensor]] = {}
        """(parameters, 2) of each leaf of a bucket."""
        self._itemsizes: dict[Bucket, int] = {}
        """Bytes of an element of the last of these leaves."""

    def begin(
        self, step: int, leaf: Leaf, micro_batches: Sequence[MicroBatch], arguments: Mapping[str, Any]
    ) -> Callable[[], None]:
        """Compute a leaf of another rank, before the step; collective.

        Args:
            leaf: of `turns`.
            micro_batches, arguments: of the `train_step` to come.

        Returns:
            For `train_step(before_update=...)`. It raises a CorruptionError on all ranks if they differ.
        """
        replicas, number = list(self._replicas()), leaf.virtual_rank % self.turns.leaves
        calls = Calls(arguments.get("before_each", no_seed), with_outputs=arguments.get("with_outputs", False))
        again = self._compute(leaf, calls, replicas)
        self._watch()
        per_leaf = len(leaf.micro_batches)
        where, weights = slice(number * per_leaf, (number + 1) * per_leaf), arguments.get("weights")
        own = micro_batches[where], None if weights is None else weights[where]

        def compare() -> None:
            computed = self._take_digests(slice(number, number + 1 if number < self.turns.leaves - 1 else None))
            held = [sums for replica in replicas for sums in replica.digests]
            rows = self._exchange([digest(computed), digest(again), *held])
            corruption = self._compare_replicas(step, replicas, rows)
            distance, size = self.turns.distance(step), self._world.size
            doubts = [rank for rank in range(size) if rows[rank][1] != rows[(rank + distance) % size][0]]
            if corruption is None and doubts:
                facts = {"computed": computed, "again": again, "leaf": tuple(leaf), "own": _bits(own)}
                on_host = tree_map_only(torch.Tensor, torch.Tensor.cpu, facts)
                everyone = self._engine.collectives.gather_objects(on_host, name="leaves in doubt")
                checker, owner = doubts[0], (doubts[0] + distance) % size
                results = {owner: [rows[owner][0]]}
                results.setdefault(checker, []).append(rows[checker][1])
                corruption = self._arbitrate(step, everyone[checker], everyone[owner], results, calls)
            if corruption is not None:
                raise CorruptionError(corruption.describe(), asdict(corruption))
            self.num_steps, self.last_step = self.num_steps + 1, step

        return compare

    # ---- the digests of this rank

    def _compute(self, leaf: Leaf, calls: Calls, replicas: list[Replica]) -> torch.Tensor:
        """(parameters, 2) the digests of a leaf, computed now.

        Args:
            replicas: gets what gathers have brought meanwhile.
        """
        buckets, gathered = self._engine.schedule.buckets, dict[Bucket, list[torch.Tensor]]()

        def note_weights(bucket: Bucket, weights: torch.Tensor) -> None:
            gathered.setdefault(bucket, []).append(digest(weights))

        self._watch()
        for bucket in buckets if self._engine.plan.shards_parameters else ():
            bucket.weights.watch = partial(note_weights, bucket)
        try:
            self._engine.run_discarded(*leaf, calls)
        finally:
            for bucket in buckets:
                bucket.weights.watch = None
        for bucket, brought in gathered.items():
            weights, sums = bucket.weights, torch.stack(brought).sum(0)
            owned = None if weights.home.moves else digest(weights.shard, weights.own.start) * len(brought)
            replicas.append(Replica("gathered weights", bucket, weights.shard.itemsize, sums, owned))
        return self._take_digests(slice(None))

    def _watch(self) -> None:
        """Note digests of leaves from now on."""
        for bucket in self._engine.schedule.trained:
            self._noted[bucket] = []
            bucket.gradient.watch = partial(self._note, bucket)

    def _note(self, bucket: Bucket, leaf: torch.Tensor) -> None:
        self._itemsizes[bucket] = leaf.itemsize
        self._noted[bucket].append(torch.stack([digest(leaf[slot.offset : slot.end]) for slot in bucket.layout.slots]))

    def _take_digests(self, where: slice) -> torch.Tensor:
        """(parameters, 2) of the leaf that is there among those noted. The last of a rank may come in several parts."""
        digests = []
        for bucket in self._engine.schedule.trained:
            bucket.gradient.watch = None
            digests.append(torch.stack(self._noted.pop(bucket)[where]).sum(0))
        return torch.cat(digests)

    def _replicas(self) -> Iterator[Replica]:
        """All that lies at other ranks as at this one, between two steps."""
        plan, inside = self._engine.plan, self._engine.collectives.inside
        for bucket in self._engine.schedule.buckets:
            weights, itemsize = bucket.weights, bucket.weights.shard.itemsize
            update = bucket.update if isinstance(bucket, TrainedBucket) and not bucket.update.is_away else None
            if not plan.shards_parameters:
                weights.finish_gather()
                owned = None
                if update is not None and update.has_copy and plan.shards_optimizer:
                    owned = digest(update.current_weight().to(weights.shard.dtype), weights.own.start)
                yield Replica("weights", bucket, itemsize, digest(weights.model_weight.tensor), owned)
            elif weights.refresh is not None and not weights.home.moves:
                weights.refresh.finish()
                sums = digest(weights.part, bucket.layout.part(self._world.rank).start)
                yield Replica("weights", bucket, itemsize, sums, stride=inside.size)
            if update is None or plan.shards_optimizer:
                continue
            if update.has_copy:
                master = update.current_weight()
                yield Replica("master weights", bucket, master.itemsize, digest(master))
            states = [(span.where.start, update.span_state(span)) for span in update.spans]
            if update.whole is not None:
                states += [
                    (bucket.layout.slots[slot].offset, update.whole_state(slot)) for slot in update.whole.targets
                ]
            for start, state in states:
                for name, value in state.items():
                    if isinstance(value, torch.Tensor) and value.ndim:
                        yield Replica(name, bucket, value.itemsize, digest(value, start))

    # ---- the comparison, the same on all ranks

    def _exchange(self, digests: Sequence[torch.Tensor]) -> list[list[Digest]]:
        """The digests of all ranks, a row for each."""
        rows = self._engine.collectives.gather_small(torch.stack(list(digests)).view(-1), name="verification")
        return [[(first, second) for first, second in row] for row in rows.view(self._world.size, -1, 2).tolist()]

    def _compare_replicas(
        self, step: int, replicas: Sequence[Replica], rows: Sequence[Sequence[Digest]]
    ) -> Corruption | None:
        """The first of the replicas that the ranks do not hold alike."""
        for number, replica in enumerate(replicas):
            place = 2 + 2 * number
            owned = None if replica.owned is None else sum_of(row[place + 1] for row in rows)
            for first in range(replica.stride):
                values = {rank: rows[rank][place] for rank in range(first, self._world.size, replica.stride)}
                if len({*values.values(), owned} - {None}) > 1:
                    return self._judge(step, replica, values, owned)
        return None

    def _judge(self, step: int, replica: Replica, values: Mapping[int, Digest], owned: Digest | None) -> Corruption:
        """Name the ranks that hold a replica wrongly: they differ from more than half of all, or from its owners."""
        right, votes, wrong = _majority({rank: [value] for rank, value in values.items()}, owned)
        size, layout, spec = len(values), replica.bucket.layout, replica.bucket.spec
        evidence = f"{votes} of {size} ranks have the same"
        if right is None:
            evidence = "two ranks differ, and no third one tells which is right"
        elif 2 * votes <= size:
            evidence = "its owners have what the other rank has"
        reference = right or values[min(values)]
        other = next((value for value in values.values() if value != reference), owned)
        assert other is not None
        place = wrong_element(other, reference, replica.itemsize)
        if not wrong and right is not None and place is not None:
            wrong = [rank for rank in range(size) if layout.shard(rank).start <= place < layout.shard(rank).stop]
            evidence = "all ranks have the same, and its owner has kept something else"
        name, element = spec.parameters[0].names[0] if len(spec.parameters) == 1 else spec.name, None
        for managed, slot in zip(spec.parameters, layout.slots, strict=True):
            if place is not None and slot.offset <= place < slot.end:
                name, element = managed.names[0], place - slot.offset
        return self._corruption(step, replica.what, name, element, wrong, evidence)

    def _arbitrate(
        self,
        step: int,
        checker: Mapping[str, Any],
        owner: Mapping[str, Any],
        results: dict[int, list[Digest]],
        calls: Calls,
    ) -> Corruption:
        """Let all ranks compute a leaf in doubt again, and say which are wrong about it. Collective."""
        self._engine.zero_grad()
        move = partial(torch.Tensor.to, device=self._world.device)
        leaf, trained = Leaf(*tree_map_only(torch.Tensor, move, checker["leaf"])), self._engine.schedule.trained
        unlike = int((checker["again"] != owner["computed"]).any(dim=1).nonzero()[0])
        places = [(managed.names[0], bucket) for bucket in trained for managed in bucket.spec.parameters]
        name, bucket = places[unlike]
        first, second = (facts[unlike].tolist() for facts in (owner["computed"], checker["again"]))
        place = wrong_element(first, second, self._itemsizes[bucket])
        if _bits(leaf[1:]) != owner["own"]:
            evidence = f"ranks {sorted(results)} have read other rows for virtual rank {leaf.virtual_rank}"
            return self._corruption(step, "gradient", name, place, [], evidence)
        for _ in range(_NUM_MORE):
            for rank, (value,) in enumerate(self._exchange([digest(self._compute(leaf, calls, []))])):
                results.setdefault(rank, []).append(value)
        _, votes, wrong = _majority(results)
        evidence = f"computed again, {votes} of {self._world.size} ranks agree"
        for rank in wrong:
            how = "another result each time" if len(set(results[rank])) == 1 else "several results"
            evidence += f", rank {rank} comes to {how}"
        if not wrong:
            evidence = "computed again, each rank comes to its own result, and none has most ranks for it"
        return self._corruption(step, "gradient", name, place, wrong, evidence)

    def _corruption(
        self, step: int, what: str, parameter: str, element: int | None, wrong: Sequence[int], evidence: str
    ) -> Corruption:
        """With the places of the ranks. Collective."""
        device = device_of(self._world.device).name.partition(",")[0]
        place = f"rank {self._world.rank} on {socket.gethostname()} ({device})"
        places = self._engine.collectives.gather_objects(place, name="places of the ranks")
        return Corruption(step, what, parameter, element, tuple(wrong), tuple(map(places.__getitem__, wrong)), evidence)


def _bits(values: Any) -> list[Any]:
    """All of the bits in rows and their weights, to be compared."""
    leaves = tree_leaves(values)
    return [digest(leaf).tolist() if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]


def _majority(
    results: Mapping[int, Sequence[Digest]], owned: Digest | None = None
) -> tuple[Digest | None, int, list[int]]:
    """(right result, ranks that have it, ranks in the wrong). A rank with several results is wrong. Right is the result
    of more than half of the others, else the owners', if any has it; None: nothing tells.

    Args:
        results: of each rank.
    """
    steady = Counter(values[0] for values in results.values() if len(set(values)) == 1)
    common, votes = steady.most_common(1)[0] if steady else (None, 0)
    right = common if 2 * votes > steady.total() else owned if owned in steady else None
    return right, votes, [rank for rank, values in sorted(results.items()) if set(values) != {right or values[0]}]
