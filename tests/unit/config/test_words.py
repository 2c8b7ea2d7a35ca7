"""What the engine says in the words of `build_engine`, said in those of the config."""

import inspect
from operator import attrgetter

import pytest

import zerotrain
from zerotrain.config.checks import must_be
from zerotrain.config.compose import to_config
from zerotrain.config.words import REMOVED, SETTINGS, did_you_mean, in_words_of_config, we_call_it, words_of_config
from zerotrain.errors import CommError, ConfigError, DisagreementError, EngineStateError, TrainingError, ZeroTrainError

SAID = [
    ("compile=True: works unit by unit; or set compile=False", "model.compile=true: works unit by unit; or set "
     "model.compile=false"),
    ("activation_checkpointing=True: works", "model.activation_checkpointing=true: works"),
    ("torch.compile needs a C++ compiler; compile less", "torch.compile needs a C++ compiler; compile less"),
    ("max_grad_norm: differs between the ranks", "train.max_grad_norm: differs between the ranks"),
    ("let more be skipped (max_skipped_steps)", "let more be skipped (train.on_nonfinite=skip, "
     "train.max_skipped_steps)"),
    ("max_skipped_steps: got 0", "train.max_skipped_steps: got 0"),
    ('use precision="bf16" or lower the optimizer\'s lr', "use precision=bf16 or lower optimizer.lr"),
    ("precision.keep_fp32: keeps every parameter", "precision.keep_fp32: keeps every parameter"),
    ("set zero.reshard_after_forward=False", "set zero.reshard_after_forward=false"),
    ("name its units with zero.units=['blocks.*', 'head']", "name its units with zero.units=[blocks.*,head]"),
    ("MuonWithAdamW(matrices='auto'): found none", "optimizer.matrices=auto: found none"),
    ("MuonWithAdamW(matrices=...): none matches 'x'", "optimizer.matrices: none matches 'x'"),
    ("such as zerotrain.MuonWithAdamW(matrices=['*.weight'])", "such as optimizer.matrices=[*.weight]"),
    ("use zerotrain.MuonWithAdamW(...), which", "use optimizer=muon, which"),
    ("World.from_environment(device='cuda'): no GPU", "launch.device=cuda: no GPU"),
    ("use torchrun --nproc-per-node=2 or less", "use launch.nproc_per_node=2 or less"),
    ("checkpoint with use_reentrant=False", "checkpoint with use_reentrant=False"),
    ("train.max_grad_norm=1.0 and model.compile=true", "train.max_grad_norm=1.0 and model.compile=true"),
]  # fmt: skip


@pytest.mark.parametrize(("text", "said"), SAID)
def test_arguments_become_settings_and_settings_stay(text: str, said: str) -> None:
    assert in_words_of_config(text) == said
    assert in_words_of_config(said) == said


@pytest.mark.parametrize("kind", [ConfigError, TrainingError, CommError, DisagreementError, EngineStateError])
def test_an_error_stays_the_same_with_its_cause(kind: type[ZeroTrainError]) -> None:
    raised = kind("max_grad_norm: wrong")
    with pytest.raises(ZeroTrainError) as caught, words_of_config():
        raise raised from ValueError("below")
    assert caught.value is raised
    assert str(raised) == "train.max_grad_norm: wrong"
    assert isinstance(raised.__cause__, ValueError)


def test_each_problem_of_a_config_error_is_told_so() -> None:
    with pytest.raises(ConfigError) as caught, words_of_config():
        raise ConfigError("compile=True: no", "zero.units: no")
    assert caught.value.problems == ("model.compile=true: no", "zero.units: no")


def test_what_is_not_ours_is_left_alone() -> None:
    with pytest.raises(ValueError, match=r"^max_grad_norm$"), words_of_config():
        raise ValueError("max_grad_norm")


@pytest.mark.parametrize(("argument", "setting"), SETTINGS.items())
def test_both_names_exist(argument: str, setting: str) -> None:
    callee, _, name = argument.rstrip(")").rpartition("(")
    called = attrgetter(callee or "build_engine")(zerotrain)
    assert name in inspect.signature(called).parameters
    assert must_be(setting, "?") or setting == "optimizer.matrices"


# A value that points elsewhere and leads nowhere is one line, and all of them are told.


@pytest.mark.parametrize(
    ("overrides", "lines"),
    [
        (["seed=${nowhere}"], ["seed: got ${nowhere}; there is no nowhere; give seed=..."]),
        (
            ["seed=${oc.env:NOT_SET}"],
            [
                "seed: got ${oc.env:NOT_SET}; the environment variable NOT_SET is not set; set it, or use "
                "${oc.env:NOT_SET,...}"
            ],
        ),
        (
            ["seed=${train.max_steps}", "train.max_steps=${seed}"],
            [
                "seed: got ${train.max_steps}, which leads back to itself; give seed=...",
                "train.max_steps: got ${seed}, which leads back to itself; give train.max_steps=...",
            ],
        ),
        (
            ["seed=${nope:1}", "optimizer.betas=[0.9,${x}]"],
            [
                "seed: got ${nope:1}; there is no resolver nope; give seed=...; write \\$ for the character $",
                "optimizer.betas.1: got ${x}; there is no x; give optimizer.betas.1=...",
            ],
        ),
    ],
)
def test_what_leads_nowhere_is_named_with_what_was_given(compose, overrides, lines, monkeypatch):
    monkeypatch.delenv("NOT_SET", raising=False)
    with pytest.raises(ConfigError) as refused:
        to_config(compose(overrides))
    assert list(refused.value.problems) == lines


def test_what_leads_somewhere_is_followed(compose):
    config, problems = to_config(compose(["seed=${train.log_every}"]))
    assert (config.seed, problems) == (10, [])


# The nearest name that exists.


NAMES = ["seed", "zero.stage", "zero.bucket_mb", "train.max_steps"]


@pytest.mark.parametrize(
    ("name", "nearest"),
    [
        ("sed", "seed"),
        ("zero.stge", "zero.stage"),
        ("zero.bucketmb", "zero.bucket_mb"),
        ("bucket_mb", "zero.bucket_mb"),
        ("zero.max_steps", "train.max_steps"),
    ],
)
def test_the_nearest_name_is_suggested_even_from_another_place(name, nearest):
    assert did_you_mean(name, NAMES) == f"; did you mean {nearest}?"


@pytest.mark.parametrize(("name", "remedy"), REMOVED.items())
def test_a_setting_that_was_removed_is_answered_by_what_to_do_and_not_by_its_neighbour(name: str, remedy: str):
    assert did_you_mean(name, [*NAMES, f"{name}_too"]) == f" any more; {remedy}"


def test_a_name_like_no_other_gets_no_suggestion():
    assert did_you_mean("zzz.qqq", NAMES) == ""


@pytest.mark.parametrize("word", ["epochs", "max_epochs", "training.epochs", "a.b.num_train_epochs"])
def test_a_word_of_others_is_answered_in_whatever_group_they_have_it(word):
    assert we_call_it(word) == "; zerotrain calls it train.num_epochs"


def test_a_word_may_be_one_with_its_group_or_with_its_value():
    assert we_call_it("strategy", "fsdp") == "; zerotrain calls it zero.stage=3"
    assert we_call_it("strategy", "another") == "; zerotrain calls it zero.stage"
    assert we_call_it("model.lora.r") == "; zerotrain calls it model=huggingface model.lora.rank"
    assert we_call_it("model.r") == we_call_it("seed") == ""
