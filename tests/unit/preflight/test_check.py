"""What is refused before any rank starts."""

import re
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.data import Dataset, IterableDataset

from tests.unit.configs import ADAMW, CONSTANT, COSINE, GPT, SYNTHETIC, Rows, config, config_with
from zerotrain.checkpoint.manifest import Manifest
from zerotrain.comm.world import World
from zerotrain.config.schema import CheckpointConfig, Config, LaunchConfig, TrainConfig, ZeroGroup
from zerotrain.data import SyntheticTokens
from zerotrain.data.batches import ORDER_VERSION
from zerotrain.errors import ConfigError
from zerotrain.models import GPT as GPT_CLASS
from zerotrain.preflight import check as preflight
from zerotrain.preflight.check import require_callbacks_fit, take_max_steps
from zerotrain.preflight.rehearsal import Links, Rehearsals
from zerotrain.run import factory
from zerotrain.settings import OffloadConfig, PrecisionGroup


class Bounded(torch.nn.Embedding):
    """A model that changes its weight in the forward."""

    def forward(self, ids: torch.Tensor, labels: torch.Tensor | None = None) -> torch.Tensor:
        return super().forward(ids).sum()


MLP = {"_target_": "zerotrain.models.MLP", "vocab_size": 256, "context": 2, "hidden_size": 8, "num_layers": 2}
MUON = {"_target_": "zerotrain.MuonWithAdamW", "lr": 0.02, "adamw_lr": 1e-3}


def test_a_config_that_can_run_passes() -> None:
    preflight.check(config())


def test_a_config_may_say_of_an_optimizer_of_others_that_it_needs_complete_tensors() -> None:
    layerwise = {"_target_": "tests.unit.engine.groups.own_optimizers.LayerwiseRate", "_partial_": True, "lr": 0.01}
    with pytest.raises(ConfigError, match=r"optimizer=LayerwiseRate: .*choose optimizer\.whole_tensor=true, "):
        preflight.check(config(optimizer=layerwise))
    declared = config(optimizer=layerwise | {"whole_tensor": True})
    preflight.check(declared)
    engine = factory.build_engine_of(declared, World(rank=0, size=1, local_rank=0, device=torch.device("cpu")))
    assert {group["name"] for group in engine.param_groups} == {"whole matrices", "whole others"}


