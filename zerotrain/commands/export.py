"""`zerotrain export RUN_OR_CHECKPOINT --out DIR`: what is trained, in the forms of others.

By default DIR gets model.safetensors, in parts if it is large. For model=huggingface, from_pretrained opens DIR; for
adapters, peft opens it, and with --merge it holds the merged model. RUN is a run (its newest checkpoint is read) or a
checkpoint, or the URL of a mirror. The export is verified, and DIR appears when it is complete; it may be a URL, too.

  zerotrain export outputs/2026-11-22/10-00-00 --out exported --dtype bf16
  zerotrain export outputs/2026-11-22/10-00-00/checkpoints/step-00000100 --out exported --optimizer
  zerotrain export outputs/2026-11-22/10-00-00 --out averaged --weights ema
  zerotrain export outputs/2026-11-22/10-00-00 --out dcp --dcp

Exit code 0: it is there; 1: a disk is full or broken; 2: an argument is wrong, --out cannot be written or the
checkpoint is damaged, one line;
130, 143, 129: a signal, and nothing is left in DIR; a URL may have files, all if zerotrain_export.json is there.
"""

import math
import sys
from argparse import Namespace
from collections.abc import Sequence

from zerotrain.commands.frame import add_run, exit_code, is_averaged, parser_of
from zerotrain.errors import ConfigError
from zerotrain.files import terminal
from zerotrain.launching import exits

DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
"""The names of torch for those of --dtype."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return the exit code."""
    parser = parser_of("export", __doc__)
    parser.add_argument("--out", required=True, metavar="DIR", help="the folder to make, or its URL")
    parser.add_argument("--dtype", metavar="NAME", help="dtype of all floating-point weights: fp32, bf16 or fp16")
    parser.add_argument("--merge", action="store_true", help="add the adapters to the weights")
    parser.add_argument("--optimizer", action="store_true", help="optimizer.pt too, for torch.optim")
    parser.add_argument("--dcp", action="store_true", help="a folder of torch.distributed.checkpoint instead")
    parser.add_argument(
        "--shard-mb", type=float, default=5000.0, metavar="MB", help="largest size of a file, default 5000"
    )
    parser.add_argument("--overwrite", action="store_true", help="replace an earlier export")
    add_run(parser, has_weights=True, type=str, metavar="RUN_OR_CHECKPOINT", help=None)
    options = parser.parse_args(arguments)
    left = "nothing is left"
    if "://" in options.out:
        left = "files may be at --out, all of them if zerotrain_export.json is there"

    def work() -> None:
        require_options(options)
        from zerotrain.commands.export_folder import export  # imports torch, which takes seconds

        with exits.ended_in_order():
            for line in export(options):
                print(line, flush=True)

    try:
        return exit_code(work, when_stopped=f"stopped by Ctrl-C; {left}")
    except SystemExit as ending:
        print(f"stopped by a signal; {left}", file=sys.stderr)
        return terminal.code_of(ending)


def require_options(options: Namespace) -> None:
    """Check the options alone. Raises a ConfigError with the first that is wrong."""
    if options.dtype not in (None, *DTYPES):
        raise ConfigError(
            f"--dtype: got {options.dtype}; it must be one of {', '.join(DTYPES)}; without it, as it was saved"
        )
    if not (math.isfinite(options.shard_mb) and options.shard_mb > 0):
        raise ConfigError(f"--shard-mb: got {options.shard_mb}; it must be a number of megabytes above 0")
    if options.dcp and (options.merge or options.optimizer or options.dtype):
        raise ConfigError(
            "--dcp: writes weights and optimizer state as they are; leave out --merge, --optimizer, --dtype"
        )
    if is_averaged(options.weights) and (options.dcp or options.optimizer):
        other = "--dcp" if options.dcp else "--optimizer"
        raise ConfigError(f"{other}: the optimizer's state is that of the trained weights; leave out --weights ema")
