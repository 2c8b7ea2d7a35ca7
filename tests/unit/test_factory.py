"""What is refused before any rank starts, and building an engine in a process of its own."""

from pathlib import Path
from typing import Any

import pytest
import torch

from zerotrain import factory
from zerotrain.config.schema import Config, LaunchConfig, PrecisionConfig
from zerotrain.errors import ConfigError

GPT = {
    "_target_": "zerotrain.models.GPT",
    "vocab_size": 256,
    "max_seq_len": 16,
    "num_layers": 1,
    "num_heads": 2,
    "hidden_size": 8,
}
ADAMW = {"_target_": "torch.optim.AdamW", "_partial_": True, "lr": 1e-3}
MUON = {"_target_": "zerotrain.MuonWithAdamW", "lr": 0.02, "adamw_lr": 1e-3}
COSINE = {"_target_": "zerotrain.training.warmup_cosine", "_partial_": True, "warmup_steps": 2, "final_fraction": 0.1}
SYNTHETIC = {"_target_": "zerotrain.data.SyntheticTokens", "seq_len": 16, "vocab_size": 256, "num_sequences": 64}


def config(**groups: Any) -> Config:
    return Config(**({"model": GPT, "data": SYNTHETIC, "optimizer": ADAMW, "scheduler": COSINE} | groups))


def test_a_config_that_can_run_passes() -> None:
    factory.check(config())


@pytest.mark.parametrize(
    ("groups", "problem"),
    [
        ({"model": GPT | {"num_heads": 3}}, "model.num_heads=3 does not divide model.hidden_size=8"),
        ({"optimizer": ADAMW | {"lr": -1.0}}, "optimizer: Invalid learning rate: -1.0"),
        ({"optimizer": ADAMW | {"_target_": "torch.optim.Muon"}}, "optimizer=Muon: takes matrices alone"),
        ({"optimizer": MUON | {"matrices": ["no"]}}, "optimizer.matrices: no trainable two-dimensional parameter"),
        ({"optimizer": MUON | {"matrices": "blocks.*"}}, "optimizer.matrices=blocks.*: must be auto, or a list"),
        ({"optimizer": ADAMW | {"betas": [0.9]}}, "optimizer: list index out of range; one of these may be of another"),
        ({"model": GPT | {"num_layers": "x"}}, "model.num_layers=x is no whole number"),
        (
            {"model": GPT | {"max_seq_len": 8}},
            "data.seq_len=16, but GPT knows 8 positions; choose data.seq_len=8 or less or a model with more",
        ),
        (
            {"precision": PrecisionConfig("bf16", ["rms*"])},
            "precision.keep_fp32: no module or parameter matches 'rms*'; there are wte, wpe, blocks.*.ln_1,",
        ),
        ({"precision": PrecisionConfig("bf16", ["*"])}, "precision.keep_fp32: keeps every parameter"),
        ({"scheduler": COSINE | {"warmup_steps": "abc"}}, "scheduler: "),
        ({"data": {"_target_": "zerotrain.data.TextDataset", "path": "no/such", "seq_len": 8}}, "data.path=no/such"),
    ],
)
def test_what_a_class_refuses_is_one_line_with_its_group(groups: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError) as refused:
        factory.check(config(**groups))
    assert len(refused.value.problems) == 1
    assert refused.value.problems[0].startswith(problem)
    assert "\n" not in refused.value.problems[0]


def test_data_with_more_tokens_than_the_model_knows_is_refused() -> None:
    small = {"_target_": "zerotrain.models.HuggingFaceModel", "config": {"model_type": "gpt2", "n_layer": 1}}
    pytest.importorskip("transformers")
    factory.check(config(model=small | {"vocab_size": 256}))
    with pytest.raises(ConfigError, match=r"data\.vocab_size=256, but HuggingFaceModel knows 100 tokens"):
        factory.check(config(model=small | {"vocab_size": 100}))


