"""Further validation sets by name: evaluated beside the data's own, as what they are alone, and what cannot be."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.unit.configs import ADAMW, GPT
from tests.unit.training.runs import lines_in
from zerotrain.config.checks import class_problems, value_problems
from zerotrain.config.schema import Config
from zerotrain.data import GlobalBatchSampler, Mix, SyntheticTokens
from zerotrain.data.fetch import fingerprint_of
from zerotrain.errors import ConfigError
from zerotrain.preflight import check as preflight
from zerotrain.preflight.check import require_callbacks_fit, require_outputs
from zerotrain.run import factory
from zerotrain.training import Accuracy, Perplexity
from zerotrain.training.callbacks.evaluation import evaluate_all

SYNTHETIC = {"_target_": "zerotrain.data.SyntheticTokens", "seq_len": 16, "vocab_size": 256, "num_sequences": 64}
OTHER = SYNTHETIC | {"num_sequences": 40}
OTHERS: dict[str, Any] = {"seq_len": 16, "vocab_size": 32}


@pytest.mark.case(
    "losses",
    "Further validation sets by name, a mix among them",
    "each has the loss and metrics that it has alone; `val_loss` and the bits of training are as without",
)
def test_each_set_is_evaluated_as_it_is_alone_and_changes_nothing_else(
    make_trainer, model, dataset, screen, world, tmp_path
) -> None:
    start = {name: value.clone() for name, value in model.state_dict().items()}
    plain = make_trainer(eval_every=2).run()
    model.load_state_dict(start)
    few = SimpleNamespace(train=SyntheticTokens(**OTHERS, num_sequences=30).train, validation=[])
    mix = Mix({"a": {"data": dataset, "weight": 3}, "b": {"data": dataset, "weight": 1}})
    trainer = make_trainer(eval_every=2, validation_sets={"few": few, "mix": mix}, callbacks={"accuracy": Accuracy()})
    body = trainer.run()
    for name in ("weights_sha256", "final_val_loss", "final_train_loss"):
        assert body[name] == plain[name]
    alone = evaluate_all(
        engine=trainer.engine, world=world, dataset=few.train, num_sequences=16, micro_batch_size=4,
        metrics={"accuracy": Accuracy()},
    )  # fmt: skip
    last = lines_in(tmp_path, "val_loss/few")[-1]
    assert (last["val_loss/few"], last["val_accuracy/few"]) == (alone["val_loss"], alone["val_accuracy"])
    assert body["val_loss_by_source"] == {name: last[f"val_loss/{name}"] for name in ("few", "mix", "mix/a", "mix/b")}
    assert body["val_metrics"]["val_accuracy/mix/b"] == last["val_accuracy/mix/b"]
    said = " ".join(screen.getvalue().split())
    assert f"sets few: 16 of {len(few.train)} rows, mix: " in said
    assert f"val/few {last['val_loss/few']:.3f} val/mix {last['val_loss/mix']:.3f}" in said


def test_without_a_validation_part_the_sets_alone_are_evaluated(make_trainer, dataset, tmp_path) -> None:
    data = SimpleNamespace(train=dataset.train, validation=[])
    body = make_trainer(dataset=data, eval_every=2, validation_sets={"own": dataset}).run()
    assert (body["final_val_loss"], list(body["val_loss_by_source"])) == (None, ["own"])
    assert [list(line) for line in lines_in(tmp_path, "val_loss/own")] == [["step", "val_loss/own"]] * 3


def test_a_set_whose_loss_is_nan_is_warned_of_by_name(make_trainer, dataset, screen) -> None:
    ids = torch.zeros(16, dtype=torch.int64)
    rows = [(ids, torch.full_like(ids, -100))]
    make_trainer(validation_sets={"own": dataset, "none": SimpleNamespace(train=rows, validation=rows)}).run()
    assert screen.getvalue().count("the validation loss of none is nan") == 1


def config_with(sets: Any, **data: Any) -> Config:
    constant = {"_target_": "zerotrain.training.constant", "_partial_": True}
    values = SYNTHETIC | {"validation_sets": sets} | data
    config = Config(model=GPT | {"max_seq_len": 16}, data=values, optimizer=ADAMW, scheduler=constant)
    config.train.eval_batches, config.train.max_steps = 1, 1
    return config


class Odd:
    """Data of all kinds that cannot be evaluated."""

    def __init__(self, kind: str) -> None:
        item = (torch.arange(16), torch.arange(1, 17))
        kinds = {"empty": [], "strings": ["text"], "unknown": [(item[0], item[1] + 1000)]}
        if kind != "no data":
            self.train = self.validation = kinds[kind]


def odd(kind: str) -> dict[str, Any]:
    return {"odd": {"_target_": f"{__name__}.Odd", "kind": kind}}


@pytest.mark.parametrize(
    ("sets", "problem"),
    [
        ({"a/b": {}}, "data.validation_sets: got {'a/b': {}}; it must be null, or data by names of letters, digits"),
        ({"a": {"seqlen": 3}}, "data.validation_sets.a.seqlen: zerotrain.data.SyntheticTokens takes no such argument"),
        ({"a": {"_target_": "nowhere.It"}}, "data.validation_sets.a._target_: got nowhere.It; there is no module"),
        ({"a": {"vocab_size": 300}}, "data.validation_sets.a.vocab_size=300, but data.vocab_size=256; both must be"),
        ({"a": {"seq_len": 0}}, "data.validation_sets.a.seq_len=0 is too small"),
        ({"a": {"seq_len": 32}}, "data.validation_sets.a.seq_len=32, but GPT knows 16 positions; choose data.validat"),
        (odd("no data"), "data.validation_sets.odd: makes a Odd, which has not the datasets train and validation"),
        (odd("empty"), "data.validation_sets.odd: has no rows; give other data, or leave it out"),
        (odd("strings"), "data.validation_sets.odd[0] is of type str; a batch is made of tensors and numbers"),
        (odd("unknown"), "data.validation_sets.odd[0] has the token 1001, but GPT knows the tokens from 0 to 255"),
    ],
)
def test_what_cannot_be_a_validation_set_is_refused_in_one_line(sets: Any, problem: str) -> None:
    config = config_with(sets)
    problems = value_problems(config) + class_problems(config)
    if not problems:
        with pytest.raises(ConfigError) as refused:
            preflight.check(config)
        problems = list(refused.value.problems)
    [line] = problems
    assert line.startswith(problem)
    assert "\n" not in line


def test_a_set_of_the_name_of_a_source_is_refused() -> None:
    data = {"_target_": "zerotrain.data.Mix", "sources": {"a": {"weight": 1, "data": SYNTHETIC}}}
    config = config_with({"a": SYNTHETIC})
    config.data = data | {"validation_sets": {"a": SYNTHETIC}}
    with pytest.raises(ConfigError, match=r"^data\.validation_sets\.a: a source of the data is called so too; give it"):
        preflight.check(config)


def test_a_set_takes_the_arguments_of_the_data_but_for_what_it_is_validated_on(tmp_path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        for number in range(4):
            (tmp_path / name / f"{number}.txt").write_text(f"{name}{number} " * (90 if name == "a" else 130))
    text: dict[str, Any] = {"_target_": "zerotrain.data.TextDataset", "path": str(tmp_path / "a"), "seq_len": 8}
    text |= {"cache_dir": str(tmp_path / "cache"), "validation_fraction": 0.5, "num_workers": 1}
    split = {"path": str(tmp_path / "b"), "validation_fraction": 0.25}
    own = {"_target_": "zerotrain.data.TextDataset", "path": str(tmp_path / "b"), "seq_len": 16}
    config = config_with({"whole": {"path": str(tmp_path / "b")}, "split": split, "own": own})
    config.data = text | {"validation_sets": config.data["validation_sets"]}
    assert not value_problems(config) + class_problems(config)
    built = factory.build_validation_sets(config)
    assert [len(each.validation) > 0 for each in built.values()] == [False, True, False]
    assert len(built["whole"].train) == 4 * 130 * 3 // 8 == 2 * len(built["own"].train) + 1
    assert (tmp_path / "cache").is_dir()


def test_what_follows_a_set_must_be_one_that_an_evaluation_has() -> None:
    sets = {"own": SimpleNamespace(train=[1], validation=[])}
    for rows, best, problem in (
        ([1], "val_loss/own", None),
        ([1], "val_accuracy/own", None),
        ([1], "val_loss/other", "an evaluation has val_loss, val_accuracy, val_loss/own, val_accuracy/own"),
        ([], "val_loss/own", None),
        ([], "val_loss", "an evaluation has val_loss/own, val_accuracy/own"),
    ):
        config = Config(callbacks={"accuracy": {"_target_": "zerotrain.training.Accuracy"}})
        config.checkpoint.best = best
        data = SimpleNamespace(train=[1], validation=rows)
        if problem is None:
            require_callbacks_fit(data, sets, config)
        else:
            with pytest.raises(ConfigError, match=f"checkpoint.best: got {best}; {problem}$"):
                require_callbacks_fit(data, sets, config)


def sampler_of(sets: dict[str, Any], data: Any) -> GlobalBatchSampler:
    known = fingerprint_of(data, validation_sets=sets)
    return GlobalBatchSampler(
        num_sequences=8, micro_batch_size=1, num_micro_batches=1, rank=0, num_ranks=1, seed=0, fingerprint=known
    )


def test_a_run_goes_on_with_more_sets_or_fewer_and_not_with_one_that_has_changed(dataset) -> None:
    small, large = (SyntheticTokens(**OTHERS, num_sequences=size) for size in (30, 50))
    state = sampler_of({"own": small, "other": large}, dataset).state_dict()
    for sets in ({"own": small, "other": large}, {"own": small, "third": large}, {}):
        sampler_of(sets, dataset).load_state_dict(state)
    with pytest.raises(ValueError, match=r"validation set own\.rows of the data: 30 there, 50 here"):
        sampler_of({"own": large}, dataset).load_state_dict(state)
    with pytest.raises(ValueError, match="the saved run read other rows"):
        sampler_of({"own": small}, small).load_state_dict(state)


def test_a_metric_of_training_is_refused_where_it_cannot_be() -> None:
    for of in ([], ["train"], "training", None, [1]):
        with pytest.raises(ValueError, match=r"^of: got .*; it must be a list of validation, training or both"):
            Accuracy(of=of)  # type: ignore[arg-type]
    for name, of, problem in (
        ("s", ["training"], "callbacks.s: metrics.jsonl has train_s already"),
        ("loss", ["training"], "callbacks.loss: metrics.jsonl has train_loss already"),
        ("accuracy", ["training"], "checkpoint.best: got val_accuracy; an evaluation has val_loss$"),
    ):
        config = Config(callbacks={name: {"_target_": "zerotrain.training.Accuracy", "of": of}})
        config.checkpoint.best = "val_accuracy"
        with pytest.raises(ConfigError, match=problem):
            require_callbacks_fit(SimpleNamespace(train=[1], validation=[1]), {}, config)
    plain = torch.nn.Linear(2, 2)
    with pytest.raises(
        ConfigError, match=r"callbacks\.top\.of: has training, for which Linear\.forward must take with_"
    ):
        require_outputs(plain, {"top": Accuracy(of=["training"])})
    require_outputs(plain, {"loss": Perplexity(of=["training"])})


def test_a_metric_with_a_constructor_of_its_own_is_of_evaluations(make_trainer, tmp_path) -> None:
    class OfItsOwn(Accuracy):
        def __init__(self) -> None:
            """Knows no `of`."""

    make_trainer(callbacks={"labels": OfItsOwn()}).run()
    lines = lines_in(tmp_path)
    assert ["val_labels" in line for line in lines] == ["val_loss" in line for line in lines]
    assert not any("train_labels" in line for line in lines)
