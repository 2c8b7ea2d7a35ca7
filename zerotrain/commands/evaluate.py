"""`zerotrain evaluate RUN [SETTING=VALUE ...]`: validation loss and metrics of a checkpoint, as the run had
them.

RUN is a run (its newest checkpoint is read), a checkpoint or an export. Settings and metrics are those of the run;
SETTING=VALUE changes one by its full name. On a CPU all numbers equal those of the run at this step, to the bit, if you
change only settings of zero and launch. One rank starts, unless launch.nproc_per_node or torchrun asks for more.
Nothing is written to the folder of the run, which may still train, nor to the paths in its settings: text is prepared
in your own cache, unless you give data.cache_dir.

  zerotrain evaluate outputs/2026-11-22/10-00-00
  zerotrain evaluate outputs/2026-11-22/10-00-00 zero.stage=3 launch.nproc_per_node=4
  zerotrain evaluate outputs/2026-11-22/10-00-00 --weights ema
  zerotrain evaluate exported data.path=other_texts train.eval_batches=100
  zerotrain evaluate exported --metrics accuracy,perplexity 'data.validation_sets={docs: {path: docs}}'

Exit code 0; 1: a rank failed; 2: an argument is wrong or the weights are damaged, one line a problem.
"""

import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, TypedDict

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from zerotrain.comm.environment import RankEnvironment
from zerotrain.commands.frame import add_run, exit_code, is_averaged, parser_of
from zerotrain.config import checks, words
from zerotrain.config.compose import first_paragraph, from_values, known_keys, literal
from zerotrain.config.schema import CheckpointConfig, Config
from zerotrain.device.processes import end_with_parent
from zerotrain.engine.state.from_weights import weight_misfits
from zerotrain.errors import CheckpointError, ConfigError, ZeroTrainError
from zerotrain.files import kept_out, untrusted
from zerotrain.launching import exits, failures, job, resuming, spawn, task
from zerotrain.launching.command import run_as_rank
from zerotrain.launching.torchrun import job_exchange
from zerotrain.preflight import check, choice
from zerotrain.preflight.room import Ranks
from zerotrain.run.factory import build_on_meta
from zerotrain.saved import evaluating, saved
from zerotrain.settings import OffloadGroup
from zerotrain.training.callbacks.stages import stage_at
from zerotrain.training.metrics import Metric

GROUPS = tuple(field.name for field in fields(Config) if field.name != "seed")
OPEN_GROUPS = ("model", "loss", "data")
"""Groups with settings of any name, decided by their classes."""
IDLE = ("zero.schedule", "data.num_workers")


@dataclass(frozen=True, kw_only=True)
class Use:
    """A second use of the config of a run, such as an evaluation."""

    name: str
    built: tuple[str, ...]
    """The groups whose classes are built."""
    settings: tuple[str, ...]
    """Beginnings of the names of settings with an effect, but for those of `IDLE`."""

    def has_use_for(self, setting: str) -> bool:
        """Whether the setting of this name changes anything."""
        return setting not in IDLE and setting.startswith(self.settings)


EVALUATION = Use(
    name="an evaluation",
    built=(*checks.OPEN_GROUPS, "callbacks"),
    settings=(
        *("seed", "zero.", "precision.", "model.", "loss.", "data.", "train.eval_batches", "train.micro_batch_size"),
        *("train.deterministic", "train.loss_over", "launch.device", "launch.nproc_per_node"),
        *("launch.threads_per_rank", "launch.timeout_s"),
    ),
)


class _Loss(TypedDict):
    metrics: dict[str, float]


