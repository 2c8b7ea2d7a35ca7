"""Curves at Trackio, on this machine or in a Space: pip install trackio, this file in the folder that you start in, and

python launch.py '+callbacks.trackio={_target_: trackio_logger.TrackioLogger}'
"""

import json
import math
import secrets

from zerotrain.training import Callback


class TrackioLogger(Callback):
    ranks = "first"
    may_fail = True

    def __init__(self, project: str = "zerotrain", space_id: str | None = None) -> None:
        self.project, self.space_id, self.name = project, space_id, None

    def start(self, run) -> None:
        import trackio

        self.name = self.name or "-".join([*run.folder.parts[-2:], secrets.token_hex(4)])
        self.tracked = trackio.init(
            project=self.project,
            name=self.name,  # by which Trackio finds a run again
            group=run.folder.parent.name,
            space_id=self.space_id,
            config=dict(run.settings or {}),
            resume="allow",
            embed=False,
        )
        self.last_step = self.tracked._next_step - 1
        for line in (run.folder / "metrics.jsonl").read_text().splitlines():  # a run that was killed may not have sent
            metrics = json.loads(line)
            self.send(metrics.pop("step"), metrics)

    def send(self, step, metrics) -> None:
        numbers = {name: value for name, value in metrics.items() if isinstance(value, int | float)}
        if step > self.last_step:  # a run that goes on comes to the same numbers again
            self.tracked.log({name: value for name, value in numbers.items() if math.isfinite(value)}, step=step)

    def log(self, run, metrics) -> None:
        self.send(run.step, metrics)

    def end(self, run) -> None:
        self.tracked.finish()

    def failure(self, run, error) -> None:
        self.tracked.finish()

    def state_dict(self) -> dict:
        return {"name": self.name}

    def load_state_dict(self, state) -> None:
        self.name = str(state["name"])
