"""The endings of a run, and the exit code of each by how its ranks were started. docs/endings.py writes the page."""

from dataclasses import dataclass, field

STARTERS = ("launch.py", "torchrun", "srun")
JOB = {"SLURM_JOB_ID": "12"}
"""Variables of a job, for what is started outside one."""


@dataclass(frozen=True, kw_only=True)
class Ending:
    """An ending, and what is promised of it."""

    name: str
    settings: tuple[str, ...]
    codes: tuple[int | None, int | None, int | None]
    """The exit codes of `STARTERS`; None where there is no such case."""
    status: str | None
    """In result.json; None where there is none."""
    ended: int
    """The exit code of `zerotrain ended`."""
    control: str | None = None
    """The content of control.yaml."""
    environment: dict[str, str] = field(default_factory=lambda: JOB)
    num_starts: int = 1


def misbehaving(action: str) -> tuple[str, ...]:
    """A rank does this in its second step."""
    return ("model._target_=misbehaving.MisbehavingMLP", f"+model.action={action}")


STOPS_EARLY = (
    "callbacks=early_stopping",
    "callbacks.early_stopping.patience=1",
    "train.eval_every=1",
    "optimizer.lr=0",
)
ENDINGS = (
    Ending(name="completed", settings=(), codes=(0, 0, 0), status="completed", ended=0),
    Ending(
        name="completed, and started again with `checkpoint.resume=auto`",
        settings=("checkpoint.resume=auto",),
        codes=(0, 0, 0),
        status="completed",
        ended=0,
        num_starts=2,
    ),
    Ending(name="SIGTERM to a rank", settings=misbehaving("terminate"), codes=(85, 0, 85), status="stopped", ended=85),
    Ending(name="SIGINT to a rank", settings=misbehaving("interrupt"), codes=(85, 0, 85), status="stopped", ended=85),
    Ending(
        name="SIGTERM to a rank, outside a job of a scheduler",
        settings=misbehaving("terminate"),
        codes=(0, 0, None),
        status="stopped",
        ended=0,
        environment={},
    ),
    Ending(
        name="SIGINT to a rank, outside a job of a scheduler",
        settings=misbehaving("interrupt"),
        codes=(130, 0, None),
        status="stopped",
        ended=130,
        environment={},
    ),
    Ending(
        name="`control.yaml` asks for a stop",
        settings=(),
        codes=(0, 0, 0),
        status="stopped",
        ended=0,
        control="stop: true",
    ),
    Ending(name="a callback stops it", settings=STOPS_EARLY, codes=(0, 0, 0), status="stopped", ended=0),
    Ending(name="a rank raises", settings=misbehaving("raise"), codes=(1, 1, 1), status="failed", ended=1),
    Ending(name="a rank is killed", settings=misbehaving("kill"), codes=(1, 1, 137), status="failed", ended=1),
    Ending(name="a setting's value is refused", settings=("seed=-1",), codes=(2, 1, 2), status="failed", ended=2),
    Ending(name="a setting is misspelt", settings=("zero.stge=3",), codes=(2, 1, 2), status=None, ended=1),
)
