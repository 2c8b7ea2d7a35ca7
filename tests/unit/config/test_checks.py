"""Every rule on a value refuses what is outside it, and settings without effect are named."""

import inspect
import json
from dataclasses import asdict, fields, replace
from typing import Any, Optional

import pytest

from zerotrain.config.checks import (
    checked_config,
    doubtful,
    must_be,
    target_problems,
    value_problems,
    without_effect,
)
from zerotrain.config.compose import config_hash, from_values
from zerotrain.config.schema import Config, DataSwitches, LaunchConfig, ModelSwitches, TrainConfig, ZeroGroup
from zerotrain.settings import PrecisionGroup


def problems_of(compose, *overrides):
    return checked_config(compose(list(overrides)))[1]


@pytest.mark.parametrize("group", ["model=gpt2", "model=mlp", "data=synthetic", "optimizer=sgd", "scheduler=constant"])
def test_what_we_ship_has_no_problems(compose, group):
    assert problems_of(compose, group) == []


OUTSIDE = """
seed=-1 zero.stage=4 zero.stage=-1 zero.bucket_mb=0 zero.bucket_mb=-0.5 zero.bucket_mb=nan zero.bucket_mb=inf
zero.prefetch=-1 zero.reduction=fast zero.units=blocks zero.units=[] zero.units=[1] precision.name=fp8
precision.keep_fp32=[''] precision.initial_scale=3 precision.initial_scale=0.5 precision.initial_scale=2e10
precision.growth_interval=0 model.compile=maybe model.activation_checkpointing=null train.max_steps=0 train.num_epochs=0
train.num_epochs=nan train.max_tokens=-1 train.max_tokens=inf train.micro_batch_size=0
train.gradient_accumulation_steps=0 train.max_grad_norm=0 train.max_grad_norm=nan train.on_nonfinite=ignore
train.max_skipped_steps=0 train.eval_every=-1 train.eval_batches=0 train.eval_batches=2.5 train.eval_batches=some
train.log_every=0 train.sample_tokens=-1 launch.nproc_per_node=0 launch.device=tpu launch.threads_per_rank=0
launch.timeout_s=0 zero.stage=autos zero.stage=1.5 zero.stage=true zero.stage=null zero.stage=[1] zero.stage={a:1}
train.micro_batch_size=1.5 train.micro_batch_size=automatic offload.optimizer=nvme offload.update=auto
"""
AT_THE_EDGE = """
zero.bucket_mb=0.01 zero.prefetch=0 train.max_grad_norm=null train.eval_every=0 zero.units=[a.*,b]
precision.keep_fp32=[a.*,b] precision.initial_scale=1 precision.initial_scale=4294967296 train.max_skipped_steps=1
"""


@pytest.mark.parametrize("override", OUTSIDE.split())
def test_a_value_outside_its_range_is_refused_in_one_line(compose, override):
    [problem] = problems_of(compose, override)
    assert problem.startswith(f"{override.partition('=')[0]}: got ")
    assert "it must be" in problem
    assert "the default is" in problem
    assert "\n" not in problem


@pytest.mark.parametrize("override", AT_THE_EDGE.split())
def test_the_edge_of_a_range_is_allowed(compose, override):
    assert problems_of(compose, override) == []


@pytest.mark.parametrize("group", ["model=gpt2", "model=mlp"])
def test_every_model_can_be_compiled_and_checkpointed(compose, group):
    config, problems = checked_config(compose([group, "model.compile=true", "model.activation_checkpointing=true"]))
    assert problems == []
    assert config.switches("model") == {"compile": True, "activation_checkpointing": True, "freeze": None}
    assert not config.switches("model").keys() & config.target("model").keys()


