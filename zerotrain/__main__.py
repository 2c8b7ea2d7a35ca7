"""The command `zerotrain VERB`, also as `python -m zerotrain VERB`; settings without a verb train."""

import importlib
import os
import sys

from zerotrain import __version__
from zerotrain.files.here_last import look_here_last, require_here  # imports nothing that could lie in this folder

VERBS = {
    "train": ("zerotrain.commands.train", "train a model, plan a run or sweep with -m; the word may be left out"),
    "generate": ("zerotrain.commands.generate", "continue a text with a trained model"),
    "evaluate": ("zerotrain.commands.evaluate", "measure the loss and metrics of a checkpoint on other data"),
    "export": ("zerotrain.commands.export", "write the weights for safetensors, transformers, peft or FSDP2"),
    "inspect": ("zerotrain.commands.inspection", "show what a checkpoint holds, verify it, or compare two"),
    "report": ("zerotrain.commands.report", "compare runs on a page, in a table, as csv and json"),
    "replay": ("zerotrain.commands.replay", "compute a step of a run again and compare it, to the bit"),
    "tokenizer": ("zerotrain.commands.tokenizer", "train a tokenizer on your own text"),
    "prepare": ("zerotrain.commands.prepare", "make the tokens of a text before a run"),
    "slurm": ("zerotrain.commands.slurm", "write a job of Slurm that outlasts its time limit"),
    "ended": ("zerotrain.commands.ended", "tell how a run has ended, by the exit code"),
    "alive": ("zerotrain.commands.alive", "tell whether a run still makes steps, for a probe"),
}
"""Verb -> the module with its `main`, which imports what it needs and no more; what the verb does."""
ONLY_PRINT = ("generate", "inspect")
"""They have nothing to do when nobody reads their output any more."""
_LINES = "\n".join(f"  {verb:10} {line}" for verb, (_, line) in VERBS.items())
HELP = f"""usage: zerotrain [VERB] ...

Train any PyTorch nn.Module with ZeRO stages 0 to 3, and use what a run leaves.

{_LINES}

  zerotrain zero.stage=2 launch.nproc_per_node=2
  zerotrain generate outputs/my_run --prompt "def main"

`zerotrain VERB --help` tells more, `zerotrain train --help` what may be set; `zerotrain --version` is the version."""


def run(verb: str, arguments: list[str]) -> None:
    """Run a command as this process, and exit with its code."""
    require_here()
    module, _ = VERBS[verb]
    if verb == "train":
        importlib.import_module(module).main(arguments)
        return
    look_here_last()
    from zerotrain.files.terminal import run_command
    from zerotrain.launching.imports import importing

    with importing():
        main = importlib.import_module(module).main
    run_command(lambda: main(arguments), only_prints=verb in ONLY_PRINT)


def main(arguments: list[str]) -> None:
    """Run the command that a command line names; settings without a verb train, as no words do as a rank."""
    first = arguments[0] if arguments else "" if {"RANK", "SLURM_PROCID"} & os.environ.keys() else "help"
    if first in VERBS:
        return run(first, arguments[1:])
    if first in ("--help", "-h", "help", "--version"):
        return _tell(first)
    if first == "-sc" and arguments[1:2] == ["query=bash"]:
        # Verbs and settings may stand for the last word of COMP_LINE: Hydra prints settings, bash finds paths.
        words = os.environ.get("COMP_LINE", "").split(" ")[1:] or [""]
        if len(words) == 1:
            print(*(verb for verb in VERBS if verb.startswith(words[0])), end=" ")
        elif words[0] in VERBS and words[0] != "train":
            return None
        os.environ["COMP_LINE"] = " ".join(["zerotrain", *words[words[0] == "train" :]])
    if not first.isidentifier():
        return run("train", arguments)
    from zerotrain.config.words import did_you_mean
    from zerotrain.files.untrusted import printable

    verb = printable(first, keep="")
    hint = "; zerotrain plan.only=true plans a run" if verb == "plan" else did_you_mean(verb, VERBS)
    print(f"{verb}: there is no such verb{hint}; there are {', '.join(VERBS)}", file=sys.stderr)
    sys.exit(2)


def _tell(question: str) -> None:
    """Print the version, or else what verbs there are; of the ranks of torchrun one does."""
    require_here()
    look_here_last()
    from importlib.metadata import version

    from zerotrain.files.terminal import run_command

    text = HELP
    if question == "--version":
        text = f"zerotrain {__version__}, torch {version('torch')}, Python {sys.version.partition(' ')[0]}"
    is_first = os.environ.get("RANK", "0") == "0"
    run_command(lambda: print(text) or 0 if is_first else 0, only_prints=True)


def command() -> None:
    """The program `zerotrain` that an installation has."""
    require_here()
    if not sys.flags.safe_path:
        sys.path.append(os.getcwd())  # where classes of the user's lie; `python -m` does the same
    main(sys.argv[1:])


if __name__ == "__main__":
    main(sys.argv[1:])