METRICS = {
    name: {saved.TARGET: f"zerotrain.training.metrics.{name.capitalize()}"} for name in ("accuracy", "perplexity")
}
"""Metrics for any run."""
NO_METRICS = "zerotrain.training.callbacks."
"""The name of a class beginning so is no metric."""
MAX_LOSS_NBYTES = 1 << 20
OTHER_WEIGHTS = "the run evaluates its average of weights, and this is the loss of the trained ones; give --weights ema"
LEFT_OUT = "is left out; if it is a metric, --trust-code computes it"
OTHER_DATA = "the data differs from that of the run: its files or their split have changed, and the loss may differ too"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return the exit code."""
    spawn.open_fork_server()
    parser = parser_of("evaluate", __doc__)
    add_run(parser, has_settings=True, has_weights=True)
    parser.add_argument("--metrics", metavar="NAMES", help="such as accuracy,perplexity, in place of those of the run")
    options = parser.parse_intermixed_args(arguments)
    names = None if options.metrics is None else [name for name in options.metrics.split(",") if name]
    request = {"metrics": names, "trust_code": options.trust_code, "weights": options.weights}

    def lead() -> int:
        return exit_code(lambda: _run(options.path, options.settings, **request))

    def work() -> int:
        ranks = RankEnvironment.read()
        if ranks is None:
            return lead()
        end_with_parent(signal.SIGTERM)
        with kept_out.nothing_imported_from(options.path):
            return run_as_rank(lead, ranks)

    return exit_code(work)


def _run(path: Path, settings: Sequence[str], **request: Any) -> int:
    try:
        with words.words_of_config():
            step, metrics = evaluate(path, settings, **request)
    except (ConfigError, CheckpointError):
        raise
    except Exception as error:
        print(task.failure_of(error, Path(tempfile.gettempdir())), file=sys.stderr)
        return exits.FAILED
    print(f"step {step}: validation loss {metrics.pop('val_loss', 'of each set')}")
    for name, value in metrics.items():
        print(f"  {untrusted.printable(name.removeprefix('val_').removeprefix('loss/'), keep='')}: {value!r}")
    return exits.COMPLETED


def evaluate(
    path: str | os.PathLike[str],
    settings: Sequence[str] = (),
    *,
    metrics: Sequence[str] | None = None,
    trust_code: bool = False,
    weights: str = "trained",
) -> tuple[int, dict[str, float]]:
    """(step, the numbers of `RunEvaluation.after`) of a checkpoint, by ranks that are started for it, or by those of
    torchrun, of which this process is the first.

    Args:
        path: of a checkpoint, of a run, of which the newest is taken, or of an exported folder.
        settings: such as train.eval_batches=100, in place of those of the run.
        metrics: names of the run's or of `METRICS`; None: all of the run's.
        trust_code: see `OfRun.trusts_code`. A class that one of `settings` names is trusted.
        weights: trained or ema.

    Raises:
        ConfigError: a setting is wrong, a class is not trusted, the weights are of no run from a config, or not what
            was written.
        CheckpointError: there is none, or its manifest is damaged.
        RunError: a rank that was started failed.
    """
    ranks, averaged = RankEnvironment.read(), is_averaged(weights)
    with kept_out.nothing_imported_from(path), saved.opened_or_exported(path, averaged=averaged) as run:
        request: dict[str, Any] = {"weights": str(run.path), "step": run.step, "averaged": averaged}
        warnings = []
        if not averaged and isinstance(run, saved.SavedRun) and run.evaluates_average:
            warnings.append(OTHER_WEIGHTS)
        config = _evaluation_config(run, ranks)
        config.callbacks, left_out = _metrics_of(config, metrics, trust_code)
        warnings += [f"callbacks.{untrusted.printable(name)} {LEFT_OUT}" for name in left_out]
        config = with_settings(config, settings, run.path, EVALUATION, trust_code=trust_code)
        started, problems = task.started_ranks(config, ranks)
        if problems:
            raise ConfigError(*problems)
        try:
            data = _checked(config, run, averaged, started)
            is_meant = any(setting.startswith(("data.", "seed=")) for setting in settings)
            warnings += [] if is_meant or run.data_fingerprint in (None, data) else [OTHER_DATA]
            for warning in warnings:
                print(f"warning: {warning}", file=sys.stderr)
            result = _by_ranks(config, request, started.num_ranks, ranks)
        except ZeroTrainError as error:
            if run.path.exists():
                raise
            raise CheckpointError(
                f"{run.path} was removed by its run while it was read; try again with a newer one"
            ) from error
    return request["step"], result["metrics"]


def _metrics_of(config: Config, names: Sequence[str] | None, trust_code: bool) -> tuple[dict[str, Any], list[str]]:
    """The metrics among the callbacks of a run, or the wanted ones; and the names of callbacks of untrusted classes,
    which may be metrics too: nothing of those is imported.

    Raises:
        ConfigError: a wanted one is not there, or not trusted.
    """
    metrics, left_out = {}, []
    for name, values in config.callback_targets.items():
        if not (trust_code or saved.are_known(values)):
            is_none = isinstance(values, dict) and str(values.get(saved.TARGET)).startswith(NO_METRICS)
            left_out += [] if is_none else [name]
        elif checks.makes(values.get(saved.TARGET), Metric):
            metrics[name] = values
    if names is None:
        return metrics, left_out
    problems = []
    for name in names:
        if name in left_out:
            problems.append(f"--metrics: {name} is of a class that is not known; give --trust-code to run its code")
        elif name not in metrics | METRICS:
            problems.append(
                f"--metrics: there is no {untrusted.printable(name)}; there are {', '.join(metrics | METRICS)}"
            )
    if problems:
        raise ConfigError(*problems)
    chosen = {name: (METRICS | metrics)[name] for name in names}
    return {name: {key: value for key, value in values.items() if key != "of"} for name, values in chosen.items()}, []


def _evaluation_config(run: saved.OfRun, ranks: RankEnvironment | None) -> Config:
    """The run's config, without what is of training alone. A ConfigError where it has none, or no whole weights."""
    config, form = run.require_config(), run.form
    if form == saved.ADAPTERS:
        raise ConfigError(f"{run.path} has only adapters; give the run, or an export that was written with --merge")
    if form == saved.MERGED:
        config.model["lora"] = None
    config.zero.stage, config.zero.schedule = stage_at(config.zero.stages, run.step), None
    config.train.virtual_ranks, config.train.gradient_accumulation_steps = None, 1
    config.offload, config.checkpoint = OffloadGroup(), CheckpointConfig()
    config.launch.nproc_per_node, config.launch.max_restarts = 1 if ranks is None else None, 0
    return config


