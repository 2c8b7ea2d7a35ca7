"""The models people have, in a tiny random form: at every stage the bits of plain PyTorch in one process."""

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import place, run_over, three_stages
from commands import result_of
from torch import nn

import zerotrain
from zerotrain.sharding.units import find_units, walk

pytest.importorskip("transformers")

ADAMW: Any = functools.partial(torch.optim.AdamW, lr=1e-2, weight_decay=0.1, fused=False)
"""The fused one rounds the last element of a vector of 97 in another way where it lies in a bucket."""
VOCAB, SEQ_LEN, NUM_STEPS, NUM_RANKS = 97, 12, 2, 2
SIZES = {"hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2, "intermediate_size": 48}
DECODER = SIZES | {"vocab_size": VOCAB, "num_key_value_heads": 1, "max_position_embeddings": 16}


def hugging_face(name: str, **fields: Any) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        import transformers

        kind = getattr(transformers, name)
        return kind(kind.config_class(**fields))

    return make


def checkpointed_llama() -> nn.Module:
    model = hugging_face("LlamaForCausalLM", **DECODER)()
    model.gradient_checkpointing_enable()
    return model


def three(name: str) -> list[str]:
    return [f"{name}.{number}" for number in range(3)]


MODELS: dict[str, tuple[Callable[[], nn.Module], list[str]]] = {
    "GPT-2": (
        hugging_face("GPT2LMHeadModel", n_embd=32, n_layer=3, n_head=2, n_positions=16, vocab_size=VOCAB),
        three("transformer.h"),
    ),
    "GPT-NeoX": (
        hugging_face("GPTNeoXForCausalLM", **SIZES, vocab_size=VOCAB, max_position_embeddings=16),
        three("gpt_neox.layers"),
    ),
    "Llama": (hugging_face("LlamaForCausalLM", **DECODER), three("model.layers")),
    "Llama, checkpointed": (checkpointed_llama, three("model.layers")),
    "Qwen": (
        hugging_face("Qwen3ForCausalLM", **DECODER, head_dim=16, tie_word_embeddings=True),
        three("model.layers"),
    ),
    "Mistral": (hugging_face("MistralForCausalLM", **DECODER), three("model.layers")),
    "Mixtral": (  # 16 experts, of which 12 tokens cannot reach all in every layer
        hugging_face("MixtralForCausalLM", **DECODER, num_local_experts=16, num_experts_per_tok=1),
        three("model.layers"),
    ),
    "T5": (
        hugging_face("T5ForConditionalGeneration", d_model=32, d_kv=16, d_ff=48, num_layers=2, num_heads=2,
                     vocab_size=VOCAB, decoder_start_token_id=0),
        ["encoder.block.0", "encoder.block.1", "decoder.block.0", "decoder.block.1"],
    ),
    "BERT": (
        hugging_face("BertForMaskedLM", **SIZES, vocab_size=VOCAB, max_position_embeddings=16),
        three("bert.encoder.layer"),
    ),
    "ViT": (
        hugging_face("ViTForImageClassification", **SIZES, image_size=8, patch_size=4, num_labels=5),
        three("vit.layers"),
    ),
}  # fmt: skip


def make_model(name: str) -> nn.Module:
    torch.manual_seed(0)
    return MODELS[name][0]().train()


def inputs_of(name: str, step: int, rank: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    if name == "ViT":
        labels = torch.randint(0, 5, (3,), generator=generator)
        return {"pixel_values": torch.randn(3, 3, 8, 8, generator=generator), "labels": labels}
    ids = torch.randint(1, VOCAB, (1, SEQ_LEN), generator=generator)
    return {"input_ids": ids, "labels": ids}


def train(setting: tuple[str, int]) -> dict[str, torch.Tensor]:
    """On each rank: what two steps with dropout made of a model's parameters and buffers."""
    name, stage = setting
    rank, _ = place()
    model = make_model(name)
    engine = zerotrain.build_engine(
        model,
        optimizer=ADAMW,
        zero=zerotrain.ZeroConfig(stage=stage, bucket_mb=0.02),
    )
    for step in range(NUM_STEPS):
        torch.manual_seed(1000 + 10 * step + rank)  # of the dropout
        engine.backward(engine(**inputs_of(name, step, rank))["loss"])
        engine.step()
    return engine.full_state_dict()


def reference(name: str) -> dict[str, torch.Tensor]:
    """The same in plain PyTorch. Each rank has buffers of its own (those of batch norm); rank 0's are saved."""
    torch.set_num_threads(1)
    models = [make_model(name) for _ in range(NUM_RANKS)]
    weights = dict(models[0].named_parameters())
    optimizer = ADAMW(list(weights.values()))
    for step in range(NUM_STEPS):
        gradients = []
        for rank, model in enumerate(models):
            torch.manual_seed(1000 + 10 * step + rank)
            model(**inputs_of(name, step, rank))["loss"].backward()
            gradients.append([parameter.grad for parameter in model.parameters()])
            model.zero_grad()
        for weight, parts in zip(weights.values(), zip(*gradients, strict=True), strict=True):
            weight.grad = sum(torch.zeros_like(weight) if part is None else part for part in parts) / NUM_RANKS
        optimizer.step()
        for model in models[1:]:
            with torch.no_grad():
                for parameter, weight in zip(model.parameters(), weights.values(), strict=True):
                    parameter.copy_(weight)
        models[0].zero_grad()
    return models[0].state_dict()


@pytest.mark.parametrize("name", MODELS)
def test_the_repeated_blocks_are_found_to_be_the_units(name: str) -> None:
    assert list(find_units(walk(make_model(name)), None)) == MODELS[name][1]


ADAPTERS: dict[str, Any] = {"use_dora": True, "use_rslora": True, "modules_to_save": ["lm_head"]}
ADAPTED_STEPS = 4


def batch_of(step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    ids = inputs_of("Llama", step, rank)["input_ids"]
    return ids, ids.roll(-1)


def train_adapted(setting: tuple[int, str]) -> tuple[list[float], dict[str, torch.Tensor]]:
    """On each rank: the losses of some steps of a Llama with adapters, half of them after a resume at another stage;
    what has become of it."""
    stage, folder = setting
    losses = []
    for start, at_stage in ((0, stage), (ADAPTED_STEPS // 2, 3 - stage)):
        torch.manual_seed(start)
        fields = {"model_type": "llama", **DECODER}
        model = zerotrain.models.HuggingFaceModel(config=fields, lora={"rank": 2, "alpha": 3} | ADAPTERS)
        zero = zerotrain.ZeroConfig(stage=at_stage, bucket_mb=0.002)
        engine = zerotrain.build_engine(model, optimizer=ADAMW, zero=zero)
        if start:
            engine.load(folder)
        for step in range(start, start + ADAPTED_STEPS // 2):
            loss = engine(*batch_of(step, place()[0]))
            losses.append(loss.item())
            engine.backward(loss)
            engine.step()
        if not start:
            engine.save(folder)
    return losses, engine.full_state_dict()


def adapted_by_peft() -> tuple[list[list[float]], dict[str, torch.Tensor]]:
    """The same in plain PyTorch and peft, in one process."""
    import peft

    torch.manual_seed(0)
    model = hugging_face("LlamaForCausalLM", **DECODER)()
    config = peft.LoraConfig(r=2, lora_alpha=3, target_modules="all-linear", **ADAPTERS)
    model = peft.get_peft_model(model, config)
    optimizer = ADAMW([parameter for parameter in model.parameters() if parameter.requires_grad])
    losses: list[list[float]] = [[], []]
    for step in range(ADAPTED_STEPS):
        for rank in range(NUM_RANKS):
            ids, labels = batch_of(step, rank)
            loss = nn.functional.cross_entropy(model(input_ids=ids).logits.flatten(0, 1), labels.flatten())
            losses[rank].append(loss.item())
            (loss / NUM_RANKS).backward()
        optimizer.step()
        optimizer.zero_grad()
    return losses, model.state_dict()


def job_of(job: tuple[str, Any]) -> Any:
    return globals()[job[0]](job[1])


@pytest.mark.case(
    "models: Models and optimizers",
    "GPT-2, GPT-NeoX, Llama, Qwen, Mistral, Mixtral, T5, BERT, ViT",
    "same bits in fp32, on 2 ranks; units found by themselves",
)
def test_every_model_trains_at_every_stage_as_in_plain_pytorch(tmp_path: Path) -> None:
    pytest.importorskip("peft")
    settings = [(name, stage) for number, name in enumerate(MODELS) for stage in three_stages(number)]
    adapted = [(stage, str(tmp_path / f"step-{stage}")) for stage in range(4)]
    jobs = [("train", setting) for setting in settings] + [("train_adapted", setting) for setting in adapted]
    answers = run_over(jobs, job_of, NUM_RANKS)
    expected = {name: reference(name) for name in MODELS}
    wrong = []
    for (name, stage), (got, _) in zip(settings, answers[: len(settings)], strict=True):
        assert list(got) == list(expected[name])
        differing = [key for key, value in expected[name].items() if not torch.equal(got[key], value)]
        wrong += [(name, stage, differing)] if differing else []
    assert wrong == []
    losses, weights = adapted_by_peft()
    for (first, got), (second, _) in answers[len(settings) :]:
        torch.testing.assert_close(torch.tensor([first, second]), torch.tensor(losses), rtol=0, atol=1e-6)
        assert [name.removeprefix("model.") for name in got] == list(weights)
        for name, value in weights.items():
            torch.testing.assert_close(got[f"model.{name}"], value, rtol=0, atol=1e-6)


def save_pretrained(folder: Path) -> None:
    """A GPT-2 with random weights and a tokenizer of words, as a pretrained model lies in its folder."""
    import tokenizers
    import transformers

    words = ["[UNK]", *"abcdefghij"]
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(dict(zip(words, range(11), strict=True)), "[UNK]"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]").save_pretrained(folder)
    hugging_face("GPT2LMHeadModel", n_embd=128, n_layer=2, n_head=2, n_positions=16, vocab_size=11)().save_pretrained(
        folder
    )


@pytest.mark.slow
@pytest.mark.case(
    "models: Models and optimizers", "LoRA on a pretrained folder from the command line", "runs at stage 3"
)
def test_a_pretrained_model_is_fine_tuned_with_adapters_from_the_command_line(tmp_path: Path, launch) -> None:
    pytest.importorskip("peft")
    save_pretrained(tmp_path / "tiny")
    (tmp_path / "text.txt").write_text("a b c d e f g h i j " * 200)
    run = ("launch.device=cpu", "launch.nproc_per_node=2", "launch.threads_per_rank=1", "zero.stage=3")
    model = ("model=huggingface", "model.name_or_path=tiny", "model.lora.rank=2", "optimizer.lr=0.05")
    data = ("data=tokenized", "data.path=text.txt", "data.seq_len=16", "data.cache_dir=cache")
    loop = ("train.max_steps=10", "train.micro_batch_size=4", "train.eval_batches=1", "train.sample_tokens=4")
    settings = (*run, *model, *data, *loop, "scheduler=constant", "hydra.run.dir=run")
    command = launch(*settings, folder=tmp_path)
    assert command.wait() == 0, command.stderr
    result = result_of(tmp_path / "run")
    first, *_ = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert result["final_val_loss"] < first["val_loss"] - 0.1
    theory = result["memory_bytes"]["theory"]
    assert theory["optimizer"] < 0.1 * theory["parameters"]  # two numbers for each trained element
    assert "tokens after" in command.stdout