class Measured(GPT_CLASS):
    """Computes with its values when it is made, which the meta device has none of."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self.scale = float(self.wte.weight.sum())


def test_an_optimizer_that_needs_complete_tensors_is_tried_on_them_also_where_the_model_has_to_have_values() -> None:
    layerwise = {"_target_": "tests.unit.engine.groups.own_optimizers.LayerwiseRate", "_partial_": True, "lr": 0.01}
    measured = GPT | {"_target_": f"{__name__}.Measured"}
    preflight.check(config(model=measured, optimizer=layerwise | {"whole_tensor": True}))


class Looking(torch.optim.SGD):
    """Looks at its tensors when it is made."""

    def __init__(self, params: Any, lr: float, look: str) -> None:
        super().__init__(params, lr=lr)
        for tensor in (tensor for group in self.param_groups for tensor in group["params"]):
            if look == "numpy":
                tensor.detach().numpy()
            elif look == "error" and tensor.is_meta:
                raise ValueError("parameters must be materialized")
            assert look != "assert" or tensor.device.type in ("cpu", "cuda")


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("look", ["numpy", "error", "assert"])
def test_an_optimizer_that_looks_at_its_tensors_gets_some_with_values(look, num_ranks, monkeypatch):
    monkeypatch.setattr("zerotrain.preflight.check.LARGE_NUMEL", 1)
    looking = {"_target_": f"{__name__}.Looking", "_partial_": True, "lr": 0.1, "look": look, "whole_tensor": True}
    wanted, row = config(optimizer=looking), (torch.zeros(1, 16, dtype=torch.int64),) * 2
    preflight.check(wanted, num_ranks, num_ranks)
    links = Links.of_run(wanted, num_ranks, on_host=True)
    assert Rehearsals.of_run(wanted, links, row, factory.build_optimizer_factory(wanted), None).plan(2).peak is not None


@pytest.mark.parametrize(
    ("groups", "problem"),
    [
        ({"model": GPT | {"num_heads": 3}}, "model.num_heads=3 does not divide model.hidden_size=8"),
        ({"optimizer": ADAMW | {"lr": -1.0}}, "optimizer.lr: got -1.0; Invalid learning rate: -1.0"),
        ({"optimizer": ADAMW | {"_target_": "torch.optim.Muon"}}, "optimizer=Muon: updates only matrices"),
        ({"optimizer": MUON | {"matrices": ["no"]}}, "optimizer.matrices: no trainable two-dimensional parameter"),
        ({"optimizer": MUON | {"matrices": "blocks.*"}}, "optimizer.matrices=blocks.*: must be auto, or a list"),
        ({"optimizer": ADAMW | {"betas": [0.9]}}, "optimizer.betas: got [0.9]; list index out of range"),
        (
            {"optimizer": ADAMW | {"_target_": "builtins.dict"}},
            "optimizer._target_: got builtins.dict, which makes a dict",
        ),
        ({"optimizer": ADAMW | {"capturable": True}}, "optimizer=AdamW: its step fails on small tensors (Asser"),
        ({"model": GPT | {"num_layers": "x"}}, "model.num_layers=x is no whole number"),
        (
            {"model": GPT | {"max_seq_len": 8}},
            "data.seq_len=16, but GPT knows 8 positions; choose data.seq_len=8 or less or a model with more",
        ),
        (
            {"precision": PrecisionGroup("bf16", ["rms*"])},
            "precision.keep_fp32: no module or parameter matches 'rms*'; there are wte, wpe, blocks.*.ln_1,",
        ),
        ({"precision": PrecisionGroup("bf16", ["*"])}, "precision.keep_fp32: keeps every parameter"),
        (
            {"model": {"_target_": f"{__name__}.Bounded", "num_embeddings": 256, "embedding_dim": 4, "max_norm": 1.0}},
            "model: the model is a Bounded with max_norm=1.0, which changes its weight in the forward",
        ),
        ({"scheduler": COSINE | {"warmup_steps": "abc"}}, "scheduler.warmup_steps: got abc; '<' not supported"),
        (
            {"scheduler": {"_target_": "builtins.divmod", "_partial_": True}},
            "scheduler._target_: got builtins.divmod, which returns a tuple for (0, max_steps); "
            "it must return a number",
        ),
        (
            {"model": GPT | {"vocab_size": 100}},
            "data.vocab_size=256, but GPT knows 100 tokens",
        ),
        (
            {"model": {"_target_": "builtins.dict"}},
            "model._target_: got builtins.dict, which makes a dict; it must make a",
        ),
        (
            {"data": {"_target_": "builtins.dict"}},
            "data._target_: got builtins.dict, which makes a dict with no dataset called train; it must make an object",
        ),
        (
            {"train": TrainConfig(micro_batch_size=10**9)},
            "train.micro_batch_size: got 1000000000; a rank would read 1000000000 rows in a step, and the data",
        ),
        (
            {"train": TrainConfig(gradient_accumulation_steps=10**9)},
            "train.gradient_accumulation_steps: got 1000000000; ",
        ),
        (
            {"data": {"_target_": "zerotrain.data.TextDataset", "path": "a\nb", "seq_len": 8}},
            "data.path=a\\nb does not",
        ),
        ({"data": {"_target_": "zerotrain.data.TextDataset", "path": "no/such", "seq_len": 8}}, "data.path=no/such"),
    ],
)
def test_what_a_class_refuses_is_one_line_with_its_group(groups: dict[str, Any], problem: str) -> None:
    with pytest.raises(ConfigError) as refused:
        preflight.check(config(**groups))
    assert len(refused.value.problems) == 1
    assert refused.value.problems[0].startswith(problem)
    assert "\n" not in refused.value.problems[0]


def test_tokens_and_positions_are_compared_and_frozen_models_refused_also_of_hugging_face() -> None:
    pytest.importorskip("transformers")
    fields = {"model_type": "gpt2", "n_layer": 1, "n_embd": 8, "n_head": 2}
    small = {"_target_": "zerotrain.models.HuggingFaceModel", "config": fields, "vocab_size": 256}
    with pytest.raises(ConfigError, match=r"data\.vocab_size=256, but HuggingFaceModel knows 100 tokens"):
        preflight.check(config(model=small | {"vocab_size": 100}))
    with pytest.raises(ConfigError, match=r"data\.seq_len=16, but HuggingFaceModel knows 8 positions"):
        preflight.check(config(model=small | {"config": fields | {"n_positions": 8}}))
    preflight.check(config(model=small | {"config": fields | {"max_position_embeddings": 16}}))
    with pytest.raises(ConfigError, match=r"model\.freeze: leaves no parameter that trains"):
        preflight.check(config(model=small | {"freeze": ["*"]}))


def test_a_model_that_cannot_be_found_is_one_line() -> None:
    pytest.importorskip("transformers")
    model = {"_target_": "zerotrain.models.HuggingFaceModel", "name_or_path": "nowhere"}
    with pytest.raises(ConfigError) as refused:
        preflight.check(config(model=model))
    [problem] = refused.value.problems
    assert problem.startswith("model.name_or_path=nowhere is neither a folder with a model nor one that the Hugging")


def test_all_problems_are_reported_at_once() -> None:
    with pytest.raises(ConfigError) as refused:
        preflight.check(config(model=GPT | {"num_heads": 3}, optimizer=ADAMW | {"lr": -1.0}))
    assert len(refused.value.problems) == 2


def test_all_problems_that_the_engine_finds_are_reported_at_once() -> None:
    wrong = config(
        model=GPT | {"num_layers": 2},
        optimizer=MUON | {"matrices": ["no"]},
        zero=ZeroGroup(units=["layers.*"]),
        precision=PrecisionGroup("bf16", ["rms*"]),
        train=TrainConfig(virtual_ranks=3),
    )
    with pytest.raises(ConfigError) as refused:
        preflight.check(wrong)
    names = [re.split("[=:]", problem)[0] for problem in refused.value.problems]
    assert names == ["train.virtual_ranks", "zero.units", "precision.keep_fp32", "optimizer.matrices"]


@pytest.mark.parametrize("switch", ["compile", "activation_checkpointing"])
def test_what_works_unit_by_unit_is_refused_for_a_model_without_units(switch: str) -> None:
    with pytest.raises(ConfigError, match=rf"model\.{switch}=true: works unit by unit, and GPT has no repeated blocks"):
        preflight.check(config(model=GPT | {switch: True}))  # one block repeats nothing


@pytest.mark.case("offload: Activations off the device", "A model without units")
def test_offloaded_activations_are_refused_for_a_model_without_units(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"offload\.activations=cpu: works unit by unit, and GPT has no repeated"):
        preflight.check(config(offload=OffloadConfig(activations="cpu")), run_dir=tmp_path)


def test_asking_for_gpus_that_are_not_there_is_refused() -> None:
    if torch.cuda.is_available():
        few = torch.cuda.device_count()
        with pytest.raises(ConfigError, match="has no GPU"):
            preflight.check(config(launch=LaunchConfig(device="cuda")), num_local_ranks=few + 1)
    else:
        with pytest.raises(ConfigError, match=r"launch\.device=cuda, but torch sees no GPU here"):
            preflight.check(config(launch=LaunchConfig(device="cuda")))


MOST_MODULES = 157
"""Of zerotrain, in the process that starts ranks: 156, and the metric here."""


@pytest.mark.parametrize("model", ["zerotrain.models.GPT", "own.Own"])
def test_what_takes_seconds_to_import_is_left_out_where_nothing_is_compiled(model: str, tmp_path: Path) -> None:
    """torch's compiler and its symbolic shapes, in a start that is refused by nothing."""
    (tmp_path / "own.py").write_text("from zerotrain.models import GPT\n\n\nclass Own(GPT):\n    pass\n")
    launch = Path(__file__).resolve().parents[3] / "launch.py"
    program = (
        "import os, runpy, sys\n"
        "from zerotrain.launching import task\n"
        "def end(*_):\n"
        "    own = [name for name in sys.modules if name.startswith('zerotrain')]\n"
        "    print(len(own), *[name for name in sys.modules if name in ('torch._dynamo', 'sympy')], flush=True)\n"
        "    os._exit(3)\n"
        "task._run_spawned = end\n"
        f"sys.argv = [{str(launch)!r}, 'data=synthetic', 'optimizer=muon', 'model._target_={model}', "
        "'metrics=accuracy']\n"
        f"runpy.run_path({str(launch)!r}, run_name='__main__')\n"
    )
    process = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True)
    assert (process.returncode, process.stderr) == (3, "")
    num_modules, *slow = process.stdout.splitlines()[-1].split()
    assert slow == []
    assert int(num_modules) <= MOST_MODULES