def test_positions_are_compared_and_frozen_models_refused_also_of_hugging_face() -> None:
    pytest.importorskip("transformers")
    fields = {"model_type": "gpt2", "n_layer": 1, "n_embd": 8, "n_head": 2}
    small = {"_target_": "zerotrain.models.HuggingFaceModel", "config": fields, "vocab_size": 256}
    with pytest.raises(ConfigError, match=r"data\.seq_len=16, but HuggingFaceModel knows 8 positions"):
        factory.check(config(model=small | {"config": fields | {"n_positions": 8}}))
    factory.check(config(model=small | {"config": fields | {"max_position_embeddings": 16}}))
    with pytest.raises(ConfigError, match="has no trainable floating-point parameter"):
        factory.check(config(model=small | {"freeze": ["*"]}))


def test_a_model_that_cannot_be_found_is_one_line() -> None:
    pytest.importorskip("transformers")
    model = {"_target_": "zerotrain.models.HuggingFaceModel", "name_or_path": "nowhere"}
    with pytest.raises(ConfigError) as refused:
        factory.check(config(model=model))
    [problem] = refused.value.problems
    assert problem.startswith("model.name_or_path=nowhere is neither a folder with a model nor one that the Hugging")


def test_all_problems_are_reported_at_once() -> None:
    with pytest.raises(ConfigError) as refused:
        factory.check(config(model=GPT | {"num_heads": 3}, optimizer=ADAMW | {"lr": -1.0}))
    assert len(refused.value.problems) == 2


@pytest.mark.parametrize("switch", ["compile", "activation_checkpointing"])
def test_what_works_unit_by_unit_is_refused_for_a_model_without_units(switch: str) -> None:
    with pytest.raises(ConfigError, match=rf"model\.{switch}=true: works unit by unit, and GPT has no repeated blocks"):
        factory.check(config(model=GPT | {switch: True}))  # one block repeats nothing


@pytest.mark.parametrize(
    ("argument", "value", "answer"),
    [
        ("model", None, "model: got an object of type NoneType; it must be an nn.Module"),
        ("optimizer", "adamw", "optimizer: got an object of type str; it must be functools.partial"),
        ("zero", 3, "zero: got an object of type int; it must be a zerotrain.ZeroConfig"),
        ("precision", torch.bfloat16, "precision: got an object of type dtype; it must be a name such as bf16"),
    ],
)
def test_arguments_of_another_kind_are_refused_in_python_too(argument: str, value: Any, answer: str) -> None:
    arguments = {"model": torch.nn.Linear(2, 2), "optimizer": torch.optim.AdamW} | {argument: value}
    with pytest.raises(ConfigError, match=answer):
        factory.build_engine(**arguments)


def test_asking_for_gpus_that_are_not_there_is_refused() -> None:
    if torch.cuda.is_available():
        few = torch.cuda.device_count()
        with pytest.raises(ConfigError, match="has no GPU"):
            factory.check(config(launch=LaunchConfig(device="cuda")), num_local_ranks=few + 1)
    else:
        with pytest.raises(ConfigError, match=r"launch\.device=cuda, but torch sees no GPU here"):
            factory.check(config(launch=LaunchConfig(device="cuda")))


def run(folder: Path, **groups: Any) -> dict[str, Any]:
    settings = config(**groups)
    settings.train.max_steps = 2
    settings.train.eval_batches = 1
    folder.mkdir(exist_ok=True)
    return factory.run(settings, folder, overrides=["train.max_steps=2"], config_hash="abc")


def test_mfu_counts_no_operation_that_is_made_twice_to_save_memory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(factory, "device_peak_flops", lambda device, dtype: 1e12)
    model = GPT | {"num_layers": 2}
    plain = run(tmp_path / "plain", model=model)
    recomputed = run(tmp_path / "recomputed", model=model | {"activation_checkpointing": True})
    assert plain["weights_sha256"] == recomputed["weights_sha256"]
    assert plain["mfu"] / plain["tokens_per_s"] == pytest.approx(recomputed["mfu"] / recomputed["tokens_per_s"])


def test_where_the_peak_of_the_device_is_not_known_there_is_no_mfu(tmp_path: Path) -> None:
    assert run(tmp_path)["mfu"] is None


def test_one_process_without_a_group_trains_and_writes_its_result(tmp_path: Path) -> None:
    result = run(tmp_path)
    assert result["status"] == "completed"
    assert result["overrides"] == ["train.max_steps=2"]
    assert (tmp_path / "result.json").exists()
