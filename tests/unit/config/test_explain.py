"""What a user reads of a command line that Hydra refuses: a line for each problem, and all of them."""

from pathlib import Path

import pytest

from zerotrain.config.explain import composition_problems, with_place

CONF = Path(__file__).resolve().parents[3] / "conf"


@pytest.mark.parametrize(
    ("override", "line"),
    [
        ("zero.stge=3", "zero.stge: there is no such setting; did you mean zero.stage?"),
        ("max_steps=3", "max_steps: there is no such setting; did you mean train.max_steps?"),
        ("trainer.max_epochs=3", "trainer.max_epochs: there is no such setting; zerotrain calls it train.num_epochs"),
        ("strategy=fsdp", "strategy: there is no such setting; zerotrain calls it zero.stage=3"),
        (
            "precision=16-mixed",
            "precision=16-mixed: there is no such choice; zerotrain calls it precision=fp16; there are bf16, fp16, "
            "fp32",
        ),
        ("train.seed=3", "train.seed: there is no such setting; did you mean seed?"),
        ("warmup_steps=3", "warmup_steps: there is no such setting; did you mean scheduler.warmup_steps?"),
        ("model.num_layer=3", "model.num_layer: there is no such setting; did you mean model.num_layers?"),
        ("precison=bf16", "precison: there is no such setting; did you mean precision?"),
        ("precision=bf17", "precision=bf17: there is no such choice; did you mean bf16?; there are bf16, fp16, fp32"),
        ("zero.stage=abc", "zero.stage: got abc; it must be 0, 1, 2 or 3, or auto; the default is 2"),
        (
            "precision.keep_fp32=norm",
            "precision.keep_fp32: got norm; it must be a list of name patterns such as ['*norm*']; the default is []",
        ),
        ("zero.overlap=maybe", "zero.overlap: got maybe; it must be true or false; the default is true"),
        ("seed=null", "seed: got null; it must be between 0 and 2**63 - 1; the default is 0"),
        (
            "+zero.stage=3",
            "+zero.stage=3: Could not append to config. An item is already at 'zero.stage'. Either remove + prefix: "
            "'zero.stage=3' Or add a second + to add or override 'zero.stage': '++zero.stage=3'",
        ),
    ],
)
def test_a_refused_override_gets_one_line_that_helps(compose, override, line):
    assert composition_problems([override], compose, is_sweep=False) == [line]


@pytest.mark.parametrize("chosen", ["tensorboard", "[early_stopping,tensorboard]"])
def test_a_choice_of_another_group_is_told(compose, chosen):
    [line] = composition_problems([f"callbacks={chosen}"], compose, is_sweep=False, folders=[CONF])
    assert "; did you mean logger=tensorboard?; there are early_stopping" in line


@pytest.mark.parametrize("override", ["zero.stage", "zero.stage=[", "zero.stage={"])
def test_an_override_that_cannot_be_read_is_named(compose, override):
    [line] = composition_problems([override], compose, is_sweep=False)
    assert line.startswith(f"{override}: cannot be read; write key=value")


@pytest.mark.parametrize(
    "override", ["zero=fast", "model=null", "precision=16", "=3", "~zero.nothing", "+model@foo=mlp", "debug=slow"]
)
def test_whatever_else_hydra_refuses_stays_one_line(compose, override):
    [line] = composition_problems(["seed=1", override], compose, is_sweep=False)
    assert line.startswith((override, override.lstrip("+").partition("=")[0]))
    assert "\n" not in line