class Unshifted(SyntheticTokens):
    """Labels as transformers takes them, equal to the ids."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.train = self.validation = [(ids, ids) for ids, _ in (self.train[row] for row in range(3))]


class Shifting(GPT_CLASS):
    """A model that shifts labels itself."""

    next_token_labels = False


@pytest.mark.case(
    "losses", "Labels that equal the ids", "refused before any rank starts, for models that do not shift them"
)
def test_labels_that_are_not_shifted_are_refused_for_models_that_do_not_shift_them_and_taken_for_others() -> None:
    data = SYNTHETIC | {"_target_": f"{__name__}.Unshifted"}
    with pytest.raises(ConfigError, match=r"^data: the labels of the first items of data\.train equal their ids; GPT "):
        preflight.check(config(data=data))
    preflight.check(config(data=data, model=GPT | {"_target_": f"{__name__}.Shifting"}))


@pytest.mark.case(
    "losses",
    "`model.vocab_size=null`, as with `data=tokenized`",
    "as many tokens as the data has; your own value stays, if it is large enough",
)
def test_a_vocabulary_that_is_left_open_is_that_of_the_data_and_one_that_is_given_stays() -> None:
    def checked(vocab_size: int | None) -> Any:
        tried = config(model=GPT | {"vocab_size": vocab_size})
        preflight.check(tried)
        return tried.model["vocab_size"]

    assert checked(None) == 256
    assert checked(300) == 300
    with pytest.raises(ConfigError, match=r"data\.vocab_size=256, but GPT knows 100 tokens"):
        checked(100)


def test_a_hugging_face_model_from_scratch_knows_the_tokens_of_the_tokenizer() -> None:
    pytest.importorskip("transformers")
    model = {"_target_": "zerotrain.models.HuggingFaceModel", "config": {"model_type": "llama", "num_hidden_layers": 1}}
    tried = config(model=model | {"vocab_size": None})
    preflight.check(tried)
    assert factory.build_on_meta(tried).model.get_input_embeddings().weight.shape[0] == 256
    preflight.check(own := config(model=model | {"config": model["config"] | {"vocab_size": 320}, "vocab_size": None}))
    assert factory.build_on_meta(own).vocab_size == 320


def test_a_fault_of_the_rehearsal_itself_is_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise AssertionError("our own")

    monkeypatch.setattr(Rehearsals, "_engine", fail)
    with pytest.raises(AssertionError, match="our own"):
        preflight.check(config())


def test_virtual_ranks_that_the_ranks_cannot_share_are_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"^train\.virtual_ranks=3: 2 ranks cannot share them evenly, 3 can; .* such as 2 or 4$"
    ):
        preflight.check(config(train=TrainConfig(virtual_ranks=3)), 2, 2)
    with pytest.raises(ConfigError, match=r"^train\.virtual_ranks=4: 3 ranks cannot share them evenly, 1, 2, 4 can; "):
        preflight.check(config(train=TrainConfig(virtual_ranks=4)), 3, 3)
    preflight.check(config(train=TrainConfig(virtual_ranks=4)), 1, 2)


FROZEN = {
    "nothing": (["wpee.*", "*.lnn_1.*"], ["'wpee.*' is no floating-point parameter of the model; did you mean wpe.*?"]),
    "a model in another": (["*.wpe.*"], ["did you mean wpe.*?"]),
    "a part of a model": (["ln_1.*"], ["did you mean *.ln_1.*?"]),
    "another name": (["xyz"], ["it has wte.weight, wpe.weight, blocks.0.ln_1.weight, ..."]),
    "twice": (["wpe.*", "wpe.weight"], ["wpe.weight has no effect, since all that it matches is frozen by the model"]),
    "all": (["*"], ["leaves no parameter that trains in the first step; freeze fewer"]),
    "all until": ([{"match": "*", "until": 3}], ["leaves no parameter that trains in the first step; freeze fewer"]),
    "to the end": ([{"match": "wpe.*", "until": 4}], ["until 4 is step 4, and the run has 4; give an earlier one, or"]),
    "of tokens": ([{"match": "wpe.*", "until": "1e5tokens"}], ["until 1e5tokens is step 781, and the run has 4"]),
}
"""Four steps; the run's sequences have 16 tokens, its batches 8 of them."""


