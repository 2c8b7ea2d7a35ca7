"""result.json: what came out of a run, for people and for the tools that compare runs."""

import errno
import json
import math
import os
import re
import signal
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, Protocol, TypedDict

from msgspec import Meta, Struct, field, structs

from zerotrain.files import untrusted
from zerotrain.files.lock import whole
from zerotrain.files.untrusted import dotted

RESULT_NAME = "result.json"
KEPT = ("skipped_steps", "final_train_loss", "final_val_loss", "val_loss_by_source", "val_metrics", "stages")
"""Fields with which a resumed run begins."""
MAX_NBYTES = 2**26
"""Largest result.json that is read: each stage tells of all ranks."""


_StopName = Meta(pattern=rf"^({'|'.join(signal.Signals.__members__)}|control\.yaml|sweep\.pruner|callbacks\..+)\Z")


class RunResult(Struct):
    """The body of result.json. Null is what was not known when the run ended, and a loss that is no number."""

    world_size: untrusted.Natural
    """Ranks."""
    stage: int | None = None
    """ZeRO stage: the last, where it has changed."""
    overrides: list[str] | None = None
    """The settings given on the command line."""
    config_hash: str | None = None
    """Equal where all settings are equal."""
    status: Annotated[str, untrusted.one_of("completed", "stopped", "failed")] = "failed"
    """completed, stopped (from outside) or failed."""
    error: str | None = None
    """The error that ended a run before it completed."""
    stopped_by: Annotated[str, _StopName] | None = None
    """The signal after which the run ended in order, its step done on all ranks; null however else it ended."""
    exit_code: Annotated[int, Meta(ge=0, le=255)] | None = None
    """The exit code of the command, also where torchrun makes 1 of it; null of a run that has not ended, or was killed.
    See `code_of_stop`."""
    restarts: int = 0
    """How often the ranks were started again before, after a failure."""
    resumed_from: str | None = None
    """The checkpoint that the last sitting of the run has gone on from."""
    checkpoint: str | None = None
    """The newest checkpoint of the run."""
    steps: untrusted.Natural = 0
    """Optimizer steps done, skipped ones included."""
    skipped_steps: int = 0
    """Those of them that changed nothing, because the gradient was not finite."""
    final_train_loss: float | None = None
    """Mean loss over the tokens of the last logged global batch, in nats."""
    final_val_loss: float | None = None
    """Mean loss over the tokens of the last evaluation, in nats."""
    val_loss_by_source: Mapping[str, float | None] | None = None
    """Likewise of each source of `data=mix`, and of each of `data.validation_sets`; null where there are none."""
    val_metrics: Mapping[str, float | None] | None = None
    """Other metrics of the last evaluation, by name; null where there are none."""
    tokens_per_s: float | None = None
    """Tokens of all ranks per second of training, padding too, the first steps and evaluations left out; null of data
    that is none."""
    labels_per_s: float | None = None
    """Likewise labels that count in the loss."""
    samples_per_s: float | None = None
    """Likewise rows of the data."""
    step_ms_median: float | None = None
    """Milliseconds of one optimizer step, the first steps left out."""
    data_wait_ms: float | None = None
    """Milliseconds of a step in which rank 0 waited for its rows, the mean, the first steps left out."""
    comm_wait_ms: float | None = None
    """Likewise in which it waited for other ranks: communication that hid behind nothing; null on a GPU, whose host
    does not wait."""
    update_ms: float | None = None
    """Likewise of the optimizer's update, without that wait; null on a GPU."""
    train_s: float | None = None
    """Seconds of training steps, of all sittings."""
    save_pause_ms: float | None = None
    """Milliseconds that a save held the training of rank 0, the mean; null where there was none."""
    save_step_ratio: float | None = None
    """Time of a step beside which a save was written to that of the others, by their medians; null where either kind
    is missing."""
    mfu: float | None = None
    """Model FLOPs utilization, 0 to 1, the first steps left out; null where the device's peak is not known."""
    weights_sha256: str | None = None
    """Hash of the full fp32 master weights in name order."""
    comm_bytes_per_step: dict[str, int] | None = None
    """Bytes rank 0 sent in the last step, and what theory says: {sent, theory}; with `zero.shard_size` also those
    between replicas: {across, theory_across}."""
    memory_bytes: dict[str, Any] | None = None
    """Bytes rank 0 holds at rest {parameters, gradients, optimizer}, the same in theory {theory}, and its {peak}; where
    the run was planned, its `Memory.usage_of` in zerotrain.preflight.plan {planned}, from the run's begin on."""

    mirror: dict[str, Any] | None = None
    """The copies of checkpoints under `checkpoint.mirror`: {url, newest: name of the last one, failures: tries that
    failed, problem: of the last try}; null without a mirror."""
    verification: dict[str, Any] | None = None
    """Verified steps under `train.verify_every`: {every, steps: of the last sitting, without a difference, last_step:
    the last of them, or the sitting's first step, corruption: the `Corruption` that ended the run, or null}; null where
    no step is verified."""
    environment: dict[str, Any] | None = None
    """The machine and software that the bits depend on: {torch, zerotrain, device, machine, kernels, attention, cudnn,
    threads}, and {graphs}: how many steps of the last sitting were replayed, and why others were not."""

    stages: list[dict[str, Any]] = field(default_factory=list)
    """The stages that steps were trained at, in order: {stage, from_step: steps done before, sent_nbytes,
    theory_sent_nbytes: what rank 0 sent for the change in mid-run, ranks: `gather_usages` of all ranks at its end}."""

    def state_dict(self) -> dict[str, Any]:
        """The state from which a resumed run begins, for a checkpoint."""
        return without_non_finite({name: getattr(self, name) for name in KEPT})

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Begin with what another one has left."""
        for name in KEPT:
            if name in state:
                setattr(self, name, state[name])

    def end(
        self, stopped_by: str | None, max_steps: int, failure: Exception | None, when_stopped: int | None = None
    ) -> None:
        """The run ends in order: its steps are done, or a signal came before. Some of its saves may have failed.

        Args:
            when_stopped: see `code_of_stop`.
        """
        self.status, self.stopped_by, self.exit_code = "completed", stopped_by, 0
        if stopped_by:
            self.status, self.exit_code = "stopped", code_of_stop(stopped_by, when_stopped)
            self.error = f"stopped by {stopped_by} after step {self.steps} of {max_steps}"
        if failure is not None:
            self.status, self.exit_code = "failed", 1
            self.error = untrusted.printable(f"{type(failure).__name__}: {failure}")

    def body(self) -> dict[str, Any]:
        """The content that is written."""
        body: dict[str, Any] = without_non_finite(structs.asdict(self))
        return body

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> "RunResult":
        """The result that `write` has left, with defaults for the fields that another zerotrain did not know.

        Raises:
            OSError: it cannot be read; `FileNotFoundError` where there is none.
            UntrustedFileError: it is no result of a run; the text names the field.
        """
        result: RunResult = untrusted.read_json(path, cls, max_nbytes=MAX_NBYTES)
        if result.status == "failed" and result.exit_code == 0:
            raise untrusted.UntrustedFileError("exit_code: got 0 of a run that has failed")
        return result

    def write(self, run_dir: Path) -> None:
        """Write `run_dir`/result.json, whole or not at all."""
        with whole(run_dir / RESULT_NAME) as file:
            file.write((json.dumps(self.body(), indent=2) + "\n").encode())


def code_of_stop(stopped_by: str, code: int | None) -> int:
    """The exit code of a run that was stopped in order: 0 where control.yaml, a callback or a pruner has, since nobody
    is to try it again.

    Args:
        stopped_by: a signal's name, or who has asked for the stop.
        code: after a signal; None: that of a shell for SIGINT, else 0.
    """
    signum = signal.Signals.__members__.get(stopped_by)
    if signum is None:
        return 0
    if code is not None:
        return code
    return 128 + signal.SIGINT if signum == signal.SIGINT else 0


def read_result(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The body of `RunResult.read`."""
    return RunResult.read(path).body()


