"""The study of a sweep, as a driver begins it and Optuna's sweeper uses it, in one process."""

import contextlib
import copy
import functools
import math
import os
import pickle
import sqlite3
import statistics
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import hydra
import optuna
import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.plugins import Plugins
from omegaconf import DictConfig, OmegaConf
from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

from zerotrain.commands import train  # makes the schema known to Hydra
from zerotrain.errors import ConfigError
from zerotrain.launching.sweep import telling
from zerotrain.launching.sweep.study import OptunaSweeper, Study, StudyError, distribution
from zerotrain.launching.sweep.telling import SweepFolder
from zerotrain.report.journal import JobEvent, SweepJournal
from zerotrain.training.result import RunResult

optuna.logging.set_verbosity(optuna.logging.WARNING)
Begin = Callable[..., Any]
SEARCHED = "hydra.sweeper.params={optimizer.lr:'interval(0,1)'}"


@functools.cache
def composed(*groups: str) -> DictConfig:
    with hydra.initialize_config_dir(config_dir=str(train.CONF), version_base="1.3"):
        return hydra.compose("train", list(groups), return_hydra_config=True)


@pytest.fixture
def begin(tmp_path: Path) -> Iterator[Begin]:
    """Begins a sweep in `sweep` of the test's folder, as Hydra does; returns its study."""

    def begun(*overrides: str, sweeper: str = "optuna", groups: tuple[str, ...] = ()) -> Study | None:
        config = copy.deepcopy(composed(f"hydra/sweeper={sweeper}", *groups))
        OmegaConf.set_struct(config, False)
        OmegaConf.set_readonly(config.hydra, False)
        for override in OverridesParser.create().parse_overrides(
            [f"hydra.sweep.dir={tmp_path}/sweep", *([SEARCHED] if sweeper == "optuna" else []), *overrides]
        ):
            OmegaConf.update(config, override.key_or_group, override.value(), merge=False)
        SweepFolder().on_multirun_start(config)
        return telling.driven_sweep()[0].study

    yield begun
    telling._driven.clear()


def test_values_of_an_interval_on_a_log_scale_lie_evenly_over_its_decades(begin: Begin):
    swept = "hydra.sweeper.params={a:'tag(log,interval(1e-4,1e-1))',b:'interval(1e-4,1e-1)'}"
    by_chance = "hydra.sweeper.sampler={_target_:optuna.samplers.RandomSampler,seed:5}"
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:  # a database on a disk takes half a second a trial
        storage = f"hydra.sweeper.storage=sqlite:///{folder}/study.db"
        study = begin(swept, by_chance, storage, "hydra.sweeper.n_trials=12")
        jobs, trials = study.ask(12), study._study.get_trials()
    for words, trial in zip(jobs.values(), trials, strict=True):
        assert words[:2] == (f"a={trial.params['a']}", f"b={trial.params['b']}")
    places = {name: [math.log10(trial.params[name]) for trial in trials] for name in "ab"}
    assert {math.floor(place) for place in places["a"]} == {-4, -3, -2}
    assert abs(statistics.fmean(places["a"]) + 2.5) < 0.5
    assert statistics.fmean(places["b"]) > -1.7  # nine in ten are of the last decade


def end_driver(study: Study) -> None:
    """As the end of a process does."""
    study._own_lock.close()


def trials_in(folder: Path, name: str = "sweep") -> list[optuna.trial.FrozenTrial]:
    return optuna.load_study(study_name=name, storage=f"sqlite:///{folder}/sweep/study.db").trials


def states_in(folder: Path, name: str = "sweep") -> list[str]:
    return [trial.state.name for trial in trials_in(folder, name)]


def end_job(folder: Path, number: int, status: str = "completed", value: Any = None) -> None:
    """A line in the journal about a job that has ended."""
    event = JobEvent(event="ended", job=number, folder=str(number), hash=None, overrides=[], status=status, value=value)
    SweepJournal(folder / "sweep").append(event)


