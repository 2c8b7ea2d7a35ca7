"""A value that points elsewhere and leads nowhere is one line, and all of them are told."""

import pytest

from zerotrain.config.compose import to_config
from zerotrain.errors import ConfigError


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
