"""`zerotrain generate RUN --prompt "def main"`: text from a checkpoint or an exported folder.

RUN is a run, a checkpoint, an export, a folder of Hugging Face or the URL of a mirror. One process starts, on a GPU if
there is one. Without --prompt it continues each line of the input, until Ctrl-D.

  zerotrain generate outputs/2026-11-22/10-00-00 --prompt "def main" --max-tokens 200
  zerotrain generate exported --temperature 0 < prompts.txt

Exit code 0; 2: an argument is wrong or RUN cannot be read, one line; 130: Ctrl-C.
"""

import math
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from zerotrain.commands.frame import add_run, exit_code, is_averaged, parser_of
from zerotrain.errors import ConfigError


def require_sampling(options: dict[str, Any]) -> None:
    """Check how tokens are to be chosen. Raises a ConfigError with the first option that is wrong."""
    for name, least in (("max_tokens", 0), ("top_k", 1), ("seed", 0)):
        if not least <= (value := options[name]) < 1 << 63:
            raise ConfigError(f"--{name.replace('_', '-')}: got {value}; it must be {least} or more, and below 2**63")
    if not (math.isfinite(temperature := options["temperature"]) and temperature >= 0):
        raise ConfigError(f"--temperature: got {temperature}; it must be 0 (the likeliest token) or above")


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
        require_sampling(options)
        averaged = is_averaged(weights)
        from zerotrain.checkpoint.mirror import local_run  # import torch, which takes seconds
        from zerotrain.files.kept_out import nothing_imported_from
        from zerotrain.saved.text_model import continuation, text_model

        folder = local_run(path)
        with nothing_imported_from(folder):
            model = text_model(folder, trust_code=trust_code, averaged=averaged)
            for line in _lines() if prompt is None else [prompt]:
                print(line, end="", flush=True)
                try:
                    for text in continuation(model, line, **options):
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
