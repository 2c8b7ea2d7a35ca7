"""The study of a sweep, as a driver begins it and Optuna's sweeper uses it, in one process."""

import contextlib
import copy
import functools
import gc
import os
import sqlite3
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import hydra
import optuna
import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig, OmegaConf

from zerotrain.commands import train  # makes the schema known to Hydra
from zerotrain.errors import ConfigError
from zerotrain.launching.sweep import sweep as study
from zerotrain.launching.sweep import telling as driver
from zerotrain.launching.sweep.sweep import Sweep
from zerotrain.launching.sweep.telling import SweepFolder
from zerotrain.report.journal import JobEvent, SweepJournal

optuna.logging.set_verbosity(optuna.logging.WARNING)
Begin = Callable[..., DictConfig]
SEARCHED = "hydra.sweeper.params={optimizer.lr:'interval(0,1)'}"


@functools.cache
def composed(*groups: str) -> DictConfig:
    with hydra.initialize_config_dir(config_dir=str(train.CONF), version_base="1.3"):
        return hydra.compose("train", list(groups), return_hydra_config=True)


@pytest.fixture
def begin(tmp_path: Path) -> Iterator[Begin]:
    """Begins a sweep in `sweep` of the test's folder, as Hydra does; returns the config that the sweeper is made of."""

    def begun(*overrides: str, sweeper: str = "optuna", groups: tuple[str, ...] = ()) -> DictConfig:
        config = copy.deepcopy(composed(f"hydra/sweeper={sweeper}", *groups))
        OmegaConf.set_struct(config, False)
        OmegaConf.set_readonly(config.hydra, False)
        for each in OverridesParser.create().parse_overrides(
            [f"hydra.sweep.dir={tmp_path}/sweep", SEARCHED, *overrides]
        ):
            OmegaConf.update(config, each.key_or_group, each.value(), merge=False)
        config.hydra.overrides.hydra = list(overrides)
        SweepFolder().on_multirun_start(config)
        return config

    yield begun
    driver._driven.clear()
    study._held.clear()


def end_driver() -> None:
    """As the end of a process does."""
    study._held.clear()
    gc.collect()


def sweeps_study(config: DictConfig, **arguments: Any) -> optuna.Study:
    """The study as the sweeper has it."""
    sweeper = config.hydra.sweeper
    return optuna.create_study(
        study_name=sweeper.study_name, storage=sweeper.storage, directions=["minimize"],
        load_if_exists=True, **arguments,
    )  # fmt: skip


def states_in(folder: Path, name: str = "sweep") -> list[str]:
    found = optuna.load_study(study_name=name, storage=f"sqlite:///{folder}/sweep/study.db")
    return [each.state.name for each in found.trials]


def ask(of: optuna.Study) -> optuna.Trial:
    trial = of.ask()
    trial.suggest_float("optimizer.lr", 0.0, 1.0)
    return trial


REFUSED = {
    "sweep.objective=final_vol_loss": "sweep.objective: got final_vol_loss; there is no such value; did you mean ",
    "sweep.objective=val_metrics": "sweep.objective: got val_metrics; there is",
    "sweep.objective=3": "sweep.objective: got 3; it must be a number of result.json",
    "sweep.objective=[]": "sweep.objective: got []; it must be a number of result.json",
    "sweep.objective=val_nope": "sweep.objective: got val_nope; there is no such value; ",
    "sweep.objective=val_accuracy/docs": "sweep.objective: got val_accuracy/docs; there is no such value; there are ",
    "sweep.objective=comm_bytes_per_step": "sweep.objective: got comm_bytes_per_step; there is no such value; ",
    "sweep.objective=memory_bytes.peak.x": "sweep.objective: got memory_bytes.peak.x; there is no such value; ",
    "sweep.objective=steps.x": "sweep.objective: got steps.x; there is no such value; ",
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
    "hydra.sweeper.direction=minimize sweep.direction=maximize": "hydra.sweeper.direction: got minimize, but ",
    "hydra.sweeper.storage={_target_:a.b}": "hydra.sweeper.storage: got an object; it must be a URL",
    "hydra.sweeper.storage=nonsense": "hydra.sweeper.storage: got nonsense, which Optuna cannot open: ",
    "hydra.sweeper.n_trials=0": "hydra.sweeper.n_trials: got 0; it must be 1 or more",
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
def test_what_cannot_be_is_one_line_before_the_first_job(
    begin: Begin, capsys: pytest.CaptureFixture[str], tmp_path: Path, given: str, said: str
):
    settings = given.split()
    names = {"sweeper": settings.pop(0).partition("=")[2]} if settings[0].startswith("sweeper=") else {}
    with pytest.raises(SystemExit) as ending:
        begin(*settings, **names)
    [line] = capsys.readouterr().err.splitlines()
    assert ending.value.code == 2
    assert line.startswith(said)
    assert driver.driven_sweep() is None


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
def test_a_metric_is_known_before_the_first_job_where_all_jobs_have_the_same(
    begin: Begin, capsys: pytest.CaptureFixture[str], swept: str, objective: str, is_known: bool
):
    given = (f"hydra.overrides.task=['{swept}']", f"sweep.objective={objective}")
    if is_known:
        begin(*given, groups=("metrics=accuracy",))
        return
    with pytest.raises(SystemExit):
        begin(*given, groups=("metrics=accuracy",))
    said = capsys.readouterr().err
    assert said.startswith(f"sweep.objective: got {objective}; there is no such value; ")
    assert "; there are val_loss, val_accuracy, world_size, " in said


def make_text(path: Path) -> None:
    path.write_text("optimizer.lr=1")


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
    "text": (make_text, "study.db, which cannot be read: it is no database of SQLite; move it away"),
    "link to nowhere": (lambda path: path.symlink_to("/nowhere/study.db"), "study.db, which cannot be read: "),
    "another direction": (make_of_maximize, "sweep.objective: got minimize final_val_loss, but the study sweep in "),
    "another Optuna": (make_of_another_optuna, "study.db, which Optuna cannot open: RuntimeError: "),
}


