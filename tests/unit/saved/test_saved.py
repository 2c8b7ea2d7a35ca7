"""What is said of a config that a file has, and that is none."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

from zerotrain.config.compose import from_values
from zerotrain.config.schema import Config
from zerotrain.errors import CheckpointError, ConfigError
from zerotrain.models import GPT
from zerotrain.saved.saved import OfRun, config_from


@pytest.mark.parametrize(
    ("name", "value", "told"),
    [
        ("seed", None, "seed: got null; it must be between 0 and 2**63 - 1; the default is 0"),
        ("seed", {"a": None}, "seed: got {'a': None}; it must be between 0 and 2**63 - 1; the default is 0"),
        ("zero.stage", "a", "zero.stage: got a; it must be 0, 1, 2 or 3, or auto; the default is 2"),
        ("zero.overlap", "maybe", "zero.overlap: got maybe; it must be true or false; the default is true"),
        (
            "precision.keep_fp32",
            [None],
            "precision.keep_fp32: got [None]; it must be a list of name patterns such as ['*norm*']; the default is []",
        ),
        ("launch.device", [], "launch.device: got []; it must be auto, cpu or cuda; the default is auto"),
        ("zero", None, "zero: got null; it must be a group of settings"),
        ("model", [1], "model: got [1]; it must be a group of settings"),
        ("zero.un[its", 1, "zero.un[its: there is no such setting"),
        ("nonsense", None, "nonsense: there is no such setting"),
        (
            "train.virtual_ranks",
            2**40,
            "train.virtual_ranks: got 1099511627776 with train.gradient_accumulation_steps=1; a step must have 1048576 "
            "micro-batches or fewer",
        ),
    ],
)
def test_what_a_config_of_a_file_cannot_be_is_told_with_the_setting_and_what_it_got(name: str, value: Any, told: str):
    """OmegaConf said "NoneType is not a subclass of str", and not of what."""
    values = asdict(Config())
    group, _, setting = name.rpartition(".")
    (values[group] if group else values)[setting] = value
    with pytest.raises(ConfigError) as refused:
        config_from(values, Path("/run"))
    assert str(refused.value) == f"/run has a config that this zerotrain does not know: {told}"


TINY = {"vocab_size": 16, "max_seq_len": 8, "num_layers": 2, "num_heads": 2, "hidden_size": 16}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda state: state.pop("blocks.1.ln_1.weight"), r"it lacks blocks\.1\.ln_1\.weight; was the class changed"),
        (lambda state: state.clear(), r"it lacks .* and \d+ more; was the class changed"),
        (lambda state: state.update(head=torch.ones(1)), "the model has no head; was the class changed"),
        (
            lambda state: state.update({"ln_f.weight": torch.ones(8)}),
            r"ln_f\.weight is of shape \(8,\) in it, and of shape \(16,\) in the model",
        ),
    ],
    ids=["one missing", "all missing", "one more", "another shape"],
)
def test_weights_that_are_not_all_of_the_model_are_refused(change: Any, said: str, tmp_path: Path):
    """Of what is missing the model would have the values that it was built with."""
    (tmp_path / "weights").write_bytes(bytes(100_000))
    state = dict(GPT(**TINY).state_dict())
    config = from_values({"model": {"_target_": "zerotrain.models.GPT", **TINY}})
    run = OfRun(path=tmp_path, step=1, config=config, data_fingerprint=None, tensors=lambda: iter(state.items()))
    loaded = run.model(torch.device("cpu")).state_dict()
    assert all(torch.equal(loaded[name], value) for name, value in state.items())
    change(state)
    with pytest.raises(CheckpointError, match=said):
        run.model(torch.device("cpu"))


@pytest.mark.parametrize("build", [lambda run: run.model(torch.device("cpu")), OfRun.on_meta], ids=["whole", "on meta"])
def test_a_config_that_builds_more_than_its_files_hold_is_refused_before_it_is_built(build: Any, tmp_path: Path):
    """A million million layers were made until the memory was full."""
    (tmp_path / "weights").write_bytes(bytes(10_000))
    config = from_values({"model": {"_target_": "zerotrain.models.GPT", **TINY, "num_layers": 10**12}})
    run = OfRun(path=tmp_path, step=1, config=config, data_fingerprint=None, tensors=lambda: iter(()))
    with pytest.raises(ConfigError, match=r"more parameters than the files have bytes \(10,000\)$"):
        build(run)
