"""The state as a save found it, while the training that goes on changes it: read where it lies, or from copies.

State does not change in forward and backward, so the thread that writes reads the live tensors, bucket by bucket in the
order of updates. Before a bucket changes, its unwritten parts are copied; the change waits if copies would take more
memory than they may.
"""

import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from functools import partial

import torch
from torch import nn

from zerotrain.checkpoint.tensor_file import CHUNK_NBYTES, Entry, flat_bytes
from zerotrain.engine.buckets.bucket import Bucket
from zerotrain.engine.state.saving.chunks import ChunkReader
from zerotrain.errors import CheckpointError, ZeroTrainError


class Snapshot:
    """Gives the bytes of entries to one thread, while another trains.

    Args:
        entries: of each bucket what this rank saves, the live memory; buckets without entries may be left out.
        staging_nbytes: that copies may take at a time; None for what the largest bucket takes.
        reader: reads on the thread that writes.
    """

    held_s = 0.0
    """How long changes have waited here, for copies and for room."""
    copied_nbytes = 0

    def __init__(
        self, entries: Mapping[Bucket, Sequence[Entry]], staging_nbytes: int | None, reader: ChunkReader
    ) -> None:
        self._reader = reader
        self._bucket_of = {entry: bucket for bucket, own in entries.items() for entry in own}
        self._unread = {bucket: [*own] for bucket, own in entries.items()}
        """Entries that are not read to their end, as long as the bucket may change."""
        self._num_read: dict[Entry, int] = {}
        """Bytes read of entries that are begun."""
        self._copies: dict[Entry, torch.Tensor] = {}
        """Flat bytes of entries from where they were read to; whose bucket has changed since."""
        self._under_way: Bucket | None = None
        """The bucket of whose live memory a chunk is being read."""
        self._versions = {bucket: _versions(bucket) for bucket, own in entries.items() if _is_exposed(bucket, own)}
        """Versions of the parameters that users can write to, until the engine changes them itself."""
        largest = max((_nbytes(own) for own in entries.values()), default=0)
        self._staging_nbytes = largest if staging_nbytes is None else staging_nbytes
        self._held_nbytes = 0
        self._error: ZeroTrainError | None = None
        self._is_closed = False
        self._changed = threading.Condition()
        for bucket in entries:
            bucket.weights.before_change = partial(self.keep, bucket)

    # ---- on the thread that trains

    def keep(self, bucket: Bucket) -> None:
        """The bucket is about to change: copy what is not read of it, as soon as there is room."""
        started_s = time.perf_counter()
        with self._changed:
            self._require_unwritten(bucket)
            self._versions.pop(bucket, None)
            self._changed.wait_for(lambda: self._is_closed or (self._under_way is not bucket and self._fits(bucket)))
            if not self._is_closed:
                for entry in self._unread.pop(bucket, ()):
                    self._copy(entry)
        bucket.weights.before_change = None
        self.held_s += time.perf_counter() - started_s

    def wait_until_read(self) -> None:
        """Wait until nothing is read of the state any more."""
        started_s = time.perf_counter()
        with self._changed:
            self._changed.wait_for(lambda: self._is_closed or not any(self._unread.values()))
            for bucket in self._versions:
                self._require_unwritten(bucket)
            self._versions.clear()  # what comes now is the engine's
        self.held_s += time.perf_counter() - started_s

    def stop(self, error: ZeroTrainError) -> None:
        """Let the thread that writes raise an error when it comes for the next chunk."""
        with self._changed:
            self._error = self._error or error

    def _fits(self, bucket: Bucket) -> bool:
        unread = self._unread.get(bucket, ())
        rest = _nbytes(unread) - sum(self._num_read.get(entry, 0) for entry in unread)
        return rest == 0 or self._held_nbytes + rest <= self._staging_nbytes

    def _copy(self, entry: Entry) -> None:
        if entry not in self._copies:
            start, bucket = self._num_read.get(entry, 0), self._bucket_of.get(entry)
            if entry.values.is_contiguous():
                rest = _at_rest(bucket, flat_bytes(entry.values)[start:])
            else:
                rest = flat_bytes(_at_rest(bucket, entry.values))[start:]
            self._hold(entry, rest.clone())
            self.copied_nbytes += rest.nbytes

    def _hold(self, entry: Entry, copy: torch.Tensor) -> None:
        self._copies[entry] = copy
        self._held_nbytes += copy.nbytes
        self._reader.was_copied(entry)

    # ---- on the thread that writes

    def chunks(self, entry: Entry) -> Iterator[memoryview]:
        """The bytes of an entry, some MiB at a time. Each is looked at before the next is asked for."""
        first = 0
        """Offset at which the copy begins, if there is one."""
        nbytes = entry.values.nbytes
        for start in range(0, nbytes, CHUNK_NBYTES):
            with self._changed:
                self._raise_error()
                bucket = self._bucket_of.get(entry)
                if not entry.values.is_contiguous():
                    self._copy(entry)  # or each chunk would copy all of it
                if entry in self._copies:
                    source = self._copies[entry]
                    first = nbytes - source.nbytes
                else:
                    source, self._under_way = flat_bytes(entry.values), bucket
            try:
                chunk = source[start - first : start - first + CHUNK_NBYTES]
                yield self._reader.read(entry, _at_rest(self._under_way, chunk))
            finally:
                with self._changed:
                    self._under_way = None
                    self._num_read[entry] = min(start + CHUNK_NBYTES, nbytes)
                    self._changed.notify_all()
        self._end(entry)

    def _end(self, entry: Entry) -> None:
        with self._changed:
            self._num_read.pop(entry, None)
            if (copy := self._copies.pop(entry, None)) is not None:
                self._held_nbytes -= copy.nbytes
            unread = self._unread.get(self._bucket_of[entry], []) if entry in self._bucket_of else []
            if entry in unread:
                unread.remove(entry)
            self._changed.notify_all()

    def require_unwritten(self) -> None:
        """All was read: make sure that nobody has written to a parameter meanwhile, which may be half in the file.

        Raises:
            CheckpointError: somebody has.
        """
        with self._changed:
            for bucket in self._versions:
                self._require_unwritten(bucket)
            self._raise_error()

    def close(self) -> None:
        """Nothing is read any more, all or not: let go of the memory, and of who waits."""
        with self._changed:
            self._is_closed = True
            for bucket in self._unread:
                bucket.weights.before_change = None
            for kept in (self._unread, self._copies, self._versions, self._num_read, self._bucket_of):
                kept.clear()
            self._changed.notify_all()

    def _require_unwritten(self, bucket: Bucket) -> None:
        if self._is_closed or (before := self._versions.get(bucket)) is None:
            return
        for managed, old, new in zip(bucket.spec.parameters, before, _versions(bucket), strict=True):
            if old != new:
                self._error = self._error or CheckpointError(
                    f"{managed.names[0]} was written in place while it was saved: wait for the save before you write, "
                    "or write through engine.load_state_dict(...)"
                )

    def _raise_error(self) -> None:
        if self._error is not None:
            raise self._error


def _at_rest(bucket: Bucket | None, values: torch.Tensor) -> torch.Tensor:
    """Not by the memory itself if a disk is behind it: that would come in and stay, and fail without an error."""
    return values if bucket is None else bucket.at_rest(values)


def _nbytes(entries: Sequence[Entry]) -> int:
    return sum(entry.values.nbytes for entry in entries)


def _is_exposed(bucket: Bucket, entries: Sequence[Entry]) -> bool:
    """Whether what is saved of a bucket lies in the memory that its parameters are views of."""
    open_to_all = bucket.weights.model_weight.tensor.untyped_storage().data_ptr()
    return any(entry.values.untyped_storage().data_ptr() == open_to_all for entry in entries)


def _versions(bucket: Bucket) -> list[int]:
    """PyTorch's count of the writes to each parameter."""
    parameters: list[nn.Parameter] = [managed.parameter for managed in bucket.spec.parameters]
    with torch._C.DisableTorchFunctionSubclass():  # which would complete those that are not ready
        return [parameter._version for parameter in parameters]