REFUSED = {
    "sweep.objective=final_vol_loss": "sweep.objective: got final_vol_loss; there is no such value; did you mean ",
    "sweep.objective=[]": "sweep.objective: got []; it must be a number of result.json",
    "sweep.objective=val_nope": "sweep.objective: got val_nope; there is no such value; ",
    "sweep.objective=val_accuracy/docs": "sweep.objective: got val_accuracy/docs; there is no such value; there are ",
    "sweep.objective=comm_bytes_per_step": "sweep.objective: got comm_bytes_per_step; there is no such value; ",
    "sweep.jobs=0": "sweep.jobs: got 0; it must be between 1 and 1024 jobs, or null; the default is null",
    "sweep.again=never": "sweep.again: got never; it must be failed, all or none",
    "sweep.pruner={_target_:os.system,command:ls}": (
        "sweep.pruner: Target 'os.system' is blocklisted because it allows config data to control executable behavior "
    ),
    "sweep.pruner={_target_:builtins.dict}": "sweep.pruner._target_: got builtins.dict, which makes a dict; it must ",
    "hydra.overrides.task=['optimizer.lr=interval(0,1e400)']": "optimizer.lr=interval(0,1e400): its bounds must be ",
    "hydra.overrides.task=['seed=range(0,1e400)']": "seed=range(0,1e400): its bounds must be finite numbers",
    "sweeper=basic hydra.sweeper.params=null hydra.overrides.task=['seed=range(0,1000000000)']": (
        "-m: got 100,001 jobs or more; a sweep has 100,000 at most; give fewer values"
    ),
    "sweeper=basic hydra.sweeper.params=null hydra.overrides.task=['a=range(0,1000)','b=range(1,1001)']": (
        "-m: got 1,000,000 jobs or more; "
    ),
    "sweep.direction=up": "sweep.direction: got up; it must be minimize or maximize",
    "sweep.direction=[minimize,maximize]": "sweep.direction: got 2 for 1 objectives; give one for each",
    "hydra.sweeper.direction=maximize": (
        "hydra.sweeper.direction: got maximize, but sweep.direction=minimize; give sweep.direction=maximize"
    ),
    "hydra.sweeper.direction=foo": "hydra.sweeper.direction: got foo; it must be minimize or maximize",
    "hydra.sweeper.storage={_target_:a.b}": "hydra.sweeper.storage: got {'_target_': 'a.b'}; it must be a URL",
    "hydra.sweeper.storage=nonsense": "hydra.sweeper.storage: got nonsense, which Optuna cannot open: ",
    "hydra.sweeper.n_trials=0": "hydra.sweeper.n_trials: got 0; it must be 1 or more",
    "hydra.sweep.dir=a?b": "hydra.sweep.dir: got a?b; no URL of study.db can have a ?; give another",
    "hydra.sweeper.n_jobs=0": "hydra.sweeper.n_jobs: got 0; it must be 1 or more",
    "hydra.sweeper.params={seed:'range('}": "hydra.sweeper.params: ",
    "hydra.sweeper.params={seed:'interval(2,1)'}": "seed=interval(2,1): ",
    "hydra.sweeper.params={seed:'tag(log,interval(0,1))'}": "seed=tag(log,interval(0,1)): ",
    "hydra.sweeper.sampler._target_=optuna.samplers.Best": "hydra.sweeper.sampler._target_: got optuna.samplers.Best; ",
    "hydra.sweeper.sampler=null": "hydra.sweeper.sampler._target_: got null; it must be the import path of a class",
    "hydra.sweeper.sampler={_target_:builtins.dict}": (
        "hydra.sweeper.sampler._target_: got builtins.dict; it must make a sampler of Optuna"
    ),
    "hydra.sweeper.params={seed:'choice(1,2)'} hydra.sweeper.sampler={_target_:builtins.int,_partial_:true}": (
        "hydra.sweeper.sampler: int() argument must be "
    ),
    "hydra.sweeper.sampler.seed=x": "hydra.sweeper.sampler.seed: got x; it must be between 0 and 2**31 - 1, or null",
    "hydra.sweeper.sampler.seed=-1": "hydra.sweeper.sampler.seed: got -1; it must be between 0 and 2**31 - 1, or null",
    "hydra.sweeper.sampler={_target_:optuna.samplers.GridSampler,_partial_:true}": (
        "optimizer.lr=interval(0,1): a grid has points; give choice() or range()"
    ),
    "sweep.pruner=median": "sweep.pruner: got median; it must be a class of optuna.pruners",
    "sweep.pruner={_target_:optuna.pruners.Medium}": "sweep.pruner._target_: got optuna.pruners.Medium; ",
    "sweep.pruner={_target_:optuna.pruners.NopPruner,speed:1}": "sweep.pruner.speed: optuna.pruners.NopPruner takes no",
    "sweep.pruner={_target_:optuna.pruners.NopPruner} sweep.objective=tokens_per_s": (
        "sweep.objective: got tokens_per_s, which no evaluation measures, with sweep.pruner; "
    ),
    "sweep.pruner={_target_:optuna.pruners.NopPruner} sweep.objective=[val_loss,steps]": (
        "sweep.pruner: got one for 2 objectives; "
    ),
    "sweeper=basic sweep.pruner={_target_:optuna.pruners.NopPruner}": "sweep.pruner: needs hydra/sweeper=optuna; ",
    "sweeper=basic sweep.objective=[val_loss,steps]": "sweep.objective: got 2; several need hydra/sweeper=optuna; ",
}  # fmt: skip


