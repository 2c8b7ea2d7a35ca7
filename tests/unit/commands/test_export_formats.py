"""Exported folders that transformers and peft open, and text from them."""

import functools
from dataclasses import asdict
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

import pytest
import torch

import zerotrain
from tests.cases import EVALUATION, EXPORT, GENERATION, WRONG_RUN
from tests.ranks.fake_wire import run_threads
from tests.unit.commands.test_export import ONE_SEED_AT_A_TIME, exported, refused, tensors_in, told_of_small_files
from tests.unit.data.tokenizers_made import END, saved
from zerotrain.commands import evaluate, generate
from zerotrain.config.compose import from_values
from zerotrain.data.chat import CHATML
from zerotrain.models import HuggingFaceModel
from zerotrain.models.gpt import MeanCrossEntropy

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")


REPOSITORY = Path(__file__).resolve().parents[3]
LLAMA = {"model_type": "llama", "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
LLAMA |= {"num_key_value_heads": 2, "intermediate_size": 48, "max_position_embeddings": 32, "tie_word_embeddings": True}
GPT2 = {"model_type": "gpt2", "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 16, "vocab_size": 300}
IDS = torch.arange(12)[None] * 7


def engine_of(
    arguments: dict[str, Any], world: zerotrain.World | None = None, stage: int = 3, **options: Any
) -> zerotrain.ZeroEngine:
    with ONE_SEED_AT_A_TIME:
        torch.manual_seed(0)
        model = HuggingFaceModel(**{name: value for name, value in arguments.items() if name != "freeze"})
    for name, parameter in model.named_parameters():
        if any(fnmatch(name, pattern) for pattern in arguments.get("freeze", ())):
            parameter.requires_grad = False
    optimizer = functools.partial(torch.optim.AdamW, lr=0.01)
    zero = zerotrain.ZeroConfig(stage)
    return zerotrain.build_engine(model, optimizer=optimizer, zero=zero, world=world, **options)


def run_of(folder: Path, arguments: dict[str, Any], data: dict[str, Any], **options: Any) -> dict[str, torch.Tensor]:
    """What a run of four ranks at stage 3 leaves that was interrupted; its weights."""
    model = {"_target_": "zerotrain.models.HuggingFaceModel", **arguments}
    of_training = {
        "optimizer": {"_target_": "torch.optim.AdamW", "_partial_": True, "lr": 0.01},
        "scheduler": {"_target_": "zerotrain.training.warmup_cosine", "_partial_": True, "warmup_steps": 1},
    }
    data = {"_target_": "zerotrain.data.TextDataset", **data}
    config = asdict(from_values({"model": model, "data": data, **of_training}))

    def train(world: zerotrain.World) -> dict[str, torch.Tensor]:
        engine = engine_of(arguments, world, **options)
        for _ in range(2):
            engine.backward(engine(IDS, IDS.roll(-1)))
            engine.step()
        engine.save(folder / "checkpoints" / "step-00000002", config=config)
        return engine.full_state_dict()

    return run_threads(train, 4)[0][0]


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any], dict[str, torch.Tensor]]:
    folder = tmp_path_factory.mktemp("llama")
    tokenizer = saved("bytes, GPT-2", folder / "tokenizer", eos_token=END)
    arguments = {"config": LLAMA, "vocab_size": 600}
    return folder / "run", arguments, run_of(folder / "run", arguments, {"tokenizer": tokenizer})


@pytest.fixture(scope="module")
def trained_adapters(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any], dict[str, torch.Tensor]]:
    folder = tmp_path_factory.mktemp("adapters")
    torch.manual_seed(5)
    config = transformers.AutoConfig.for_model(**GPT2, bos_token_id=None, eos_token_id=None)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder / "base")
    arguments = {"name_or_path": str(folder / "base"), "lora": {"rank": 2}}
    return folder / "run", arguments, run_of(folder / "run", arguments, {"tokenizer": None})