@pytest.mark.parametrize("name", FROZEN)
def test_what_freezes_nothing_or_too_much_is_one_line(name: str) -> None:
    given, says = FROZEN[name]
    with pytest.raises(ConfigError) as refused:
        preflight.check(config(model=GPT | {"freeze": given}, train=TrainConfig(max_steps=4)))
    assert all(line.startswith("model.freeze: ") for line in refused.value.problems)
    assert all(said in line for said, line in zip(says, refused.value.problems, strict=False))


GROUPED: dict[str, tuple[dict[str, Any], dict[str, Any], str]] = {
    "nothing": (ADAMW, {"match": "wpee.*", "lr": 1}, ".a: 'wpee.*' is no floating-point parameter of the model; did"),
    "no such option": (ADAMW, {"match": "wpe.*", "momentum": 0.9}, ".a: AdamW has no momentum; it has amsgrad, betas,"),
    "a negative rate": (ADAMW, {"match": "wpe.*", "lr": -1}, ".a: AdamW cannot have lr=-1: Invalid learning rate: -1"),
    "a text": (ADAMW, {"match": "wpe.*", "lr": "fast"}, ".a: lr='fast' is a text; AdamW takes a number"),
    "betas": (ADAMW, {"match": "wpe.*", "betas": [0.9, 2.0]}, ".a: AdamW cannot have betas=[0.9, 2.0]: Invalid beta"),
    "frozen": (ADAMW, {"match": "ln_f.*", "lr": 1}, ".a: has no effect, since all that it matches is frozen; leave it"),
    "of neither": (MUON, {"match": "blocks.*", "mu": 1}, ".a: AdamW and Muon has no mu; it has adjust_lr_fn, amsgrad"),
    "of the other": (MUON, {"match": "wpe.*", "momentum": 0.5}, ".a: AdamW has no momentum; it has amsgrad"),
}


@pytest.mark.parametrize("name", GROUPED)
def test_a_group_that_cannot_be_is_one_line(name: str) -> None:
    optimizer, entry, says = GROUPED[name]
    given = config(model=GPT | {"num_layers": 2, "freeze": ["ln_f.*"]}, optimizer=optimizer | {"groups": {"a": entry}})
    with pytest.raises(ConfigError) as refused:
        preflight.check(given)
    [line] = refused.value.problems
    assert line.startswith(f"optimizer.groups{says}")