@pytest.mark.parametrize(("given", "said"), REFUSED.items())
def test_what_cannot_be_is_one_line_before_the_first_job(begin, capsys, tmp_path, given, said):
    settings = given.split()
    names = {"sweeper": settings.pop(0).partition("=")[2]} if settings[0].startswith("sweeper=") else {}
    with pytest.raises(SystemExit) as ending:
        begin(*settings, **names)
    [line] = capsys.readouterr().err.splitlines()
    assert (ending.value.code, line[: len(said)]) == (2, said)
    assert telling.driven_sweep() is None
    assert not (tmp_path / "sweep/study.db").exists()


@pytest.mark.parametrize(
    ("swept", "objective", "is_known"),
    [
        ("seed=0,1", "val_accuracy", True),
        ("seed=0,1", "val_perplexity", False),
        ("metrics=accuracy,perplexity", "val_perplexity", True),  # of some jobs, which refuse or measure it
        ("+case=a,b", "val_perplexity", True),
        ("model.num_layers=1,2", "val_perplexity", False),
    ],
)
def test_a_metric_is_known_before_the_first_job_where_all_jobs_have_the_same(begin, capsys, swept, objective, is_known):
    given = (f"hydra.overrides.task=['{swept}']", f"sweep.objective={objective}")
    if is_known:
        begin(*given, groups=("metrics=accuracy",))
        return
    with pytest.raises(SystemExit):
        begin(*given, groups=("metrics=accuracy",))
    said = capsys.readouterr().err
    assert said.startswith(f"sweep.objective: got {objective}; there is no such value; ")
    assert "; there are val_loss, val_accuracy, world_size, " in said


def make_of_maximize(path: Path) -> None:
    optuna.create_study(study_name="sweep", storage=f"sqlite:///{path}", direction="maximize")


def make_of_another_optuna(path: Path) -> None:
    optuna.create_study(study_name="sweep", storage=f"sqlite:///{path}")
    with sqlite3.connect(path) as database:
        database.execute("UPDATE version_info SET schema_version = 99")
        database.execute("UPDATE alembic_version SET version_num = 'v99.0.0'")


def make_of_others(path: Path) -> None:
    with contextlib.closing(sqlite3.connect(path)) as database:
        database.execute("CREATE TABLE books (title TEXT)")


FILES = {
    "database of others": (
        make_of_others,
        "which cannot be read: it is a database of something else, with books; move",
    ),
    "cut-off database": (
        lambda path: path.write_bytes(b"SQLite format 3\0"),
        "which cannot be read: file is not a data",
    ),
    "FIFO": (os.mkfifo, "study.db, which cannot be read: it is a FIFO, and must be"),
    "folder": (Path.mkdir, "study.db, which cannot be read: "),
    "text": (
        lambda path: path.write_text("a=1"),
        "study.db, which cannot be read: it is no database of SQLite; move it away",
    ),
    "link to nowhere": (lambda path: path.symlink_to("/nowhere/study.db"), "study.db, which cannot be read: "),
    "another direction": (make_of_maximize, "sweep.objective: got minimize final_val_loss, but the study sweep in "),
    "another Optuna": (make_of_another_optuna, "study.db, which Optuna cannot open: RuntimeError: "),
}