@pytest.mark.parametrize(
    ("setting", "given"),
    [
        ("model.freeze", "wpe.*"),
        ("model.freeze", "[{match: wpe.*, unitl: 3}]"),
        ("model.freeze", "[{match: [], until: 3}]"),
        ("model.freeze", "[{match: wpe.*, until: 15m}]"),
        ("model.freeze", "['']"),
        ("optimizer.groups", "[{match: wpe.*, lr: 1}]"),
        ("optimizer.groups", "{a: {lr: 1}}"),
        ("optimizer.groups", "{a: {match: wpe.*}}"),
        ("optimizer.groups", "{a: {match: wpe.*, name: b, lr: 1}}"),
        ("optimizer.groups", "{a: {match: wpe.*, lr: inf}}"),
    ],
)
def test_what_is_frozen_and_in_groups_has_one_form(compose, setting: str, given: str) -> None:
    _, problems = checked_config(compose(["model=mlp", f"{setting}={given}"]))
    assert len(problems) == 1
    assert problems[0].startswith(f"{setting}: got ")


def test_every_dataset_can_be_read_by_workers_and_collated_by_a_function(compose):
    collate = "data.collate_fn={_target_: torch.utils.data.default_collate, _partial_: true}"
    config, problems = checked_config(compose(["data=synthetic", "data.num_workers=2", collate]))
    assert problems == []
    assert problems_of(compose, "data.collate_fn={_target_: torch.nn.Identity}") == []  # whose objects can be called
    assert config.switches("data")["num_workers"] == 2
    assert not config.switches("data").keys() & config.target("data").keys()


def test_a_dataset_of_ones_own_is_named_on_the_command_line_as_the_refusal_says(compose):
    target = "data._target_=zerotrain.data.SyntheticTokens"
    [line] = [line for line in problems_of(compose, target) if line.startswith("data.path: ")]
    assert line.endswith("give data=own, which starts without arguments, or a data yaml without it")
    assert problems_of(compose, "data=own", target, "+data.seq_len=16", "+data.vocab_size=13") == []


@pytest.mark.parametrize(
    ("given", "problem"),
    [
        ("my.pad", "data.collate_fn: got my.pad; it must be null, or a function such as {_target_: my_components.pad"),
        ("{_target_: torch.utils.data.default_collate}", "data.collate_fn._partial_: got null; it must be true"),
        ("{_target_: torch.nope, _partial_: true}", "data.collate_fn._target_: got torch.nope; torch has no nope"),
        (
            "{_target_: torch.utils.data.default_collate, _partial_: true, pad: 0}",
            "data.collate_fn.pad: torch.utils.data.default_collate takes no such argument",
        ),
    ],
)
def test_a_collate_function_that_cannot_be_called_is_refused(compose, given, problem):
    [line] = problems_of(compose, f"data.collate_fn={given}")
    assert line.startswith(problem)


def test_all_problems_are_reported_at_once(compose):
    problems = problems_of(
        compose, "zero.stage=5", "train.max_steps=-1", "+foo=1", "optimizer.lr=nan", "+model.depth=3"
    )
    starts = [problem.split(":")[0] for problem in problems]
    assert starts == ["+foo", "zero.stage", "train.max_steps", "model.depth", "optimizer.lr"]


def test_numbers_in_open_groups_must_be_finite_and_an_optimizer_is_not_built_too_early(compose):
    finite = "optimizer.betas.1: got inf; it must be a finite number"
    assert problems_of(compose, "optimizer.betas=[0.9,inf]") == [finite]
    assert "optimizer._partial_: got false; it must be true" in problems_of(compose, "optimizer._partial_=false")


def test_every_default_keeps_the_rules_and_a_value_of_the_wrong_type_breaks_one():
    assert value_problems(Config()) == []
    [problem] = value_problems(Config(zero=ZeroGroup(bucket_mb="large")))  # type: ignore[arg-type]
    assert problem == "zero.bucket_mb: got large; it must be a number of MiB above 0, or auto; the default is auto"


