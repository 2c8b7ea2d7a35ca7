"""Messages name what their reader knows: arguments in Python, settings in a run; and the name nearest to another."""

import ast
import inspect
import re
from collections.abc import Iterator
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest

import zerotrain
from zerotrain.config.checks import must_be
from zerotrain.config.compose import to_config
from zerotrain.config.words import PHRASES, REMOVED, SETTINGS, did_you_mean, we_call_it, words_of_config
from zerotrain.errors import ConfigError, argument, naming_entry

PACKAGE = Path(zerotrain.__file__).parent
NAMED = [
    (("compile", True), "compile=True", "model.compile=true"),
    (("max_grad_norm",), "max_grad_norm", "train.max_grad_norm"),
    (("build_engine(max_grad_norm)",), "build_engine(max_grad_norm=...)", "train.max_grad_norm"),
    (("(max_skipped_steps)",), "(max_skipped_steps)", "(train.on_nonfinite=skip, train.max_skipped_steps)"),
    (("precision", "bf16"), "precision='bf16'", "precision=bf16"),
    (("strict", False), "strict=False", "checkpoint.strict=false"),
    (("zero.accumulate", "reduced"), "zero.accumulate='reduced'", "zero.accumulate=reduced"),
    (("World.from_environment(device)", "cuda"), "World.from_environment(device='cuda')", "launch.device=cuda"),
    (("World.from_environment(interface)", None), "World.from_environment(interface=None)", "launch.interface=null"),
    (("MuonWithAdamW(matrices)",), "MuonWithAdamW(matrices=...)", "optimizer.matrices"),
    (("MuonWithAdamW(matrices)", ["a.*", "b"]), "MuonWithAdamW(matrices=['a.*', 'b'])", "optimizer.matrices=[a.*,b]"),
    (("zerotrain.MuonWithAdamW(...)",), "zerotrain.MuonWithAdamW(...)", "optimizer=muon"),
    (("torchrun --nproc-per-node", 2), "torchrun --nproc-per-node=2", "launch.nproc_per_node=2"),
]


@pytest.mark.parametrize(("named", "in_python", "in_config"), NAMED)
def test_an_argument_is_named_as_its_reader_knows_it(named: tuple[Any, ...], in_python: str, in_config: str) -> None:
    with pytest.raises(ConfigError, match=f"^{re.escape(in_config)}$"), words_of_config():
        raise ConfigError(argument(*named))
    assert argument(*named) == in_python


def test_an_entry_of_a_setting_is_named_in_a_run() -> None:
    with naming_entry("param_groups", "head"):
        assert argument("param_groups") == "param_groups"
    with words_of_config(), naming_entry("param_groups", "head"):
        assert argument("param_groups") == "optimizer.groups.head"


@pytest.mark.parametrize(("name", "setting"), SETTINGS.items())
def test_both_names_exist(name: str, setting: str) -> None:
    callee, _, own_name = name.rstrip(")").rpartition("(")
    called = attrgetter(callee or "build_engine")(zerotrain)
    assert own_name in inspect.signature(called).parameters
    assert must_be(setting, "?") or setting == "optimizer.matrices"


def messages(node: ast.AST) -> Iterator[str]:
    """The texts below a node, without documentation and what `argument` gets."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Constant) and isinstance(child.value, str):
            yield child.value
        is_named = isinstance(child, ast.Call) and ast.unparse(child.func) in ("argument", "naming_entry")
        is_documentation = isinstance(child, ast.Expr) and isinstance(child.value, ast.Constant)
        if not is_named and not is_documentation:
            yield from messages(child)


@pytest.mark.parametrize("room", ["comm", "checkpoint", "sharding", "engine"])
def test_no_message_of_the_engine_has_an_argument_that_a_run_calls_otherwise(room: str) -> None:
    words = [name for name in SETTINGS | PHRASES if re.search(r"\W|_", name)]
    pattern = re.compile(rf"(?<![\w.])(?:{'|'.join(map(re.escape, words))})(?!\w)")
    for path in (PACKAGE / room).rglob("*.py"):
        for text in messages(ast.parse(path.read_text())):
            assert " " not in text.strip() or not pattern.search(text), (path, text)


# A value that points elsewhere and leads nowhere is one line, and all of them are told.


@pytest.mark.parametrize(
    ("overrides", "lines"),
    [
        (
            ["seed=${oc.env:NOT_SET}"],
            [
                'seed: got ${oc.env:NOT_SET}; KeyError raised while resolving interpolation: "Environment variable '
                "'NOT_SET' not found\"; give seed=..."
            ],
        ),
        (
            ["seed=${train.max_steps}", "train.max_steps=${seed}"],
            [
                "seed: got ${train.max_steps}; Recursive interpolation detected; give seed=...",
                "train.max_steps: got ${seed}; Recursive interpolation detected; give train.max_steps=...",
            ],
        ),
        (
            ["seed=${nope:1}", "optimizer.betas=[0.9,${x}]"],
            [
                "seed: got ${nope:1}; Unsupported interpolation type nope; give seed=...",
                "optimizer.betas.1: got ${x}; Interpolation key 'x' not found; give optimizer.betas.1=...",
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