def test_a_group_whose_parameters_are_all_in_one_before_it_and_a_name_of_the_engines_are_refused() -> None:
    groups = {"a": {"match": "w*", "lr": 1}, "b": {"match": ["wpe.*"], "lr": 2}, "others": {"match": "ln_f.*", "lr": 1}}
    with pytest.raises(ConfigError) as refused:
        preflight.check(config(optimizer=ADAMW | {"groups": groups}))
    assert refused.value.problems == (
        "optimizer.groups.b: has no effect, since all that it matches is in a before it; leave it out",
        "optimizer.groups.others: a group is called 'others', a name of the engine's; give it another",
    )


def test_a_checkpoint_in_which_a_parameter_is_in_another_group_is_refused() -> None:
    def groups(**given: str) -> Config:
        entries = {name: {"match": match, "lr": 1e-3} for name, match in given.items()}
        return config(optimizer=ADAMW | {"groups": entries or None})

    model = factory.build("model", config().target("model"))
    manifest = saved_by(model)
    names = ["matrices", "others", "head", "added later"]
    manifest.content["config"] = {"optimizer": {"groups": {"head": {}}}}
    manifest.content["groups"] = [{"hyperparameters": {"name": name}, "optimizer": "AdamW"} for name in names]
    for name, parameter in model.named_parameters():
        manifest.parameters[name].group = 2 if name == "wte.weight" else int(parameter.ndim < 2)
    manifest.parameters["ln_f.bias"].group = 3
    preflight.check(groups(head="wte.*"), goes_on_from=manifest)
    for other in (groups(head="w*e.*"), groups(tables="wte.*"), groups()):
        with pytest.raises(
            ConfigError, match=r"optimizer\.groups: w[tp]e.weight is in group .*, and in the checkpoint"
        ):
            preflight.check(other, goes_on_from=manifest)


def saved_by(model: torch.nn.Module, settings: dict[str, Any] = GPT) -> Manifest:
    others = {"trains": True, "group": None, "generation": 0, "is_updated_whole": False, "counts": {}, "tensors": {}}
    parameters = {
        name: {"names": [name], "shape": list(parameter.shape), "stride": list(parameter.stride()), **others}
        for name, parameter in model.named_parameters()
    }
    groups = [{"hyperparameters": {"name": name}, "optimizer": "AdamW"} for name in ("matrices", "others")]
    of_run = {"files": [], "buffers": {}, "groups": groups, "step": 0, "extra": {}, "config": {"model": settings}}
    return Manifest({"parameters": parameters, **of_run})


@pytest.mark.case(
    "checkpoints", "of a run from a config", "refused before any rank starts", under="weights out of a safetensors file"
)
def test_weights_to_start_from_that_do_not_fit_are_refused_before_any_rank_starts(tmp_path: Path) -> None:
    model = factory.build("model", config().target("model"))
    state = model.state_dict()
    path = str(tmp_path / "weights.pt")
    torch.save({"model": state}, path)
    preflight.check(config(checkpoint=CheckpointConfig(init_from=path)))
    name = next(iter(state))
    torch.save({"model": {each: value for each, value in state.items() if each != name} | {"head": state[name]}}, path)
    with pytest.raises(ConfigError) as refused:
        preflight.check(config(checkpoint=CheckpointConfig(init_from=path)))
    begin = f"checkpoint.init_from: {path} does not fit the engine: "
    assert refused.value.problems == (
        f"{begin}it lacks {name}; or give checkpoint.strict=false",
        f"{begin}the model has no head; or give checkpoint.strict=false",
        f"checkpoint.init_from: {path}: its 'model' was read",
    )
    preflight.check(config(checkpoint=CheckpointConfig(init_from=path, strict=False)))
    preflight.check(config(checkpoint=CheckpointConfig(init_from=path)), goes_on_from=saved_by(model))


def test_the_checkpoint_of_another_optimizer_is_refused_before_any_rank_starts() -> None:
    """Its ranks refused it, and then named the same command to go on with (2026-11-29)."""
    model = factory.build("model", config().target("model"))
    sgd = {"_target_": "torch.optim.SGD", "_partial_": True, "lr": 1e-3}
    said = "^checkpoint.resume: its optimizer is AdamW, AdamW, and the engine's SGD, SGD; keep the optimizer, or "
    with pytest.raises(ConfigError, match=said):
        preflight.check(config(optimizer=sgd), goes_on_from=saved_by(model))
    whole, said = config(optimizer=ADAMW | {"whole_tensor": True}), "^checkpoint.resume: its parameter groups are "
    with pytest.raises(ConfigError, match=said):
        preflight.check(whole, goes_on_from=saved_by(model))