@pytest.mark.parametrize(("make", "said"), FILES.values(), ids=FILES)
def test_a_file_that_is_no_study_of_this_is_one_line_and_stays(begin, capsys, tmp_path, make, said):
    path = tmp_path / "sweep/study.db"
    path.parent.mkdir()
    make(path)
    before = path.read_bytes() if path.is_file() else None
    with pytest.raises(SystemExit) as ending:
        begin()
    [line] = capsys.readouterr().err.splitlines()
    assert (ending.value.code, said in line) == (2, True), line
    assert before == (path.read_bytes() if path.is_file() else None)


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("seed=1,2", CategoricalDistribution([1, 2])),
        ("seed='a b',null,true", CategoricalDistribution(["'a b'", "null", True])),
        ("seed=shuffle(range(1,4))", CategoricalDistribution([1, 2, 3])),
        ("seed=range(1,9,step=2)", IntDistribution(1, 9, step=2)),
        ("seed=range(0,1,step=0.25)", FloatDistribution(0, 1, step=0.25)),
        ("seed=int(interval(1,8))", IntDistribution(1, 8)),
        ("seed=tag(log,int(interval(1,8)))", IntDistribution(1, 8, log=True)),
        ("seed=interval(0.5,1)", FloatDistribution(0.5, 1.0)),
        ("seed=tag(log,interval(1e-4,1))", FloatDistribution(1e-4, 1.0, log=True)),
    ],
)
def test_the_values_of_a_setting_are_what_hydra_s_grammar_says(line: str, expected: Any):
    assert distribution(OverridesParser.create().parse_override(line)) == expected


def test_the_choices_of_a_group_that_match_a_glob_are_values(begin: Begin):
    for sweeper in ("optuna", "basic"):
        composed(f"hydra/sweeper={sweeper}")
    with hydra.initialize_config_dir(config_dir=str(train.CONF), version_base="1.3"):  # as within a command
        study = begin("hydra.sweeper.params={model:'glob(gpt2*)'}")
        begin("hydra.overrides.task=['model=glob(gpt2*)']", sweeper="basic")
    assert study.space == {"model": CategoricalDistribution(["gpt2", "gpt2_large", "gpt2_medium", "gpt2_xl"])}
    assert telling.driven_sweep()[0].total == 4


def test_hydra_makes_the_sweeper_and_a_job_gets_the_study_without_its_database(begin: Begin, tmp_path: Path):
    study = begin("hydra.sweeper.n_trials=2", "hydra.overrides.task=['seed=7']")
    sweeper = Plugins.instance()._instantiate(composed("hydra/sweeper=optuna").hydra.sweeper)
    assert type(sweeper) is OptunaSweeper
    [(lr, seed)] = study.ask(1).values()
    assert (lr, seed) == (f"optimizer.lr={trials_in(tmp_path)[0].params['optimizer.lr']}", "seed=7")
    of_job = pickle.loads(pickle.dumps(study))
    assert (of_job.url, of_job.name) == (f"sqlite:///{tmp_path}/sweep/study.db", "sweep")
    assert of_job._study is None


def test_trials_of_a_driver_that_is_gone_wait_and_keep_their_values(begin: Begin, tmp_path: Path):
    first = begin("hydra.sweeper.n_trials=4")
    first.ask(1)
    end_job(tmp_path, 0, value=1.0)
    first.tell()
    asked = first.ask(1)
    assert list(asked) == [1]

    second = begin("hydra.sweeper.n_trials=4")  # beside the first, whose lock is held
    assert states_in(tmp_path) == ["COMPLETE", "RUNNING"]
    assert second.num_left == 2

    end_driver(first)
    third = begin("hydra.sweeper.n_trials=4")
    assert states_in(tmp_path) == ["COMPLETE", "WAITING"]
    assert third.num_left == 3
    assert third.ask(1) == asked
    assert states_in(tmp_path) == ["COMPLETE", "RUNNING"]


def test_a_misspelt_setting_and_values_of_another_kind_do_not_spoil_a_study(begin: Begin, tmp_path: Path):
    misspelt = begin("hydra.sweeper.n_trials=2", "hydra.sweeper.params={optimizer.lrr:'interval(0,1)'}")
    misspelt.ask(1)
    end_driver(misspelt)
    study = begin("hydra.sweeper.n_trials=2")
    assert [setting.partition("=")[0] for [setting] in study.ask(9).values()] == ["optimizer.lr"] * 2
    end_driver(study)
    other = begin("hydra.sweeper.n_trials=3", "hydra.sweeper.params={optimizer.lr:'choice(1,2)'}")
    with pytest.raises(ConfigError, match=r"optimizer\.lr: the study has other values for it \(.*\); give it those, "):
        other.ask(3)


