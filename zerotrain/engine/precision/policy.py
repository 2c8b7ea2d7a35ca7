"""Which dtypes compute, travel and are kept."""

from dataclasses import dataclass, replace

import torch

from zerotrain.errors import ConfigError


@dataclass(frozen=True)
class Precision:
    """The dtypes of one run, or of one bucket where parameters are kept in fp32."""

    name: str
    compute: torch.dtype
    """Weights the model sees, activations, gradients and everything on the wire."""
    master: torch.dtype = torch.float32
    """Master weights, optimizer state, and sums of gradients over micro-batches and ranks."""
    keep_fp32: tuple[str, ...] = ()
    """Name patterns of parameters held, computed with and sent in the master dtype; see `kept_fp32`."""

    @property
    def separate_master(self) -> bool:
        """Whether the master weight is a copy; in fp32 it shares the model weight's storage."""
        return self.compute != self.master

    @property
    def needs_loss_scale(self) -> bool:
        """Whether gradients would leave the range of the compute dtype: fp16 has 5 bits of exponent, fp32 has 8."""
        return self.compute == torch.float16

    def of_bucket(self, dtype: torch.dtype) -> "Precision":
        """That of a bucket whose parameters are held in `dtype`."""
        return replace(self, compute=dtype)


PRECISIONS = {
    "fp32": Precision("fp32", torch.float32),
    "bf16": Precision("bf16", torch.bfloat16),
    "fp16": Precision("fp16", torch.float16),
}


def precision_named(name: str, keep_fp32: tuple[str, ...] = ()) -> Precision:
    """The precision called `name`, in which the parameters that the patterns of `keep_fp32` name stay in fp32.

    Raises:
        ConfigError: there is none of that name.
    """
    if name not in PRECISIONS:
        raise ConfigError(f"precision={name}: is none of {', '.join(PRECISIONS)}")
    return replace(PRECISIONS[name], keep_fp32=keep_fp32)