def test_the_checkpoint_of_a_run_that_read_other_rows_is_refused_before_any_rank_starts() -> None:
    model = factory.build("model", config().target("model"))
    fingerprint = preflight.check(config())
    rows = {"rows_consumed": 8, "seed": 0, "order_version": ORDER_VERSION, "fingerprint": fingerprint}
    manifest = saved_by(model)
    manifest.content["extra"] = {"trainer": {"run": {"data": rows}}}
    assert preflight.check(config(), goes_on_from=manifest) == fingerprint
    said = "^data: the saved run read other rows, so this one cannot go on at its row 8: seed: 0 there, 7 here; "
    with pytest.raises(ConfigError, match=said):
        preflight.check(config(seed=7), goes_on_from=manifest)
    for of_an_own_loop in ("text", {"rows_consumed": 8}, {**rows, "fingerprint": "text"}):
        manifest.content["extra"] = {"trainer": {"run": {"data": of_an_own_loop}}}
        preflight.check(config(), goes_on_from=manifest)  # the ranks refuse it


def test_the_checkpoint_of_another_model_is_refused() -> None:
    model = factory.build("model", config().target("model"))
    preflight.check(config(), goes_on_from=saved_by(model))
    settings = GPT | {"hidden_size": 16, "num_layers": 2}
    wider = factory.build("model", settings)
    with pytest.raises(ConfigError) as refused:
        preflight.check(config(), goes_on_from=saved_by(wider, settings))
    why, surplus, *shapes, more = refused.value.problems
    assert why == (
        "checkpoint.resume: the checkpoint was trained with model.num_layers=2, model.hidden_size=16; give that, or "
        "another checkpoint"
    )
    assert re.fullmatch(r"checkpoint.resume: the model has no blocks\.1\S+, .*", surplus)
    assert len(shapes) == 10
    of_shape = re.compile(r"checkpoint.resume: \S+ is of shape .* in it, and of shape .* in the model")
    assert all(of_shape.fullmatch(each) for each in shapes)
    assert re.fullmatch(r"checkpoint.resume: and \d+ more are of other shapes", more)


# Users' datasets: what is refused before any rank starts, each in one line, and what is taken.


class Items:
    """A dataset of the same items on both sides."""

    def __init__(self, kind: str = "pairs", seq_len: int = 16) -> None:
        tokens = torch.arange(seq_len + 1)
        pair = (tokens[:-1], tokens[1:])
        kinds: dict[str, Any] = {
            "pairs": [pair] * 4,
            "dicts": [{"labels": pair[1], "ids": pair[0]}] * 4,
            "stream": Stream(),
            "no length": NoLength(),
            "empty": [],
            "strings": ["text"],
            "lists": [(pair[0].tolist(), pair[1].tolist())],
            "triples": [(*pair, pair[0])],
            "single": [pair[0]],
            "int32": [(pair[0], pair[1].int())],
            "unequal": [(pair[0], pair[1][:-1])],
            "unknown": [(pair[0], pair[1] + 1000)],
            "unknown in the second": [pair, (pair[0], pair[1] + 1000)],
            "ragged": [pair, (pair[0][:8], pair[1][:8])],
            "failing": Failing(),
        }
        self.train = kinds[kind]
        self.validation = kinds["pairs"]


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Any:
        return iter(())


class NoLength(Dataset[Any]):
    def __getitem__(self, index: int) -> Any:
        return torch.arange(16), torch.arange(1, 17)


class Failing(Dataset[Any]):
    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> Any:
        return {}["image"]


def padded(items: list[Any]) -> dict[str, torch.Tensor]:
    """Pads to the longest item; the labels that are added do not count."""
    ids, labels = zip(*items, strict=True)
    pad = torch.nn.utils.rnn.pad_sequence
    return {"ids": pad(ids, batch_first=True), "labels": pad(labels, batch_first=True, padding_value=-100)}


def check(kind: str, **settings: Any) -> None:
    data = {"_target_": f"{__name__}.Items", "kind": kind, **settings}
    preflight.check(Config(model=GPT, data=data, optimizer=ADAMW, scheduler=CONSTANT))


@pytest.mark.case(
    "losses",
    "An `IterableDataset`, no `len()`, an empty dataset, strings, lists of numbers, items of "
    "several shapes without a collate function",
)
@pytest.mark.parametrize(
    ("kind", "problem"),
    [
        ("stream", "data.train is of type Stream, which cannot be indexed; it must be map-style"),
        ("no length", "data.train is of type NoLength, which cannot be indexed"),
        ("empty", "data.train is empty"),
        ("strings", "data.train[0] is of type str; a batch is made of tensors and numbers"),
        ("lists", "data.train[0][0] is a list of numbers; give torch.tensor"),
        ("triples", "data.train[0] gives 3 parts without names, but GPT.forward takes (ids, labels, position_ids): "),
        ("single", "data.train[0] gives 1 part without names and no labels, but GPT.forward takes (ids, labels, "),
        ("int32", "data.train[0] has int64 (16,) for ids and int32 (16,) for labels; GPT takes int64"),
        ("unequal", "data.train[0] has int64 (16,) for ids and int64 (15,) for labels"),
        ("unknown", "data.train[0] has the token 1001, but GPT knows the tokens from 0 to 255"),
        ("unknown in the second", "data.train[1] has the token 1001, but GPT knows the tokens from 0 to 255"),
        ("ragged", "data.train[1] has shapes [0] (8,), [1] (8,) and data.train[0] shapes [0] (16,), [1] (16,)"),
        ("failing", f"data.train: row 0 (epoch 0, step 1) cannot be read: KeyError: 'image' ({__file__}, line "),
    ],
)
def test_items_that_cannot_be_trained_on_are_refused_in_one_line(kind: str, problem: str) -> None:
    with pytest.raises(ConfigError) as refused:
        check(kind)
    [line] = refused.value.problems
    assert line.startswith(problem)
    assert "\n" not in line