def test_a_trial_with_a_setting_that_is_not_varied_fails_and_does_not_count(begin, capsys, tmp_path):
    (tmp_path / "sweep").mkdir()
    written = optuna.create_study(study_name="sweep", storage=f"sqlite:///{tmp_path}/sweep/study.db")
    of_class = {"model._target_": CategoricalDistribution(["os.system"])}
    waiting = {"state": optuna.trial.TrialState.WAITING, "distributions": of_class}
    written.add_trial(optuna.trial.create_trial(params={"model._target_": "os.system"}, **waiting))
    written.enqueue_trial({"optimizer.lrr": 0.25})
    written.enqueue_trial({"optimizer.lr": 0.5})
    study = begin("hydra.sweeper.n_trials=3")
    dropped = [
        f"trial {number} fails: the sweep has no {name}"
        for number, name in enumerate(["model._target_", "optimizer.lrr"])
    ]
    assert capsys.readouterr().err.splitlines() == dropped
    written.enqueue_trial({"optimizer.wd": 0.25})
    asked = study.ask(9)
    assert capsys.readouterr().err == "trial 3 fails: the sweep has no optimizer.wd\n"
    assert (list(asked), asked[2]) == ([2, 4, 5], ("optimizer.lr=0.5",))
    assert states_in(tmp_path) == ["FAIL", "FAIL", "RUNNING", "FAIL", "RUNNING", "RUNNING"]


def test_the_best_trial_has_no_setting_that_was_varied_before(begin: Begin, tmp_path: Path):
    both = "hydra.sweeper.params={optimizer.lr:'interval(0,1)',optimizer.weight_decay:'interval(0,1)'}"
    first = begin("hydra.sweeper.n_trials=1", both)
    first.ask(1)
    end_driver(first)
    study = begin("hydra.sweeper.n_trials=1")
    study.ask(1)
    end_job(tmp_path, 1, value=1.0)
    study.tell()
    study.write_best(tmp_path)
    assert list(OmegaConf.load(tmp_path / "optimization_results.yaml").best_params) == ["optimizer.lr"]


def test_a_study_never_has_more_trials_than_wanted(begin: Begin, capsys: pytest.CaptureFixture[str]):
    first, second = begin("hydra.sweeper.n_trials=3"), begin("hydra.sweeper.n_trials=3")
    assert [len(first.ask(2)), len(second.ask(2)), len(first.ask(2))] == [2, 1, 0]
    capsys.readouterr()
    assert begin("hydra.sweeper.n_trials=1").num_left == 0
    assert capsys.readouterr().out == "the study has its 3 trials; a larger hydra.sweeper.n_trials asks for more\n"


def test_a_fixed_seed_moves_on_with_each_start(begin: Begin):
    seeded = ("hydra.sweeper.sampler.seed=7", "hydra.sweeper.n_trials=9")
    assert len({settings for _ in range(3) for settings in begin(*seeded).ask(1).values()}) == 3


@pytest.mark.parametrize("name", ["cmaes", "nsgaii", "random", "tpe"])
def test_each_sampler_chooses(begin: Begin, name: str):
    study = begin(groups=(f"hydra/sweeper/sampler={name}",))
    assert len(set(study.ask(3).values())) == 3


@pytest.mark.parametrize("seeded", [[], ["hydra.sweeper.sampler.seed=7"]])
def test_a_grid_has_as_many_trials_as_points_and_one_that_waited_keeps_its_point(begin, tmp_path, seeded):
    params = "hydra.sweeper.params={seed:'shuffle(1,2,3)',zero.stage:'range(0,2)'}"
    grid = functools.partial(begin, params, *seeded, groups=("hydra/sweeper/sampler=grid",))
    first = grid()
    assert first.num_trials == 6
    asked = first.ask(2)
    end_driver(first)
    second = grid()
    again = second.ask(2)
    assert again == asked
    for number in range(2):
        end_job(tmp_path, number, value=1.0)
    second.tell()
    rest = second.ask(9)
    assert len({*again.values(), *rest.values()}) == 6
    for number in range(2, 6):
        end_job(tmp_path, number, value=1.0)
    second.tell()
    assert states_in(tmp_path) == ["COMPLETE"] * 6