def logits_of(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model.eval()(input_ids=IDS).logits


def trained(arguments: dict[str, Any], weights: dict[str, torch.Tensor]) -> Any:
    """The model of transformers or peft that the run has trained, by plain torch."""
    model = HuggingFaceModel(**arguments)
    model.load_state_dict(weights)
    return model.model


@pytest.mark.case(
    "checkpoints",
    "of a model of Hugging Face, with or without adapters, merged or not",
    "opened by transformers and peft, equal logits; in again unchanged",
    under=EXPORT,
)
def test_transformers_opens_what_was_exported_and_gives_equal_logits(llama, tmp_path: Path) -> None:
    run, arguments, weights = llama
    out = exported(run, tmp_path / "out", "--shard-mb", "0.03")
    assert (out / "model.safetensors.index.json").exists()
    opened = transformers.AutoModelForCausalLM.from_pretrained(out)
    assert opened.dtype == torch.float32
    assert opened.config.use_cache
    assert torch.equal(logits_of(opened), logits_of(trained(arguments, weights)))
    assert opened.lm_head.weight is opened.model.embed_tokens.weight
    tokenizer = transformers.AutoTokenizer.from_pretrained(out)
    own = transformers.AutoTokenizer.from_pretrained(run.parent / "tokenizer")
    assert tokenizer.encode("def main") == own.encode("def main") != []


def test_a_template_of_the_settings_goes_with_the_tokenizer(llama, tmp_path: Path, capsys) -> None:
    chats = {"_target_": "zerotrain.data.ChatDataset", "tokenizer": str(llama[0].parent / "tokenizer")}
    written = tmp_path / "template.jinja"
    written.write_text(CHATML)
    for name, template in {"chatml": "chatml", "file": str(written)}.items():
        run_of(tmp_path / name, llama[1], chats | {"template": template})
        out = exported(tmp_path / name, tmp_path / f"{name}_out")
        assert transformers.AutoTokenizer.from_pretrained(out).chat_template == CHATML
    written.unlink()
    exported(tmp_path / "file", tmp_path / "gone")
    assert "warning: without the template of the chats: " in capsys.readouterr().out


@pytest.mark.case("checkpoints", "an export loaded again; a Llama of transformers loaded and exported")
def test_a_llama_of_others_goes_in_and_out_unchanged(tmp_path: Path) -> None:
    torch.manual_seed(11)
    config = transformers.AutoConfig.for_model(**LLAMA | {"tie_word_embeddings": False}, vocab_size=600)
    theirs = transformers.AutoModelForCausalLM.from_config(config)
    theirs.save_pretrained(tmp_path / "theirs")
    arguments = {"config": LLAMA | {"tie_word_embeddings": False}, "vocab_size": 600}
    model = {"_target_": "zerotrain.models.HuggingFaceModel", **arguments}
    config_of_run = asdict(from_values({"model": model}))

    def load(world: zerotrain.World) -> None:
        engine = engine_of(arguments, world)
        [told] = engine.load_weights(tmp_path / "theirs").told()
        assert told.endswith("'model.', with which all names of the model begin, was put before those in it")
        engine.save(tmp_path / "run" / "checkpoints" / "step-00000000", config=config_of_run)

    run_threads(load, 2)
    out = exported(tmp_path / "run", tmp_path / "out")
    found, wanted = tensors_in(out), theirs.state_dict()
    assert found.keys() == wanted.keys()
    assert [name for name in wanted if not torch.equal(found[name], wanted[name])] == []
    opened = transformers.AutoModelForCausalLM.from_pretrained(out)
    assert torch.equal(logits_of(opened), logits_of(theirs))


def test_what_a_pretrained_model_says_about_generation_goes_with_the_export(trained_adapters, tmp_path: Path) -> None:
    theirs = transformers.AutoModelForCausalLM.from_pretrained(trained_adapters[1]["name_or_path"])
    theirs.save_pretrained(tmp_path / "base")
    # A temperature without do_sample, as some published models have it, is refused where it is saved anew.
    (tmp_path / "base" / "generation_config.json").write_text('{"eos_token_id": [2, 3], "temperature": 0.7}')
    for name, lora, options in (("whole", {}, ()), ("merged", {"rank": 2}, ("--merge",))):
        run_of(tmp_path / name, {"name_or_path": str(tmp_path / "base"), "lora": lora}, {"tokenizer": None})
        out = exported(tmp_path / name, tmp_path / f"{name}_out", *options)
        own = transformers.AutoModelForCausalLM.from_pretrained(out).generation_config
        assert (own.eos_token_id, own.temperature) == ([2, 3], 0.7)


KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "DoRA": {"use_dora": True, "use_rslora": True, "rank_pattern": {"c_fc": 3}, "bias": "lora_only"},
    "PiSSA": {"init_lora_weights": "pissa", "alpha": 3, "targets": r".*\.1\..*c_attn"},
    "saved": {"modules_to_save": ["wte", "ln_f"], "targets": "all-linear"},
    "tokens": {"trainable_token_indices": [7, 14], "targets": ["c_attn"]},
    "repeated": {"layer_replication": [[0, 2], [1, 2]], "targets": ["q_proj"]},
}


