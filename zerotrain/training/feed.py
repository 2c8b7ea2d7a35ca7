"""Feeds a rank: the run's place in the data, the next micro-batches, and their weights in the loss."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any

import torch

from zerotrain.data import fetch
from zerotrain.data.batches import GlobalBatchSampler, RowsToRead
from zerotrain.data.loader import DeviceCopies, StepLoader, reader_of
from zerotrain.engine.engine import ZeroEngine
from zerotrain.errors import ConfigError
from zerotrain.training.sameness import require_same_data


@dataclass(eq=False)
class TrainingFeed:
    """The micro-batches of this rank, step by step. Arguments are those of the `Trainer`."""

    dataset: Any
    validation_sets: Mapping[str, Any]
    _: KW_ONLY
    engine: ZeroEngine
    seed: int
    micro_batch_size: int
    num_micro_batches: int
    first_step: int
    """Steps done before."""
    num_workers: int
    collate: fetch.Collate | None
    loss_over: str = fetch.AUTO
    reads_tokens: bool = False
    """Whether the rows of the last step were of tokens."""
    counts: tuple[list[float], list[int]] = ([], [])
    """(weights in the mean loss, labels that count) of the micro-batches of the last step."""
    further: tuple[list[Any], Sequence[float | torch.Tensor] | None] = ([], None)
    """(inputs of each micro-batch, weight of each) of virtual ranks of others in the last step."""

    def __post_init__(self) -> None:
        train, self._world = self.dataset.train, self.engine.world
        self._vocab_size = fetch.tokens_known(self.engine.module)
        self._counted, self._weigh = fetch.weighing_of(self.loss_over, self.engine.module)
        self.tokens_per_sequence: int | None = getattr(train, "tokens_per_sequence", None)
        """Labels that count in each sequence, where all have the same number."""
        # Rows weigh the same where they have the same number of labels, but by two ways to count.
        by_labels = self._counted not in (fetch.MODEL, fetch.SUM, "shifted_labels")
        self._weighs_alike = self.tokens_per_sequence is not None and by_labels
        self.sampler = GlobalBatchSampler(
            num_sequences=len(train),
            micro_batch_size=self.micro_batch_size,
            num_micro_batches=self.num_micro_batches,
            rank=self._world.rank,
            num_ranks=self._world.size,
            seed=self.seed,
            leaves_per_rank=len(self.engine.virtual_ranks),
            order=getattr(train, "order", None),
        )
        self.sampler.rows_consumed = self.first_step * self.sampler.global_batch_size

    def position(self) -> dict[str, float | None]:
        """The data read so far: the `epoch`, `samples` (rows) and `tokens` (labels); None of those if
        its sequences do not tell."""
        num_rows, tokens = self.sampler.rows_consumed, self.tokens_per_sequence
        return {
            "epoch": num_rows / self.sampler.num_sequences,
            "samples": num_rows,
            "tokens": None if tokens is None else num_rows * tokens,
        }

    def agree(
        self, state: Mapping[str, Any] | None, checked: Mapping[str, Any] | None, like: Mapping[str, Any] | None = None
    ) -> None:
        """Compare the data with that of the other ranks, of the process that checked it and of the resumed run, and go
        on at the row of that run. Collective.

        Args:
            state: what `sampler.state_dict` gave in that run; None: there was none.
            checked: see `require_same_data`.
            like: see `fingerprint_of`; None: `checked`.

        Raises:
            ConfigError: on every rank, where it is another.
        """
        fingerprint = self._fingerprint(like or checked)
        if checked is None and self._world.size > 1:
            fingerprint = self._fingerprint(self.engine.collectives.gather_objects(fingerprint, name="data")[0])
        require_same_data(self.engine.collectives, fingerprint, checked)
        if state is not None:
            theirs = state.get("fingerprint")
            self.sampler.fingerprint = fingerprint if fingerprint == theirs else self._fingerprint(theirs)
            try:
                self.sampler.load_state_dict(state)
            except ValueError as error:
                raise ConfigError(f"data: {error}") from error
        self.sampler.fingerprint = fingerprint

    def _fingerprint(self, like: Mapping[str, Any] | None) -> fetch.Fingerprint:
        with fetch.in_time(self._world.timeout_s):
            return fetch.fingerprint_of(self.dataset, self.sampler.seed, self.validation_sets, like)

    def loader(self, num_steps: int, further: Callable[[int], Sequence[int]] = lambda step: ()) -> StepLoader:
        """Reads the next so many steps.

        Args:
            further: see `StepLoader`.
        """
        return StepLoader(
            self.dataset.train,
            self.sampler,
            device=self._world.device,
            num_steps=num_steps,
            first_step=self.first_step,
            num_workers=self.num_workers,
            collate=self.collate,
            vocab_size=self._vocab_size,
            timeout_s=self._world.timeout_s,
            weigh=self._weigh,
            further=further,
        )

    def next_step(self, loader: StepLoader) -> tuple[list[Any], Sequence[float | torch.Tensor] | None, torch.Tensor]:
        """(inputs of each micro-batch, weight of each, [labels that count, tokens] over all ranks) of the next step.
        Tokens count with their padding; there are 0 in rows of something else.

        The engine takes the mean over virtual ranks, so a micro-batch with n of what the losses of the global batch
        are means over weighs n * num_virtual_ranks / total. If all sequences have the same number, that is 1 / len, the
        engine's default; else the ranks must add up their counts. That is not done needlessly: the sum would wait
        behind the parameters still being gathered after the last step, which the engine hides behind the forward.
        Losses that are sums weigh num_virtual_ranks each: they are added up.

        A micro-batch of weight 0 says so as a number: the engine then lets nothing of it through, also where its loss
        is nan.
        """
        micro_batches, weights, num_labels = loader.next_step()
        num_own = self.num_micro_batches * self.sampler.leaves_per_rank
        self.counts = weights[:num_own], num_labels[:num_own]
        num_tokens = sum(map(fetch.num_tokens_of, micro_batches[:num_own]))
        self.reads_tokens = num_tokens > 0
        inputs = [fetch.as_inputs(batch) for batch in micro_batches]
        inputs, further = inputs[:num_own], inputs[num_own:]
        self.further = further, None
        if self._weighs_alike and self.tokens_per_sequence is not None:
            of_all = (self.sampler.global_batch_size * self.tokens_per_sequence, num_tokens * self._world.size)
            return inputs, None, torch.tensor(of_all, dtype=torch.float64)
        own_weights, own_labels = self.counts
        sums = torch.tensor((sum(own_weights), sum(own_labels), num_tokens), dtype=torch.float64)
        total = self._world.sum(sums.to(self._world.device, non_blocking=True))
        self.further = further, self._parts_of(weights[num_own:], total[0])
        return inputs, self._parts_of(own_weights, total[0]), total[1:]

    def leaf(self, virtual_rank: int) -> tuple[list[Any], list[float | torch.Tensor] | None]:
        """(inputs of each micro-batch, weight of each) of one virtual rank in the next step, read here and alone. If
        sequences differ in what they weigh, it reads all of the step to weigh them.

        Raises:
            ValueError: there is no such virtual rank.
            RowError: a row could not be read.
        """
        numbers, position = range(self.sampler.num_virtual_ranks), self.sampler.rows_consumed
        if virtual_rank not in numbers:
            raise ValueError(f"virtual_rank={virtual_rank}: there are {len(numbers)}; give 0 to {numbers[-1]}")
        read = list(self._read(self.sampler.micro_batches(position, [virtual_rank])))
        inputs = self._inputs([batch for batch, _ in read])
        if self._weighs_alike:
            return inputs, None
        of_all = sum(weight for _, weight in self._read(self.sampler.micro_batches(position, numbers)))
        total = torch.tensor(of_all, dtype=torch.float64, device=self._world.device)
        return inputs, self._parts_of([weight for _, weight in read], total)

    def rows_of(self, virtual_rank: int, micro_batch: int) -> RowsToRead:
        """The rows of one micro-batch of the next step."""
        return self.sampler.micro_batches(self.sampler.rows_consumed, [virtual_rank])[micro_batch]

    def read(self, rows: RowsToRead) -> Any:
        """The inputs of a micro-batch of any rows, read here and alone; RowError where one cannot be read."""
        [inputs] = self._inputs([batch for batch, _ in self._read([rows])])
        return inputs

    def _read(self, micro_batches: Iterable[RowsToRead]) -> Iterator[tuple[Any, float]]:
        """(batch, what it weighs) of each, in the host's memory; for the next step."""
        reader = reader_of(self.dataset.train, self.sampler.seed, self.collate, self._vocab_size)
        step = 1 + self.sampler.rows_consumed // self.sampler.global_batch_size
        return ((batch, self._weigh(batch, num)) for batch, num in (reader((rows, step)) for rows in micro_batches))

    def _inputs(self, batches: list[Any]) -> list[Any]:
        """The inputs of the model in each batch, on the device."""
        copies = DeviceCopies(self._world.device)
        return [fetch.as_inputs(batch) for batch in copies.finish(copies.start(batches))]

    def step_done(self) -> None:
        """The last step read is trained."""
        self.sampler.rows_consumed += self.sampler.global_batch_size

    def advice_on_waiting(self) -> str:
        """Advice for a run slowed down by its data."""
        if self.num_workers:
            return f"data.num_workers={2 * self.num_workers} reads with more processes"
        if not fetch.draws(self.dataset.train, self.collate):
            return "data.num_workers=2 reads with processes, where one thread is not enough"
        return (
            "data.num_workers=2 reads with processes; or a dataset that draws no random numbers says `draws = False`, "
            "and is read by a thread"
        )

    def _parts_of(self, weights: list[float], total: torch.Tensor) -> list[float | torch.Tensor]:
        of_all = torch.ones_like(total) if self._counted == fetch.SUM else torch.where(total > 0, total, 1.0)
        size = self.sampler.num_virtual_ranks
        return [(weight * size / of_all).float() if weight else 0.0 for weight in weights]