@pytest.mark.case("losses", "Items of several lengths with `data.collate_fn`")
def test_items_that_are_named_or_that_a_collate_function_pads_are_taken() -> None:
    check("dicts")
    check("ragged", collate_fn={"_target_": f"{__name__}.padded", "_partial_": True})
    with pytest.raises(ConfigError, match=r"^data\.train: row 0 .* cannot be collated into a batch: ValueError: too"):
        check("triples", collate_fn={"_target_": f"{__name__}.padded", "_partial_": True})


@pytest.mark.parametrize(
    ("best", "problem"),
    [
        ("val_accuracy/b", None),
        ("val_accuracy", None),
        (
            "val_f1",
            "checkpoint.best: got val_f1; an evaluation has val_loss, val_accuracy, val_loss/a, val_loss/b, val_a",
        ),
        (None, None),
        ("val_loss", None),
        ("val_loss/a", None),
        (
            "val_loss/c",
            "checkpoint.best: got val_loss/c; an evaluation has val_loss, val_accuracy, val_loss/a, val_loss/b",
        ),
    ],
)
def test_the_best_is_of_a_loss_that_an_evaluation_has(best: str | None, problem: str | None) -> None:
    data = SimpleNamespace(validation=SimpleNamespace(sources={"a": [], "b": []}))
    accuracy = {"_target_": "zerotrain.training.Accuracy"}
    settings = Config(checkpoint=CheckpointConfig(best=best), callbacks={"accuracy": accuracy})
    with nullcontext() if problem is None else pytest.raises(ConfigError, match=problem):
        require_callbacks_fit(data, {}, settings)
    if best is not None:  # of jobs that are compared by it likewise
        settings.checkpoint.best, settings.sweep.objective = None, best
        said = None if problem is None else problem.replace("checkpoint.best", "sweep.objective")
        with nullcontext() if said is None else pytest.raises(ConfigError, match=said):
            require_callbacks_fit(data, {}, settings)


class Named(torch.nn.Linear):
    """Regression of dicts."""

    def __init__(self) -> None:
        super().__init__(3, 1)

    def forward(self, features: torch.Tensor, target: torch.Tensor | None = None) -> torch.Tensor:
        outputs = super().forward(features).squeeze(-1)
        return outputs if target is None else (outputs - target).square().mean()


