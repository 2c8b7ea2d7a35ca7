"""The protocol of what happens beside the steps of a run, and the list of a run's callbacks."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Literal

from rich.console import Console

from zerotrain.comm.world import World
from zerotrain.engine.engine import ZeroEngine
from zerotrain.engine.results import StageSwitch, TrainStepResult
from zerotrain.errors import CallbackError, CommError, ConfigError
from zerotrain.files.untrusted import printable
from zerotrain.training.clock import StepClock
from zerotrain.training.report import say
from zerotrain.training.request import ASKED, CALLBACK, PRUNER, Request
from zerotrain.training.result import RunResult


class Callback:
    """Something beside the steps of a run: subclasses override moments.

    The constructor stores its arguments: a mere check of the config makes one too. A callback may call
    collectives, such as `run.world.sum`, in the moments that say so, provided that it runs on all ranks. In the other
    moments ranks may be at different places, and a collective would wait for ranks that do not come.

    An exception in a moment ends the run, with the name of the callback and of the moment.
    """

    ranks: ClassVar[Literal["all", "first"]] = "all"
    """Its ranks: all, or rank 0 alone."""
    may_fail: ClassVar[bool] = False
    """Whether the run goes on where a moment raises: it warns once, and calls the callback again at later moments. For
    callbacks of rank 0 alone."""

    def prepare(self, run: "Run") -> None:
        """The engine is built, and no checkpoint is loaded: the moment for what a checkpoint is to fill. Collective."""

    def start(self, run: "Run") -> None:
        """The run is about to train its first step, or to go on. Collective."""

    def before_step(self, run: "Run") -> None:
        """A step begins; `run.step` are done. Collective."""

    def ask(self, run: "Run") -> Request | None:
        """This rank's wish for after the next step. All ranks follow one rank's wish."""

    def after_step(self, run: "Run", outcome: TrainStepResult) -> None:
        """A step is done, and counts in `run.step`. Collective."""

    def log(self, run: "Run", metrics: dict[str, Any]) -> None:
        """Something was measured: of training ("train_loss" and more), of an evaluation ("val_loss"), or by a callback.
        A number may be nan or infinite; None is what is not known."""

    def after_evaluation(self, run: "Run", metrics: dict[str, Any]) -> None:
        """The model was evaluated: {"val_loss": ...}, the same on all ranks. Collective."""

    def after_stage_change(self, run: "Run", change: StageSwitch) -> None:
        """The engine is at another stage. Collective."""

    def before_save(self, run: "Run") -> None:
        """A checkpoint is about to be made, for which `state_dict` of rank 0 is asked next. Collective."""

    def after_save(self, run: "Run", path: Path) -> None:
        """A checkpoint is on the disk: ranks see that at different steps."""

    def end(self, run: "Run") -> None:
        """The last step is done, or the run is stopped (`run.stopped_by`). Callbacks end in the reverse of the order in
        which they start. Collective."""

    def failure(self, run: "Run", error: BaseException) -> None:
        """The run has failed, or was interrupted, after `start`. In the same order as `end`."""

    def completed(self, run: "Run") -> None:
        """The last step is done, and result.json is on the disk."""

    def state_dict(self) -> dict[str, Any]:
        """The state for a checkpoint, from which a resumed run begins: values that JSON can hold. Rank 0's is kept."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from what `state_dict` gave on rank 0, before `start`. It comes out of a file, which anybody may have
        written: look at it before it is used."""


class Closing(Callback):
    """A callback with one end, however the run ends."""

    def failure(self, run: "Run", error: BaseException) -> None:
        """See `Callback.failure`."""
        self.end(run)


@dataclass(kw_only=True)
class Run:
    """A run as callbacks see it."""

    engine: ZeroEngine
    world: World
    dataset: Any
    """Has `train` and `validation`."""
    console: Console
    """Shows lines on rank 0, nothing on others."""
    folder: Path
    """The run's own."""
    max_steps: int
    result: RunResult
    """Becomes result.json."""
    clock: StepClock
    callbacks: "CallbackList"
    state: Callable[[], dict[str, Any]]
    """The run's place in the training, for a checkpoint."""
    settings: Mapping[str, Any] | None = None
    """Those of the run, as its checkpoints note them: nested dicts of values that JSON can hold."""
    rising: frozenset[str] = frozenset()
    """Metrics of an evaluation; higher is better of these."""
    evaluates_average: bool = False
    """Whether evaluations use the engine's average of weights."""
    asked: Request = field(default_factory=Request)
    """The wishes of all ranks after the last step."""
    failed_saves: Exception | None = None
    """Raised when all else is done."""

    @property
    def step(self) -> int:
        """Steps done, those before a run went on included."""
        return self.result.steps

    @property
    def is_last(self) -> bool:
        """Whether the last step is done."""
        return self.step == self.max_steps

    @property
    def stopped_by(self) -> str | None:
        """Why the run ends before its last step; None: it does not."""
        return None if self.is_last else self.asked.stopped_by

    def is_due(self, every: int) -> bool:
        """Whether something to be done every so many steps comes now; 0: only after the last."""
        return self.is_last or (every > 0 and self.step % every == 0)

    def badness(self, metric: str, value: float) -> float:
        """The value of a metric of an evaluation, negative where higher is better: lower is better of all of them."""
        return -value if metric.partition("/")[0] in self.rising else value

    def log(self, metrics: dict[str, Any]) -> None:
        """Send metrics to metrics.jsonl and to all callbacks, as those of the last step."""
        self.callbacks.call("log", self, metrics)