def test_a_grid_goes_on_with_a_trial_that_a_user_has_queued(begin: Begin, tmp_path: Path):
    """With one point left Optuna asked such a trial for its place in the grid, which it has none of."""
    grid = functools.partial(begin, "hydra.sweeper.params={seed:'choice(1,2)'}", "hydra.sweeper.n_trials=3")
    groups = ("hydra/sweeper/sampler=grid",)
    end_driver(grid(groups=groups))
    optuna.load_study(study_name="sweep", storage=f"sqlite:///{tmp_path}/sweep/study.db").enqueue_trial({"seed": 1})
    study = grid(groups=groups)
    study.ask(2)
    for number in (0, 1):
        end_job(tmp_path, number, value=1.0)
    study.tell()
    assert states_in(tmp_path) == ["COMPLETE", "COMPLETE"]


@pytest.mark.parametrize("use", ["ask", "tell"])
def test_a_study_that_is_deleted_in_mid_sweep_is_one_line(begin: Begin, tmp_path: Path, use: str):
    study = begin()
    study.ask(1)
    optuna.delete_study(study_name="sweep", storage=f"sqlite:///{tmp_path}/sweep/study.db")
    told = r"^hydra\.sweeper\.storage: the study sweep was deleted in mid-sweep; the same command begins another$"
    with pytest.raises(StudyError, match=told):
        study.ask(1) if use == "ask" else study.tell()


class Launcher:
    """Runs no job; each ends at once, with its number as its value."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.launched, self.best = folder, [], []

    def launch(self, jobs: list[tuple[str, ...]], initial_job_idx: int) -> None:
        """See Hydra's."""
        self.launched.append([*range(initial_job_idx, initial_job_idx + len(jobs))])
        path = self.folder / "sweep/optimization_results.yaml"
        self.best.append(OmegaConf.load(path).best_value if path.exists() else None)
        for number in self.launched[-1]:
            end_job(self.folder, number, value=float(number))


