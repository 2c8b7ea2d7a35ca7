"""An engine into a checkpoint: what each rank writes is planned together, and then a thread of each writes it."""

import atexit
import hashlib
import json
import os
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from msgspec import to_builtins

from zerotrain.checkpoint.folder import PartialFolder
from zerotrain.checkpoint.manifest import BUFFER, EXTRA_STATE, MAX_NBYTES, DescribedFile, Manifest, hash_of, head
from zerotrain.checkpoint.tensor_file import CHUNK_NBYTES, Entry, TensorFile, chunks, flat_bytes
from zerotrain.device.device import Event, lies_on_host
from zerotrain.device.kinds import device_of
from zerotrain.engine.buckets.bucket import Bucket
from zerotrain.engine.groups.hyperparameters import saved_group
from zerotrain.engine.state import named
from zerotrain.engine.state.named import Holdings
from zerotrain.engine.state.together import SharedError, attempt, exchange, joint, on_all, shared_error
from zerotrain.errors import CheckpointError, CommError, ConfigError, ZeroTrainError
from zerotrain.files.untrusted import MAX_DEPTH, UntrustedFileError, read_json

# Bytes of tensors in the host's memory, for a writing thread beside the training one.


class ChunkReader:
    """Reads from the host's memory without a copy, and from a GPU's through one buffer, on a stream of its own.

    Made on the training thread: the device finishes that thread's work until then before anything is read.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device_of(device)
        self._stream, self._begun = self._device.stream(), self._device.event()
        self._buffer = self._device.host_bytes(CHUNK_NBYTES)
        self._copied: dict[Entry, Event] = {}

    def was_copied(self, entry: Entry) -> None:
        """From now on the bytes of an entry are read from a copy, queued just now."""
        if not lies_on_host(entry.values):
            self._copied[entry] = self._device.event()

    def read(self, entry: Entry, source: torch.Tensor) -> memoryview:
        """Bytes of an entry, at most `CHUNK_NBYTES` of them: they stay until the next call."""
        if lies_on_host(source):
            return source.numpy().data
        target = self._buffer[: source.numel()]
        self._stream.copy(target, source, events=[self._copied.get(entry, self._begun)]).settle()
        return target.numpy().data


# The state at the begin of a save, while the training goes on and changes it: read where it lies, or from copies.
#
# State does not change in forward and backward, so the writing thread reads the live tensors, bucket by bucket in
# the order of updates. Before a bucket changes, its unwritten parts are copied; the change waits if copies would
# take more memory than they may.


class Snapshot:
    """Gives the bytes of entries to the writing thread, beside the training.

    Args:
        entries: of each bucket what this rank saves, the live memory; buckets without entries may be left out.
        staging_nbytes: of all copies at a time; None: as many as the largest bucket has.
        reader: reads on the writing thread.
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
        """Entries not read to their end, as long as the bucket may change."""
        self._num_read: dict[Entry, int] = {}
        """Bytes read of begun entries."""
        self._copies: dict[Entry, torch.Tensor] = {}
        """The unread bytes of entries, flat, from before their bucket changed."""
        self._under_way: Bucket | None = None
        """The bucket whose live memory is being read."""
        self._versions: dict[Bucket, list[int]] = {}
        """Versions of parameters within the users' reach, until the engine changes them itself."""
        largest = max((_nbytes(own) for own in entries.values()), default=0)
        self._staging_nbytes = largest if staging_nbytes is None else staging_nbytes
        self._held_nbytes = 0
        self._error: ZeroTrainError | None = None
        self._is_closed = False
        self._changed = threading.Condition()

    # ---- on the training thread

    def begin(self) -> None:
        """From now on it is read: be asked before a bucket changes."""
        for bucket, own in self._unread.items():
            open_to_all = bucket.weights.model_weight.tensor.untyped_storage().data_ptr()
            if any(entry.values.untyped_storage().data_ptr() == open_to_all for entry in own):
                self._versions[bucket] = _versions(bucket)
            bucket.weights.before_change = partial(self.keep, bucket)

    def keep(self, bucket: Bucket) -> None:
        """The bucket is about to change: copy its unread bytes, as soon as there is room."""
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
            self._require_unwritten(*self._versions)
            self._versions.clear()  # what comes now is the engine's
        self.held_s += time.perf_counter() - started_s

    def stop(self, error: ZeroTrainError) -> None:
        """Let the writing thread raise an error when it comes for the next chunk."""
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
            self._copies[entry] = rest.clone()
            self._held_nbytes += rest.nbytes
            self.copied_nbytes += rest.nbytes
            self._reader.was_copied(entry)

    # ---- on the writing thread

    def chunks(self, entry: Entry) -> Iterator[memoryview]:
        """The bytes of an entry, some MiB at a time. Each is looked at before the next is asked for."""
        copy_start = 0
        """Offset at which the copy begins, if there is one."""
        nbytes = entry.values.nbytes
        for start in range(0, nbytes, CHUNK_NBYTES):
            with self._changed:
                if self._error is not None:
                    raise self._error
                bucket = self._bucket_of.get(entry)
                if not entry.values.is_contiguous():
                    self._copy(entry)  # or each chunk would copy all of it
                if entry in self._copies:
                    source = self._copies[entry]
                    copy_start = nbytes - source.nbytes
                else:
                    source, self._under_way = flat_bytes(entry.values), bucket
            try:
                chunk = source[start - copy_start : start - copy_start + CHUNK_NBYTES]
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
        """All was read: make sure that nobody has written to a parameter meanwhile: half of it may be in the file.

        Raises:
            CheckpointError: somebody has.
        """
        with self._changed:
            self._require_unwritten(*self._versions)
            if self._error is not None:
                raise self._error

    def close(self) -> None:
        """Nothing is read any more, all or not: let go of the memory, and of waiting changes."""
        with self._changed:
            self._is_closed = True
            for bucket in self._unread:
                bucket.weights.before_change = None
            for collection in (self._unread, self._copies, self._versions, self._num_read, self._bucket_of):
                collection.clear()
            self._changed.notify_all()

    def _require_unwritten(self, *buckets: Bucket) -> None:
        for bucket in buckets if not self._is_closed else ():
            parameters, versions = bucket.spec.parameters, self._versions.get(bucket, ())
            for managed, old, new in zip(parameters, versions, _versions(bucket), strict=False):
                if old != new:
                    self._error = self._error or CheckpointError(
                        f"{managed.names[0]} was written in place while it was saved: wait for the save before you "
                        "write, or write through engine.load_state_dict(...)"
                    )