class AlwaysLoss(Named):
    def forward(self, features: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return super().forward(features, target)


class Square(torch.nn.Module):
    """As many classes as positions, in dimension 1."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(4, 4)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor | None = None) -> torch.Tensor:
        outputs = self.embedding(ids).transpose(1, 2)
        return outputs if labels is None else torch.nn.functional.cross_entropy(outputs, labels)


class Table:
    def __init__(self, kind: str = "named") -> None:
        x, ids = torch.ones(3), torch.tensor([0, 1, 2, 3])
        rows = {
            "named": {"features": x, "target": x.sum()},
            "nested": {"features": {"x": x, "y": x.sum()}, "target": x.sum()},
            "single": x,
            "square": (ids, ids),
        }
        self.train = self.validation = [rows[kind]] * 4


R2 = {"_target_": "zerotrain.training.TorchMetric", "metric": {"_target_": "torchmetrics.R2Score"}}


@pytest.mark.case(
    "losses",
    "A metric whose labels or `target` no batch has, or that cannot know which dimension has the classes",
    "refused before any rank starts, with the names that there are",
)
@pytest.mark.parametrize(
    ("model", "kind", "metric", "problem"),
    [
        (
            "Named",
            "named",
            R2,
            "compares outputs with labels, and a batch of data.validation has features, target; give",
        ),
        ("Named", "named", R2 | {"target": "target"}, None),
        (
            "Named",
            "named",
            R2 | {"target": "tarqet"},
            "compares outputs with tarqet, and a batch of data.validation has f",
        ),
        (
            "Named",
            "nested",
            R2 | {"target": "features.z"},
            "with features.z, .* has features.x, features.y, target; give",
        ),
        (
            "Named",
            "single",
            R2,
            "compares outputs with labels, and a batch of data.validation has no such part; give d",
        ),
        (
            "AlwaysLoss",
            "named",
            R2 | {"target": "target"},
            "calls AlwaysLoss.forward without labels for its outputs: mis",
        ),
        (
            "Square",
            "square",
            {"_target_": "zerotrain.training.Accuracy"},
            "classes of outputs of shape .1, 4, 4. may be",
        ),
        ("Square", "square", {"_target_": "zerotrain.training.Accuracy", "class_dim": 1}, None),
    ],
)
def test_a_metric_without_its_labels_is_refused_before_any_rank_starts(model, kind, metric, problem) -> None:
    pytest.importorskip("torchmetrics")
    settings = Config(
        model={"_target_": f"{__name__}.{model}"},
        data={"_target_": f"{__name__}.Table", "kind": kind},
        optimizer=ADAMW,
        scheduler=CONSTANT,
        callbacks={"mine": metric},
    )
    with nullcontext() if problem is None else pytest.raises(ConfigError, match=rf"^callbacks\.mine: .*{problem}"):
        preflight.check(settings)


# The steps that epochs and tokens come to.


def steps_of(config: Config, num_ranks: int = 1, goes_on_from: Manifest | None = None, rows: Any = None) -> int | None:
    take_max_steps(config, SimpleNamespace(train=rows or Rows()), num_ranks, goes_on_from)
    return config.train.max_steps


def saved(step: int, num_read: Any) -> Manifest:
    state = {"trainer": {"run": {"data": {"rows_consumed": num_read}}}}
    return Manifest({"files": [], "parameters": {}, "buffers": {}, "step": step, "extra": state})


@pytest.mark.parametrize(
    ("given", "num_ranks", "steps"),
    [
        ({"num_epochs": 1.0}, 1, 250),
        ({"num_epochs": 1.0, "micro_batch_size": 3}, 1, 334),
        ({"num_epochs": 2.0, "gradient_accumulation_steps": 5}, 2, 50),
        ({"num_epochs": 2.0, "virtual_ranks": 8}, 2, 63),
        ({"num_epochs": 1.1}, 1, 275),  # 1.1 * 1000 is 1100.0000000000002
        ({"num_epochs": 0.0001}, 1, 1),
        ({"max_tokens": 16_000.0}, 1, 250),
        ({"max_tokens": 16_001.0}, 1, 251),
        ({"max_tokens": 1.0}, 4, 1),
        ({"max_steps": 7}, 1, 7),
    ],
)
def test_a_length_is_rounded_up_to_whole_steps(given: dict[str, Any], num_ranks: int, steps: int) -> None:
    assert steps_of(config_with(**given), num_ranks) == steps


@pytest.mark.parametrize(
    ("num_epochs", "num_ranks", "step", "num_read", "steps"),
    [
        (2.0, 1, 100, 400, 500),  # batches of the same size: as many steps as from the first on
        (2.0, 4, 100, 400, 200),  # of four times the size: 1600 sequences are left
        (1.0, 1, 250, 1000, 250),
        (1.0, 3, 84, 1008, 84),  # the last batch has read some of the next epoch
        (1.0, 1, 10, "many", 250),
    ],
)
def test_a_run_that_goes_on_reads_the_sequences_that_are_left(num_epochs, num_ranks, step, num_read, steps):
    assert steps_of(config_with(num_epochs=num_epochs), num_ranks, saved(step, num_read)) == steps


def test_a_checkpoint_beyond_the_end_of_the_run_is_refused() -> None:
    with pytest.raises(ConfigError) as refused:
        steps_of(config_with(num_epochs=0.5), 1, saved(200, 800))
    told = "train.num_epochs=0.5: is 500 rows, and the checkpoint to go on from has been trained on 800; give more"
    assert refused.value.problems == (told,)


def test_tokens_of_sequences_that_differ_are_refused() -> None:
    assert steps_of(config_with(num_epochs=1.0), rows=[0] * 8) == 2
    with pytest.raises(ConfigError, match=r"^train.max_tokens=100.0: the data does not tell how many tokens each"):
        steps_of(config_with(max_tokens=100.0), rows=[0] * 8)


@pytest.mark.parametrize("name", ["num_epochs", "max_tokens"])
def test_a_length_without_end_is_refused(name: str) -> None:
    with pytest.raises(
        ConfigError, match=rf"^train\.{name}=1e\+300: is more steps than anybody can count, 2\*\*63 or "
    ):
        steps_of(config_with(**{name: 1e300}))


@pytest.mark.parametrize("wrong", [{"num_epochs": float("nan")}, {"num_epochs": -1.0}, {"micro_batch_size": 0}, {}])
def test_what_breaks_its_rule_is_left_to_who_says_so(wrong: dict[str, Any]) -> None:
    assert steps_of(config_with(**wrong)) is None


def test_the_check_before_a_run_works_the_steps_out() -> None:
    settings = Config(model=GPT, data=SYNTHETIC, optimizer=ADAMW, scheduler=COSINE)
    settings.train.max_steps, settings.train.num_epochs = None, 3.0
    preflight.check(settings, num_ranks=2)
    assert settings.train.max_steps == 12  # 3 x 64 sequences in batches of 16
    settings.train.max_steps = 5  # of an evaluation, which reads the settings of a run that is done
    preflight.check(settings)
    assert settings.train.max_steps == 5
