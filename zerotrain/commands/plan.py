"""`python -m zerotrain plan --parameters 7.5e9 --ranks 64`: memory of each stage, by the size of a model alone.

The formulas are those of ZeRO (arXiv 1910.02054, figure 1), without padding and activations. `python launch.py
plan.only=true` plans a model that is there, with all of these.

Exit code 0; 2 for a wrong argument.
"""

import math
from argparse import ArgumentTypeError
from collections.abc import Sequence

from zerotrain.commands.frame import parser_of
from zerotrain.sharding.plan import ITEMSIZE, STATE_PER_PARAMETER, stages_of_size

KINDS = ("parameters", "gradients", "optimizer")


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table; returns the exit code."""
    parser = parser_of("plan", "Show what each rank holds and sends at each ZeRO stage, by the formulas of the paper.")
    parser.add_argument("--parameters", type=_number, required=True, metavar="N", help="of the model, such as 7.5e9")
    parser.add_argument("--ranks", type=_ranks, default=1, metavar="N", help="that share it; default: 1")
    parser.add_argument("--optimizer", choices=[*STATE_PER_PARAMETER], default="adamw", help="default: adamw")
    parser.add_argument("--precision", choices=[*ITEMSIZE], default="bf16", help="default: bf16, with fp32 masters")
    options = parser.parse_args(arguments)
    print("GB of a rank, by stage (1 GB = 1e9 bytes)")
    print(f"{'stage':>5} {'parameters':>11} {'gradients':>10} {'optimizer':>10} {'sum':>8} {'sent/step':>10}")
    stages = stages_of_size(options.parameters, options.ranks, options.optimizer, options.precision)
    for stage, sizes in enumerate(stages):
        gb = {kind: nbytes / 1e9 for kind, nbytes in sizes.items()}
        held = sum(gb[kind] for kind in KINDS)
        print(
            f"{stage:>5} {gb['parameters']:>11.4g} {gb['gradients']:>10.4g} {gb['optimizer']:>10.4g} {held:>8.3g} "
            f"{gb['sent']:>10.4g}"
        )
    print("without activations and what a step takes beside: python launch.py plan.only=true plans those too")
    return 0


def _number(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not 1 <= number <= 1e18:
        raise ArgumentTypeError(f"got {text!r}; it must be a number from 1 to 1e18, such as 7.5e9")
    return number


def _ranks(text: str) -> int:
    if not text.isdecimal() or not int(text[:9]) >= 1 or len(text) > 9:
        raise ArgumentTypeError(f"got {text!r}; it must be a whole number from 1 to 999999999")
    return int(text)
