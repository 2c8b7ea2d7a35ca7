"""From composed settings to a typed config, and back from its file."""

from pathlib import Path

import pytest
from omegaconf import OmegaConf

from zerotrain.config.compose import config_hash, from_values, known_keys, save_config, to_config
from zerotrain.config.schema import Config
from zerotrain.errors import ConfigError


def test_the_defaults_compose_into_the_schemas_own_defaults(compose):
    config, problems = to_config(compose([]))
    assert problems == []
    assert (config.zero, config.train, config.launch) == (Config().zero, Config().train, Config().launch)


def test_a_dataset_without_a_number_of_tokens_is_told_that_null_is_its_own(compose):
    with pytest.raises(
        ConfigError, match=r"'data.vocab_size' not found; give model.vocab_size=..., or .*=null, which takes the number"
    ):
        to_config(compose(["data=own", "data._target_=my.Data"]))


def test_a_stray_word_of_others_is_answered_with_ours(compose):
    _, problems = to_config(compose(["+trainer.max_epochs=3", "+early_stopping=true"]))
    assert problems == [
        "+trainer.max_epochs: there is no such setting; zerotrain calls it train.num_epochs",
        "+early_stopping: there is no such setting; zerotrain calls it callbacks=early_stopping",
    ]


def test_a_stray_key_is_refused_with_a_suggestion_and_left_out(compose):
    config, problems = to_config(compose(["+train.max_stpes=3", "+max_steps=4"]))
    assert problems == [
        "+train.max_stpes: there is no such setting; did you mean train.max_steps?",
        "+max_steps: there is no such setting; did you mean train.max_steps?",
    ]
    assert config.train == Config().train


def test_a_key_added_to_an_open_group_is_no_stray(compose):
    config, problems = to_config(compose(["+model.my_argument=3"]))
    assert problems == []
    assert config.model["my_argument"] == 3


def test_a_value_nobody_gave_is_asked_for(compose):
    config, problems = to_config(compose(["data=tokens"]))
    assert problems == ["data.path: has no value and needs one; give data.path=..."]
    assert config.data["path"] is None


def test_a_config_survives_its_file(compose, tmp_path: Path):
    config, _ = to_config(compose(["zero.units=[blocks.*]", "optimizer.eps=1e-8", "train.max_grad_norm=null"]))
    save_config(config, tmp_path / "config.yaml")
    assert from_values(OmegaConf.load(tmp_path / "config.yaml")) == config


def test_the_hash_tells_runs_apart_but_not_machines(compose):
    hashes = {
        overrides: config_hash(to_config(compose(list(overrides)))[0])
        for overrides in [
            (),
            ("seed=1",),
            ("optimizer.lr=1e-3",),
            ("train.max_steps=6",),
            ("launch.nproc_per_node=8", "launch.device=cpu"),
        ]
    }
    assert len(set(hashes.values())) == 4
    assert hashes[()] == hashes["launch.nproc_per_node=8", "launch.device=cpu"]


def test_the_hash_is_that_of_the_values_and_not_of_their_order():
    one = from_values({"model": {"a": 1, "b": 2}})
    other = from_values({"model": {"b": 2, "a": 1}})
    assert config_hash(one) == config_hash(other)


def test_the_known_keys_are_those_of_the_schema_and_of_the_chosen_classes(compose):
    assert {"zero", "zero.stage", "train.max_steps"} <= set(known_keys())
    assert "model.num_heads" not in known_keys()
    assert "model.num_heads" in known_keys(compose([]))