SCALED = PrecisionGroup("bf16", ["*norm*"], initial_scale=2.0, growth_interval=10)
EVALUATED = TrainConfig(eval_every="0.1epoch", eval_batches=3)
LATE = {"prefetch": 2, "reshard_after_forward": False}
NO_TF32 = "or with train.deterministic=true; it has one with fp32 and without"
NO_ROWS = "has no effect with data.validation_fraction=0, which leaves nothing to evaluate on"
EFFECTS: list[tuple[dict[str, Any], list[str]]] = [
    ({}, []),
    (
        {"zero": ZeroGroup(stage=1, **LATE)},
        [
            "zero.prefetch=2 has no effect at zero.stage=1; it has one at 3",
            "zero.reshard_after_forward=false has no effect at zero.stage=1; it has one at 3",
        ],
    ),
    ({"zero": ZeroGroup(prefetch=2, schedule={5: 3})}, []),
    (
        {"zero": ZeroGroup(prefetch=2, schedule={5: 1})},
        ["zero.prefetch=2 has no effect at zero.schedule={5: 1}; it has one at 3"],
    ),
    (
        {"zero": ZeroGroup(stage=3, schedule={0: 1})},
        ["zero.stage=3 has no effect with zero.schedule={0: 1}, which has the stage from step 0 on"],
    ),
    ({"zero": ZeroGroup(stage=3, schedule={5: 1})}, []),
    (
        {"precision": PrecisionGroup("fp32", ["*norm*"])},
        ["precision.keep_fp32=['*norm*'] has no effect with precision=fp32; it has one with bf16 or fp16"],
    ),
    (
        {"precision": SCALED},
        [
            "precision.initial_scale=2.0 has no effect with precision=bf16; it has one with fp16",
            "precision.growth_interval=10 has no effect with precision=bf16; it has one with fp16",
        ],
    ),
    ({"precision": replace(SCALED, name="fp16")}, []),
    ({"precision": PrecisionGroup("fp32", tf32=True)}, []),
    (
        {"precision": PrecisionGroup("fp32", tf32=True), "train": TrainConfig(deterministic=True)},
        [f"precision.tf32=true has no effect with precision=fp32, {NO_TF32}"],
    ),
    (
        {"train": TrainConfig(on_nonfinite="stop", max_skipped_steps=3)},
        ["train.max_skipped_steps=3 has no effect with train.on_nonfinite=stop; it has one with skip"],
    ),
    (
        {"train": TrainConfig(sample_tokens=0, sample_prompts=["a"])},
        ["train.sample_prompts=['a'] has no effect with train.sample_tokens=0"],
    ),
    (
        {"train": EVALUATED, "data": {"validation_fraction": 0}},
        [f"train.eval_every=0.1epoch {NO_ROWS}", f"train.eval_batches=3 {NO_ROWS}"],
    ),
    ({"train": EVALUATED, "data": {"validation_fraction": 0, "validation_path": "val.bin"}}, []),
    ({"train": EVALUATED, "data": {"validation_fraction": 0.1}}, []),
    ({"data": {"validation_fraction": 0}}, []),
]


@pytest.mark.parametrize(("groups", "lines"), EFFECTS)
def test_a_setting_without_effect_is_named_with_what_it_needs(groups: dict[str, Any], lines: list[str]) -> None:
    assert without_effect(Config(**groups), world_size=2) == lines


def test_one_rank_alone_sends_nothing_and_shares_nothing():
    config = Config(zero=ZeroGroup(stage=3, overlap=False, bucket_mb=1.0))
    sharing, sending = without_effect(config, world_size=1)
    assert sharing.startswith("zero.stage=3 has no effect on memory with one rank; launch.nproc_per_node=2 starts two")
    assert sending.startswith("zero.overlap=false ")
    assert without_effect(Config(), world_size=1) == []


def test_too_many_micro_batches_are_named_by_the_setting_that_was_given(compose):
    many = "train.gradient_accumulation_steps=1000000000"
    allowed = "; a step must have 1048576 micro-batches or fewer"
    assert problems_of(compose, many) == [f"{many.replace('=', ': got ')}{allowed}"]
    assert problems_of(compose, many, "train.virtual_ranks=2") == [f"train.virtual_ranks: got 2 with {many}{allowed}"]