def _at_rest(bucket: Bucket | None, values: torch.Tensor) -> torch.Tensor:
    """From the disk if the bucket lies there: by the memory itself it would come in and stay, and fail silently."""
    return values if bucket is None else bucket.at_rest(values)


def _nbytes(entries: Sequence[Entry]) -> int:
    return sum(entry.values.nbytes for entry in entries)


def _versions(bucket: Bucket) -> list[int]:
    """PyTorch's count of the writes to each parameter."""
    parameters: list[torch.nn.Parameter] = [managed.parameter for managed in bucket.spec.parameters]
    with torch._C.DisableTorchFunctionSubclass():  # it would complete unready ones
        return [parameter._version for parameter in parameters]


# The part of a save that goes on beside the training: each rank writes its file, and rank 0 gives the folder its
# name.
#
# The collectives belong to the training. So the ranks leave each other notes: how far each has come, that one has
# failed, how it ended.


LEFT = "nothing was saved, what was there before is as it was, and training can go on"
MAX_PAUSE_S = 0.25
"""Between two looks at the notes."""
_STOP, _END, _NUM_WRITTEN = "stop", "end", "written"


DESCRIBED = "described-{:05d}.json"
"""Name of a rank's file with the description of its tensors for rank 0: too much for a note. Reading removes it."""
PROCESS_ENDED = "its process ended before the save was done; call wait() on what engine.begin_save returns"


class _EndedByOthersError(Exception):
    """Another rank has failed, and this one need not go on."""


