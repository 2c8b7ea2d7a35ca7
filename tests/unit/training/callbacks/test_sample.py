"""The samples of text that a run ends with."""

import io
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console

import zerotrain
from zerotrain.config.schema import Config, TrainConfig
from zerotrain.errors import ConfigError
from zerotrain.preflight.check import require_prompts
from zerotrain.training.callbacks.sample import Sample, generate

VOCAB_SIZE = 128
SEQ_LEN = 8


class Counting(torch.nn.Module):
    """Its likeliest token by far is the next number."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = torch.nn.Parameter(torch.tensor([100.0]))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.one_hot((ids + 1) % VOCAB_SIZE, VOCAB_SIZE).float() * self.scale


def letters(**others: Any) -> Any:
    rows = [(torch.arange(65, 65 + SEQ_LEN), torch.arange(66, 66 + SEQ_LEN))]
    return SimpleNamespace(
        **{
            "train": rows,
            "validation": rows,
            "vocab_size": VOCAB_SIZE,
            "encode": lambda text: torch.tensor([ord(each) for each in text]),
            "decode": lambda ids: "".join(map(chr, ids.tolist())),
        }
        | others
    )


def sample(dataset: Any, prompts: list[str] | None = None, num_tokens: int = 5) -> list[str]:
    file = io.StringIO()
    engine = zerotrain.build_engine(Counting(), optimizer=partial(torch.optim.SGD, lr=0.1))
    run: Any = SimpleNamespace(
        engine=engine, world=engine.world, dataset=dataset, console=Console(file=file, width=60), stopped_by=None
    )
    Sample(num_tokens=num_tokens, prompts=prompts, seed=0).end(run)
    return [line.strip("─ ") for line in file.getvalue().splitlines()]


def test_each_prompt_is_continued_under_a_title_of_its_own() -> None:
    assert sample(letters(), ["AB", "f"]) == [
        "5 tokens after 'AB'", "ABCDEFG", "5 tokens after 'f'", "fghijk", "",
    ]  # fmt: skip


def test_without_prompts_the_validation_text_is_continued() -> None:
    assert sample(letters()) == ["5 tokens after 8 of the validation text", "ABCDEFGHIJKLM", ""]


def test_without_prompts_a_question_is_continued_where_its_answer_begins() -> None:
    ids, labels = torch.arange(65, 65 + SEQ_LEN), torch.arange(66, 66 + SEQ_LEN)
    labels[:3] = -100
    [title, text, _] = sample(letters(validation=[(ids, labels)]))
    assert (title, text) == ("5 tokens after 4 of the validation text", "ABCDEFGHI")


def test_a_sample_stops_at_the_end_of_text_which_is_not_shown() -> None:
    assert sample(letters(end_of_text=ord("E")), ["AB"]) == ["3 tokens after 'AB'", "ABCD", ""]
    assert sample(letters(end_of_text=ord("B")), ["AB"]) == ["5 tokens after 'AB'", "ABCDEFG", ""]


def test_what_a_terminal_would_obey_is_escaped() -> None:
    title, text, *_ = sample(letters(), ["[b]\x1b"], num_tokens=1)
    assert title == r"1 tokens after '[b]\\x1b'"
    assert text == r"[b]\x1b\x1c"


def broken(text: str) -> torch.Tensor:
    raise KeyError(f"no {text}")


@pytest.mark.parametrize(
    ("data", "prompts", "problem"),
    [
        (letters(), ["A", chr(VOCAB_SIZE)], "has token 128, and the data knows 128; give other texts, or null"),
        (letters(encode=lambda text: torch.tensor([])), ["A"], "'A' has no token; give other texts, or null"),
        (letters(encode=broken), ["A"], "no A"),
        (letters(encode=None), ["A"], "the data cannot encode text; give null, or data of text"),
        (letters(decode=None), ["A"], "the data cannot decode text; give null, or data of text"),
    ],
)
def test_a_prompt_that_cannot_be_continued_is_refused_before_the_run(data: Any, prompts: Any, problem: str) -> None:
    with pytest.raises(ConfigError) as refused:
        require_prompts(data, Config(train=TrainConfig(sample_prompts=prompts)))
    [line] = refused.value.problems
    assert line.startswith("train.sample_prompts: ")
    assert problem in line
    require_prompts(data, Config(train=TrainConfig(sample_prompts=prompts, sample_tokens=0)))


@pytest.fixture
def engine(model, world):
    return zerotrain.build_engine(model, optimizer=partial(torch.optim.AdamW, lr=1e-2), world=world)


def generate_ids(engine, **changes):
    arguments = {"prompt": torch.tensor([1, 2, 3]), "num_tokens": 30, "max_seq_len": 16, "seed": 0}
    return generate(engine=engine, **arguments | changes)


def test_the_same_seed_gives_the_same_tokens_whatever_the_global_generator_says(engine):
    torch.manual_seed(1)
    first = generate_ids(engine)
    torch.manual_seed(2)
    assert torch.equal(generate_ids(engine), first)
    assert not torch.equal(generate_ids(engine, seed=1), first)


def test_one_of_one_likeliest_tokens_is_the_likeliest(engine):
    ids = generate_ids(engine, num_tokens=5, top_k=1)
    for position in range(3, 8):
        with torch.no_grad():
            assert ids[position] == engine.module(ids[None, :position])[0, -1].argmax()
