"""The nearest name that exists."""

import pytest

from zerotrain.config.words import REMOVED, did_you_mean, we_call_it

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