class Writing:
    """One rank's part, for a thread of its own.

    Args:
        messages: those of the plans of all ranks.
    """

    def __init__(self, plan: "_Plan", messages: Sequence[Mapping[str, Any]]) -> None:
        collectives = plan.holdings.collectives
        self.path = plan.arguments.target
        """Path of the checkpoint."""
        self.folder = Path(messages[0]["folder"])
        """Its name while it is written."""
        self.file = plan.file(messages)
        self.snapshot = Snapshot(plan.own, plan.arguments.staging_nbytes, ChunkReader(collectives.world.device))
        self.notes = collectives.notes(f"save/{messages[0]['token']}")
        self.rank, self.num_ranks = plan.rank, len(messages)
        self.partial = plan.partial
        """On rank 0: it gives the folder its name, or removes it."""
        self.content = {} if plan.partial is None else plan.content(messages)
        """The manifest's content but for the entries of the ranks' files."""
        self.process_ends = threading.Event()
        self._heard: dict[int, tuple[Any, float]] = {}
        """The last note of other ranks, and since when there is no newer one."""

    def run(self) -> tuple[SharedError | None, BaseException | None]:
        """Write and wait for the others. Returns why the save has failed, the same on all ranks, and the error of this
        rank itself."""
        error: BaseException | None = None
        try:
            self._write()
        except BaseException as cause:
            error = cause
        finally:
            self.snapshot.close()
        try:
            return self._settled(error), None if isinstance(error, _EndedByOthersError) else error
        except BaseException as cause:  # the store is gone, and with it all notes of the others
            if self.partial is not None:
                self.partial.remove()
            return self._joint([(self.rank, shared_error(cause))]), cause

    def _write(self) -> None:
        for nbytes in self.file.write(self.folder, self.snapshot.chunks):
            self.notes.leave(str(self.rank), nbytes)
            if self.notes.read(_STOP) is not None:
                raise _EndedByOthersError
        self.snapshot.require_unwritten()
        if self.rank > 0:
            described = to_builtins(self.file.described(self.rank), enc_hook=str)  # `FileName` is a text of its own
            (self.folder / DESCRIBED.format(self.rank)).write_text(json.dumps(described))

    def _settled(self, error: BaseException | None) -> SharedError | None:
        """Tell the others how it went here; return how it went for all."""
        failure = None if error is None or isinstance(error, _EndedByOthersError) else shared_error(error)
        if failure is not None:
            self.notes.leave(_STOP, self.rank)
        self.notes.leave(f"error {self.rank}", [failure])
        self.notes.count(_NUM_WRITTEN, 1)
        if self.partial is None:
            return self._await_end()
        failed = self._await_all()
        if not failed:
            try:
                _add_files(self.content, [self._described_by(rank) for rank in range(self.num_ranks)])
                self.partial.publish(Manifest(self.content))
            except Exception as cause:
                failed = [(0, shared_error(cause))]
        end = None
        if failed:
            self.partial.remove()
            end = self._joint(failed)
        with suppress(CommError):  # nobody is left to be told, and the checkpoint is there all the same
            self.notes.leave(_END, [end])
        return end

    def _await_all(self) -> list[tuple[int, SharedError]]:
        """On rank 0: wait until no rank writes any more. Returns the failed ones, each with its error."""
        for number in self._moments():
            if self.notes.count(_NUM_WRITTEN) == self.num_ranks:
                break
            if self.process_ends.is_set():
                return [(0, shared_error(CheckpointError(PROCESS_ENDED)))]
            if number % 4 == 0:  # each look at each rank goes over the network
                self.notes.leave("0", f"waiting {number}")
                for rank in range(1, self.num_ranks):
                    silence = self._silence(rank)
                    if silence is not None and self.notes.read(f"error {rank}") is None:
                        self.notes.leave(_STOP, 0)
                        return [(rank, silence)]
        errors = {rank: self.notes.read(f"error {rank}")[0] for rank in range(self.num_ranks)}
        return [(rank, SharedError(*error)) for rank, error in errors.items() if error is not None]

    def _await_end(self) -> SharedError | None:
        """On all ranks but 0: learn from it how the save ended."""
        for number in self._moments():
            if (end := self.notes.read(_END)) is not None:
                return None if end[0] is None else SharedError(*end[0])
            if self.process_ends.is_set():
                return self._joint([(self.rank, shared_error(CheckpointError(PROCESS_ENDED)))])
            if number % 4 == 0 and (silence := self._silence(0)) is not None:
                return self._joint([(0, silence)])
        raise AssertionError

    def _silence(self, rank: int) -> SharedError | None:
        """The message about a rank after too long a time without a new note of it; None before."""
        note, now_s = self.notes.read(str(rank)), time.monotonic()
        former, since_s = self._heard.get(rank, (note, now_s))
        if note != former:
            since_s = now_s
        self._heard[rank] = note, since_s
        if now_s - since_s <= self.notes.timeout_s:
            return None
        return shared_error(
            CheckpointError(
                f"nothing was heard of it for {self.notes.timeout_s:g} s: its process is gone, or its disk does not "
                "answer"
            )
        )

    def _described_by(self, rank: int) -> DescribedFile:
        if rank == 0:
            return self.file.described(0)
        path = self.folder / DESCRIBED.format(rank)
        try:
            described: DescribedFile = read_json(path, DescribedFile, max_nbytes=MAX_NBYTES)
        except UntrustedFileError as error:
            raise CheckpointError(f"{path} is not what rank {rank} has written: {error}") from None
        except FileNotFoundError:
            raise CheckpointError(
                f"{path} is missing on the machine of rank 0: all machines of a run must reach one folder under this "
                "name"
            ) from None
        path.unlink()
        return described

    def _joint(self, failed: list[tuple[int, SharedError]]) -> SharedError:
        return joint(failed, self.num_ranks, doing=f"saving {self.path}", outcome=LEFT)

    def _moments(self) -> Iterator[int]:
        """Numbers of the looks at the notes: often at first, then four times a second."""
        pause_s, number = 0.002, 0
        while True:
            yield number
            self.process_ends.wait(pause_s)
            pause_s, number = min(1.3 * pause_s, MAX_PAUSE_S, self.notes.timeout_s / 20), number + 1


