"""`python -m zerotrain export RUN_OR_CHECKPOINT --out DIR`: what is trained, in the forms of others."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from zerotrain.commands.export.command import Asked, export
from zerotrain.errors import CheckpointError, ConfigError
from zerotrain.files.terminal import code_of
from zerotrain.launching.end import exits
from zerotrain.launching.end.signals import ended_in_order

EXAMPLES = """\
Without more: model.safetensors, in parts where it is large; of model=huggingface a folder that from_pretrained opens;
of its adapters one that peft opens, or with --merge one of the whole model. Of a run its newest checkpoint is taken.
What is written was verified; the folder appears when it is whole.

  python -m zerotrain export outputs/2026-11-22/10-00-00 --out exported --dtype bf16
  python -m zerotrain export outputs/2026-11-22/10-00-00/checkpoints/step-00000100 --out exported --optimizer
  python -m zerotrain export outputs/2026-11-22/10-00-00 --out dcp --dcp

Exit code 0: it is there; 1: the disk failed; 2: an argument or a checkpoint that is not what was written, one line;
130, 143, 129: a signal, and nothing is left.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return the exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m zerotrain export",
        description=__doc__,
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("path", type=Path, metavar="RUN_OR_CHECKPOINT")
    parser.add_argument("--out", type=Path, required=True, metavar="DIR", help="the folder to make")
    parser.add_argument("--dtype", metavar="NAME", help="of all floating-point weights: fp32, bf16 or fp16")
    parser.add_argument("--merge", action="store_true", help="add the adapters to the weights")
    parser.add_argument("--optimizer", action="store_true", help="optimizer.pt too, for torch.optim")
    parser.add_argument("--dcp", action="store_true", help="a folder of torch.distributed.checkpoint instead")
    parser.add_argument("--shard-mb", type=float, default=5000.0, metavar="MB", help="of a file at most, default 5000")
    parser.add_argument("--overwrite", action="store_true", help="replace an earlier export")
    parser.add_argument("--trust-code", action="store_true", help="build classes of others too, whose code runs")
    given = vars(parser.parse_args(arguments))
    try:
        with ended_in_order():
            for line in export(given.pop("path"), Asked(**given)):
                print(line, flush=True)
    except (ConfigError, CheckpointError) as error:
        print(error, file=sys.stderr)
        return exits.FAILED if isinstance(error.__cause__, OSError) else exits.CONFIG_PROBLEM
    except KeyboardInterrupt:
        print("stopped by Ctrl-C; nothing is left", file=sys.stderr)
        return exits.of_signal(2)
    except SystemExit as ending:
        print("stopped by a signal; nothing is left", file=sys.stderr)
        return code_of(ending)
    return exits.COMPLETED
