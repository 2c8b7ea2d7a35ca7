"""Chats and instructions: turns rendered by a chat template, of which the answers are learnt.

A row of a file becomes turns, then a text by the template of the tokenizer, then tokens. The tokens of all rows lie in
a store of the cache, as those of text do. Bit 31 of each says whether it belongs to an answer, so the choice of what is
learnt and of how rows are cut and filled makes no new store:

    alone                  padded to the longest row of a micro-batch; with group_by_length rows of like lengths meet
    packed (data.pack)     several to a row of seq_len; position_ids begin anew with each:

        ids            a a a a b b b c c 0        labels of the padding are ignored
        position_ids   0 1 2 3 0 1 2 0 1 0        a model lets no token see another example
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice, pairwise
from operator import itemgetter
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from torch.utils.data import Dataset

from zerotrain.data import fetch, text_files
from zerotrain.data.batches import IGNORED_LABEL, GlobalBatchSampler, Order, require_at_least, require_fraction, rows_at
from zerotrain.data.formats import files_matching
from zerotrain.data.prepare import Recipe, cache_folder, prepare_in_cache
from zerotrain.data.store import TokenStore
from zerotrain.data.tokenizer import TextTokenizer
from zerotrain.files.untrusted import parse_json, printable, read_regular

# A row of a file as turns.


ROLES = ("system", "developer", "user", "assistant", "tool")
_OTHER_NAMES = {"human": "user", "gpt": "assistant", "chatgpt": "assistant", "function": "tool", "observation": "tool"}
"""Roles of ShareGPT."""
FIELDS = "messages, conversations, prompt and completion, or instruction and output"
Turn = dict[str, Any]


def turns_of(row: Any) -> tuple[list[Turn], list[Any] | None] | None:
    """The turns of a row of any known form, and its tools; None of a row whose turns are null.

    Raises:
        ValueError: it is of no known form, a turn cannot be read, or there is no answer in it.
    """
    if not isinstance(row, dict) or not text_files.is_chat(row):
        names = printable(", ".join(map(str, row)), 200, keep="") if isinstance(row, dict) else type(row).__name__
        raise ValueError(f"is no chat: it has {names}; data=chat reads {FIELDS}")
    name = next((name for name in ("messages", "conversations") if name in row), None)
    if name is not None:
        values = row[name]
        if values is None:
            return None
    elif "completion" in row:
        values = _as_turns(row["prompt"], "user") + _as_turns(row["completion"], "assistant")
    else:
        texts = [text for text in (row["instruction"], row.get("input")) if text]
        question = "\n\n".join(map(_require_text, texts))
        values = _as_turns(row.get("system") or [], "system") + _as_turns(question, "user")
        values += _as_turns(row["output"], "assistant")
    if not isinstance(values, list) or not values:
        raise ValueError(f"has no turns in {name or 'it'}; give a list of {{role, content}}")
    turns = [_read_turn(value, number) for number, value in enumerate(values, start=1)]
    for number, (before, turn) in enumerate(pairwise(turns), start=2):
        if before["role"] == turn["role"] == "assistant":
            raise ValueError(f"turn {number} is an answer (assistant) right behind another; join them to one")
    if all(turn["role"] != "assistant" for turn in turns):
        raise ValueError("has no answer, a turn of the role assistant; leave it out, or add one")
    tools = row.get("tools")
    tools = parse_json(tools, Any) if isinstance(tools, str) and tools else tools
    if not isinstance(tools, list | None):
        raise ValueError(f"has a {type(tools).__name__} for tools; give a list of their JSON schemas")
    return turns, _without_nulls(tools) or None


def _as_turns(value: Any, role: str) -> list[Any]:
    return value if isinstance(value, list) else [{"role": role, "content": value}]


def _require_text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"has a {type(value).__name__} where its text should be; give a text")
    return value


def _read_turn(value: Any, number: int) -> Turn:
    """A turn with role and content, and whatever else it has for the template."""
    if not isinstance(value, dict):
        raise ValueError(f"has a {type(value).__name__} for turn {number}; give {{role, content}}")
    turn: Turn = _without_nulls(value)
    role, content = turn.pop("from", None), turn.pop("value", None)
    role, content = turn.pop("role", role), turn.pop("content", content)
    role = _OTHER_NAMES.get(role, role) if isinstance(role, str) else role
    if role not in ROLES:
        shown = printable(f"{role}", 60, keep="")
        raise ValueError(f"turn {number} has the role {shown}; it must be {', '.join(ROLES)}, or ShareGPT's")
    if isinstance(content, list):
        kinds = [part.get("type", "text") if isinstance(part, dict) else "text" for part in content]
        for kind in kinds:
            if kind != "text":
                shown = printable(f"{kind}", 60, keep="")
                raise ValueError(f"turn {number} holds a part of type {shown}; data=chat reads text alone")
        content = "".join(_require_text(part.get("text") if isinstance(part, dict) else part) for part in content)
    if content is None and turn.get("tool_calls"):
        content = ""
    if content is None and not {"content", "value"} & value.keys():
        names = printable(", ".join(map(str, value)), 60, keep="")
        raise ValueError(f"turn {number} has no content; it has {names}")
    if not isinstance(content, str):
        raise ValueError(f"turn {number} has content of type {type(content).__name__}; give a text")
    if turn.get("weight", 1) != 1:
        raise ValueError(
            f"turn {number} has a weight, which data=chat does not know; data.train_on=last learns the last"
        )
    for call in turn.get("tool_calls", ()):
        function = call.get("function", call) if isinstance(call, dict) else {}
        if isinstance(function, dict) and isinstance(arguments := function.get("arguments"), str):
            function["arguments"] = parse_json(arguments or "{}", Any)  # templates write them as JSON themselves
    return {"role": role, "content": content, **turn}


def _without_nulls(value: Any) -> Any:
    """The same without the nulls in objects: in a column each object has the fields of all."""
    if isinstance(value, dict):
        return {name: _without_nulls(part) for name, part in value.items() if part is not None}
    return [_without_nulls(part) for part in value] if isinstance(value, list) else value


# Turns as a text, and where the answers are in it.


CHATML = (
    "{% for turn in messages %}{{ '<|im_start|>' + turn.role + '\\n' }}{% if turn.role == 'assistant' %}"
    "{% generation %}{{ turn.content + '<|im_end|>\\n' }}{% endgeneration %}{% else %}"
    "{{ turn.content + '<|im_end|>\\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")
MAX_TEMPLATE_NBYTES = 1 << 20


class ChatTemplate:
    """A chat template with its tokenizer. It is rendered as transformers renders it, in jinja's sandbox.

    Args:
        template: the name of one of the tokenizer's own templates, `chatml`, or a file; None: the tokenizer's default.

    Raises:
        ValueError: there is no such template, or it cannot render a question and an answer.
    """

    def __init__(self, tokenizer: TextTokenizer, template: str | None = None) -> None:
        self.tokenizer, self.decode = tokenizer, tokenizer.decode
        own, setting = tokenizer.chat_templates, f"data.template={template or 'null'}"
        if not tokenizer.has_offsets:
            raise ValueError(
                f"data.tokenizer={tokenizer.name} cannot say where its tokens lie in a text; give a fast one"
            )
        if (name := template or "default") in own:
            self.text = own[name]
        elif template == "chatml":
            self.text = CHATML
        elif template is not None and Path(template).expanduser().is_file():
            try:
                self.text = read_regular(Path(template).expanduser(), max_nbytes=MAX_TEMPLATE_NBYTES).decode()
            except ValueError as error:
                raise ValueError(f"{setting} cannot be read as a template: {error}") from error
        else:
            names = f"its names are {printable(', '.join(own), 200, keep='')}" if own else "it has none"
            raise ValueError(
                f"{setting} is no template of data.tokenizer={tokenizer.name}: {names}; give chatml, or a file with one"
            )
        self.marks_answers = bool(_GENERATION.search(self.text))
        """Whether it says itself where the answers are."""
        try:
            text, spans = self.render_answers([_turn("user", "a"), _turn("assistant", "b")])
        except ValueError as error:
            raise ValueError(f"{setting}: a question and an answer {error}") from error
        [(tokens, is_answer)] = tokenizer.encode_marked([text], [spans])
        ends = [token for token in tokens[is_answer].tolist() if token in tokenizer.added_tokens.values()]
        self.end_of_text = ends[-1] if ends else tokenizer.end_of_text
        """The token at the end of an answer, where a sample stops."""

    def encode(self, text: str) -> torch.Tensor:
        """The tokens of a question, up to where the answer begins."""
        return torch.tensor(self.tokenizer.tokens_of(self._render([_turn("user", text)], None, asks=True)[0]))

    def render_answers(self, turns: list[Turn], tools: list[Any] | None = None) -> tuple[str, list[tuple[int, int]]]:
        """(a text, begin and end of each answer in it, in characters).

        Raises:
            ValueError: the template refuses the turns, or nobody can tell where an answer begins and ends.
        """
        text, spans = self._render(turns, tools)
        if not self.marks_answers:
            spans, tail = [], str(self.tokenizer.special_tokens.get("eos_token", ""))
            for number, turn in enumerate(turns, start=1):
                if turn["role"] == "assistant":
                    begins = self._render(turns[: number - 1], tools, asks=True)[0]
                    ends = self._render(turns[:number], tools)[0]
                    if not text.startswith(ends):  # some put a token behind all turns
                        ends = ends.removesuffix(tail)
                    if not text.startswith(ends) or not ends.startswith(begins):
                        raise ValueError(
                            f"turn {number}: the template renders turns otherwise once others follow, so the answer "
                            "cannot be found; give data.template a file that has {% generation %} around answers"
                        )
                    spans.append((len(begins), len(ends)))
        spans = [(begin, end) for begin, end in spans if begin < end]
        if not spans:
            raise ValueError("has no text of an answer by the template")
        return text, spans

    def _render(
        self, turns: list[Turn], tools: list[Any] | None, *, asks: bool = False
    ) -> tuple[str, list[tuple[int, int]]]:
        from transformers.utils.chat_template_utils import render_jinja_template  # the tokenizer has imported it

        try:
            [text], spans = render_jinja_template(
                conversations=[turns],
                tools=tools,
                chat_template=self.text,
                return_assistant_tokens_mask=self.marks_answers,
                add_generation_prompt=asks,
                **self.tokenizer.special_tokens,
            )
        except Exception as error:  # of jinja, and of whatever the template does with the turns
            problem = printable(f"{type(error).__name__}: {error}", 300, keep="")
            raise ValueError(f"cannot be rendered by the template: {problem}") from error
        return text, spans[0] if spans else []


def _turn(role: str, content: str) -> Turn:
    return {"role": role, "content": content}


# Files of chats, and their tokens in a store.


SUFFIXES = (*text_files.JSONL, *text_files.COLUMNS, ".json")
_OF_DATASETS = ("dataset_info.json", "dataset_dict.json", "state.json")
_VALIDATION, _TEST = {"validation", "valid", "val", "dev"}, {"test"}
_ANSWER, _TOKEN = np.uint32(1 << 31), np.uint32((1 << 31) - 1)


def find_chats(path: str, source: str) -> tuple[list[Path], list[Path], list[Path]]:
    """The files to train on, those for validation by their names or folders (validation, else test), and those for
    tests that are not read.

    Args:
        path: a file; a folder, such as save_to_disk() of Hugging Face writes; or a glob pattern.
        source: the setting, as the user wrote it.

    Raises:
        FileNotFoundError, ValueError: there are none, or one is of another kind.
    """
    root = Path(path).expanduser()
    if root.is_dir():
        names = dict[Path, Path]()
        for file in sorted(root.rglob("*")):
            name = file.relative_to(root)
            is_hidden = any(part.startswith(".") for part in name.parts)
            # Beside the files of a dataset lie its descriptions, and what its functions have made of it before.
            is_beside = file.suffix == text_files.ARROW and not file.name.startswith("data-")
            is_beside |= file.name in _OF_DATASETS
            if text_files.inner_suffix(file) in SUFFIXES and file.is_file() and not is_hidden and not is_beside:
                names[file] = name
    else:
        files = [root] if root.is_file() else files_matching(str(root), source, "give a file or folder with chats")
        names = {file: Path(file.name) for file in sorted(files)}
    if not names or any(text_files.inner_suffix(file) not in SUFFIXES for file in names):
        raise ValueError(
            f"{source} has no chats; give files of {', '.join(SUFFIXES)}, such as a chat in each line of .jsonl"
        )
    words = {file: set(re.findall("[a-z]+", str(name).lower())) for file, name in names.items()}
    validation, tests = ([file for file in names if words[file] & marks] for marks in (_VALIDATION, _TEST))
    train = [file for file in names if file not in (*validation, *tests)]
    if not train:  # the user has named the files to read
        return [*names], [], []
    return (train, validation, tests) if validation else (train, tests, [])


@dataclass(kw_only=True)
class ChatRecipe(Recipe):
    """How files of chats become a row of tokens, with a bit for those of answers."""

    template: ChatTemplate

    def __post_init__(self, document_end: str | None) -> None:
        super().__post_init__(document_end)
        self.dtype = _TOKEN.dtype

    def facts(self) -> tuple[Any, ...]:
        """See `Recipe.facts`."""
        return "chat", self.template.text, self.template.tokenizer.special_tokens

    def pieces_of(self, path: Path, start: int) -> Iterator[text_files.TextPiece]:
        """See `Recipe.pieces_of`; a piece is a chat."""
        for row in text_files.read_rows(path, start=start):
            with text_files.naming_row(path, row.place):
                chat = turns_of(row.value)
                text, spans = ("", []) if chat is None else self.template.render_answers(*chat)
            is_chat, encoded = chat is not None, text.encode(errors="replace")  # JSON can hold half a character
            yield text_files.TextPiece(
                encoded, is_chat, is_chat, row.resume_at, row.reached, not is_chat, spans=tuple(spans)
            )

    def tokens_of(self, pieces: list[text_files.TextPiece]) -> list[np.ndarray]:
        """The tokens of each chat, those of answers with the bit."""
        texts, spans = [piece.text.decode() for piece in pieces], [piece.spans for piece in pieces]
        marked = self.template.tokenizer.encode_marked(texts, spans)
        return [tokens.astype(np.uint32) | is_answer * _ANSWER for tokens, is_answer in marked]

    def place_of(self, number: int) -> str:
        """The file and the line of a chat."""
        rows = ((path, row) for path in self.sources.files for row in text_files.read_rows(path) if turns_of(row.value))
        path, row = next(islice(rows, number, None))
        return f"{path}, {row.place()}"


# Rows of chats.


TRAIN_ON = ("answers", "last", "all")
TOO_LONG = ("turn", "cut", "leave_out")
_BLOCK, _GROUP = 4096, 64
"""Rows that are sorted by length at a time, and those of like lengths that stay beside each other."""
_LOOKED_AT = 1 << 14


@dataclass(eq=False)
class ChatRows(Dataset[Any]):
    """Chats as rows: (ids, labels), or a dict of ids, labels and position_ids where several are packed to a row.

    Args:
        store: of a `ChatRecipe`.
        starts, lengths: (num_chats,) where each chat starts in the store, and its tokens.
        seq_len: tokens of a packed row, and the most of another.
        train_on: one of `TRAIN_ON`.
        bins: the chats in each packed row; None: a chat is a row.
        is_grouped: rows of like lengths are read one behind the other.
    """

    store: TokenStore
    starts: np.ndarray
    lengths: np.ndarray
    seq_len: int
    train_on: str
    bins: list[list[int]] | None = None
    is_grouped: bool = False

    def __post_init__(self) -> None:
        self.longest_row = int(self.lengths.argmax()) if self.bins is None and len(self.lengths) else 0
        """The row that takes the most memory."""
        self.order: Order | None = self._order_by_length if self.is_grouped else None
        """The order of its own, if it has one."""

    def __len__(self) -> int:
        return len(self.lengths if self.bins is None else self.bins)

    def __getitem__(self, row: int) -> Any:
        """Read a row, filled up to `seq_len`."""
        return fetch.with_tensors(self._batch([row], self.seq_len), itemgetter(0))

    def rows(self, indices: Sequence[int]) -> Any:
        """Read some rows, each (len(indices), tokens of the longest) int64; packed ones have `seq_len`.

        Raises:
            IndexError: there is no such row.
            OSError: the store cannot be read.
        """
        return self._batch(indices, None if self.bins is None else self.seq_len)

    def packed(self) -> tuple[Any, list[Any]] | None:
        """The row with the most chats, and each of them alone, as batches of one; None where no row has several."""
        sizes = [*map(len, self.bins or [[]])]
        row, alone = sizes.index(max(sizes)), replace(self, bins=None)
        if self.bins is None or sizes[row] < 2:
            return None
        return self.rows([row]), [alone.rows([chat]) for chat in self.bins[row]]

    def read(self, chat: int) -> tuple[np.ndarray, np.ndarray]:
        """(tokens, whether each is learnt) of a chat."""
        start = int(self.starts[chat])
        values = self.store.read(start, start + int(self.lengths[chat]))
        is_learnt = values >= _ANSWER
        if self.train_on == "all":
            is_learnt[:] = True
        elif self.train_on == "last":
            others = np.flatnonzero(~is_learnt[: np.flatnonzero(is_learnt)[-1]])
            is_learnt[: others[-1] + 1 if len(others) else 0] = False
        return (values & _TOKEN).astype(np.int64), is_learnt

    def _order_by_length(self, positions: ArrayLike, *, seed: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """(rows, epochs) at some positions of a run: in each block of an epoch the rows are sorted by length, cut into
        groups, and the groups are shuffled. So rows of like lengths meet at any size of a batch."""
        epochs, places = np.divmod(np.asarray(positions, dtype=np.int64), len(self))
        rows, blocks, num_blocks = np.empty_like(places), places // _BLOCK, len(self) // _BLOCK + 1
        for number in np.unique(epochs * num_blocks + blocks).tolist():
            epoch, block = divmod(number, num_blocks)
            first, end = block * _BLOCK, min((block + 1) * _BLOCK, len(self))
            members = rows_at(epoch * len(self) + np.arange(first, end), seed=seed, num_rows=len(self))
            members = members[np.argsort(self.lengths[members], kind="stable")]
            if num_groups := len(members) // _GROUP:
                turns = rows_at(number * num_groups + np.arange(num_groups), seed=seed, num_rows=num_groups)
                whole = members[: num_groups * _GROUP].reshape(num_groups, _GROUP)
                members[: num_groups * _GROUP] = whole[turns].ravel()
            mask = (epochs == epoch) & (blocks == block)
            rows[mask] = members[places[mask] - first]
        return rows, epochs

    def describe_padding(self, sampler: GlobalBatchSampler) -> str:
        """How much of the rows that a run reads first is padding."""
        if self.bins is not None:
            used, read = int((self.lengths - 1).sum()), len(self) * self.seq_len
            return f"{100 * (1 - used / read):.1f} % of the tokens: {len(self.lengths):,} chats in {len(self):,} rows"
        size = sampler.micro_batch_size
        positions = np.arange(max(1, min(len(self), _LOOKED_AT) // size) * size)
        order = sampler.order or partial(rows_at, num_rows=len(self))
        rows = order(positions, seed=sampler.seed)
        tokens = self.lengths[rows[0] if sampler.order else rows].reshape(-1, size) - 1
        part = 1 - tokens.sum() / (tokens.max(axis=1).sum() * size)
        return f"{100 * part:.1f} % of the tokens" + ("; data.pack=true has less" if part > 0.1 else "")

    def _batch(self, indices: Sequence[int], width: int | None) -> Any:
        for row in indices:
            if not 0 <= row < len(self):
                raise IndexError(f"row {row} of {len(self)}")
        groups = [[row] if self.bins is None else self.bins[row] for row in indices]
        width = width or int(self.lengths[[group[0] for group in groups]].max()) - 1
        ids = torch.zeros(len(groups), width, dtype=torch.int64)
        labels, positions = torch.full_like(ids, IGNORED_LABEL), torch.zeros_like(ids)
        for row, group in enumerate(groups):
            end = 0
            for chat in group:
                tokens, is_learnt = self.read(chat)
                part = slice(end, end := end + len(tokens) - 1)
                ids[row, part] = torch.from_numpy(tokens[:-1])
                labels[row, part] = torch.from_numpy(np.where(is_learnt[1:], tokens[1:], IGNORED_LABEL))
                positions[row, part] = torch.arange(len(tokens) - 1)
            positions[row, end:] = torch.arange(width - end)  # the padding is an example of its own
        return (ids, labels) if self.bins is None else {"ids": ids, "labels": labels, "position_ids": positions}


def pack_rows(lengths: np.ndarray, size: int) -> list[list[int]]:
    """Put items into few bins: the longest first, each where the least room is left that holds it.

    Args:
        lengths: (num_items,) 1 to `size`.
        size: of a bin.

    Returns:
        The items of each bin.
    """
    bins: list[list[int]] = []
    by_room: list[list[int]] = [[] for _ in range(size + 1)]
    rooms = 0  # bit r: there is a bin with room r
    for item in np.argsort(-lengths, kind="stable").tolist():
        length = int(lengths[item])
        fitting = rooms >> length << length
        if fitting:
            room = (fitting & -fitting).bit_length() - 1
            number = by_room[room].pop()
            rooms ^= (not by_room[room]) << room
        else:
            room, number = size, len(bins)
            bins.append([])
        bins[number].append(item)
        by_room[room - length].append(number)
        rooms |= 1 << room - length
    return bins


class ChatDataset:
    """Chats, instructions, or prompts and completions, of files or of a saved dataset; see `turns_of` for their forms.

    Args:
        path: a .jsonl, .json, .parquet or .arrow file, .gz and .zst too; a folder of such, also one that save_to_disk()
            of Hugging Face has written; or a glob pattern. Files and folders called validation, or else test, are to
            validate on.
        tokenizer: a folder with a Hugging Face tokenizer, or the name of one on the hub.
        template: as `ChatTemplate` has it; None: the tokenizer's own.
        train_on: the tokens that are learnt: all "answers", the "last" of each chat, or "all" tokens.
        seq_len: tokens of a row, at most.
        too_long: of a longer chat the answers up to the last that fits are kept ("turn"), all that fits ("cut"), or
            nothing ("leave_out").
        pack: put several chats into a row; the model must take position_ids.
        group_by_length: read chats of like lengths together, so that less is padded.
        vocab_size: tokens the model knows; None for as many as the tokenizer has.
        validation_fraction: the part to validate on where no files are for that, between 0 and 1; 0: none.
        cache_dir: as `TextDataset` has it.

    Raises:
        FileNotFoundError: `path` names nothing.
        ImportError: a package is not installed.
        ValueError: a chat cannot be read or rendered, none fits, or an argument is out of range.
    """

    def __init__(
        self,
        path: str,
        *,
        tokenizer: str,
        template: str | None = None,
        train_on: str = "answers",
        seq_len: int = 1024,
        too_long: str = "turn",
        pack: bool = False,
        group_by_length: bool = False,
        vocab_size: int | None = None,
        validation_fraction: float = 0.1,
        cache_dir: str | None = None,
    ) -> None:
        require_at_least("seq_len", seq_len, 1)
        for field, value, allowed in (("train_on", train_on, TRAIN_ON), ("too_long", too_long, TOO_LONG)):
            if value not in allowed:
                raise ValueError(f"data.{field}={value} is not known; it must be {', '.join(allowed)}")
        if pack and group_by_length:
            raise ValueError("data.group_by_length=true has no effect with data.pack=true, which pads little; drop one")
        require_fraction(validation_fraction)
        if not isinstance(tokenizer, str):
            name = "null" if tokenizer is None else tokenizer
            raise ValueError(f"data.tokenizer={name}: chats need one; give a folder with it, or its name on the hub")
        self._template = ChatTemplate(TextTokenizer(tokenizer), template)
        self.vocab_size = self._template.tokenizer.require_known(vocab_size)
        self.encode, self.decode = self._template.encode, self._template.decode
        self.end_of_text = self._template.end_of_text
        self._cache, self._source = cache_folder(cache_dir), f"data.path={path}"
        files, validation_files, unread = find_chats(path, self._source)
        self._unread = [file.name for file in unread]
        self._cut, self._num_left_out, self._left_out = 0, 0, list[str]()
        chats = validation_chats = self._prepare(files)
        numbers = np.arange(len(chats.starts))
        num_validation = max(1, round(len(numbers) * validation_fraction)) if validation_fraction else 0
        shuffled = rows_at(numbers, seed=0, num_rows=len(numbers))
        validation_numbers = np.sort(shuffled[:num_validation])
        if validation_files:
            validation_chats = self._prepare(validation_files)
            validation_numbers = np.arange(len(validation_chats.starts))
        elif num_validation:
            numbers = np.sort(shuffled[num_validation:])
        if not len(numbers):
            raise ValueError(f"{self._source} has 1 chat; give another, or data.validation_fraction=0")
        empty = ChatRows(chats.store, chats.starts, chats.lengths, seq_len, train_on, is_grouped=group_by_length)
        self.train = self._fit(empty, chats, numbers, too_long, pack)
        self.validation = self._fit(
            replace(empty, is_grouped=False), validation_chats, validation_numbers, too_long, pack
        )
        self._parts = self.train, self.validation

    def _prepare(self, files: list[Path]) -> "_Chats":
        sources = text_files.add_files(files, text_files.Sources(self._source))
        recipe = ChatRecipe(sources, self._template.tokenizer, template=self._template)
        store = prepare_in_cache(recipe, self._cache)
        starts = np.zeros(1, np.int64) if store.documents is None else store.documents
        return _Chats(recipe, store, starts, np.diff(starts, append=store.tokens))

    def _fit(self, like: ChatRows, chats: "_Chats", numbers: np.ndarray, too_long: str, packs: bool) -> ChatRows:
        """Some of the chats as rows. A ValueError where none has room."""
        limit, starts, whole = like.seq_len + 1, chats.starts[numbers], chats.lengths[numbers]
        lengths = whole.copy()
        for index in np.flatnonzero(whole > limit).tolist():
            start, lengths[index] = int(starts[index]), 0
            is_answer = chats.store.read(start, start + limit + 1) >= _ANSWER
            ends = np.flatnonzero(is_answer[1:-1] & ~is_answer[2:]) + 2
            if too_long == "turn" and len(ends):
                lengths[index] = ends[-1]
            elif too_long == "cut" and is_answer[1:-1].any():
                lengths[index] = limit
        is_fitting = lengths > 0
        self._cut += int((is_fitting & (lengths < whole)).sum())
        self._left_out += [chats.recipe.place_of(number) for number in numbers[~is_fitting][:1].tolist()]
        self._num_left_out += int((~is_fitting).sum())
        if len(numbers) and not is_fitting.any():
            raise ValueError(
                f"{self._source}: no chat has room in data.seq_len={like.seq_len}; {self._left_out[-1]}, has "
                f"{whole[0]} tokens: give more, or data.too_long=cut"
            )
        rows = replace(like, store=chats.store, starts=starts[is_fitting], lengths=lengths[is_fitting])
        return replace(rows, bins=pack_rows(rows.lengths - 1, like.seq_len)) if packs else rows

    def summary(self) -> str:
        """One line: chats, those cut and left out, and files that are not read."""
        train, validation = self._parts
        line = f"{len(train.starts):,} chats, {len(validation.starts):,} to validate; learns {train.train_on}"
        if self._cut or self._left_out:
            line += f"; longer than data.seq_len={train.seq_len}: {self._cut:,} cut, {self._num_left_out:,} left out"
        if self._left_out:
            line += f" (the first: {self._left_out[0]})"
        return line + (f"; not read, since named for tests: {', '.join(self._unread)}" if self._unread else "")

    def example(self) -> list[tuple[str, bool]]:
        """The text of the first chat to train on in parts, and whether each is learnt."""
        tokens, is_learnt = self._parts[0].read(0)
        borders = np.flatnonzero(np.diff(is_learnt)) + 1
        parts = zip(np.split(tokens, borders), np.split(is_learnt, borders), strict=True)
        return [(self.decode(part.tolist()), bool(marks[0])) for part, marks in parts]


class _Chats(NamedTuple):
    """Files of chats in a store."""

    recipe: ChatRecipe
    store: TokenStore
    starts: np.ndarray
    lengths: np.ndarray