MAX_NESTED = MAX_DEPTH - 14
"""Most dicts and lists in each other in a save: a manifest has more around them, and is read up to `MAX_DEPTH`."""


@dataclass(frozen=True, kw_only=True)
class SaveArguments:
    """The arguments of `begin_save`."""

    path: str | os.PathLike[str]
    extra: Any
    config: Any
    own: Any
    staging_nbytes: int | None
    progress: Mapping[str, Any]
    """"step", and other counts of the engine; values for JSON."""

    @property
    def target(self) -> Path:
        """The folder, absolute."""
        return Path(os.path.abspath(self.path))


def prepare(arguments: SaveArguments, holdings: Holdings, settle_former: Callable[[], None]) -> Writing:
    """Do all of a save but the writing. Collective.

    Args:
        settle_former: waits for the save before this one, and raises its error if nobody has read it.
    """
    collectives, doing = holdings.collectives, f"saving {arguments.target}"
    plan, error = attempt(lambda: _Plan(arguments, holdings, settle_former))
    try:
        messages = exchange(collectives, None if plan is None else plan.message, error, doing=doing, outcome=LEFT)
        assert plan is not None
        return on_all(collectives, partial(Writing, plan, messages), doing=doing, outcome=LEFT)
    except BaseException:
        if plan is not None and plan.partial is not None:
            plan.partial.remove()
        raise


def facts_of(arguments: SaveArguments) -> dict[str, object]:
    """The arguments to be equal on all ranks, by name.

    Raises:
        ConfigError: something of it cannot be saved.
    """
    for name, value in (("extra", arguments.extra), ("config", arguments.config), ("own", arguments.own)):
        require_plain(value, name)
    if arguments.staging_nbytes is not None and arguments.staging_nbytes < 0:
        raise ConfigError(f"engine.begin_save: staging_nbytes is {arguments.staging_nbytes}; give 0 or more bytes")
    extra, config = (json.dumps(value, sort_keys=True) for value in (arguments.extra, arguments.config))
    return {"path": arguments.target, "extra": extra, "config": config}


