"""The frame of a command: what it is called with, the words it fails in, and its exit code."""

import sys
from argparse import ArgumentParser, RawDescriptionHelpFormatter
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from zerotrain.config.words import hint_for_option
from zerotrain.errors import CheckpointError, ConfigError
from zerotrain.files.untrusted import printable
from zerotrain.launching import exits


def is_averaged(weights: str) -> bool:
    """Whether `--weights` asks for the average.

    Raises:
        ConfigError: it asks for something else than that and the trained weights.
    """
    if weights not in ("trained", "ema"):
        raise ConfigError(f"--weights: got {weights}; it must be trained or ema")
    return weights == "ema"


class Parser(ArgumentParser):
    """Answers a wrong argument with one line, and an unknown option with ours of the same meaning."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """As of ArgumentParser, which would complain of what lacks before it complains of what is unknown."""
        options = self._option_string_actions
        takes_settings = any(action.dest == "settings" for action in self._actions)
        for argument in sys.argv[1:] if args is None else args:
            name = argument.partition("=")[0]
            if (
                not name.startswith("--")
                or name == "--"
                or " " in name
                or any(option.startswith(name) for option in options)
            ):
                continue
            hint = hint_for_option(name, options, takes_settings=takes_settings)
            self.error(f"{printable(name, keep='')}: there is no such option{hint}")
        return super().parse_known_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        """Print a line and end with exit code 2."""
        self.exit(exits.CONFIG_PROBLEM, f"{self.prog}: {message}\n{self.prog} --help lists the options\n")


def program() -> str:
    """The program that the user has started: zerotrain, or python -m zerotrain."""
    return "zerotrain" if Path(sys.argv[0]).name == "zerotrain" else "python -m zerotrain"


def parser_of(verb: str, text: str | None) -> ArgumentParser:
    """The parser of a command, as yet without arguments; its help begins with the first paragraph of a text, and ends
    with the others."""
    description, _, examples = (text or "").partition("\n\n")
    return Parser(
        prog=f"{program()} {verb}",
        description=description,
        epilog=examples,
        formatter_class=RawDescriptionHelpFormatter,
    )


def add_run(parser: ArgumentParser, *, has_settings: bool = False, has_weights: bool = False, **how: Any) -> None:
    """Add what names a run and what is to be done with its classes, settings and weights: `RUN --trust-code
    [SETTING=VALUE ...] [--weights NAME]`.

    Args:
        how: of `add_argument`, where RUN has another name, or other words.
    """
    words: dict[str, Any] = {"type": Path, "metavar": "RUN", "help": "a run, a checkpoint or an export"} | how
    parser.add_argument("path", **words)
    if has_settings:
        parser.add_argument("settings", nargs="*", metavar="SETTING=VALUE", help="a setting to change")
    if has_weights:
        text = "trained, the default, or ema: their moving average, of a run with callbacks=ema"
        parser.add_argument("--weights", default="trained", metavar="NAME", help=text)
    parser.add_argument(
        "--trust-code",
        action="store_true",
        help="also build classes that are not of zerotrain or torch: their code runs",
    )


def exit_code(work: Callable[[], int | None], *, when_stopped: str | None = None) -> int:
    """Do the work of a command; return the exit code. It prints errors that the user can mend on stderr, a line each.

    Args:
        work: may return a code; None for success.
        when_stopped: the line printed on Ctrl-C; None: none.
    """
    try:
        return work() or exits.COMPLETED
    except (ConfigError, CheckpointError, OSError) as error:
        # A file that cannot be read or written, or a folder in its place: whoever has named it mends that.
        text = str(error)
        if isinstance(error, OSError) and error.filename is not None:
            text = printable(f"{error.filename}: {error.strerror}", keep="")
        print(text, file=sys.stderr)
        return exits.of_error(error)
    except KeyboardInterrupt:
        if when_stopped is not None:
            print(when_stopped, file=sys.stderr)
        return exits.of_signal(2)