def test_fp16_cannot_stop_at_the_first_overflow(compose):
    assert problems_of(compose, "precision=fp16", "train.on_nonfinite=stop") == [
        "train.on_nonfinite: got stop; it must be skip with precision=fp16, which finds its loss scale by overflows"
    ]


def test_a_pretrained_model_that_is_given_bytes_is_told_of():
    pretrained = {"name_or_path": "llama"}
    assert doubtful(Config(model=pretrained, data={"tokenizer": None})) == [
        "data.tokenizer=null reads bytes, which model.name_or_path=llama has never seen; use data=tokenized"
    ]
    assert doubtful(Config(model=pretrained, data={"tokenizer": "llama"})) == []
    assert doubtful(Config(model=pretrained, data={"path": "tokens.bin"})) == []
    assert doubtful(Config(model={"name_or_path": None}, data={"tokenizer": None})) == []


def test_every_setting_has_a_rule():
    groups = {"zero": ZeroGroup, "precision": PrecisionGroup, "train": TrainConfig, "launch": LaunchConfig}
    declared = {f"{group}.{each.name}" for group, kind in groups.items() for each in fields(kind)}
    declared |= {"seed", *(f"model.{each.name}" for each in fields(ModelSwitches))}
    declared |= {f"data.{each.name}" for each in fields(DataSwitches)} | {"optimizer.groups"}
    refused = {name for name in declared if must_be(name, "?")}
    assert refused == declared


def test_a_tokenizer_of_ones_own_needs_no_count_of_its_tokens_for_any_model(compose):
    """data=tokenized says null until it is built: "model.vocab_size=None is no whole number"."""
    for model in ("gpt_tiny", "gpt2", "mlp", "huggingface"):
        assert problems_of(compose, "data=tokenized", "data.tokenizer=some", f"model={model}") == []
    assert [problem.split(":")[0] for problem in problems_of(compose, "model.vocab_size=x")] == ["model.vocab_size"]


@pytest.mark.parametrize(
    "given", ["{0:2,500:7}", "3", "[1]", "{}", "{-1:2}", "{a:2}", "{1.5:2}", "{0:true}", "{0:1.5}", "abc"]
)
def test_a_schedule_of_stages_is_steps_and_stages(compose, given):
    [problem] = problems_of(compose, f"zero.schedule={given}")
    assert problem.startswith("zero.schedule: got ")
    assert "; it must be steps done and the stage (0 to 3) from there on, such as {0: 2, 500: 3}, or null" in problem


def test_a_schedule_replaces_one_of_before_where_null_stands_between(compose):
    config, _ = checked_config(compose(["zero.schedule={0:1,9:2}", "zero.schedule=null", "zero.schedule={7:3}"]))
    assert config.zero.stages == {0: 2, 7: 3}
    config, _ = checked_config(compose(["zero.schedule={0:1,9:2}", "zero.schedule={9:3}"]))
    assert config.zero.stages == {0: 1, 9: 3}


@pytest.mark.parametrize("given", ["train.num_epochs=2", "train.num_epochs=0.5", "train.max_tokens=1e9"])
def test_the_length_of_a_run_is_given_once(compose, given):
    """The default number of steps counts as none."""
    for more in ([], ["train.max_steps=null"], ["train.max_steps=400"]):
        config, problems = checked_config(compose([given, *more]))
        assert problems == []
        assert config.train.max_steps is None
    [problem] = problems_of(compose, given, "train.max_steps=30")
    said = f"{given.replace('1e9', '1000000000')}{'' if '.5' in given else '.0'}"
    assert problem == f"train.max_steps=30, {said}: a run has one length; leave out the others, or give them null"
    [problem] = problems_of(compose, "train.num_epochs=2", "train.max_tokens=7")
    assert problem.startswith("train.num_epochs=2.0, train.max_tokens=7.0: a run has one length")
    [problem] = problems_of(compose, "train.max_steps=null")
    assert problem.startswith("train.max_steps: got null; it must be a number of steps without train.num_epochs")


