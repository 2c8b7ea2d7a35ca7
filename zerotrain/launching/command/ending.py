"""The last lines of a run."""

from pathlib import Path
from typing import Any

from zerotrain.comm.environment import RankEnvironment
from zerotrain.launching.job import resuming


def shown_from(here: Path, path: Path) -> Path:
    """A path as one who works in `here` would write it."""
    return path.relative_to(here) if path.is_relative_to(here) else path


def print_ending(result: dict[str, Any], run_dir: Path, here: Path, ranks: RankEnvironment | None) -> None:
    """Say where a run lies that has completed or was stopped in order, and how to go on with it."""
    shown = shown_from(here, run_dir)
    print_place(result, shown)
    if result["checkpoint"] is not None:
        more = [f"train.max_steps={2 * result['steps']}"] if result["status"] == "completed" else []
        print(f"to go on: {resuming.command_to_go_on(result['overrides'], shown, ranks, *more)}", flush=True)
    else:
        print(
            "next: checkpoint.save_at_end=true lets a run train longer later; --cfg job shows every setting",
            flush=True,
        )


def print_place(result: dict[str, Any], shown: Path) -> None:
    """Say how a run has ended, and what lies in its folder."""
    files = f"result.json, metrics.jsonl, ranks/{'' if result['checkpoint'] is None else ', checkpoints/'}"
    print(f"{result['error'] or 'completed'}; in {shown}: {files}", flush=True)
