"""Chats become rows: turns of every form, masks as transformers gives them, and what is wrong told by row and file."""

import gzip
import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.unit.data.chat_templates import R1_DISTILL, TEMPLATES, chat_tokenizer, without_marks
from tests.unit.data.tokenizers_made import saved
from zerotrain.data import ChatDataset, GlobalBatchSampler, Mix
from zerotrain.data.chat import ChatTemplate, pack_rows, turns_of
from zerotrain.data.tokenizer import TextTokenizer
from zerotrain.models import GPT, HuggingFaceModel


def say(role: str, content: Any, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


CALL = {"type": "function", "function": {"name": "weather", "arguments": {"city": "Bonn"}}}
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}]
TURNS = [
    say("user", "Two and two?"),
    say("assistant", "Four."),
    say("user", " And\nthree? "),
    say("assistant", "Éh, 6"),
]
CHATS = {
    "two answers": {"messages": TURNS},
    "a system": {"messages": [say("system", "Be short."), *TURNS]},
    "an empty answer": {"messages": [*TURNS[:3], say("assistant", "")]},
    "a question at the end": {"messages": TURNS[:3]},
    "tools": {
        "messages": [
            TURNS[0], say("assistant", None, tool_calls=[CALL]), say("tool", "rain"), say("tool", "8 °C"), TURNS[1]
        ],
        "tools": TOOLS,
    },
}  # fmt: skip


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A folder with a tokenizer whose template is ChatML."""
    return chat_tokenizer(tmp_path_factory.mktemp("tokenizer"))


def written(path: Path, *rows: Any) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(row if isinstance(row, str) else json.dumps(row) + "\n" for row in rows))
    return str(path)


def chats(path: str | Path, tokenizer: str, **settings: Any) -> ChatDataset:
    base = Path(path) if Path(path).is_dir() else Path(path).parent
    usual = {"tokenizer": tokenizer, "cache_dir": str(base / ".cache"), "validation_fraction": 0, "seq_len": 512}
    return ChatDataset(str(path), **usual | settings)


def conversations(number: int, seed: int = 0) -> list[dict[str, Any]]:
    """Chats of one to four answers, whose lengths differ much."""
    numbers = np.random.default_rng(seed)
    return [
        {"messages": [say(("user", "assistant")[k % 2], "ab " * int(numbers.integers(1, 9))) for k in range(2 * n)]}
        for n in numbers.integers(1, 5, number)
    ]  # fmt: skip


# Which tokens are answers?


@pytest.mark.case(
    "data: Chats",
    "templates of ten models, with {% generation %} and without; systems, tools, empty answers",
    "the masks of transformers' return_assistant_tokens_mask, token for token",
)
@pytest.mark.parametrize("kind", ["bytes, GPT-2", "Llama 2"])
def test_the_answers_are_those_of_transformers_token_for_token(tmp_path: Path, kind: str):
    folder = saved(kind, tmp_path, bos_token="<s>", eos_token="</s>", additional_special_tokens=["<|im_end|>"])
    tokenizer, num_compared = TextTokenizer(folder), 0
    for name, marked in TEMPLATES.items():
        for template in (marked, without_marks(marked)):
            chat_template = ChatTemplate(tokenizer, written(tmp_path / "t.jinja", template))
            for what, row in CHATS.items():
                turns, tools = turns_of(row)
                render = partial(tokenizer._tokenizer.apply_chat_template, turns, tools=tools, chat_template=marked)
                try:
                    expected = render(return_dict=True, return_assistant_tokens_mask=True)
                except Exception:  # the template takes no system, or no tools
                    with pytest.raises(ValueError, match="cannot be rendered by the template"):
                        chat_template.render_answers(turns, tools)
                    continue
                text, spans = chat_template.render_answers(turns, tools)
                [(tokens, is_answer)] = tokenizer.encode_marked([text], [spans])
                assert tokens.tolist() == expected["input_ids"], (name, what)
                assert is_answer.astype(int).tolist() == expected["assistant_masks"], (name, what)
                num_compared += 1
    assert num_compared > 70


def test_space_at_the_end_of_an_answer_that_has_no_token_is_no_answer(tmp_path: Path):
    """transformers takes all behind it for an answer."""
    tokenizer = TextTokenizer(saved("WordPiece", tmp_path, eos_token="</s>"))
    [(tokens, is_marked)] = tokenizer.encode_marked(["the answer \n the rest \n"], [[(3, 12), (21, 23)]])
    assert tokenizer.decode(tokens[is_marked]) == tokenizer.decode(tokenizer.tokens_of("answer"))


def test_a_template_that_renders_turns_otherwise_later_is_refused_with_the_turn(tmp_path: Path, tokenizer: str):
    with pytest.raises(ValueError, match=r"t.jinja: a question and an answer turn 2: the template renders turns other"):
        ChatTemplate(TextTokenizer(tokenizer), written(tmp_path / "t.jinja", R1_DISTILL))


def test_a_prompt_is_a_question_and_a_sample_stops_where_an_answer_does(tokenizer: str):
    template = ChatTemplate(TextTokenizer(tokenizer), "chatml")
    assert template.decode(template.encode("Hi")) == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    assert template.decode([template.end_of_text]) == "<|im_end|>"


# Rows of every form, and of every kind of file.


SAME = {
    "messages": {"messages": TURNS[:2]},
    "messages in parts": {"messages": [say("user", [{"type": "text", "text": "Two and two?"}]), TURNS[1]]},
    "conversations": {"conversations": [{"from": "human", "value": "Two and two?"}, {"from": "gpt", "value": "Four."}]},
    "prompt": {"prompt": "Two and two?", "completion": "Four."},
    "prompt of turns": {"prompt": TURNS[:1], "completion": TURNS[1:2]},
    "instruction": {"instruction": "Two and two?", "input": "", "output": "Four."},
}  # fmt: skip


@pytest.mark.case(
    "data: Chats", "messages, conversations, prompt and completion, instruction and output", "the same turns"
)
def test_all_forms_of_a_row_give_the_same_turns():
    for row in SAME.values():
        assert turns_of(row) == (TURNS[:2], None)
    alpaca = {"instruction": "Add.", "input": "2, 2", "output": "4", "system": "Be short."}
    assert turns_of(alpaca)[0] == [say("system", "Be short."), say("user", "Add.\n\n2, 2"), say("assistant", "4")]
    assert turns_of({"messages": None}) is None
    call = {**CALL, "function": {**CALL["function"], "arguments": '{"city": "Bonn"}', "strict": None}}
    turns, tools = turns_of(
        {"messages": [TURNS[0], say("assistant", "", tool_calls=[call])], "tools": json.dumps(TOOLS)}
    )
    assert (turns[1]["tool_calls"], tools) == ([CALL], TOOLS)


def arrow(folder: Path, rows: list[dict[str, Any]]) -> None:
    """What save_to_disk() of `datasets` writes, with what a function has made of it beside it."""
    pyarrow = pytest.importorskip("pyarrow")
    folder.mkdir(parents=True)
    table = pyarrow.Table.from_pylist(rows)
    for name in ("data-00000-of-00001.arrow", "cache-0f.arrow"):
        with pyarrow.ipc.new_stream(folder / name, table.schema) as file:
            file.write_table(table, max_chunksize=2)
    (folder / "state.json").write_text("{}")
    (folder / "dataset_info.json").write_text("{}")


def parquet(path: Path, rows: list[dict[str, Any]]) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    pytest.importorskip("pyarrow.parquet").write_table(pyarrow.Table.from_pylist(rows), path, row_group_size=2)


def test_all_kinds_of_files_give_the_same_rows_and_validation_is_by_name(tmp_path: Path, tokenizer: str):
    rows = [*conversations(5), {"messages": None}]
    written(tmp_path / "a/c.jsonl", *rows, "\n")
    written(tmp_path / "b/c.json", json.dumps(rows))
    (tmp_path / "c").mkdir()
    (tmp_path / "c/c.jsonl.gz").write_bytes(gzip.compress((tmp_path / "a/c.jsonl").read_bytes()))
    (tmp_path / "d").mkdir()
    parquet(tmp_path / "d/train-00000.parquet", rows)
    parquet(tmp_path / "d/test-00000.parquet", rows[:2])
    arrow(tmp_path / "e/train", rows)
    arrow(tmp_path / "e/validation", rows[:2])
    arrow(tmp_path / "e/test", rows[:3])
    found = {name: chats(tmp_path / name, tokenizer) for name in "abcde"}
    assert [len(data.validation) for data in found.values()] == [0, 0, 0, 2, 2]
    assert "not read, since named for tests: data-00000-of-00001.arrow" in found["e"].summary()
    for data in found.values():
        assert len(data.train) == 5
        for row, other in zip(data.train, found["a"].train, strict=True):
            assert all(map(torch.equal, row, other))


# What is wrong is told in a line, with file and row.


LONG = "ab " * 300
Q, A = say("user", "Hi"), say("assistant", "Ho")
WRONG_ROWS = {
    "no chat": ({"a": 1}, "is no chat: it has a; data=chat reads messages, conversations"),
    "a list": ([1], "is no chat: it has list"),
    "no turns": ({"messages": []}, "has no turns in messages"),
    "turns of a text": ({"messages": "Hi"}, "has no turns in messages"),
    "an unknown role": ({"messages": [Q, say("bot", "Ho")]}, "turn 2 has the role bot; it must be system, developer"),
    "a role of escapes": ({"messages": [say("\x1b[31m", "Hi"), A]}, r"turn 1 has the role \\x1b\[31m"),
    "no role": ({"messages": [Q, {"content": "Ho"}]}, "turn 2 has the role None"),
    "two answers in a row": ({"messages": [Q, A, A]}, "turn 3 is an answer .* right behind another"),
    "no answer": ({"messages": [Q]}, "has no answer, a turn of the role assistant"),
    "a turn of text": ({"messages": ["Hi", A]}, "has a str for turn 1"),
    "text for content": (
        {"messages": [Q, {"role": "assistant", "text": "x"}]},
        "turn 2 has no content; it has role, text",
    ),
    "content of a number": ({"messages": [Q, say("assistant", 1)]}, "turn 2 has content of type int; give a text"),
    "an image": ({"messages": [say("user", [{"type": "image"}]), A]}, "turn 1 holds a part of type image"),
    "a weight": ({"messages": [Q, {**A, "weight": 0}]}, "turn 2 has a weight, which data=chat does not know"),
    "arguments that are no JSON": (
        {"messages": [Q, say("assistant", "", tool_calls=[{"function": {"arguments": "{"}}])]}, "it is no JSON"
    ),
    "tools of a number": ({"messages": [Q, A], "tools": 3}, "has a int for tools"),
    "an instruction of a number": ({"instruction": 3, "output": "Ho"}, "has a int where its text should be"),
    "half a line": ('{"messages": [', "is no JSON"),
}  # fmt: skip


@pytest.mark.case("data: Chats", "wrong rows, files and settings", "refused in one line, with file and row")
@pytest.mark.parametrize("what", WRONG_ROWS)
def test_a_wrong_row_is_told_in_one_line_with_file_and_row(tmp_path: Path, tokenizer: str, what: str):
    row, told = WRONG_ROWS[what]
    path = written(tmp_path / "c.jsonl", SAME["messages"], "\n", row)
    with pytest.raises(ValueError, match=rf"^data.path: {path}, line 3, (turn .: )?{told}") as error:
        chats(path, tokenizer)
    assert "\n" not in str(error.value)
    assert len(str(error.value)) < 600


def test_a_wrong_row_of_parquet_is_told_by_its_number(tmp_path: Path, tokenizer: str):
    parquet(tmp_path / "c.parquet", [SAME["messages"], {"messages": [Q, say("bot", "Ho")]}])
    with pytest.raises(ValueError, match=r"c.parquet, row 2, turn 2 has the role bot"):
        chats(tmp_path / "c.parquet", tokenizer)


WRONG_SETTINGS = {
    "no file": ({"path": "no.jsonl"}, "data.path=.*no.jsonl does not exist"),
    "another kind of file": ({"path": "t.jinja"}, "data.path=.*t.jinja has no chats; give files of .jsonl"),
    "no template": ({"template": "none"}, "data.template=none is no template of .*: its names are default"),
    "a large template": ({"template": "large"}, "data.template=.*large cannot be read as a template: it h"),
    "a broken template": ({"template": "t.jinja"}, "t.jinja: a question and an answer cannot be rendered"),
    "a template that breaks out": ({"template": "attack"}, "cannot be rendered by the template: SecurityError"),
    "an unknown part": ({"train_on": "user"}, "data.train_on=user is not known; it must be answers, last"),
    "an unknown way to cut": ({"too_long": "drop"}, "data.too_long=drop is not known; it must be turn, cut"),
    "packed and grouped": ({"pack": True, "group_by_length": True}, "data.group_by_length=true has no effect"),
    "no length": ({"seq_len": 0}, "data.seq_len=0 is too small"),
    "a small vocabulary": ({"vocab_size": 9}, "data.vocab_size=9 is too small"),
    "a large fraction": ({"validation_fraction": 1}, "data.validation_fraction=1 is out of range"),
    "nothing left to train on": ({"validation_fraction": 0.5, "path": "one.jsonl"}, "one.jsonl has 1 chat; give"),
    "no tokenizer": ({"tokenizer": None}, "data.tokenizer=null: chats need one; give a folder"),
    "an answer longer than a row": ({"seq_len": 16}, r"no chat has room in data.seq_len=16; .*c.jsonl, line 1, "),
}  # fmt: skip


@pytest.mark.parametrize("what", WRONG_SETTINGS)
def test_a_wrong_setting_is_told_in_one_line(tmp_path: Path, tokenizer: str, what: str):
    settings, told = WRONG_SETTINGS[what]
    written(tmp_path / "c.jsonl", *[{"messages": [Q, say("assistant", LONG)]}] * 3)
    written(tmp_path / "one.jsonl", SAME["messages"])
    written(tmp_path / "large", "x" * (1 << 20) + "x")
    written(tmp_path / "t.jinja", "{% for m in messages %}{{ m.content")
    written(
        tmp_path / "attack", "{{ messages.__class__.__mro__[1].__subclasses__() }}{% generation %}{% endgeneration %}"
    )
    settings = {
        name: str(tmp_path / value) if (tmp_path / str(value)).is_file() else value for name, value in settings.items()
    }
    with pytest.raises((ValueError, FileNotFoundError), match=told) as error:
        chats(settings.pop("path", tmp_path / "c.jsonl"), settings.pop("tokenizer", tokenizer), **settings)
    assert "\n" not in str(error.value)


# What is learnt, cut, filled and packed.


def learnt(data: ChatDataset, row: int = 0) -> str:
    ids, labels = data.train.rows([row])
    assert torch.equal(ids[0, 1:][labels[0, :-1] >= 0], labels[0, :-1][labels[0, :-1] >= 0])
    return data.decode(labels[0][labels[0] >= 0])


def test_what_is_learnt_and_where_a_long_chat_is_cut_are_settings(tmp_path: Path, tokenizer: str):
    path = written(tmp_path / "c.jsonl", CHATS["a system"])
    first, last = "Four.<|im_end|>\n", "Éh, 6<|im_end|>\n"
    assert learnt(chats(path, tokenizer)) == first + last
    assert learnt(chats(path, tokenizer, train_on="last")) == last
    data = chats(path, tokenizer, train_on="all")
    assert "<" + learnt(data) == ChatTemplate(TextTokenizer(tokenizer)).render_answers(CHATS["a system"]["messages"])[0]
    length = len(data.train.read(0)[0])
    for seq_len, too_long, kept in (
        (length - 1, "leave_out", first + last), (length - 2, "turn", first), (length - 2, "cut", (first + last)[:-1])
    ):  # fmt: skip
        data = chats(path, tokenizer, seq_len=seq_len, too_long=too_long)
        assert learnt(data) == kept
        assert ("1 cut" in data.summary()) is (kept != first + last)
    with pytest.raises(ValueError, match="no chat has room"):
        chats(path, tokenizer, seq_len=length - 2, too_long="leave_out")
    rows = [CHATS["a system"], {"messages": [Q, say("assistant", LONG)]}, SAME["messages"]]
    data = chats(written(tmp_path / "d.jsonl", *rows), tokenizer, seq_len=200)
    assert f"0 cut, 1 left out (the first: {tmp_path}/d.jsonl, line 2)" in data.summary()
    shown = "".join(f"[{part}]" if is_learnt else part for part, is_learnt in data.example())
    assert f"assistant\n[{first}]<|im_start|>user" in shown


def test_rows_are_padded_to_the_longest_of_a_batch_and_grouped_rows_less(tmp_path: Path, tokenizer: str):
    path = written(tmp_path / "c.jsonl", *conversations(300))
    plain, grouped = (chats(path, tokenizer, group_by_length=group) for group in (False, True))
    again = {"validation_fraction": 0.1, "seq_len": 256}
    lengths = plain.train.lengths - 1
    assert plain.train.rows([3, 7])[0].shape == (2, max(lengths[[3, 7]]))
    assert plain.train[3][0].shape == (512,)
    assert plain.train.longest_row == lengths.argmax()
    rows, epochs = grouped.train.order(np.arange(600), seed=3)
    assert sorted(rows[:300]) == sorted(rows[300:]) == list(range(300))
    assert (rows[:300] != rows[300:]).any()
    assert epochs.tolist() == [0] * 300 + [1] * 300
    some = np.array([[5, 599], [300, 17]])
    assert (grouped.train.order(some, seed=3)[0] == rows[some]).all()
    assert (grouped.train.order(np.arange(600), seed=4)[0] != rows).any()

    def padding(data: ChatDataset) -> float:
        sampler = GlobalBatchSampler(
            num_sequences=300, micro_batch_size=4, num_micro_batches=1, rank=0, num_ranks=1, seed=3,
            order=data.train.order,
        )  # fmt: skip
        batches = [data.train.rows(next(iter(sampler))) for sampler.rows_consumed in range(0, 300, 4)]
        part = 1 - lengths.sum() / sum(ids.numel() for ids, _ in batches)
        assert data.train.describe_padding(sampler).startswith(f"{100 * part:.1f} % of the tokens")
        return part

    assert padding(grouped) < padding(plain) / 3
    with pytest.raises(ValueError, match="group_by_length=true has no effect in a mix"):
        Mix({"a": {"data": chats(path, tokenizer, group_by_length=True, **again), "weight": 1}})
    assert Mix({"a": {"data": chats(path, tokenizer, **again), "weight": 1}}).train[0][0].shape == (256,)


def test_packing_leaves_less_than_a_part_of_the_room_and_loses_nothing():
    lengths = np.random.default_rng(0).integers(1, 101, 2000)
    bins = pack_rows(lengths, 100)
    assert sorted(item for items in bins for item in items) == list(range(2000))
    assert max(lengths[items].sum() for items in bins) <= 100
    assert len(bins) <= 1.02 * lengths.sum() / 100
    assert pack_rows(np.array([100, 100]), 100) == [[0], [1]]


def models() -> dict[str, torch.nn.Module]:
    llama = {"model_type": "llama", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    gpt = GPT(vocab_size=700, max_seq_len=160, num_layers=2, num_heads=2, hidden_size=32)
    return {"GPT": gpt, "Llama": HuggingFaceModel(config=llama | {"num_attention_heads": 4}, vocab_size=700)}


@pytest.mark.case(
    "data: Chats", "several chats packed to a row", "each sees itself alone: its loss and gradients to 1e-6"
)
@pytest.mark.parametrize("name", ["GPT", "Llama"])
def test_packed_chats_give_the_losses_and_gradients_of_each_alone(tmp_path: Path, tokenizer: str, name: str):
    path = written(tmp_path / "c.jsonl", *conversations(12))
    data, model = chats(path, tokenizer, seq_len=160, pack=True), models()[name]
    batch, alone = data.train.packed()
    assert len(alone) > 1
    assert batch["ids"].shape == (1, 160)
    assert [(batch["position_ids"][0] == 0).sum().item()] in ([len(alone)], [len(alone) + 1])
    counts = torch.tensor([(labels >= 0).sum() for _, labels in alone])
    packed_loss = model(**batch)
    gradients = torch.autograd.grad(packed_loss, [*model.parameters()])
    loss = sum(model(*chat) * count for chat, count in zip(alone, counts, strict=True)) / counts.sum()
    assert packed_loss.item() == pytest.approx(loss.item(), abs=1e-6)
    for packed, separate in zip(gradients, torch.autograd.grad(loss, [*model.parameters()]), strict=True):
        torch.testing.assert_close(packed, separate, atol=1e-6, rtol=1e-5)
    del batch["position_ids"]
    assert abs(model(**batch).item() - loss.item()) > 1e-5  # the test can fail