@pytest.mark.parametrize(
    ("override", "line"),
    [
        ("zero={stge:3}", "zero.stge: there is no such setting; did you mean zero.stage?"),
        ("zero={stage:x}", "zero.stage: got x; it must be 0, 1, 2 or 3, or auto; the default is 2"),
        ("train={max_step:3}", "train.max_step: there is no such setting; did you mean train.max_steps?"),
        (
            "model={_target_:torch.nn.Linear,in_features:3}",
            "model.in_features: there is no such setting; +model.in_features=... adds it",
        ),
        ("optimizer.amsgrad=true", "optimizer.amsgrad: there is no such setting; +optimizer.amsgrad=... adds it"),
        (
            "callbacks.early_stopping.patience=2",
            "callbacks.early_stopping.patience: there is no such setting; callbacks=early_stopping brings that",
        ),
        (
            "callbacks.tensorboard.max_queue=3",
            "callbacks.tensorboard.max_queue: there is no such setting; logger=tensorboard brings that callback",
        ),
        (
            "logger=mlflow",
            "logger=mlflow: there is no such choice; examples/mlflow_logger.py of the repository does",
        ),
        (
            "logger=[wandb,trackio]",
            "logger=[wandb,trackio]: needs logger/trackio, which does not exist; "
            "examples/trackio_logger.py of the repository does it, "
            "from the folder that you start in: +callbacks.trackio={_target_:trackio_logger.TrackioLogger}",
        ),
        (
            "seed=choice(null,1.0)",
            "seed=choice(null,1.0): cannot be read: mismatch type argument args[0]: NoneType is in",
        ),
        ("seed=int(x)", "seed=int(x): cannot be read: invalid literal for int() with base 10: 'x'"),
        ("hydra/launcher=rq", "hydra/launcher=rq: is not installed; pip install hydra-rq-launcher; there"),
        ("hydra/sweeper=ax", "hydra/sweeper=ax: is not installed; pip install hydra-ax-sweeper; there"),
        ("data.path='a${b'", "data.path='a${b': ${ begins a reference and needs a } to close it"),
        ("zero.stage=", "zero.stage: got ''; it must be 0, 1, 2 or 3, or auto; the default is 2"),
        ("", "'': cannot be read; write key=value"),
        ("model=glob(*)", "model=glob(*): got several values; -m runs a job for each"),
        ("zero.stage=0,1", "zero.stage=0,1: got several values; -m runs a job for each"),
        (
            "~data.path",
            "~data.path: is null, and Hydra can only leave out a setting with a value; give data=own, which starts "
            "without arguments, or a data yaml without it",
        ),
    ],
)
def test_the_inner_key_is_named_and_what_is_not_installed(compose, override: str, line: str):
    [said] = composition_problems([override], compose, is_sweep=False, folders=[CONF])
    assert said.startswith(line)


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (
            "{top}train:\n  max_steps: 3\n  max_stps: 3\n",
            "{file}, line 4: train.max_stps: there is no such setting; did",
        ),
        (
            "{top}train:\n  gradient_accumulation_steps: abc\n",
            "{file}, line 3: train.gradient_accumulation_steps: got abc; it must be 1 or more micro-batches",
        ),
        (
            "{top}seed: 1\nseed: 2\n",
            'experiment=mine: while constructing a mapping in "{file}", line 2, column 1 found duplicate key seed',
        ),
        (
            "seed: 1\n",
            "{file}: its settings go to experiment, which does not exist; its first line must be `# @package",
        ),
        ("just text", "{file}: its settings go to experiment, which does not exist; its first line must be"),
        ("{top}defaults:\n  - override /model: gpt3\n", "experiment=mine: needs model/gpt3, which does not exist; did"),
    ],
)
def test_of_a_yaml_the_file_the_line_and_the_key_are_named(compose, tmp_path: Path, text: str, line: str):
    file = tmp_path / "experiment/mine.yaml"
    file.parent.mkdir()
    file.write_text(text.format(top="# @package _global_\n"))

    def with_mine(overrides):
        return compose([*overrides, f"hydra.searchpath=[{tmp_path}]"])

    [said] = composition_problems(["experiment=mine"], with_mine, is_sweep=False, folders=[tmp_path])
    assert said.startswith(line.format(file=file))