@pytest.fixture(params=KINDS)
def adapters(request, tmp_path: Path) -> tuple[Path, dict[str, Any], dict[str, torch.Tensor]]:
    torch.manual_seed(5)
    fields = GPT2 | {"bos_token_id": None, "eos_token_id": None} if request.param != "repeated" else LLAMA
    config = transformers.AutoConfig.for_model(**fields | {"vocab_size": 300})
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "base")
    arguments = {"name_or_path": str(tmp_path / "base"), "lora": {"rank": 2} | KINDS[request.param]}
    return tmp_path / "run", arguments, run_of(tmp_path / "run", arguments, {"tokenizer": None})


@pytest.mark.case("checkpoints", "of a model of Hugging Face, with or without adapters, merged or not", under=EXPORT)
def test_adapters_of_each_kind_go_to_peft_and_come_back_and_merge_to_a_model(adapters, tmp_path: Path) -> None:
    run, arguments, weights = adapters
    out = exported(run, tmp_path / "out")
    base = transformers.AutoModelForCausalLM.from_pretrained(arguments["name_or_path"])
    before, wanted = logits_of(base), logits_of(trained(arguments, weights))
    assert not torch.equal(wanted, before)
    assert torch.equal(logits_of(peft.PeftModel.from_pretrained(base, out)), wanted)
    assert torch.equal(logits_of(peft.AutoPeftModelForCausalLM.from_pretrained(out)), wanted)
    trained(arguments, weights).save_pretrained(tmp_path / "of_peft")
    for folder in (out, tmp_path / "of_peft"):
        again = HuggingFaceModel(name_or_path=arguments["name_or_path"], lora={"name_or_path": str(folder)})
        assert torch.equal(logits_of(again.model), wanted)
        assert trained_names(again) == trained_names(HuggingFaceModel(**arguments))
    merged = transformers.AutoModelForCausalLM.from_pretrained(exported(run, tmp_path / "merged", "--merge"))
    torch.testing.assert_close(logits_of(merged), wanted, rtol=0, atol=1e-6)


def trained_names(model: torch.nn.Module) -> set[str]:
    return {name for name, parameter in model.named_parameters() if parameter.requires_grad}


def test_adapters_of_another_model_are_refused(trained_adapters, tmp_path: Path) -> None:
    run, arguments, _ = trained_adapters
    out = exported(run, tmp_path / "out")
    config = transformers.AutoConfig.for_model(**LLAMA | {"hidden_size": 64}, vocab_size=300)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "other")
    with pytest.raises(ValueError, match=r"^model\.lora(: Target modules|\.name_or_path=\S* does not fit the model: )"):
        HuggingFaceModel(name_or_path=str(tmp_path / "other"), lora={"name_or_path": str(out)})
    (out / "adapter_config.json").write_text('{"peft_type": "LORA", "use_dorra": true}')
    with pytest.raises(
        ValueError, match=r"^model\.lora\.use_dorra: LoraConfig of peft has no such field; did you mean"
    ):
        HuggingFaceModel(name_or_path=arguments["name_or_path"], lora={"name_or_path": str(out)})