def test_a_hash_that_is_made_before_the_steps_are_known_is_that_of_the_run(compose):
    config, _ = checked_config(compose(["train.num_epochs=2"]))
    before = config_hash(config)
    config.train.max_steps = 7
    assert config_hash(config) == before != config_hash(checked_config(compose(["train.num_epochs=3"]))[0])
    assert config_hash(checked_config(compose(["train.max_steps=7"]))[0]) != before


def test_a_stage_that_is_never_reached_is_told():
    config = Config(zero=ZeroGroup(schedule={400: 3}))
    assert doubtful(config) == ["zero.schedule: step 400 is not reached with train.max_steps=400"]


def test_a_schedule_is_the_same_in_the_process_that_composes_and_in_ranks_that_read_json():
    config = Config(zero=ZeroGroup(schedule={0: 2, 1000: 3, 500: 1}))
    told = from_values(json.loads(json.dumps(asdict(config))))
    assert told.zero.stages == config.zero.stages == {0: 2, 500: 1, 1000: 3}
    assert config_hash(told) == config_hash(config)


# A value of another kind than a class takes is named, with what it takes.


ADAMW = {"_target_": "torch.optim.AdamW", "_partial_": True}


def takes_much(
    size: int,
    rate=0.1,
    path: "NotHere" = None,  # type: ignore[name-defined] # noqa: F821
) -> None:
    """An annotation that cannot be read, so none counts, and the defaults speak."""


def problems(values: dict[str, Any]) -> list[str]:
    return list(target_problems(values, name="optimizer"))


@pytest.mark.parametrize(
    ("name", "value", "takes"),
    [
        ("lr", "abc", "a number; its default is 0.001"),
        ("lr", True, "a number; its default is 0.001"),
        ("lr", None, "a number; its default is 0.001"),
        ("betas", 3, "a list of 2, each a number; its default is [0.9, 0.999]"),
        ("betas", [0.9], "a list of 2, each a number; its default is [0.9, 0.999]"),
        ("betas", [0.9, "x"], "a list of 2, each a number; its default is [0.9, 0.999]"),
        ("weight_decay", [1], "a number; its default is 0.01"),
        ("fused", "maybe", "true or false or null; its default is null"),
    ],
)
def test_a_value_of_another_kind_is_named_with_what_is_taken(name: str, value: Any, takes: str) -> None:
    [line] = problems(ADAMW | {name: value})
    assert line.startswith(f"optimizer.{name}: got ")
    assert line.endswith(f"; torch.optim.AdamW takes {takes}")


@pytest.mark.parametrize(
    "values",
    [
        {"lr": 1},
        {"betas": [0, 1]},
        {"fused": None},
        {"fused": True},
        {"lr": {"_target_": "torch.ones"}},
        {"foreach": False},
    ],
)
def test_what_a_class_can_take_is_left_to_it(values: dict[str, Any]) -> None:
    assert [line for line in problems(ADAMW | values) if "takes" in line] == []


def test_a_whole_number_may_come_as_a_float_and_no_other() -> None:
    linear = {"_target_": "torch.nn.Linear", "in_features": 3.0, "out_features": 2}
    assert problems(linear) == []
    [line] = problems(linear | {"out_features": 2.5})
    assert line == "optimizer.out_features: got 2.5; torch.nn.Linear takes a whole number"


def takes_numbers(
    whole: int,
    maybe: int | None = None,
    old: Optional[int] = None,  # noqa: UP045
    either: int | float = 0,
    some: list[int] = (),  # type: ignore[assignment]
    each: tuple[int, ...] = (),
    pair: tuple[int, float] = (0, 0.0),
    real: float = 0.0,
    counted=2,
    weighed=0.5,
) -> None:
    """Numbers of each kind."""


