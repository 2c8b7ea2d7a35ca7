"""`zerotrain replay RUN --step N [SETTING=VALUE ...]`: a step of a run again, compared with what the run
recorded, and which virtual rank, micro-batch, parameter and row its loss and gradient came from.

RUN is a run, or one of its checkpoints. The newest whole checkpoint before the step is taken, or the run's beginning;
each step from there on is computed on one rank, with the run's virtual ranks, and compared with steps.jsonl. Nothing is
written to the folder of the run; replay.json is written here, or to --out. SETTING=VALUE changes a setting of zero,
offload, data, or the threads.

  zerotrain replay outputs/2026-11-22/10-00-00 --step 812
  zerotrain replay outputs/2026-11-22/10-00-00 --worst --rows
  zerotrain replay outputs/2026-11-22/10-00-00 --step 812 zero.stage=3 offload.optimizer=cpu
  zerotrain replay outputs/2026-11-22/10-00-00 --step 812 data.path=moved --save-batch batch.safetensors

Exit code 0: all steps are as the run recorded them; 1: one differs, which is named; 2: an argument is wrong, or there
is nothing to go on from, one line a problem; 130: Ctrl-C.
"""

import json
import os
import tempfile
from argparse import Namespace
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from io import BytesIO
from pathlib import Path
from typing import Any, BinaryIO

import torch
from rich.console import Console

from zerotrain.checkpoint.folder import CHECKPOINTS, candidates, newest_first
from zerotrain.checkpoint.manifest import MANIFEST, read_manifest
from zerotrain.commands.evaluate import Use, with_settings
from zerotrain.commands.frame import add_run, exit_code, parser_of
from zerotrain.config.words import words_of_config
from zerotrain.errors import CheckpointError, ConfigError
from zerotrain.files import kept_out, lock, terminal, untrusted
from zerotrain.launching import exits, job, resuming
from zerotrain.replay.record import Record, read_record
from zerotrain.replay.report import batch_of, print_around, print_report, report_of
from zerotrain.replay.steps import ReplayedSteps, of_replay, opened_steps
from zerotrain.run.factory import joined_ranks
from zerotrain.saved.saved import NO_CONFIG, config_from
from zerotrain.training.callbacks.record import environment
from zerotrain.training.result import without_non_finite

REPLAY = Use(
    name="a replay",
    built=("model", "loss", "data", "optimizer", "scheduler"),
    settings=("zero.", "offload.", "data.", "launch.device", "launch.threads_per_rank", "launch.timeout_s"),
)
REPLAY_NAME = "replay.json"
OURS = {"replay": "zerotrain"}
"""The begin of its content."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return the exit code."""
    parser = parser_of("replay", __doc__)
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--step", type=int, metavar="N", help="the step to look at, from 1")
    which.add_argument("--worst", action="store_true", help="the first step not finite, or the largest spike")
    parser.add_argument("--rows", action="store_true", help="compute each row of the worst micro-batch alone")
    parser.add_argument("--around", type=int, default=0, metavar="K", help="K steps before and after it, a line each")
    parser.add_argument("--save-batch", type=Path, metavar="FILE", help="write the worst micro-batch, as safetensors")
    parser.add_argument("--out", type=Path, default=Path(REPLAY_NAME), metavar="FILE", help=f"{REPLAY_NAME} by default")
    add_run(parser, has_settings=True, help="a run, or a checkpoint of one")
    options = parser.parse_intermixed_args(arguments)
    return exit_code(lambda: _run(options))


def _run(options: Namespace) -> int:
    if options.step is not None and options.step < 1:
        raise ConfigError(f"--step: got {options.step}; it must be 1 or more, the number of a step")
    if options.around < 0:
        raise ConfigError(f"--around: got {options.around}; it must be 0 or more steps")
    with (
        _new_file("--out", options.out, options.path) as out,
        _new_file("--save-batch", options.save_batch, options.path) as batch,
    ):
        with words_of_config():
            body = replay(options, Console(), batch)
        out.write((json.dumps(OURS | body, indent=2) + "\n").encode())
    print(f"in {options.out}")
    return exits.FAILED if body["differs"] else exits.COMPLETED


