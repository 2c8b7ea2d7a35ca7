"""Matrix products in fp8: the linear layers of the units multiply in 8 bits, by torchao.

A product divides each of its two inputs by its largest value, rounds it to fp8 (e4m3, a gradient e5m2), and gives 16
bits (Micikevicius et al. 2022, "FP8 formats for deep learning", arXiv 2209.05433). Weights, gradients, and all that is
sent or kept, stay as they are without it. A layer computes with its whole weight and the rows of one micro-batch.
So no scale depends on the stage, the bucket or the number of ranks, and no bit does.
"""

import logging
from fnmatch import fnmatchcase

import torch
from torch import nn

from zerotrain.device.kinds import device_of
from zerotrain.engine.model.forward import require_units
from zerotrain.errors import ConfigError, argument
from zerotrain.files.terminal import package
from zerotrain.settings import PrecisionConfig
from zerotrain.sharding.units import walk

MULTIPLE = 16
"""GPUs multiply in fp8 only matrices whose two sizes are multiples of this."""


def multiply_in_fp8(
    model: nn.Module, precision: PrecisionConfig, *, units: list[str] | None, device: torch.device
) -> None:
    """Let linear layers in the units of a model multiply in fp8. They keep their parameters, with their names.

    A CPU computes the same in 32 bits, rounded to fp8.

    Args:
        units: module name patterns; None: the repeated blocks.

    Raises:
        ConfigError: there is no such layer, the GPU multiplies no fp8, or torchao is not installed.
    """
    got = argument("precision.matmul", precision.matmul)
    kind = device_of(device)
    if not kind.multiplies_fp8:
        raise ConfigError(f"{got}: {kind.name} multiplies no fp8, which Ada, Hopper and later GPUs do; leave it out")
    logging.disable(logging.WARNING)  # torchao's, on kernels of its own that a card has not
    try:
        float8 = package("torchao.float8", extra="fp8", needed_by=got)
    except ImportError as error:
        raise ConfigError(str(error)) from error
    finally:
        logging.disable(logging.NOTSET)
    chosen = set()
    for unit_name, unit in require_units(walk(model), units, got).items():
        for name, layer in unit.named_modules(prefix=unit_name):
            is_matched = any(fnmatchcase(name, pattern) for pattern in precision.fp8_modules)
            if type(layer) is nn.Linear and is_matched:
                sizes = layer.in_features, layer.out_features
                if min(sizes) >= precision.fp8_min_size and all(size % MULTIPLE == 0 for size in sizes):
                    chosen.add(layer)
    if not chosen:
        patterns, smallest = precision.fp8_modules, precision.fp8_min_size
        raise ConfigError(
            f"{got}: no nn.Linear in the units has a name of precision.fp8_modules={patterns}, and two sizes of "
            f"precision.fp8_min_size={smallest} or more that are multiples of {MULTIPLE}"
        )
    config = float8.Float8LinearConfig(emulate=kind.is_host)
    float8.convert_to_float8_training(model, module_filter_fn=lambda layer, _: layer in chosen, config=config)
