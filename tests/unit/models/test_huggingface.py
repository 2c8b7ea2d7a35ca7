"""model=huggingface: from scratch, pretrained, frozen in parts, with adapters; and what it refuses."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F

transformers = pytest.importorskip("transformers")
safetensors_torch = pytest.importorskip("safetensors.torch")

from zerotrain.config.schema import Config  # noqa: E402
from zerotrain.data import fetch  # noqa: E402
from zerotrain.engine.model.deferred import MIN_NBYTES, deferred_init  # noqa: E402
from zerotrain.errors import ConfigError  # noqa: E402
from zerotrain.models import HuggingFaceModel  # noqa: E402
from zerotrain.models.pretrained import find_weights, load_weights  # noqa: E402
from zerotrain.run.factory import freeze  # noqa: E402

GPT2 = {"model_type": "gpt2", "n_embd": 128, "n_layer": 2, "n_head": 2, "n_positions": 16}
MIXTRAL = {"model_type": "mixtral", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
MIXTRAL |= {"num_key_value_heads": 1, "intermediate_size": 128, "num_local_experts": 2, "max_position_embeddings": 16}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pretrained GPT-2 of 300 tokens, in two files."""
    path = tmp_path_factory.mktemp("gpt2")
    torch.manual_seed(5)
    config = transformers.AutoConfig.for_model(**GPT2, vocab_size=300)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(path, max_shard_size="400KB")
    assert (path / "model.safetensors.index.json").exists()
    return path


def test_a_model_from_scratch_gives_logits_and_the_mean_loss() -> None:
    model = HuggingFaceModel(config=GPT2, vocab_size=60).eval()
    ids, labels = torch.randint(0, 60, (2, 2, 8)).unbind()
    logits = model(ids)
    assert logits.shape == (2, 8, 60)
    assert model.vocab_size == 60
    torch.testing.assert_close(model(ids, labels), F.cross_entropy(logits.flatten(0, 1), labels.flatten()))


def test_named_inputs_of_transformers_reach_the_model() -> None:
    model = HuggingFaceModel(config=GPT2, vocab_size=60).eval()
    ids, labels = torch.randint(0, 60, (2, 1, 8)).unbind()
    unseen = torch.tensor([[1, 1, 0, 1, 1, 1, 1, 1]])
    named = {"input_ids": ids, "labels": labels}
    assert torch.equal(model(**named), model(ids, labels))
    assert not torch.equal(model(**named, attention_mask=unseen), model(ids, labels))
    with pytest.raises(ValueError, match=r"^forward got 0 of ids and input_ids; give one of them$"):
        model(labels=labels)


@pytest.mark.case("models: What is built into a model", "Balancing losses of transformers (`output_router_logits`)")
@pytest.mark.parametrize(
    ("fields", "adds"),
    [
        (MIXTRAL | {"output_router_logits": True, "router_aux_loss_coef": 5.0}, True),
        (MIXTRAL, False),
        ({"model_type": "jetmoe", "hidden_size": 32, "num_hidden_layers": 1, "intermediate_size": 32}
         | {"num_key_value_heads": 2, "kv_channels": 8, "output_router_logits": True, "aux_loss_coef": 2.0}, True),
        ({"model_type": "bart", "d_model": 32, "decoder_layers": 1, "decoder_attention_heads": 2}
         | {"decoder_ffn_dim": 32, "dropout": 0.0}, False),
        (GPT2 | {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}, False),
    ],
    ids=["mixtral", "mixtral without it", "jetmoe", "bart, whose loss is its own", "gpt2"],
)  # fmt: skip
def test_in_training_the_loss_is_the_models_own_with_what_it_adds_and_in_evaluation_the_cross_entropy(fields, adds):
    torch.manual_seed(0)
    model = HuggingFaceModel(config=fields, vocab_size=60)
    tokens = torch.randint(0, 60, (2, 9))
    ids, labels = tokens[:, :-1], tokens[:, 1:].clone()
    labels[:, -1] = -100  # transformers shifts labels itself, and has none for the last
    entropy = F.cross_entropy(model.eval()(ids).flatten(0, 1), labels.flatten())
    own = transformers.AutoModelForCausalLM.from_config(model.model.config)
    own.load_state_dict(model.model.state_dict())
    expected = own.train()(input_ids=ids, labels=ids.contiguous()).loss
    if fields["model_type"] == "bart":  # which does not shift, and adds nothing
        expected = entropy
    torch.testing.assert_close(model(ids, labels), entropy)
    for _ in range(2):
        torch.testing.assert_close(model.train()(ids, labels), expected)
    assert adds == (abs(expected - entropy) > 0.1)