@pytest.mark.parametrize("name", inspect.signature(takes_numbers).parameters)
def test_true_is_no_number(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """`model.num_layers=true` would be 1."""
    monkeypatch.setattr("torch.nn.takes_numbers", takes_numbers, raising=False)
    values = {"_target_": "torch.nn.takes_numbers", "whole": 3}
    [line] = problems(values | {name: {"some": [True], "each": [1, True], "pair": [True, 0.5]}.get(name, True)})
    assert line.startswith(f"optimizer.{name}: got ")
    assert problems(values | {name: {"some": [1], "each": [1, 2], "pair": [1, 0.5]}.get(name, 1)}) == []


def test_what_cannot_be_read_of_a_class_is_not_guessed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch.nn.takes_much", takes_much, raising=False)
    values = {"_target_": "torch.nn.takes_much", "size": "x", "path": 3}
    assert problems(values) == []
    assert problems(values | {"rate": "z"}) == [
        "optimizer.rate: got z; torch.nn.takes_much takes a number; its default is 0.1"
    ]


# Classes named by `_target_`: found, and called with arguments they take.


MLP = {"_target_": "zerotrain.models.MLP", "vocab_size": 8, "context": 2, "hidden_size": 4, "num_layers": 1}


def without(name: str) -> dict[str, Any]:
    return {key: value for key, value in MLP.items() if key != name}


SGD = {"_target_": "torch.optim.SGD", "_partial_": True, "lr": 0.1}


@pytest.mark.parametrize(
    ("values", "problem"),
    [
        (MLP, None),
        (MLP | {"_target_": "zerotrain.models.MPL"}, "._target_: got zerotrain.models.MPL; zerotrain.models has no "
         "MPL; did you mean MLP?"),
        (MLP | {"_target_": "zerotrain.models:MLP"}, "._target_: got zerotrain.models:MLP; it must be the import pa"),
        (MLP | {"_target_": "zerotrian.models.MLP"}, "._target_: got zerotrian.models.MLP; there is no module zerotri"),
        (MLP | {"hiden_size": 3}, ".hiden_size: zerotrain.models.MLP takes no such argument; did you mean hidden_siz"),
        (MLP | {"zzz": 3}, ".zzz: zerotrain.models.MLP takes no such argument; leave it out with ~model.zzz"),
        (without("context"), ": zerotrain.models.MLP: missing a required argument: 'context'"),
        (SGD, None),
        (SGD | {"betas": [0.9, 0.99]}, ".betas: torch.optim.SGD takes no such argument"),
        ({"_target_": "builtins.dict", "whatever": 1}, None),
        *[(MLP | {"_target_": path}, "._target_: got ")
          for path in (None, 3, "MLP", "zerotrain.models", "zerotrain.models.__doc__")],
    ],
)  # fmt: skip
def test_a_class_is_found_and_gets_arguments_that_it_takes(values: dict[str, Any], problem: str | None) -> None:
    lines = list(target_problems(values, name="model"))
    assert len(lines) == (0 if problem is None else 1)
    assert all(line.startswith(f"model{problem}") and "\n" not in line for line in lines)


def test_a_module_of_the_user_that_fails_on_import_is_named_with_its_error_or_what_it_lacks(tmp_path, monkeypatch):
    (tmp_path / "broken_model.py").write_text("raise RuntimeError('no licence\\nsecond line')")
    (tmp_path / "needy_model.py").write_text("import module_nobody_has")
    monkeypatch.syspath_prepend(tmp_path)
    assert list(target_problems(MLP | {"_target_": "broken_model.Net"}, name="model")) == [
        "model._target_: got broken_model.Net; importing broken_model failed: RuntimeError: no licence"
    ]
    [problem] = target_problems(MLP | {"_target_": "needy_model.Net"}, name="model")
    assert "there is no module module_nobody_has" in problem


def test_targets_inside_arguments_are_checked_too():
    nested = {
        "_target_": "builtins.dict",
        "blocks": [{"_target_": "torch.nn.Linaer"}],
        "head": {"_target_": "torch.nn.ReLU"},
    }
    [problem] = target_problems(nested, name="model")
    assert problem.startswith(
        "model.blocks.0._target_: got torch.nn.Linaer; torch.nn has no Linaer; did you mean Linear?"
    )