@pytest.mark.case("checkpoints", "of a model of Hugging Face, with or without adapters, merged or not", under=EXPORT)
def test_adapters_are_merged_as_by_peft(trained_adapters, tmp_path: Path) -> None:
    run, arguments, weights = trained_adapters
    opened = transformers.AutoModelForCausalLM.from_pretrained(exported(run, tmp_path / "out", "--merge"))
    merged = trained(arguments, weights).merge_and_unload().state_dict()
    assert opened.state_dict().keys() == merged.keys()
    assert [name for name, value in opened.state_dict().items() if not torch.equal(value, merged[name])] == []


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        (
            {"lora_bias": True},
            "--merge: Impossible to merge LoRA with `lora_bias=True` because the base layer has no bias",
        ),
        ({"trainable_token_indices": [7], "targets": ["lm_head"]}, "--merge: a layer has adapters and trained tokens"),
    ],
)
def test_adapters_that_peft_cannot_merge_are_refused(fields, reason: str, tmp_path: Path, capsys) -> None:
    arguments = {"config": LLAMA, "vocab_size": 300, "lora": {"rank": 2} | fields}
    run_of(tmp_path / "run", arguments, {"vocab_size": 300})
    assert refused([str(tmp_path / "run"), "--out", str(tmp_path / "out"), "--merge"], capsys).startswith(reason)
    assert not (tmp_path / "out").exists()


def test_adapters_of_a_model_from_scratch_need_merging(tmp_path: Path, capsys) -> None:
    arguments = {"config": GPT2, "lora": {"rank": 2}}
    run_of(tmp_path / "run", arguments, {"vocab_size": 300})
    said = refused([str(tmp_path / "run"), "--out", str(tmp_path / "out")], capsys)
    assert "the model from scratch that they were trained on; give --merge" in said
    assert not (tmp_path / "out").exists()