def test_pretrained_weights_are_read_one_tensor_at_a_time_where_memory_is_deferred(folder: Path) -> None:
    expected = transformers.AutoModelForCausalLM.from_pretrained(folder)
    model, values = deferred_init(lambda: HuggingFaceModel(name_or_path=str(folder)))
    large = [parameter for parameter in model.parameters() if parameter.nbytes >= MIN_NBYTES]
    assert len(large) == 9
    assert sum(parameter.untyped_storage().nbytes() for parameter in large) == 0
    for got, parameter in zip(model.parameters(), expected.parameters(), strict=True):
        with values.values_of(got) as value:
            assert torch.equal(value, parameter)


def test_weights_in_another_form_than_the_models_own_are_converted_by_transformers(tmp_path: Path) -> None:
    config = transformers.AutoConfig.for_model(**MIXTRAL, vocab_size=50)
    pretrained = transformers.AutoModelForCausalLM.from_config(config)
    pretrained.save_pretrained(tmp_path)  # one tensor for each expert, where the model has one for all
    assert not load_weights(pretrained, find_weights(str(tmp_path)))
    model, values = deferred_init(lambda: HuggingFaceModel(name_or_path=str(tmp_path)))
    expected = dict(pretrained.named_parameters())
    assert any(parameter.nbytes >= MIN_NBYTES for parameter in expected.values())
    for name, parameter in model.model.named_parameters():
        with values.values_of(parameter) as value:
            assert torch.equal(value, expected[name])


def test_on_the_meta_device_nothing_is_read(folder: Path) -> None:
    with torch.device("meta"):
        model = HuggingFaceModel(name_or_path=str(folder), lora={"rank": 2})
    assert all(parameter.is_meta for parameter in model.parameters())


def test_what_the_settings_freeze_is_not_trained_and_beside_adapters_it_has_no_effect() -> None:
    def frozen(patterns: list[str], **arguments: Any) -> set[str]:
        model = HuggingFaceModel(config=GPT2, vocab_size=60, **arguments)
        freeze(Config(model={"freeze": patterns}), model)
        return {name for name, parameter in model.named_parameters() if not parameter.requires_grad}

    names = [name for name, _ in HuggingFaceModel(config=GPT2, vocab_size=60).named_parameters()]
    assert frozen(["*.wte.*", "*.bias"]) == {name for name in names if "wte" in name or name.endswith(".bias")}
    with pytest.raises(ConfigError, match=r"'transformer\.wte\.\*' is no .*; did you mean \*\.transformer\.wte\.\*\?"):
        frozen(["transformer.wte.*"])
    pytest.importorskip("peft")
    with pytest.raises(ConfigError, match=r"model\.freeze: \*\.wte\.\* has no effect, since all that it matches is"):
        frozen(["*.wte.*"], lora={"rank": 2})


@pytest.mark.parametrize("targets", [None, ["c_attn"]])
def test_with_adapters_nothing_else_is_trained(targets: list[str] | None) -> None:
    pytest.importorskip("peft")
    model = HuggingFaceModel(config=GPT2, vocab_size=60, lora={"rank": 2, "targets": targets})
    trained = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    assert len(trained) == 2 * 2 * (1 if targets else 4)
    assert all("lora_" in name for name in trained)


@pytest.mark.parametrize("task", ["sequence_classification", "token_classification", "image_classification"])
def test_with_adapters_the_head_of_a_classifier_trains_too(task: str) -> None:
    pytest.importorskip("peft")
    fields, batch = BY_TASK[task]
    model = HuggingFaceModel(task=task, config=dict(fields), vocab_size=60, lora={"rank": 2})
    model(**batch).backward()
    trained = {name for name, parameter in model.named_parameters() if parameter.grad is not None}
    assert trained == {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert {"lora_" in name or ".classifier." in name for name in trained} == {True}
    assert any(".classifier." in name for name in trained)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, r"model\.config\.model_type=null is no causal language model.*such as gpt2, llama, or model\.name"),
        ({"config": {"model_type": "lama"}}, r"model\.config\.model_type=lama is no .*llama"),
        ({"config": GPT2 | {"n_layers": 3}}, r"model\.config\.n_layers: a model of type gpt2 has no.*mean n_layer\?"),
        ({"name_or_path": "no/such_model"}, r"model\.name_or_path=no/such_model is neither a folder with a model nor"),
        (
            {"config": MIXTRAL | {"router_aux_loss_coef": 5.0}},
            r"_coef=5\.0 has no effect without \+model\.config\.output",
        ),
        ({"config": 5}, r"model\.config=5 is no group of fields"),
        ({"config": GPT2 | {"n_layer": "x"}}, r"model\.config: Field 'n_layer' expected int, got str"),
        (
            {"config": {"model_type": "llama", "hidden_size": 64, "num_attention_heads": 6}},
            r"model\.config: The hidden size \(64\) is not a multiple of the number of attention heads \(6\)",
        ),
    ],
)
def test_a_wrong_argument_is_refused_by_name(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message), torch.device("meta"):
        HuggingFaceModel(vocab_size=60, **arguments)