class _Plan:
    """A rank's part in a save, as found out without communication."""

    def __init__(self, arguments: SaveArguments, holdings: Holdings, settle_former: Callable[[], None]) -> None:
        settle_former()
        self.arguments, self.holdings, self.rank = arguments, holdings, holdings.collectives.shards.rank
        self.buffers = named.buffers(holdings.model, holdings.buckets)
        self.extra_states: dict[str, Any] = {}
        """Extra states of modules, by name. Rank 0's are saved."""
        for name, module in named.modules_with_extra_state(holdings.model):
            state = self.extra_states[name] = module.get_extra_state()
            if not isinstance(state, torch.Tensor):
                require_plain(state, name)
        named.require_known(holdings, {**self.buffers, **self.extra_states})
        self.own: dict[Bucket, list[Entry]] = {}
        """The entries of this rank, without buffers."""
        for bucket, entry in named.entries(holdings, self.rank):
            self.own.setdefault(bucket, []).append(entry)
        hashes = {}
        for name, values in self.buffers.items():
            hashes[name] = hash_of("".join(hash_of(chunk) for chunk in chunks(values)).encode())
        counts = named.counts(holdings)  # raises where something cannot be saved, before a folder is made
        self.message: dict[str, Any] = {"own": arguments.own, "buffers": hashes, "counts": counts}
        """For all ranks."""
        self.partial = PartialFolder(arguments.target) if self.rank == 0 else None
        if self.partial is not None:
            self.message |= {"token": self.partial.token, "folder": str(self.partial.path)}

    def file(self, messages: Sequence[Mapping[str, Any]]) -> TensorFile:
        """This rank's file. Rank 0 saves all buffers, any other rank its different ones: batch norms of other data."""
        rank, own = self.rank, [entry for of_bucket in self.own.values() for entry in of_bucket]
        for name, values in self.buffers.items():
            if rank == 0 or messages[rank]["buffers"][name] != messages[0]["buffers"][name]:
                # A copy: the next forward may change it.
                own.append(Entry(name, BUFFER, values.detach().reshape(-1).clone(), 0))
        for name, state in self.extra_states.items() if rank == 0 else ():
            if isinstance(state, torch.Tensor):
                own.append(Entry(name, EXTRA_STATE, state.detach().reshape(-1).clone(), 0))
        step = str(self.arguments.progress["step"])
        about = {"save": messages[0]["token"], "step": step, "rank": str(rank)}
        return TensorFile(f"rank-{rank:05d}.safetensors", own, about)

    def content(self, messages: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """The manifest but for its files and where each tensor lies in them: as the state is now."""
        holdings, arguments = self.holdings, self.arguments
        options, config = holdings.options, arguments.config
        groups = []
        for group, kind in zip(holdings.groups.hyperparameters, holdings.groups.kinds, strict=True):
            first_lr = float(group["initial_lr"])
            groups.append({"optimizer": kind, "first_lr": first_lr, "hyperparameters": saved_group(group)})
        counts_by_name: dict[str, Any] = {}
        for message in messages:
            counts_by_name |= message["counts"]
        content = {
            **head(),
            "save": messages[0]["token"],
            **arguments.progress,
            "stage": options.zero.stage,
            "ranks": len(messages),
            "virtual_ranks": len(messages) * options.leaves_per_rank,
            "precision": options.config.precision.name,
            "config": config,
            "config_sha256": None if config is None else hashlib.sha256(json.dumps(config).encode()).hexdigest(),
            "extra": arguments.extra,
            "own": [message["own"] for message in messages],
            "groups": groups,
            "parameters": named.saved_parameters(holdings, counts_by_name),
            "buffers": named.described(self.buffers),
            EXTRA_STATE: named.described(self.extra_states),
            "files": [],
        }
        # A copy: the training changes parts of it, such as the names of parameters and the values in `extra`.
        copied: dict[str, Any] = json.loads(json.dumps(content))
        return copied


def _add_files(content: dict[str, Any], files: Sequence[DescribedFile]) -> None:
    """Complete a manifest by the ranks' descriptions of their files."""
    by_role = {BUFFER: content["buffers"], EXTRA_STATE: content[EXTRA_STATE]}
    for file in files:
        for name, role, described in file.pieces:
            tensor = to_builtins(described)
            entry = by_role.get(role, {}).get(name)
            if entry is None:
                entry = content["parameters"][name]["tensors"].setdefault(role, tensor | {"pieces": []})
            entry["pieces"] += tensor["pieces"]
        content["files"].append({"name": file.name, "nbytes": file.nbytes, "hashes": file.hashes})


def require_plain(value: Any, where: str, depth: int = 0) -> None:
    """Make sure that a value comes out of JSON as it went in.

    Raises:
        ConfigError: a part does not; the text names it.
    """
    if depth > MAX_NESTED:
        raise ConfigError(
            f"engine.save: {where[:60]}... lies in more than {MAX_NESTED} dicts and lists; save it flatter"
        )
    if isinstance(value, dict):
        for key, element in value.items():
            if type(key) is not str:
                raise ConfigError(f"engine.save: {where} has the key {key!r}; keys must be texts")
            require_plain(element, f"{where}[{key!r}]", depth + 1)
    elif type(value) is list:
        for index, element in enumerate(value):
            require_plain(element, f"{where}[{index}]", depth + 1)
    elif value is not None and type(value) not in (bool, int, float, str):
        raise ConfigError(
            f"engine.save: {where} is of type {type(value).__name__}; it may hold dicts with texts as keys, lists, "
            "numbers, texts, True, False and None: give a tensor or tuple as a list"
        )


# The caller's handle on a save beside the training.


END_S = 5.0
"""Time for the thread to clean up when its process ends."""


class SaveUnderWay:
    """The handle of `engine.begin_save`: a thread writes, and ends alike on all ranks."""

    path: Path
    """The folder, absolute. It is there when the save is done."""
    pause_s: float
    """How long `begin_save` held the training on this rank."""

    def __init__(self, writing: Writing) -> None:
        self.path = writing.path
        self.pause_s = 0.0
        self._snapshot, self._process_ends = writing.snapshot, writing.process_ends
        self._error: ZeroTrainError | None = None
        self._is_error_read = False
        # The thread alone has `writing`: when it is done, nothing of the engine's memory is kept.
        self._thread = threading.Thread(target=self._run, args=(writing,), name="zerotrain save", daemon=True)
        self._snapshot.begin()
        _saves_under_way.add(self)
        self._thread.start()

    @property
    def is_done(self) -> bool:
        """Whether it has ended, well or not. Does not wait."""
        return not self._thread.is_alive()

    @property
    def error(self) -> ZeroTrainError | None:
        """Why it has failed, once it is done."""
        if not self.is_done:
            return None
        self._is_error_read = True
        return self._error

    @property
    def held_s(self) -> float:
        """How long the training was held since, by copies and by waiting for room for them."""
        return self._snapshot.held_s

    @property
    def copied_nbytes(self) -> int:
        """Bytes copied since, in front of updates."""
        return self._snapshot.copied_nbytes

    def wait(self) -> Path:
        """Wait until the checkpoint is there, on the disk.

        Returns:
            Its folder, absolute.

        Raises:
            CheckpointError: the same on every rank; it could not be written. Nothing is left of it.
        """
        self.wait_until_ended()
        if (error := self.error) is not None:
            raise error
        return self.path

    def wait_until_ended(self) -> None:
        """Wait until it has ended, well or not, and keeps nothing of the engine's memory any more."""
        self._thread.join()

    def wait_until_read(self) -> None:
        """Wait until nothing is read of the engine's state any more."""
        self._snapshot.wait_until_read()

    def settle(self) -> None:
        """Wait for its end; raise its error if nobody has read it yet."""
        self.wait_until_ended()
        if not self._is_error_read:
            self.wait()

    def _run(self, writing: Writing) -> None:
        try:
            failed, cause = writing.run()
        except BaseException as error:  # a fault of zerotrain itself
            failed, cause = shared_error(error), error
        if failed is not None:
            self._error = failed.error()
            self._error.__cause__ = cause

    def end_with_process(self) -> None:
        """The process ends: leave no half folder, and a word."""
        if self.is_done:
            return
        self._process_ends.set()
        self._snapshot.stop(CheckpointError(PROCESS_ENDED))
        self._thread.join(END_S)
        if self._error is not None:
            warnings.warn(str(self._error), RuntimeWarning, stacklevel=2)


_saves_under_way: weakref.WeakSet[SaveUnderWay] = weakref.WeakSet()


@atexit.register
def _end_all() -> None:
    for save in list(_saves_under_way):
        save.end_with_process()
