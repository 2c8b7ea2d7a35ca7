"""The nearest name that exists."""

import pytest

from zerotrain.config.suggest import did_you_mean

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


def test_a_name_like_no_other_gets_no_suggestion():
    assert did_you_mean("zzz.qqq", NAMES) == ""