def test_a_job_has_the_number_of_its_trial_and_the_best_one_is_kept_while_the_sweep_runs(begin: Begin, tmp_path: Path):
    first, other = begin(), begin()
    for number in (0, 2):
        assert list(first.ask(1)) == [number]
        end_job(tmp_path, number, value=9.0)
        first.tell()
        other.ask(1 - number // 2)  # the trial between the two
    for study in (first, other):
        end_driver(study)
    assert states_in(tmp_path) == ["COMPLETE", "RUNNING", "COMPLETE"]
    begin("hydra.sweeper.n_trials=6")
    sweeper, launcher = OptunaSweeper(n_jobs=2), Launcher(tmp_path)
    sweeper._sweep, sweeper._launcher = telling.driven_sweep()[0], launcher
    sweeper.sweep([])
    assert launcher.launched == [[1], [3], [4, 5]]
    assert launcher.best == [9.0, 9.0, 1.0]
    assert states_in(tmp_path) == ["COMPLETE"] * 6


def test_the_fate_of_a_job_is_the_journal_s(begin: Begin, tmp_path: Path):
    study = begin()
    with pytest.raises(StudyError, match="no trial of the study has completed, so that it has no best one"):
        study.require_best()
    study.ask(5)
    for number, (status, value) in enumerate([("completed", 2.0), ("pruned", 1.0), ("failed", None), ("stopped", 3.0)]):
        end_job(tmp_path, number, status, value)
    study.tell()
    assert states_in(tmp_path) == ["COMPLETE", "PRUNED", "FAIL", "COMPLETE", "FAIL"]
    study.write_best(tmp_path)
    best = OmegaConf.to_container(OmegaConf.load(tmp_path / "optimization_results.yaml"))
    assert best == {"name": "optuna", "best_params": trials_in(tmp_path)[0].params, "best_value": 2.0}


def test_the_journal_of_an_earlier_sweep_tells_nothing_of_a_trial(begin: Begin, tmp_path: Path):
    end_job(tmp_path, 0, value=0.5)
    study = begin()
    study.ask(2)
    end_job(tmp_path, 1, value=1.0)
    study.tell()
    assert [trial.values for trial in trials_in(tmp_path)] == [None, [1.0]]


def leave_result(folder: Path, overrides: list[str], **fields: Any) -> None:
    folder.mkdir()
    result = {"status": "completed", "final_train_loss": 3.0, "final_val_loss": 2.0} | fields
    RunResult(world_size=1, overrides=overrides, **result).write(folder)


def test_without_a_line_in_the_journal_the_fate_of_a_job_is_in_its_result(begin: Begin, tmp_path: Path):
    study = begin("hydra.overrides.task=['seed=7']")
    jobs, folder = [list(job) for job in study.ask(4).values()], tmp_path / "sweep"
    leave_result(folder / "0", jobs[0])
    leave_result(folder / "1", jobs[1], status="stopped", stopped_by="sweep.pruner")
    leave_result(folder / "2", ["seed=7"])  # of another job, in whose place this one has got 2_2
    begun = JobEvent(event="begun", job=3, folder="3_2", hash=None, overrides=[])
    SweepJournal(folder).append(begun)
    leave_result(folder / "3_2", jobs[3], final_val_loss=1.5)
    study.tell()
    trials = trials_in(tmp_path)
    assert [trial.state.name for trial in trials] == ["COMPLETE", "PRUNED", "FAIL", "COMPLETE"]
    assert [trial.values for trial in trials] == [[2.0], None, None, [1.5]]


@pytest.mark.parametrize("use", ["ask", "tell", "write_best"])
def test_a_database_that_fails_in_mid_sweep_is_one_line(begin: Begin, tmp_path: Path, use: str):
    study = begin()
    study.ask(1)
    with contextlib.closing(sqlite3.connect(tmp_path / "sweep/study.db")) as database:
        for table in ("trial_values", "trial_user_attributes", "trials"):
            database.execute(f"DROP TABLE {table}")
    arguments = {"ask": [1], "tell": [], "write_best": [tmp_path]}[use]
    with pytest.raises(StudyError, match=r"^hydra\.sweeper\.storage: .*no such table: .*; the same command goes on$"):
        getattr(study, use)(*arguments)


def test_without_a_completed_trial_a_pruned_or_running_one_is_no_error(begin: Begin, tmp_path: Path):
    study = begin()
    study.ask(1)
    study.require_best()  # runs
    end_job(tmp_path, 0, "pruned", 1.0)
    study.tell()
    study.require_best()
    study.write_best(tmp_path)
    assert not (tmp_path / "optimization_results.yaml").exists()


def test_a_study_keeps_its_trials_and_its_objective(begin: Begin, capsys: pytest.CaptureFixture[str], tmp_path: Path):
    begin("sweep.again=all").ask(1)
    for given in ("sweep.again=all", "sweep.objective=final_train_loss"):
        with pytest.raises(SystemExit):
            begin(given)
    again, objective = capsys.readouterr().err.splitlines()
    assert again.startswith("sweep.again: got all, but the study sweep has 1 trials, which it keeps; ")
    assert objective.startswith("sweep.objective: got minimize final_train_loss, but the study sweep in ")
    assert objective.endswith(" is to minimize final_val_loss; give that, or another hydra.sweeper.study_name")
    begin("sweep.again=all", "hydra.sweeper.study_name=another")
    assert states_in(tmp_path, "another") == []


def test_several_objectives_have_a_direction_each(begin: Begin, tmp_path: Path):
    study = begin("sweep.objective=[val_loss,tokens_per_s]", "sweep.direction=[minimize,maximize]")
    study.ask(3)
    for number, values in enumerate([[2.0, 10.0], [1.0, 9.0], [2.0, 8.0]]):
        end_job(tmp_path, number, value=values)
    study.tell()
    study.write_best(tmp_path)
    best = OmegaConf.load(tmp_path / "optimization_results.yaml")
    assert [list(solution["values"]) for solution in best.solutions] == [[2.0, 10.0], [1.0, 9.0]]


def test_a_storage_of_the_users_has_a_study_for_each_folder(begin: Begin, tmp_path: Path):
    url = f"sqlite:///{tmp_path}/all.db"
    assert begin(f"hydra.sweeper.storage={url}").name == f"{tmp_path}/sweep"
    assert [summary.study_name for summary in optuna.get_all_study_summaries(url)] == [f"{tmp_path}/sweep"]


def test_a_sweep_without_optuna_has_no_study(begin: Begin, tmp_path: Path):
    assert begin("sweep.objective=tokens_per_s", "sweep.direction=maximize", sweeper="basic") is None
    sweep = telling.driven_sweep()[0]
    assert (sweep.settings.objectives, sweep.settings.directions) == (["tokens_per_s"], ["maximize"])
    assert not (tmp_path / "sweep/study.db").exists()
