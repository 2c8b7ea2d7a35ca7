"""`zerotrain generate RUN --prompt "def main"`: text from a checkpoint or an exported folder.

RUN is a run, a checkpoint, an export, a folder of Hugging Face or the URL of a mirror. One process starts, on a GPU if
there is one. Without --prompt it continues each line of the input, until Ctrl-D.

  zerotrain generate outputs/2026-11-22/10-00-00 --prompt "def main" --max-tokens 200
  zerotrain generate exported --temperature 0 < prompts.txt

Exit code 0; 2: an argument is wrong or RUN cannot be read, one line; 130: Ctrl-C.
"""

import math
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch

from zerotrain.checkpoint.mirror import local_run
from zerotrain.commands.frame import add_run, exit_code, is_averaged, parser_of
from zerotrain.errors import ConfigError
from zerotrain.files.kept_out import nothing_imported_from
from zerotrain.saved.text_model import TextModel, text_model
from zerotrain.training.callbacks.sample import next_token


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How tokens are chosen."""

    max_tokens: int
    temperature: float
    top_k: int
    seed: int

    def __post_init__(self) -> None:
        for name, least in (("max_tokens", 0), ("top_k", 1), ("seed", 0)):
            if not least <= (value := getattr(self, name)) < 1 << 63:
                raise ConfigError(
                    f"--{name.replace('_', '-')}: got {value}; it must be {least} or more, and below 2**63"
                )
        if not (math.isfinite(self.temperature) and self.temperature >= 0):
            raise ConfigError(f"--temperature: got {self.temperature}; it must be 0 (the likeliest token) or above")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return the exit code."""
    parser = parser_of("generate", __doc__)
    parser.add_argument("--prompt", metavar="TEXT", help="the text to continue; without it, each line of the input")
    parser.add_argument("--max-tokens", type=int, default=200, help="default 200")
    parser.add_argument("--temperature", type=float, default=0.8, help="default 0.8; 0: the likeliest token")
    parser.add_argument("--top-k", type=int, default=50, help="choose among the likeliest K tokens, default 50")
    parser.add_argument("--seed", type=int, default=0, help="the same seed gives the same text, default 0")
    add_run(parser, has_weights=True, type=str, help="a run, a checkpoint, an export, or the URL of a mirror")
    options = vars(parser.parse_args(arguments))
    path, prompt, trust_code = options.pop("path"), options.pop("prompt"), options.pop("trust_code")
    weights = options.pop("weights")
    for stream in (sys.stdin, sys.stdout):  # bytes that are no text, characters that a terminal has not
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")

    def generate() -> None:
        sampling, averaged, folder = Sampling(**options), is_averaged(weights), local_run(path)
        with nothing_imported_from(folder):
            model = text_model(folder, trust_code=trust_code, averaged=averaged)
            for line in _lines() if prompt is None else [prompt]:
                print(line, end="", flush=True)
                try:
                    for text in continuation(model, line, sampling):
                        print(text, end="", flush=True)
                finally:
                    print(flush=True)

    return exit_code(generate, when_stopped="")


def _lines() -> Iterator[str]:
    while sys.stdin is not None:  # which it is where it was closed
        if sys.stdin.isatty():
            print("> ", end="", flush=True)
        line = sys.stdin.readline()
        if not line:
            return
        if line.strip():
            yield line.rstrip("\n")


@torch.no_grad()
def continuation(model: TextModel, prompt: str, sampling: Sampling) -> Iterator[str]:
    """The model's continuation of a prompt, in pieces of whole characters as they come.

    Raises:
        ConfigError: the prompt has no token, or one that the model does not know.
    """
    ids = model.encode(prompt)
    if not ids:
        raise ConfigError("--prompt: got an empty text; it must have at least one token, such as a newline")
    if max(ids) >= model.vocab_size:
        raise ConfigError(f"--prompt: has token {max(ids)}, and the model knows {model.vocab_size}")
    generator = torch.Generator().manual_seed(sampling.seed)

    def tokens() -> Iterator[int]:
        for _ in range(sampling.max_tokens):
            context = torch.tensor([ids[-model.max_seq_len :]], device=model.device)
            logits = model.logits(context)[0, -1].float().cpu()
            drawn = next_token(logits, temperature=sampling.temperature, top_k=sampling.top_k, generator=generator)
            ids.append(int(drawn))
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


CONTEXT = 8
MAX_TOKENS_OF_CHARACTER = 4
"""A character of UTF-8 has as many bytes at most: what is none by then will never be one."""