@pytest.mark.parametrize(
    ("lora", "message"),
    [
        ({"rank": 0, "alpha": 32}, r"alpha=32 has no effect without adapters"),
        ({"alpha": 0}, r"alpha=0 is out of range"),
        ({"dropout": 1.0}, r"dropout=1\.0 is out of range"),
        ({"targets": "c_attn"}, r"targets=c_attn is no list of names; give model\.lora\.targets=\[c_attn\]"),
        ({"targets": ["q_proj"]}, r"targets: no module of the model is called q_proj; did you mean c_proj"),
        ({"modules_to_save": ["lmhead"]}, r"modules_to_save: no module .* lmhead; did you mean lm_head"),
        ({"use_rslorra": True}, r"use_rslorra: LoraConfig of peft has no such field; did you mean use_rslora"),
        ({"r": 4}, r"r: zerotrain calls it model\.lora\.rank"),
        ({"use_dora": "ja"}, r"use_dora: got 'ja'; it must be true or false"),
        ({"bias": "alll"}, r"bias: got alll; it must be one of none, all, lora_only"),
        ({"init_lora_weights": "pisa"}, r": Unknown initialization init_lora_weights='pisa'"),
        ({"init_lora_weights": "eva"}, r"init_lora_weights=eva needs more than the model; .* as model\.lora\.name"),
        ({"kasa_config": {}}, r"kasa_config: needs more than adapters in layers"),
        ({"name_or_path": "."}, r"rank=2 has no effect beside model\.lora\.name"),
        ({"rank": 0, "name_or_path": "."}, r"name_or_path=\. is no folder of adapters .* no adapter_config"),
    ],
)  # fmt: skip
def test_wrong_settings_of_adapters_are_refused_by_name(lora: dict[str, Any], message: str) -> None:
    pytest.importorskip("peft")
    with pytest.raises(ValueError, match=rf"^model\.lora\.?{message}"), torch.device("meta"):
        HuggingFaceModel(config=dict(GPT2), vocab_size=60, lora={"rank": 2} | lora)


def test_a_sequence_longer_than_the_positions_is_refused() -> None:
    model = HuggingFaceModel(config=GPT2, vocab_size=60)
    with pytest.raises(ValueError, match="a sequence of 17 tokens is longer than the model's 16 positions"):
        model(torch.zeros(1, 17, dtype=torch.int64))


def test_special_tokens_that_a_small_vocabulary_does_not_have_are_left_out() -> None:
    assert HuggingFaceModel(config=GPT2, vocab_size=60).model.config.eos_token_id is None
    assert HuggingFaceModel(config=GPT2 | {"eos_token_id": 3}, vocab_size=60).model.config.eos_token_id == 3
    assert HuggingFaceModel(config=GPT2).model.config.eos_token_id == 50256


def test_a_folder_without_weights_is_refused_by_name(tmp_path: Path) -> None:
    transformers.AutoConfig.for_model(**GPT2).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"it holds neither model\.safetensors nor pytorch_model\.bin"):
        HuggingFaceModel(name_or_path=str(tmp_path))


def test_weights_of_another_shape_are_left_to_transformers_and_not_spread_over_the_models(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 3, bias=False)
    before = model.weight.detach().clone()
    safetensors_torch.save_file({"weight": torch.ones(1, 2)}, tmp_path / "model.safetensors")
    assert not load_weights(model, {"weight": str(tmp_path / "model.safetensors")})
    assert torch.equal(model.weight, before)


@pytest.mark.parametrize("device", ["meta", "cpu"])
def test_fields_that_the_weights_of_a_folder_do_not_fit_are_refused(folder: Path, device: str) -> None:
    message = r"model\.config: the weights do not fit the model: \S*wte\.weight is of shape .* leave out the fields"
    with pytest.raises(ValueError, match=message), torch.device(device):
        HuggingFaceModel(name_or_path=str(folder), config={"vocab_size": 17})


@pytest.mark.parametrize(("package", "lora"), [("transformers", None), ("peft", {"rank": 2})])
def test_a_package_that_is_missing_is_named_with_its_extra(package, lora, monkeypatch):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ImportError, match=rf"{package}, which is not installed; pip install 'zerotrain\[hf\]'"):
        HuggingFaceModel(config=GPT2, lora=lora)


