"""Every error zerotrain raises on purpose; each says what was given, what is allowed and what to do."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from zerotrain.files.untrusted import listed as listed, printable

# Arguments in messages. A reader who calls Python knows compile=True; the reader of a run knows model.compile=true.

_settings: Mapping[str, str] = {}
_write: Callable[[Any], str] = repr


@contextmanager
def naming_settings(settings: Mapping[str, str], write: Callable[[Any], str]) -> Iterator[None]:
    """In here messages name the settings of a run in place of Python's arguments.

    Args:
        settings: by the names that `argument` gets.
        write: writes a value as the command line has it.
    """
    global _settings, _write
    former = _settings, _write
    _settings, _write = settings, write
    try:
        yield
    finally:
        _settings, _write = former


@contextmanager
def naming_entry(name: str, entry: str) -> Iterator[None]:
    """In here a setting with named entries is named with one of them, such as optimizer.groups.embeddings. Python's
    argument keeps its name."""
    entries = {name: f"{_settings[name]}.{entry}"} if name in _settings else {}
    with naming_settings({**_settings, **entries}, _write):
        yield


def argument(name: str, *value: Any) -> str:
    """An argument as the reader of a message knows it.

    Args:
        name: of an argument of `build_engine`, or of another function, such as "World.from_environment(device)". A
            phrase that is written differently in a run.
        value: at most one; none: the argument is named alone.
    """
    setting = _settings.get(name, name)
    function, _, own_name = setting.rstrip(")").partition("(")
    if function and own_name.isidentifier():
        return f"{function}({own_name}={_write(value[0]) if value else '...'})"
    return f"{setting}={_write(value[0])}" if value else setting


MAX_MESSAGE = 100_000
"""Characters: a line for each of some problems."""


class ZeroTrainError(Exception):
    """Base class of all errors raised on purpose."""


class ConfigError(ZeroTrainError):
    """A setting is wrong. Raised before any process group starts; the launcher exits with code 2.

    Args:
        problems: one line per wrong setting: the field, what it got, what is allowed, what to do.
    """

    about = ""
    """The group of settings that the lines are about, if they name no setting, such as "model"."""

    def __init__(self, *problems: str) -> None:
        self.problems = tuple(printable(problem, keep="") for problem in problems)
        super().__init__("\n".join(self.problems))


@contextmanager
def noting(errors: list[ConfigError]) -> Iterator[None]:
    """Note a ConfigError of what is made in here, for `raise_noted`. After one any other error may follow from it."""
    try:
        yield
    except ConfigError as error:
        errors.append(error)
    except Exception:
        if not errors:
            raise


def raise_noted(errors: list[ConfigError]) -> None:
    """Raise what `noting` has noted, if anything: several errors as one, with all their lines."""
    if len(errors) == 1:
        raise errors[0]
    if errors:
        lines = (f"{error.about}: {line}" if error.about else line for error in errors for line in error.problems)
        raise ConfigError(*dict.fromkeys(lines)) from errors[0]


class EngineStateError(ZeroTrainError):
    """An engine call came in a state that does not allow it (for example `step` without `backward`)."""


class TrainingError(ZeroTrainError):
    """Training cannot go on: the numbers, not a setting or a rank, are at fault. Every rank raises it alike."""


class CorruptionError(TrainingError):
    """Ranks disagree about bits that they must have alike: one of them computes or remembers wrongly. Raised on every
    rank before the step in which it was found changes anything.

    Args:
        facts: of the disagreement, as values that JSON can hold: see `zerotrain.engine.verification.Corruption`.
    """

    def __init__(self, message: str, facts: Mapping[str, Any]) -> None:
        self.facts = facts
        super().__init__(message)


class CallbackError(ZeroTrainError):
    """A callback of the user has raised in one of its moments; the cause is its exception."""


class CheckpointError(ZeroTrainError):
    """A checkpoint, or weights of another file, are not what was written, do not fit the engine, or could not be saved.
    Earlier files on the disk and the engine's state are unchanged. Every rank raises it alike."""

    def __init__(self, message: str = "") -> None:
        super().__init__(printable(message, MAX_MESSAGE, keep="\n"))


class CommError(ZeroTrainError):
    """A collective failed: the other ranks did not come, or are gone.

    Args:
        unheard: the ranks that were waited for in vain and of which nothing was heard meanwhile.
        where: what they were waited for in, such as "gather of blocks.0 (step 3, forward)".
        waited_s: how long.
        is_own: whether this rank itself is the cause: the system gave it no more files, threads or memory.
    """

    def __init__(
        self,
        message: str,
        *,
        unheard: tuple[int, ...] = (),
        where: str = "",
        waited_s: float = 0.0,
        is_own: bool = False,
    ) -> None:
        self.unheard, self.where, self.waited_s, self.is_own = unheard, where, waited_s, is_own
        super().__init__(message)


class DisagreementError(CommError):
    """The ranks have not done the same since the last step. Raised on every rank."""


class OffloadError(ZeroTrainError):
    """The host's memory or the disk that state is offloaded to has no room, or does not give back what it was given.
    The step that met it cannot be repeated; the checkpoints are as they were."""