@pytest.mark.parametrize(("make", "said"), FILES.values(), ids=FILES)
def test_a_file_that_is_no_study_of_this_is_one_line_and_stays(
    begin: Begin, capsys: pytest.CaptureFixture[str], tmp_path: Path, make: Callable[[Path], None], said: str
):
    path = tmp_path / "sweep/study.db"
    path.parent.mkdir()
    make(path)
    before = path.read_bytes() if path.is_file() else None
    with pytest.raises(SystemExit) as ending:
        begin()
    [line] = capsys.readouterr().err.splitlines()
    assert (ending.value.code, said in line) == (2, True), line
    assert before == (path.read_bytes() if path.is_file() else None)


def test_trials_of_a_driver_that_is_gone_wait_and_keep_their_values(begin: Begin, tmp_path: Path):
    config = begin("hydra.sweeper.n_trials=4")
    first = sweeps_study(config)
    done, running = ask(first), ask(first)
    first.tell(done, 1.0)
    assert driver.driven_sweep()[0].study.trials == [0, 1]

    config = begin("hydra.sweeper.n_trials=4")  # the first one holds its lock: as a second driver of the same study
    assert states_in(tmp_path) == ["COMPLETE", "RUNNING"]
    assert config.hydra.sweeper.n_trials == 2

    end_driver()
    config = begin("hydra.sweeper.n_trials=4")
    assert states_in(tmp_path) == ["COMPLETE", "WAITING"]
    assert config.hydra.sweeper.n_trials == 3
    again = ask(sweeps_study(config))
    assert (again.number, again.params) == (1, running.params)
    assert driver.driven_sweep()[0].study.trials == [1]
    assert states_in(tmp_path) == ["COMPLETE", "RUNNING"]


def test_a_misspelt_setting_and_values_of_another_kind_do_not_spoil_a_study(begin: Begin, tmp_path: Path):
    misspelt = sweeps_study(begin("hydra.sweeper.n_trials=2")).ask()
    misspelt.suggest_float("optimizer.lrr", 0.0, 1.0)
    end_driver()
    config = begin("hydra.sweeper.n_trials=2")
    assert states_in(tmp_path) == ["FAIL"]
    assert config.hydra.sweeper.n_trials == 2
    begun = sweeps_study(config)
    first, second = ask(begun), begun.ask()
    assert [first.number, second.number] == [1, 2]
    with pytest.raises(ConfigError, match=r"optimizer\.lr: the study has other values for it \(.*\); give it those, "):
        second.suggest_categorical("optimizer.lr", [1, 2])
    with pytest.raises(study.StudyIsFullError):
        begun.ask()


def test_a_trial_in_the_file_gives_a_job_no_setting_that_the_sweep_does_not_vary(begin: Begin, tmp_path: Path):
    (tmp_path / "sweep").mkdir()
    written = optuna.create_study(study_name="sweep", storage=f"sqlite:///{tmp_path}/sweep/study.db")
    of_class = optuna.distributions.CategoricalDistribution(["os.system"])
    for params in ({"model._target_": of_class}, {}):
        waiting = {"state": optuna.trial.TrialState.WAITING, "distributions": params}
        written.add_trial(optuna.trial.create_trial(params=dict.fromkeys(params, "os.system"), **waiting))
    config = begin("hydra.sweeper.n_trials=1")
    assert states_in(tmp_path) == ["FAIL", "WAITING"]
    assert ask(sweeps_study(config)).params.keys() == {"optimizer.lr"}