def test_code_of_a_model_is_not_run_and_nobody_is_asked(tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr("builtins.input", lambda *_: "y")
    canary = tmp_path / "canary"
    (tmp_path / "laid.py").write_text(f"open({str(canary)!r}, 'w').close()\nclass Laid: pass\n")
    auto_map = {"AutoConfig": "laid.Laid", "AutoModelForCausalLM": "laid.Laid"}
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "laid", "auto_map": auto_map}))
    with pytest.raises(ValueError, match=r"it has code of its own \(laid\.Laid\), which zerotrain does not run"):
        HuggingFaceModel(name_or_path=str(tmp_path))
    assert not canary.exists()


def test_code_of_the_hub_is_not_fetched_whether_a_field_or_a_file_names_it(tmp_path: Path) -> None:
    fields = {"model_type": "gpt2", "n_layer": 1, "n_embd": 8, "n_head": 1, "_attn_implementation": "laid/kernel"}
    with pytest.raises(ValueError, match=r"^model\.config asks for code of the hub \(laid/kernel\)"):
        HuggingFaceModel(config=fields)
    (tmp_path / "config.json").write_text(json.dumps(fields))
    with pytest.raises(ValueError, match=r"its config asks for code of the hub \(laid/kernel\)"):
        HuggingFaceModel(name_or_path=str(tmp_path))


SMALL = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
TOKENS = torch.randint(1, 60, (2, 4, 8), generator=torch.Generator().manual_seed(3))
TAGS = torch.where(torch.arange(8) < torch.tensor([[8], [2], [5], [1]]), TOKENS[1] % 3, -100)
BY_TASK: dict[str, tuple[dict[str, Any], dict[str, torch.Tensor]]] = {
    "seq2seq": (
        {"model_type": "t5", "d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 1, "num_heads": 2,
         "dropout_rate": 0.0},
        {"input_ids": TOKENS[0], "labels": TAGS},
    ),
    "sequence_classification": (
        {"model_type": "bert", "num_labels": 3} | SMALL, {"input_ids": TOKENS[0], "labels": TOKENS[1, :, 0] % 3}
    ),
    "token_classification": (
        {"model_type": "bert", "num_labels": 3} | SMALL, {"input_ids": TOKENS[0], "labels": TAGS}
    ),
    "image_classification": (
        {"model_type": "vit", "num_labels": 3, "image_size": 8, "patch_size": 4, "num_channels": 1} | SMALL,
        {"pixel_values": torch.randn(4, 1, 8, 8), "labels": TOKENS[1, :, 0] % 3},
    ),
}  # fmt: skip


@pytest.mark.parametrize("task", BY_TASK)
def test_a_model_of_another_task_has_the_loss_of_transformers_which_parts_of_a_batch_have_by_their_weights(
    task,
) -> None:
    fields, batch = BY_TASK[task]
    model = HuggingFaceModel(task=task, config=dict(fields), vocab_size=60).eval()
    assert not model.next_token_labels
    whole = model(**batch)
    torch.testing.assert_close(whole, model.model(**batch).loss)
    loss, logits = model(**batch, with_outputs=True)
    assert torch.equal(loss, whole)
    assert len(logits) == 4
    _, weigh = fetch.weighing_of("auto", model)
    parts = [{name: part[rows] for name, part in batch.items()} for rows in (slice(1), slice(1, 4))]
    weights = [weigh(part, len(part["labels"])) for part in parts]
    mean = sum(weight * model(**part) for weight, part in zip(weights, parts, strict=True)) / sum(weights)
    torch.testing.assert_close(mean, whole)
    if task != "seq2seq":  # whose decoder reads labels
        assert torch.equal(model(*[part for name, part in batch.items() if name != "labels"]), logits)


def test_a_classifier_begins_with_the_weights_of_a_pretrained_model_and_a_head_of_its_own(tmp_path: Path) -> None:
    batch = BY_TASK["sequence_classification"][1]
    whole = transformers.BertModel(transformers.BertConfig(**SMALL, vocab_size=60))
    whole.save_pretrained(tmp_path)
    made = []
    for _ in range(2):
        torch.manual_seed(2)
        made.append(
            HuggingFaceModel(task="sequence_classification", name_or_path=str(tmp_path), config={"num_labels": 3})
        )
    model, again = made
    assert torch.equal(model.model.bert.embeddings.word_embeddings.weight, whole.embeddings.word_embeddings.weight)
    assert all(map(torch.equal, model.state_dict().values(), again.state_dict().values()))
    assert model(**batch).isfinite()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"task": "speech"}, r"^model\.task=speech: there is no such task; there are causal, seq2seq, sequence_class"),
        (
            {"task": "seq2seq", "config": dict(GPT2)},
            r"model_type=gpt2 is no sequence to sequence model of transformers; ",
        ),
        (
            {"task": "image_classification", "config": {"model_type": None}},
            r"null is no classifier of images .* vit, resnet",
        ),
    ],
)
def test_a_task_that_there_is_not_or_a_model_of_another_is_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message), torch.device("meta"):
        HuggingFaceModel(**arguments)