def test_a_group_of_settings_given_as_one_value_lists_its_settings(compose):
    [line] = composition_problems(["zero=fast"], compose, is_sweep=False)
    assert line.startswith("zero=fast: zero is a group of settings: zero.accumulate, zero.bucket_mb, ")


def test_all_problems_come_at_once_those_of_hydra_and_those_of_the_values(compose):
    overrides = ["zero.stge=3", "zero.stage=5", "precision=bf17", "zero.units=[", "+foo=1", "seed=3"]
    lines = composition_problems(overrides, compose, is_sweep=False)
    assert sorted(line.split(":")[0] for line in lines) == [
        "+foo",
        "precision=bf17",
        "zero.stage",
        "zero.stge",
        "zero.units=[",
    ]


def test_a_choice_that_is_not_there_hides_its_settings_alone(compose):
    """Without joblib, `n_jobs` was told to be no setting, of the launcher that is there."""
    given = ["model=gtp", "model.num_heds=2", "hydra/sweeper/sampler=foo", "zero.stage=9"]
    missing, sampler, value = composition_problems(given, compose, is_sweep=False)
    assert missing.startswith("model=gtp: there is no such choice; there are gpt2, ")
    assert sampler == "hydra/sweeper/sampler=foo: needs hydra/sweeper=optuna too"
    assert value.startswith("zero.stage: got 9; ")
    [sampler] = composition_problems(["hydra/sweeper=optuna", "hydra/sweeper/sampler=foo"], compose, is_sweep=True)
    assert sampler.startswith("hydra/sweeper/sampler=foo: there is no such choice; there are cmaes, grid, ")


def test_several_values_need_a_sweep(compose):
    [line] = composition_problems(["zero.stage=0,1"], compose, is_sweep=False)
    assert line.startswith("zero.stage=0,1: got several values; -m runs a job for each")


def test_of_a_sweep_the_job_with_the_problem_speaks(compose):
    lines = composition_problems(["seed=1,2", "zero.stage=0,1,abc"], compose, is_sweep=True)
    assert lines == ["zero.stage: got abc; it must be 0, 1, 2 or 3, or auto; the default is 2"]


def test_a_range_for_a_sweeper_plugin_is_no_problem_of_its_own(compose):
    lines = composition_problems(["optimizer.lr=interval(0.001,0.1)", "zero.stge=1"], compose, is_sweep=True)
    assert lines == ["zero.stge: there is no such setting; did you mean zero.stage?"]


def test_a_command_line_without_problems_has_none(compose):
    assert composition_problems(["zero.stage=0,1", "seed=1"], compose, is_sweep=True) == []


def test_a_setting_that_only_the_users_class_can_know_is_answered_with_how_to_add_it(compose):
    [line] = composition_problems(["model=huggingface", "model.config.n_layer=2"], compose, is_sweep=False)
    assert line == "model.config.n_layer: there is no such setting; +model.config.n_layer=... adds it"


def test_a_second_dict_for_a_setting_says_how_the_first_is_taken_away(compose):
    [line] = composition_problems(["zero.schedule={0:1}", "zero.schedule={5:2}"], compose, is_sweep=False)
    assert line == (
        "zero.schedule: has a value already, and the two would be merged; zero.schedule=null before it removes "
        "that value"
    )


def test_a_value_of_a_yaml_is_told_with_its_place(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model/mine.yaml").write_text("num_layers: 0\n")
    problem = "model.num_layers: got 0; it must be 1 or more"
    said = f"{problem} ({tmp_path / 'model/mine.yaml'}, line 1)"
    assert with_place(problem, {"model": "mine"}, [tmp_path], []) == said
    (tmp_path / "loss").mkdir()
    for group in ("model", "loss"):
        (tmp_path / f"{group}/mine.yaml").write_text("_target_: ???\n")
    said = f"loss._target_: got null ({tmp_path / 'loss/mine.yaml'}, line 1)"
    assert with_place("loss._target_: got null", {"model": "mine", "loss": "mine"}, [tmp_path], []) == said