def _in_own_cache(values: Any) -> Any:
    """The arguments of data, of a mix too, with the user's own cache for their tokens: a file names no folder to write
    to."""
    if isinstance(values, dict):
        is_place = {name: name == "cache_dir" and isinstance(value, str) for name, value in values.items()}
        return {name: None if is_place[name] else _in_own_cache(value) for name, value in values.items()}
    return [_in_own_cache(value) for value in values] if isinstance(values, list) else values


def with_settings(config: Config, settings: Sequence[str], path: Path, use: Use, *, trust_code: bool) -> Config:
    """The config of a run with some settings changed. Its text is prepared in the user's own cache, unless they say
    otherwise.

    Args:
        path: of the run.
        trust_code: see `OfRun.trusts_code`. A class that one of `settings` names is trusted.

    Raises:
        ConfigError: a line for each that is none, has a value that it cannot have, or has no effect; a class is not
            trusted, or cannot be built of its arguments.
    """
    values = OmegaConf.create(literal(asdict(config) | {"data": _in_own_cache(config.data)}))
    keys = known_keys(values)
    problems = []
    for setting in settings:
        name, is_setting, _ = setting.partition("=")
        plain = name.lstrip("+~")
        group = name.partition(".")[0]
        if plain != name:
            problems.append(f"{setting}: {use.name} can only change settings; give {plain}=VALUE, such as {plain}=null")
        elif name in GROUPS:
            settings_of = [key for key in keys if key.startswith(f"{name}.")]
            problems.append(f"{setting}: {name} is a group; give one of its settings: {', '.join(settings_of)}")
        elif not is_setting or (name not in keys and group not in OPEN_GROUPS):
            meant = [key for key in keys if use.has_use_for(key)]
            problems.append(f"{setting}: is no setting with a value of this run{words.did_you_mean(name, meant)}")
        elif not use.has_use_for(name):
            problems.append(f"{setting}: has no effect on {use.name}; leave it out")
        else:
            try:
                values.merge_with_dotlist([setting])
                from_values(OmegaConf.to_container(values, resolve=True))
            except (OmegaConfBaseException, ValueError) as error:
                problems.append(f"{setting}: {first_paragraph(error)}")
            except (YAMLError, RecursionError, TypeError, AttributeError, LookupError):
                problems.append(
                    f"{setting}: cannot be read as a value; close its quotes and brackets, or quote it as a text"
                )
    if problems:
        raise ConfigError(*problems)
    config = from_values(OmegaConf.to_container(values, resolve=True))
    if problems := checks.value_problems(config) + choice.unchosen_problems(config):
        raise ConfigError(*problems)
    if not trust_code:
        named: Any = OmegaConf.to_container(OmegaConf.from_dotlist(list(settings)), resolve=False)
        saved.require_trusted(config, use.built, path, overrides=named)
    if problems := checks.class_problems(config):
        raise ConfigError(*problems)
    return config


def _checked(config: Config, run: saved.OfRun, averaged: bool, ranks: Ranks) -> dict[str, Any]:
    """The data as it is after all that can be checked without ranks.

    Raises:
        ConfigError: with every problem found, or an error of zerotrain's or torch's classes in a line. That of a user's
            class keeps its traceback.
    """
    try:
        data = check.check(config, ranks.num_local, ranks.num_ranks, like=run.data_fingerprint)
        if not data["validation_rows"] and not config.validation_set_targets:
            raise ConfigError("data.validation is empty, so that there is nothing to evaluate on; give other data")
        model = build_on_meta(config)
        if model is not None:
            with words.words_of_config():
                misfits = weight_misfits(str(run.path), model, averaged=averaged)
            if misfits:
                raise ConfigError(*misfits)
        return data
    except ZeroTrainError:
        raise
    except Exception as error:
        if not all(saved.are_known(getattr(config, group)) for group in EVALUATION.built):
            raise  # of a class of the user's
        problem = f"{run.path} cannot be evaluated: {type(error).__name__}: {first_paragraph(error)}"
        raise ConfigError(problem) from error


def _by_ranks(config: Config, request: dict[str, Any], num_ranks: int, ranks: RankEnvironment | None) -> Any:
    """The result of `evaluating.run`, as a job of these ranks. The folder of their logs stays where one has failed:
    what is told of it names its log."""
    folder = Path(tempfile.mkdtemp(prefix="zerotrain_evaluate_"))
    evaluation = job.Job(config=config, run_dir=folder, overrides=[], evaluates=request)
    with ExitStack() as stack:
        stack.callback(shutil.rmtree, folder, ignore_errors=True)
        evaluation.ranks_dir.mkdir()
        if ranks is not None:
            job_exchange(ranks).require_same_commands(config.launch.start_timeout_s)
            return task.run_under_torchrun(evaluation, ranks)
        try:
            spawn.run_ranks(resuming.Attempts(evaluation), num_ranks)
        except failures.RunError:
            stack.pop_all()
            raise
        return untrusted.read_json(folder / evaluating.LOSS_NAME, _Loss, max_nbytes=MAX_LOSS_NBYTES)
