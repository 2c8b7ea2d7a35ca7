"""A model that generates text, of a run, a checkpoint or a folder of Hugging Face: logits, tokens and back."""

import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from msgspec import Struct

from zerotrain.data.chat import ChatTemplate
from zerotrain.data.prepare import NUM_BYTE_VALUES
from zerotrain.data.tokenizer import TextTokenizer
from zerotrain.device.kinds import num_gpus
from zerotrain.errors import ConfigError
from zerotrain.files.kept_out import MAX_NBYTES, refusal, require_no_kernels
from zerotrain.files.untrusted import read_json
from zerotrain.run.factory import build_data
from zerotrain.saved.saved import ONE_SET, OfRun, exported_run, has_tokenizer, opened_or_exported
from zerotrain.training.callbacks.sample import next_token, stop_token_of

NO_LIMIT = sys.maxsize
CHAT = "zerotrain.data.ChatDataset"


class _Adapters(Struct):
    base_model_name_or_path: str


@dataclass(frozen=True)
class _Tokens:
    """The tokens of a text and back."""

    encode: Callable[[str], list[int]]
    decode: Callable[[list[int]], str]
    stop_token: int | None = None
    """Ends a text."""


@dataclass(frozen=True, kw_only=True)
class TextModel(_Tokens):
    """A model and its tokens."""

    logits: Callable[[torch.Tensor], torch.Tensor]
    """(1, T) int64 -> (1, T, vocab_size)."""
    vocab_size: int
    max_seq_len: int
    """Tokens it can look back on."""
    device: torch.device


def text_model(path: Path, *, trust_code: bool = False, averaged: bool = False) -> TextModel:
    """The model at a user's path, with its weights or their averages.

    Raises:
        ConfigError: there is no text to be got from it: no tokenizer, or no model that its config builds.
        CheckpointError: there is no checkpoint, or it is not what was written.
    """
    device = torch.device("cuda" if num_gpus() else "cpu")
    for file in ("config.json", "adapter_config.json"):
        if (path / file).is_file():
            if averaged:
                raise ConfigError(ONE_SET.format(path))
            return _hugging_face_model(path, device)
    with opened_or_exported(path, trust_code=trust_code, averaged=averaged) as run:
        return _run_model(run, device)


def _run_model(run: OfRun, device: torch.device) -> TextModel:
    config, tokens = run.require_config(), _run_tokens(run)
    model = run.model(device)
    limit = getattr(model, "max_seq_len", None) or config.data.get("seq_len")
    return TextModel(
        logits=model,
        **vars(tokens),
        vocab_size=int(getattr(model, "vocab_size", NO_LIMIT)),
        max_seq_len=limit if isinstance(limit, int) else NO_LIMIT,
        device=device,
    )


def _hugging_face_model(path: Path, device: torch.device) -> TextModel:
    try:
        from transformers import AutoConfig, AutoModelForCausalLM
        from transformers.utils.logging import disable_progress_bar
    except ImportError as error:
        raise ConfigError(f"{path} needs transformers, which is not installed; pip install 'zerotrain[hf]'") from error
    disable_progress_bar()  # of files that are read, among the text
    exported = exported_run(path)
    reads_bytes = exported is not None and exported.reads_bytes
    base = str(path)
    tokens = _byte_tokens() if reads_bytes else _tokenizer_tokens(base, base)
    try:
        base = _base_of(path)
        require_no_kernels(AutoConfig.from_pretrained(base, trust_remote_code=False), f"the config of {base}")
        model: Any = AutoModelForCausalLM.from_pretrained(
            path, dtype="auto", trust_remote_code=False, weights_only=True
        )
    except Exception as error:  # transformers raises all kinds for files that it cannot read
        raise ConfigError(f"{path} is no model that transformers opens: {refusal(base, error)}") from error
    model = model.to(device).eval()
    config = model.config.get_text_config()
    positions = getattr(config, "max_position_embeddings", None)
    return TextModel(
        logits=lambda ids: model(input_ids=ids).logits,
        **vars(tokens),
        vocab_size=int(config.vocab_size),
        max_seq_len=positions if isinstance(positions, int) and positions > 0 else NO_LIMIT,
        device=device,
    )


def _base_of(path: Path) -> str:
    """The folder, or the name on the hub, of the config of a model: adapters alone name the model they are for."""
    if (path / "config.json").is_file():
        return str(path)
    adapters: _Adapters = read_json(path / "adapter_config.json", _Adapters, max_nbytes=MAX_NBYTES)
    return adapters.base_model_name_or_path


