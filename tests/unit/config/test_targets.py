"""Classes named by `_target_`: found, and called with arguments they take."""

from pathlib import Path

import pytest

from zerotrain.config.checks import makes_callables, target_problems

MLP = {"_target_": "zerotrain.models.MLP", "vocab_size": 8, "context": 2, "hidden_size": 4, "num_layers": 1}


def problems_of_a_target(**changes):
    return list(target_problems({**MLP, **changes}, name="model"))


def test_a_class_with_its_arguments_has_no_problems():
    assert problems_of_a_target() == []


def test_a_misspelt_class_is_refused_with_a_suggestion():
    assert problems_of_a_target(_target_="zerotrain.models.MPL") == [
        "model._target_: got zerotrain.models.MPL; zerotrain.models has no MPL; did you mean MLP?"
    ]


def test_a_module_that_does_not_exist_is_named():
    [problem] = problems_of_a_target(_target_="zerotrian.models.MLP")
    assert "there is no module zerotrian" in problem


@pytest.mark.parametrize("target", [None, 3, "MLP", "zerotrain.models", "zerotrain.models.__doc__"])
def test_what_is_no_path_to_a_class_is_refused_in_one_line(target):
    [problem] = problems_of_a_target(_target_=target)
    assert problem.startswith("model._target_: got ")
    assert "\n" not in problem


def test_a_module_of_the_user_that_fails_on_import_is_named_with_its_error(tmp_path: Path, monkeypatch):
    (tmp_path / "broken_model.py").write_text("raise RuntimeError('no licence\\nsecond line')")
    monkeypatch.syspath_prepend(tmp_path)
    assert problems_of_a_target(_target_="broken_model.Net") == [
        "model._target_: got broken_model.Net; importing broken_model failed: RuntimeError: no licence"
    ]


def test_a_module_that_lacks_what_it_imports_names_what_is_lacking(tmp_path: Path, monkeypatch):
    (tmp_path / "needy_model.py").write_text("import module_nobody_has")
    monkeypatch.syspath_prepend(tmp_path)
    [problem] = problems_of_a_target(_target_="needy_model.Net")
    assert "there is no module module_nobody_has" in problem


def test_an_unknown_argument_is_refused_with_a_suggestion():
    assert problems_of_a_target(hiden_size=3) == [
        "model.hiden_size: zerotrain.models.MLP takes no such argument; did you mean hidden_size?"
    ]


def test_an_unknown_argument_like_no_other_may_be_left_out():
    assert problems_of_a_target(zzz=3) == [
        "model.zzz: zerotrain.models.MLP takes no such argument; leave it out with ~model.zzz"
    ]


def test_a_missing_argument_is_named():
    values = {key: value for key, value in MLP.items() if key != "context"}
    assert list(target_problems(values, name="model")) == [
        "model: zerotrain.models.MLP: missing a required argument: 'context'"
    ]


def test_a_partial_target_may_lack_arguments_but_not_take_unknown_ones():
    optimizer = {"_target_": "torch.optim.SGD", "_partial_": True, "lr": 0.1}
    assert list(target_problems(optimizer, name="optimizer")) == []
    assert len(list(target_problems({**optimizer, "betas": [0.9, 0.99]}, name="optimizer"))) == 1


def test_a_target_that_takes_any_argument_gets_any():
    assert list(target_problems({"_target_": "builtins.dict", "whatever": 1}, name="model")) == []


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


@pytest.mark.parametrize(
    ("path", "expected"),
    [("zerotrain.MuonWithAdamW", True), ("torch.optim.AdamW", False), ("math.sqrt", False), ("no.such", False)],
)
def test_a_class_whose_objects_can_be_called_needs_no_partial(path: str, expected: bool):
    assert makes_callables(path) is expected
