"""`python -m zerotrain VERB`: train, generate, evaluate, export, inspect, ended, alive, slurm, report, prepare,
tokenizer or replay; without a verb it trains."""

import importlib
import sys

from zerotrain.files.here_last import look_here_last, require_here  # imports nothing that could lie in this folder

MODULES = {
    "train": "zerotrain.commands.train",
    "generate": "zerotrain.commands.generate",
    "evaluate": "zerotrain.commands.evaluate",
    "export": "zerotrain.commands.export",
    "inspect": "zerotrain.commands.inspection",
    "ended": "zerotrain.commands.ended",
    "alive": "zerotrain.commands.alive",
    "slurm": "zerotrain.commands.slurm",
    "report": "zerotrain.commands.report",
    "prepare": "zerotrain.commands.prepare",
    "tokenizer": "zerotrain.commands.tokenizer",
    "replay": "zerotrain.commands.replay",
}
"""Verb -> the module with its `main`: each imports what it needs, and no more."""
ONLY_PRINT = ("generate", "inspect")
"""They have nothing to do when nobody reads their output any more."""


def run(verb: str, arguments: list[str]) -> None:
    """Run a command as this process, and exit with its code."""
    require_here()
    if verb == "train":
        importlib.import_module(MODULES[verb]).main(arguments)
        return
    look_here_last()
    from zerotrain.files.terminal import run_command
    from zerotrain.launching.imports import importing

    with importing():
        main = importlib.import_module(MODULES[verb]).main
    run_command(lambda: main(arguments), only_prints=verb in ONLY_PRINT)


def main(arguments: list[str]) -> None:
    """Run the command that a command line names; without a verb it trains."""
    if arguments and arguments[0] in MODULES:
        return run(arguments[0], arguments[1:])
    if not arguments or not arguments[0].isidentifier():
        return run("train", arguments)
    from zerotrain.config.words import did_you_mean
    from zerotrain.files.untrusted import printable

    verb = printable(arguments[0], keep="")
    hint = "; python launch.py plan.only=true plans a run" if verb == "plan" else did_you_mean(verb, MODULES)
    print(f"{verb}: there is no such verb{hint}; there are {', '.join(MODULES)}", file=sys.stderr)
    sys.exit(2)


if __name__ == "__main__":
    main(sys.argv[1:])
