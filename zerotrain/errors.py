"""Every error zerotrain raises on purpose; each says what was given, what is allowed and what to do."""

from zerotrain.files.untrusted import listed as listed
from zerotrain.files.untrusted import printable

MAX_MESSAGE = 100_000
"""Characters: a line for each of some problems."""


class ZeroTrainError(Exception):
    """Base class of all errors raised on purpose."""


class ConfigError(ZeroTrainError):
    """A setting is wrong. Raised before any process group starts; the launcher exits with code 2.

    Args:
        problems: one line per wrong setting: the field, what it got, what is allowed, what to do.
    """

    def __init__(self, *problems: str) -> None:
        self.problems = tuple(printable(problem, keep="") for problem in problems)
        super().__init__("\n".join(self.problems))


class EngineStateError(ZeroTrainError):
    """An engine call came in a state that does not allow it (for example `step` without `backward`)."""


class TrainingError(ZeroTrainError):
    """Training cannot go on: the numbers, not a setting or a rank, are at fault. Every rank raises it alike."""


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