def test_a_trial_of_another_program_stays_as_it_is(begin: Begin, tmp_path: Path):
    (tmp_path / "sweep").mkdir()
    optuna.create_study(study_name="sweep", storage=f"sqlite:///{tmp_path}/sweep/study.db").ask()
    assert begin("hydra.sweeper.n_trials=3").hydra.sweeper.n_trials == 2
    assert states_in(tmp_path) == ["RUNNING"]


def test_a_study_never_has_more_trials_than_wanted_and_gives_back_half_a_batch(
    begin: Begin, capsys: pytest.CaptureFixture[str], tmp_path: Path
):
    begun = sweeps_study(begin("hydra.sweeper.n_trials=3"))
    begun.tell(ask(begun), 1.0)
    begun.tell(ask(begun), 1.0)
    ask(begun)
    with pytest.raises(study.StudyIsFullError):
        ask(begun)
    assert states_in(tmp_path) == ["COMPLETE", "COMPLETE", "WAITING"]
    assert begin("hydra.sweeper.n_trials=3").hydra.sweeper.n_trials == 1
    ask(begun)
    capsys.readouterr()
    assert begin("hydra.sweeper.n_trials=3").hydra.sweeper.n_trials == 0
    assert capsys.readouterr().out == "the study has its 3 trials; a larger hydra.sweeper.n_trials asks for more\n"
    assert begin("hydra.sweeper.n_trials=1").hydra.sweeper.n_trials == 0


def test_a_fixed_seed_moves_on_with_each_start(begin: Begin):
    seeds = [begin("hydra.sweeper.sampler.seed=7").hydra.sweeper.sampler.seed for _ in range(3)]
    assert seeds == [7, 8, 9]
    assert begin().hydra.sweeper.sampler.seed is None


def test_a_grid_has_as_many_trials_as_points_and_one_that_waited_keeps_its_point(begin: Begin):
    params = "hydra.sweeper.params={seed:'choice(1,2,3)',zero.stage:'range(0,2)'}"
    grid = functools.partial(begin, params, groups=("hydra/sweeper/sampler=grid",))
    config = grid()
    assert config.hydra.sweeper.n_trials == 6
    sampler = optuna.samplers.GridSampler({"seed": [1, 2, 3]})
    begun = sweeps_study(config, sampler=sampler)
    begun.ask().suggest_categorical("seed", [1, 2, 3])
    place = begun.trials[0].system_attrs["grid_id"]
    end_driver()
    again = sweeps_study(grid(), sampler=sampler)
    for _ in range(3):
        again.ask().suggest_categorical("seed", [1, 2, 3])
    assert again.trials[0].system_attrs["grid_id"] == place
    assert {each.params["seed"] for each in again.trials} == {1, 2, 3}


def test_a_job_that_the_journal_calls_pruned_is_a_pruned_trial(begin: Begin, tmp_path: Path):
    begun = sweeps_study(begin())
    for number, status in enumerate(["completed", "pruned"]):
        ask(begun)
        told = {"job": number, "folder": str(number), "hash": None, "overrides": []}
        SweepJournal(tmp_path / "sweep").append(JobEvent(event="ended", status=status, **told))
        begun.tell(number, 2.0 - number)
    assert states_in(tmp_path) == ["COMPLETE", "PRUNED"]
    assert begun.best_trial.number == 0


def test_a_study_keeps_its_trials_and_its_objective(begin: Begin, capsys: pytest.CaptureFixture[str], tmp_path: Path):
    ask(sweeps_study(begin("sweep.again=all")))
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
    config = begin("sweep.objective=[val_loss,tokens_per_s]", "sweep.direction=[minimize,maximize]")
    assert list(config.hydra.sweeper.direction) == ["minimize", "maximize"]
    found = optuna.load_study(study_name="sweep", storage=f"sqlite:///{tmp_path}/sweep/study.db")
    assert [each.name for each in found.directions] == ["MINIMIZE", "MAXIMIZE"]


def test_a_storage_of_the_users_has_a_study_for_each_folder(begin: Begin, tmp_path: Path):
    url = f"sqlite:///{tmp_path}/all.db"
    config = begin(f"hydra.sweeper.storage={url}")
    assert config.hydra.sweeper.study_name == f"{tmp_path}/sweep"
    assert [each.study_name for each in optuna.get_all_study_summaries(url)] == [f"{tmp_path}/sweep"]


def test_a_sweep_without_optuna_has_no_study(begin: Begin, tmp_path: Path):
    begin("sweep.objective=tokens_per_s", "sweep.direction=maximize", sweeper="basic")
    sweep: Sweep = driver.driven_sweep()[0]
    assert (sweep.study, sweep.objectives, sweep.directions) == (None, ("tokens_per_s",), ("maximize",))
    assert not (tmp_path / "sweep/study.db").exists()