def replay(options: Namespace, console: Console, batch_file: BinaryIO) -> dict[str, Any]:
    """Compute a step of a run again, print what it was made of, and return that for JSON.

    Args:
        options: those of `main`, by their names; `step` is None for the one that stands out.
        batch_file: gets the worst micro-batch, if `options.save_batch` is there.

    Raises:
        ConfigError: an argument is wrong, or the run cannot be built here.
        CheckpointError: no checkpoint before the step is whole.
    """
    folder = options.path.absolute()
    if os.path.isfile(folder / MANIFEST):
        folder = folder.parent.parent
    record = read_record(folder)
    if options.step is None and not record.steps:
        raise ConfigError(f"--worst: {folder} has recorded no steps; give --step")
    step = record.worst if options.step is None else options.step
    if record.steps and step > record.last_step + 1:
        raise ConfigError(
            f"--step: got {step}; the run has recorded {record.last_step} steps; give one of them, or the next"
        )
    start = record.start_of(step)
    first_step = max(1, step - options.around)
    checkpoints = _checkpoints_before(options.path.absolute(), first_step, has_start=0 in record.starts)
    settings = start.get("settings")
    if settings is None and (manifest := resuming.first_readable(checkpoints)) is not None:
        settings = manifest.content["config"]
    with kept_out.nothing_imported_from(folder):
        config = config_from(settings, folder)
        if config is None:
            raise ConfigError(f"{folder} {NO_CONFIG}")
        left_out = [f"callbacks.{name}" for name in config.callback_targets]
        virtual_ranks = config.train.virtual_ranks
        config = of_replay(config)
        config = with_settings(config, options.settings, folder, REPLAY, trust_code=options.trust_code)
        torch.set_num_threads(job.num_threads_per_rank(config, 1))
        with tempfile.TemporaryDirectory() as scratch, joined_ranks(config) as world:
            console.print(f"step {step}, on one rank with {virtual_ranks} virtual ranks", highlight=False)
            steps = opened_steps(config, world, checkpoints, Path(scratch), console, start.get("data"))
            if step > steps.trainer.max_steps:
                raise ConfigError(f"--step: got {step}; the run has {steps.trainer.max_steps} steps; give one of them")
            lines = _go_on(steps, record, step - 1)
            report = report_of(steps, each_row=options.rows)
            if options.save_batch is not None:
                batch = batch_of(steps, report.worst.virtual_rank, report.worst.micro_batch)
                batch_file.write(_safetensors().save(batch))
            lines += _go_on(steps, record, min(step + options.around, steps.trainer.max_steps))
            different: dict[str, Any] = next((line for line in lines if line["differs"]), {"differs": None})
            causes = []
            if different["differs"]:
                causes = record.causes(different["step"], environment(world.device), settings)
                causes += [
                    f"{setting}, which was given here" for setting in options.settings if setting.startswith("data.")
                ]
                causes += [f"{name} is left out in a replay" for name in left_out]
    print_report(console, report, steps.began_at, record, different["differs"], causes)
    around = [line for line in lines if options.around and abs(line["step"] - step) <= options.around]
    if around:
        print_around(console, around, step)
    [line] = (line for line in lines if line["step"] == step)
    body = report.body() | line | {"differs": different["differs"], "from_step": steps.began_at, "causes": causes}
    body |= {"recorded": step in record.steps} | ({"around": around} if around else {})
    return without_non_finite(body)


def _go_on(steps: ReplayedSteps, record: Record, until: int) -> list[dict[str, Any]]:
    """Go on to a step; what each step on the way came to, beside the record."""
    lines = []
    for step, outcome in steps.train(until):
        differs = record.difference(step, outcome)
        line = {
            "step": step,
            "loss": outcome.mean_loss,
            "grad_norm": outcome.grad_norm,
            "clip_coefficient": outcome.clip_coefficient,
            "skipped": outcome.skipped,
            "loss_scale": outcome.loss_scale,
            "update": outcome.update_hash,
            "lr": max(float(group["lr"]) for group in steps.trainer.engine.param_groups),
            "as_recorded": None if step not in record.steps else differs is None,
            "differs": differs,
        }
        lines.append(line)
    return lines


def _safetensors() -> Any:
    try:
        return terminal.package("safetensors.torch", extra="hf", needed_by="--save-batch")
    except ImportError as error:
        raise ConfigError(str(error)) from error


@contextmanager
def _new_file(name: str, path: Path | None, run: Path) -> Iterator[BinaryIO]:
    """The file that an argument names, to be written: it is there before anything is computed, and has its name at the
    end.

    Raises:
        ConfigError: it cannot be written, lies in the run, or is no file of an earlier replay.
    """
    if path is None:
        yield BytesIO()
        return
    if name == "--save-batch":
        _safetensors()
    if path.resolve().is_relative_to(run.resolve()):
        raise ConfigError(f"{name}: got {path}, which is in the folder of the run; give a file elsewhere")
    begin = json.dumps(OURS, indent=2).removesuffix("\n}").encode()
    with ExitStack() as stack:
        try:
            if os.path.lexists(path):
                with open(path, "rb", opener=untrusted.only_regular) as old_file:
                    if old_file.read(len(begin)) != begin:
                        raise ConfigError(f"{name}: got {path}, which is there already; give a new name")
            file = stack.enter_context(lock.whole(path))
        except OSError as error:
            problem = f"{name}: got {path}, which cannot be written: {error.strerror}"
            raise ConfigError(f"{problem}; give a file in a folder where you may write") from None
        yield file


def _checkpoints_before(path: Path, step: int, *, has_start: bool) -> list[Path]:
    """The checkpoints of a run before a step, the newest first; none for its own beginning.

    Raises:
        ConfigError: there is nothing to go on from.
    """
    is_checkpoint = os.path.isfile(path / MANIFEST)
    if not is_checkpoint and not path.is_dir():
        return candidates(path)  # which says why there is none
    checkpoints = [path] if is_checkpoint else newest_first(path / CHECKPOINTS)
    steps = {}
    for checkpoint in checkpoints:
        with suppress(CheckpointError):  # its manifest is damaged
            steps[checkpoint] = read_manifest(checkpoint).step
    earlier = [checkpoint for checkpoint in checkpoints if steps.get(checkpoint, 0) < step]
    if any(at < step for at in steps.values()):
        return earlier
    if has_start and not (is_checkpoint and earlier):
        return []
    if not steps:
        return earlier or candidates(path)
    oldest = min(steps.values())
    raise ConfigError(f"--step: got {step}; the oldest checkpoint is of step {oldest}; give a step after it")
