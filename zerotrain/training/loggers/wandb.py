"""Curves at Weights & Biases."""

import os
import secrets
from pathlib import Path
from typing import Any

from zerotrain.training.callback import Run
from zerotrain.training.loggers.curves import Written
from zerotrain.training.loggers.facts import facts_of
from zerotrain.training.loggers.tracker import Tracker, of_sweep

MODES = ("online", "offline", "disabled")
FINISH_S = 60.0
"""Seconds that the end of a run may wait for the network. `wandb sync` sends what is left."""


class WandB(Tracker):
    """Sends a run to Weights & Biases, or writes it to `wandb` in the run's folder, from where `wandb sync` sends it.

    Args:
        project, name, entity, group, tags: of the run there; None: as wandb chooses, in a sweep as that is called.
        mode: online, offline or disabled; None: as the environment's WANDB_MODE has it, else online.
    """

    package = "wandb"
    id_pattern = "[0-9a-f]{8}"

    def __init__(
        self,
        *,
        project: str = "zerotrain",
        name: str | None = None,
        entity: str | None = None,
        group: str | None = None,
        tags: list[str] | None = None,
        mode: str | None = None,
    ) -> None:
        super().__init__()
        if mode not in (*MODES, None):
            raise ValueError(f"mode={mode}; it must be {', '.join(MODES)} or null")
        self._mode = mode
        name, group = name or of_sweep("name"), group or of_sweep("group")
        self._given: dict[str, Any] = {"project": project, "name": name, "entity": entity, "group": group, "tags": tags}
        self._run: Any = None

    def _open_run(self, run: Run, run_id: str | None) -> tuple[str, Written]:
        import wandb

        mode: Any = self._mode or os.environ.get("WANDB_MODE", "online")
        run_id = run_id or secrets.token_hex(4)
        if mode == "offline":
            _set_aside(run.folder / "wandb", run_id)
        self._run = wandb.init(
            **self._given,
            id=run_id,
            mode=mode,
            dir=str(run.folder),
            resume="allow" if mode == "online" else None,
            settings=wandb.Settings(console="off", finish_timeout=FINISH_S),  # a rank's output is in its log
        )
        return run_id, Written(until=self._run.step - 1)

    def _describe_run(self, run: Run) -> None:
        config = {**(run.settings or {}), "environment": facts_of(run)}
        self._run.config.update(config, allow_val_change=True)

    def _write(self, numbers: dict[str, float], step: int) -> None:
        self._run.log(numbers, step=step)

    def _keep_file(self, path: Path) -> None:
        self._run.save(str(path), base_path=str(path.parent), policy="now", glob=False)

    def _close_run(self, result: dict[str, float], status: str | None) -> None:
        if status is not None:
            self._run.summary.update({**result, "status": status})
        self._run.finish(exit_code=int(status == "failed"))


def _set_aside(folder: Path, run_id: str) -> None:
    """Move the files of earlier sittings, which do not know of each other, to `earlier`: the next one gets all lines of
    the run, so that one file is one curve."""
    for path in folder.glob(f"offline-run-*-{run_id}"):
        (folder / "earlier").mkdir(exist_ok=True)
        path.rename(folder / "earlier" / f"{path.name}-{secrets.token_hex(4)}")