def without_non_finite(value: Any) -> Any:
    """The same value with null for each float that is nan or infinite: JSON has no such numbers."""
    if isinstance(value, dict):
        return {key: without_non_finite(item) for key, item in value.items()}
    if isinstance(value, list):
        return [without_non_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


# The value by which the jobs of a sweep are compared: a number of result.json, or a metric of the last evaluation.


VAL_LOSS = "final_val_loss"
_OF_AN_EVALUATION = re.compile(r"val_\w+(/.+)?")
_FIELDS = {member.name: member.type for member in structs.fields(RunResult)}
_NUMBERS = tuple(name for name, kind in _FIELDS.items() if kind in (int, untrusted.Natural, float | None))
NUMBERS = (
    *_NUMBERS,
    *(f"comm_bytes_per_step.{part}" for part in ("sent", "theory")),
    *(f"memory_bytes.{part}" for part in ("peak", "parameters", "gradients", "optimizer", "offloaded", "scratch")),
    *(f"memory_bytes.theory.{part}" for part in ("parameters", "gradients", "optimizer", "offloaded")),
)
"""Those of each result.json, by the names of objectives."""


def in_evaluation(name: str) -> str | None:
    """The name of this value in an evaluation; None where none measures it."""
    if name == VAL_LOSS:
        return "val_loss"
    return None if name in _FIELDS or _OF_AN_EVALUATION.fullmatch(name) is None else name


def value_in(result: Mapping[str, Any], name: str) -> float | None:
    """The value in the body of a result.json; None where it is no number.

    Args:
        name: of a number there, with dots where that lies within an object, such as comm_bytes_per_step.sent; or of a
            metric of an evaluation, such as val_accuracy, or val_loss/NAME of a source or a further validation set.

    Raises:
        LookupError: there is no such value, and which there are.
    """
    values: dict[str, Any] = {"val_loss": result.get(VAL_LOSS)}
    values |= {f"val_loss/{name}": value for name, value in (result.get("val_loss_by_source") or {}).items()}
    values |= {**(result.get("val_metrics") or {}), **{name: result.get(name) for name in _NUMBERS}}
    values |= dotted({name: result.get(name) or {} for name in ("comm_bytes_per_step", "memory_bytes")})
    values = {str(key): value for key, value in values.items()}
    if name not in values:
        names = untrusted.printable(", ".join(list(values)[:40]), keep="")
        raise LookupError(f"got {name}, which this job has not measured; it has {names}")
    value = values[name]
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return float(value) if is_number and abs(value) <= sys.float_info.max else None


# Destinations of metrics.


METRICS_NAME = "metrics.jsonl"
STEPS_NAME = "steps.jsonl"
"""A line for each step, see `zerotrain.training.callbacks.record`."""


class _MetricsLine(TypedDict):
    step: int


class MetricSink(Protocol):
    """Takes the metrics of a run: a file, the console, or a service such as TensorBoard. Only rank 0 has any.

    One that goes on where it was, such as in the same run of a tracking service, has two more methods. `state_dict()`
    returns values that JSON can hold, such as the id of the service's run, which checkpoints keep;
    `load_state_dict(state)` is called before anything is logged, where a run goes on.
    """

    def log(self, metrics: dict[str, Any], step: int) -> None:
        """Take what was measured after so many steps: of training ("train_loss" and more) or of an evaluation
        ("val_loss"). A number may be nan or infinite; None is what is not known."""

    def close(self) -> None:
        """The run is over, however it ended."""


class MetricsFile:
    """metrics.jsonl: one JSON object a line, readable while the run goes on.

    Args:
        append: go on with a file already there, in place of writing it anew.
    """

    def __init__(self, path: Path, *, append: bool = False) -> None:
        self._path = path
        self._file = open(path, "a" if append else "w", buffering=1, opener=untrusted.only_regular)  # noqa: SIM115 - closed by `close`

    def log(self, metrics: dict[str, Any], step: int) -> None:
        """Append one line; a number that is nan or infinite becomes null.

        Raises:
            FileNotFoundError: the file was deleted meanwhile. Nobody could read what is written to it.
        """
        if os.fstat(self._file.fileno()).st_nlink == 0:
            raise FileNotFoundError(errno.ENOENT, "Deleted while it was written", str(self._path))
        self._file.write(json.dumps({"step": step} | without_non_finite(metrics)) + "\n")

    def close(self) -> None:
        """See `MetricSink.close`."""
        self._file.close()


def lines_of(path: Path) -> Iterator[tuple[bytes, dict[str, Any]]]:
    """The lines of a metrics.jsonl, or of a steps.jsonl, each as it is and as what it holds. A line that is cut off is
    left out."""
    with open(path, "rb", opener=untrusted.only_regular) as lines:
        for line in lines:
            with suppress(untrusted.UntrustedFileError):
                content = untrusted.parse_json(line, dict[str, Any])
                untrusted.require_kind(content, _MetricsLine)
                yield line, content


def keep_lines(source: Path, target: Path, *, until: int) -> None:
    """Write the lines of `lines_of` that belong to the first so many steps to another file, or to the same: a run that
    goes on from step 100 comes to the steps after it again. Nothing where there is no such file."""
    if source.exists():
        with whole(target) as output:
            output.writelines(line for line, content in lines_of(source) if content["step"] <= until)