@dataclass
class _Entry:
    name: str
    """Such as callbacks.average; empty for one of the house."""
    callback: Callback
    has_warned: bool = False
    has_started: bool = False


class CallbackList:
    """The callbacks of a run, called in order. All ranks have one with the same names.

    Args:
        head, tail: of the house; what they raise is raised as it is.
        own: those of the user, by name, between the two.
    """

    def __init__(
        self,
        head: Sequence[Callback],
        own: Mapping[str, Callback],
        tail: Sequence[Callback],
        *,
        world: World,
        console: Console,
    ) -> None:
        require_callbacks(own)
        self._console = console
        own_entries = [_Entry(f"{CALLBACK}{name}", callback) for name, callback in own.items()]
        of_head, of_tail = ([_Entry("", callback) for callback in part] for part in (head, tail))
        entries = of_head + own_entries + of_tail
        self._entries = [entry for entry in entries if entry.callback.ranks == "all" or world.rank == 0]
        self.names = (ASKED, PRUNER, *(entry.name for entry in own_entries))
        """All askers for a stop."""
        self._of_moment = {
            moment: [entry for entry in self._entries if getattr(type(entry.callback), moment) is not default]
            for moment, default in vars(Callback).items()
            if not moment.startswith("_")
        }

    def call(self, moment: str, run: Run, *arguments: Any) -> None:
        """Call a moment of all callbacks, `end` in the reverse order."""
        entries = self._of_moment[moment]
        for entry in reversed(entries) if moment == "end" else entries:
            self._call(entry, moment, run.step, run, *arguments)

    def start(self, run: Run) -> None:
        """Call `start` of all."""
        for entry in self._entries:
            entry.has_started = True
            self._call(entry, "start", run.step, run)

    def failure(self, run: Run, error: BaseException) -> None:
        """Call `failure` of all. Their own exceptions are only printed, since the run's own failure matters more."""
        for entry in reversed(self._of_moment["failure"]):
            if entry.name and not entry.has_started:
                continue
            try:
                self._call(entry, "failure", run.step, run, error)
            except Exception as another:
                say(self._console, f"warning: {printable(f'{type(another).__name__}: {another}')}")

    def ask(self, run: Run) -> Request:
        """The wishes of all callbacks of this rank."""
        wishes = Request()
        for entry in self._of_moment["ask"]:
            wish = self._call(entry, "ask", run.step, run)
            if wish is not None:
                wishes |= replace(wish, stop=entry.name) if wish.stop is True else wish
        return wishes

    def state_dict(self) -> dict[str, Any]:
        """The state of all: fields of the house's, and {callbacks: {name: state}} of those of the user."""
        state: dict[str, Any] = {}
        of_user: dict[str, Any] = {}
        for entry in self._of_moment["state_dict"]:
            part = self._call(entry, "state_dict", None)
            if not entry.name:
                state |= part
            elif part is not None:  # None: it may fail, and has
                of_user[entry.name.removeprefix(CALLBACK)] = part
        return state | ({"callbacks": of_user} if of_user else {})

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from what `state_dict` gave; one of the house finds its own fields."""
        of_user: dict[str, Any] = state.get("callbacks", {})
        for entry in self._of_moment["load_state_dict"]:
            part = of_user.get(entry.name.removeprefix(CALLBACK)) if entry.name else state
            if part is not None:
                self._call(entry, "load_state_dict", None, part)

    def _call(self, entry: _Entry, moment: str, step: int | None, *arguments: Any) -> Any:
        method = getattr(entry.callback, moment)
        if not entry.name:
            return method(*arguments)
        try:
            answer = method(*arguments)
            if moment == "ask" and not isinstance(answer, Request | None):
                raise TypeError(f"it returned a {type(answer).__name__}; it must return a Request or None")
            if moment != "state_dict":
                return answer
            if not isinstance(answer, dict):
                raise TypeError(f"it returned a {type(answer).__name__}; it must return a dict")
            return json.loads(json.dumps(answer, allow_nan=False))
        except (CallbackError, CommError):  # says by itself whose it is
            raise
        except (Exception, SystemExit) as error:
            place = "" if step is None else f" after step {step}"
            line = f"{entry.name}: {moment}{place}: {printable(f'{type(error).__name__}: {error}')}"
            if not entry.callback.may_fail or isinstance(error, SystemExit):
                raise CallbackError(line) from error
            if not entry.has_warned:
                entry.has_warned = True
                say(self._console, f"warning: {line}; the run goes on without further warnings about {entry.name}")
            return None


def require_callbacks(own: Mapping[str, object]) -> None:
    """Raise a ConfigError for anything but a callback of a run."""
    for name, callback in own.items():
        if not isinstance(callback, Callback):
            raise ConfigError(f"callbacks.{name}: is a {type(callback).__name__}, and no zerotrain.training.Callback")
        if callback.ranks not in ("all", "first"):
            raise ConfigError(f"callbacks.{name}: ranks={callback.ranks!r}; it must be 'all' or 'first'")
        if callback.may_fail and callback.ranks != "first":
            problem = "has may_fail=True and runs on all ranks; if one fails, the others would wait for it"
            raise ConfigError(f"callbacks.{name}: {problem}; give it ranks='first'")