def _run_tokens(run: OfRun) -> _Tokens:
    """The tokens of the run's data."""
    config = run.require_config()
    if run.reads_bytes:
        return _byte_tokens()
    if run.tokenizer_name is not None:
        tokens = _tokenizer_tokens(run.tokenizer_name, str(run.path))
        if (chat := chat_template_of(run)) is None:
            return tokens
        # A prompt is the question of a chat, and a text the answer.
        return replace(tokens, encode=lambda text: chat.encode(text).tolist(), stop_token=chat.end_of_text)
    if run.is_hugging_face and config.model.get("name_or_path") is not None:
        return _tokenizer_tokens(config.model["name_or_path"], str(run.path))
    if not str(config.data.get("_target_")).startswith("zerotrain.data."):
        dataset = run.built("data", build_data)
        if callable(getattr(dataset, "encode", None)) and callable(getattr(dataset, "decode", None)):
            return _Tokens(
                lambda text: torch.as_tensor(dataset.encode(text)).tolist(),
                lambda ids: str(dataset.decode(torch.tensor(ids, dtype=torch.int64))),
                stop_token_of(dataset),
            )
    raise ConfigError(
        f"{run.path}: data._target_ was {config.data.get('_target_')}, which has no tokenizer, so there is no text to "
        "generate from; export the run, and put the tokenizer's files beside the model"
    )


def _byte_tokens() -> _Tokens:
    def decode(ids: list[int]) -> str:
        return bytes(token for token in ids if token < NUM_BYTE_VALUES).decode(errors="replace")

    return _Tokens(lambda text: list(text.encode(errors="surrogateescape")), decode)


def chat_template_of(run: OfRun) -> ChatTemplate | None:
    """That of the chats that a run was trained on; None: it was trained on other data."""
    data = run.require_config().data
    if data.get("_target_") != CHAT:
        return None
    try:
        return ChatTemplate(TextTokenizer(str(run.tokenizer_name)), data.get("template"))
    except ValueError as error:
        raise ConfigError(f"{run.path}: {error}") from error


def _tokenizer_tokens(name: str, source: str) -> _Tokens:
    if not has_tokenizer(name):
        raise ConfigError(
            f"{source}: text needs a tokenizer, and {name} has no file of one; put the tokenizer's files there"
        )
    try:
        tokenizer = TextTokenizer(name)
    except (ValueError, ImportError) as error:
        why = str(error).splitlines()[0].removeprefix(f"data.tokenizer={name} ")
        raise ConfigError(f"{source}: text needs a tokenizer, and {name} {why}") from error

    def decode(ids: list[int]) -> str:
        return tokenizer.decode(token for token in ids if token < tokenizer.vocab_size)

    return _Tokens(tokenizer.tokens_of, decode, stop_token_of(tokenizer))


# The text that continues a prompt.


CONTEXT = 8
MAX_TOKENS_OF_CHARACTER = 4
"""A character of UTF-8 has as many bytes at most: what is none by then will never be one."""


@torch.no_grad()
def continuation(
    model: TextModel, prompt: str, *, max_tokens: int, temperature: float, top_k: int, seed: int
) -> Iterator[str]:
    """The model's continuation of a prompt, in pieces of whole characters as they come.

    Args:
        temperature: 0: the likeliest token is taken.
        top_k: one of so many is drawn.

    Raises:
        ConfigError: the prompt has no token, or one that the model does not know.
    """
    ids = model.encode(prompt)
    if not ids:
        raise ConfigError("--prompt: got an empty text; it must have at least one token, such as a newline")
    if max(ids) >= model.vocab_size:
        raise ConfigError(f"--prompt: has token {max(ids)}, and the model knows {model.vocab_size}")
    generator = torch.Generator().manual_seed(seed)

    def tokens() -> Iterator[int]:
        for _ in range(max_tokens):
            context = torch.tensor([ids[-model.max_seq_len :]], device=model.device)
            logits = model.logits(context)[0, -1].float().cpu()
            ids.append(int(next_token(logits, temperature=temperature, top_k=top_k, generator=generator)))
            if ids[-1] == model.stop_token:
                return
            yield ids[-1]

    yield from characters(model.decode, list(ids), tokens())


def characters(decode: Callable[[list[int]], str], prompt_ids: list[int], tokens: Iterable[int]) -> Iterator[str]:
    """The text of tokens that come one by one, without what may still be a part of a character.

    A tokenizer may write a token otherwise behind others, so a few of those before are decoded too.
    """
    ids, start = list(prompt_ids), max(0, len(prompt_ids) - CONTEXT)
    num_printed = len(ids)
    for token in tokens:
        ids.append(token)
        printed, whole = decode(ids[start:num_printed]), decode(ids[start:])
        if not whole.endswith("\ufffd") or len(ids) - num_printed >= MAX_TOKENS_OF_CHARACTER:
            yield whole[len(printed) :]
            start, num_printed = max(start, num_printed - CONTEXT), len(ids)
    if num_printed < len(ids):
        yield decode(ids[start:])[len(decode(ids[start:num_printed])) :]