def text(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    capsys.readouterr()
    assert generate.main(list(arguments)) == 0
    return capsys.readouterr().out


@pytest.mark.case("checkpoints", GENERATION)
@pytest.mark.case("checkpoints", WRONG_RUN, under=EVALUATION)
def test_text_is_the_same_from_a_run_and_from_what_was_exported(llama, tmp_path: Path, capsys) -> None:
    run, _, _ = llama
    options = ("--prompt", "def main", "--max-tokens", "12", "--seed", "3")
    wanted = text(capsys, str(run), *options)
    assert wanted.startswith("def main")
    assert len(wanted) > len("def main\n")
    out = exported(run, tmp_path / "out")
    assert text(capsys, str(out), *options) == wanted
    assert text(capsys, str(run), *options[:-1], "4") != wanted
    (run.parent / "tokenizer").rename(tmp_path / "tokenizer")
    try:
        assert generate.main([str(run), *options]) == 2
        assert "text needs a tokenizer" in capsys.readouterr().err
        assert text(capsys, str(out), *options) == wanted
    finally:
        (tmp_path / "tokenizer").rename(run.parent / "tokenizer")


@pytest.mark.case("checkpoints", GENERATION)
def test_adapters_and_what_they_were_merged_to_go_on_as_the_run(trained_adapters, tmp_path: Path, capsys) -> None:
    run, _, _ = trained_adapters
    options = ("--prompt", "def", "--max-tokens", "8", "--temperature", "0")
    wanted = text(capsys, str(run), *options)
    alone, merged = exported(run, tmp_path / "alone"), exported(run, tmp_path / "merged", "--merge")
    assert text(capsys, str(alone), *options) == text(capsys, str(merged), *options) == wanted


@pytest.mark.case(
    "checkpoints", "of an exported folder, plain, in parts, of DCP, of a Llama; of merged adapters", under=EVALUATION
)
@pytest.mark.usefixtures("evaluates_here")
def test_an_exported_folder_has_the_loss_of_the_run(llama, trained_adapters, tmp_path: Path, capsys) -> None:
    (tmp_path / "text.txt").write_text("def main(): return 1\n" * 200)
    settings = [f"data.path={tmp_path}/text.txt", "data.seq_len=16", "train.eval_batches=1"]
    for name, run, size, options in (("llama", llama[0], 600, ()), ("merged", trained_adapters[0], 256, ("--merge",))):
        out = exported(run, tmp_path / name, *options)
        found, wanted = (
            evaluate.evaluate(path, [*settings, f"data.vocab_size={size}"])[1]["val_loss"] for path in (out, run)
        )
        assert found == (wanted if name == "llama" else pytest.approx(wanted, rel=1e-6))
    capsys.readouterr()
    assert evaluate.main([str(exported(trained_adapters[0], tmp_path / "alone")), *settings]) == 2
    [line] = capsys.readouterr().err.splitlines()
    assert line.endswith("alone has only adapters; give the run, or an export that was written with --merge")


def recipe(out: Path) -> str:
    """What docs/guides/export.md tells to do with optimizer.pt."""
    docs = (REPOSITORY / "docs/guides/export.md").read_text()
    [found] = [block for block in docs.split("```") if block.startswith("text\nsaved = torch.load(")]
    return found.removeprefix("text\n").replace("DIR/", f"{out}/")


def next_step_of_the_engine(run: Path, arguments: dict[str, Any]) -> dict[str, torch.Tensor]:
    engine = engine_of(arguments, stage=0)
    engine.load(run / "checkpoints" / "step-00000002")
    engine.module.eval()  # no dropout
    engine.backward(engine(IDS, IDS.roll(-1)))
    engine.step()
    return engine.full_state_dict()


@pytest.mark.parametrize("name", ["llama", "trained_adapters"], ids=["transformers", "peft"])
def test_the_recipe_of_the_docs_makes_the_next_step_of_the_engine(name: str, request, tmp_path: Path) -> None:
    run, arguments, weights = request.getfixturevalue(name)
    out = exported(run, tmp_path / "out", "--optimizer")
    if name == "llama":
        told = torch.load(out / "optimizer.pt", weights_only=True)
        trained_names = [each for group in told["param_groups"] for each in group["params"]]
        assert sorted(trained_names) == sorted(told["state"]) == sorted(tensors_in(out))
        model = transformers.AutoModelForCausalLM.from_pretrained(out)
    else:
        base = transformers.AutoModelForCausalLM.from_pretrained(arguments["name_or_path"])
        model = peft.PeftModel.from_pretrained(base, out, is_trainable=True)
    known: dict[str, Any] = {"torch": torch, "model": model}
    exec(recipe(out), known)
    MeanCrossEntropy()(model.eval()(input_ids=IDS).logits, IDS.roll(-1)).backward()
    known["optimizer"].step()
    found, wanted = dict(model.named_parameters()), next_step_of_the_engine(run, arguments)
    assert [name for name, value in found.items() if not torch.equal(value, wanted[f"model.{name}"])] == []
    moved = [name for name, value in found.items() if not torch.equal(value, weights[f"model.{name}"])]
    assert moved == [each for each in found if name == "llama" or ".lora_" in each] != []


def test_a_merged_model_has_no_place_for_the_optimizers_state(trained_adapters, tmp_path: Path, capsys) -> None:
    said = refused([str(trained_adapters[0]), "--out", str(tmp_path / "out"), "--merge", "--optimizer"], capsys)
    assert said == "--optimizer: its state is that of the adapters, which a merged model does not have; leave it out"
    assert not (tmp_path / "out").exists()


def test_a_model_kept_partly_in_fp32_is_opened_in_fp32(tmp_path: Path) -> None:
    """Frozen weights of a run in bf16 are saved in bf16, and those that train in fp32."""
    arguments = {"config": LLAMA, "vocab_size": 600, "freeze": ["*.mlp.*"]}
    weights = run_of(tmp_path / "run", arguments, {"vocab_size": 600}, precision=zerotrain.PrecisionConfig("bf16"))
    out = exported(tmp_path / "run", tmp_path / "out")
    saved_in = {name: value.dtype for name, value in tensors_in(out).items()}
    assert set(saved_in.values()) == {torch.float32, torch.bfloat16}
    opened = transformers.AutoModelForCausalLM.from_pretrained(out)
    assert opened.dtype == torch.float32
    found = opened.state_dict()
    assert [name for name in saved_in if not torch.equal(found[name], weights[f"model.{name}"].float())] == []


def test_a_disk_that_takes_a_part_of_a_tokenizer_is_one_line(llama, tmp_path: Path, capsys) -> None:
    """The tokenizers library raises an Exception of its own."""
    told = told_of_small_files([str(llama[0])], tmp_path, capsys)
    assert len([1 for said in told.values() if said]) > 4
    assert "warning" not in "".join(told.values())
