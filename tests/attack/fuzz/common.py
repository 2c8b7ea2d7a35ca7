"""What readers have in common."""

import hashlib
from collections.abc import Iterable

import torch


def hashed(values: torch.Tensor) -> str:
    """Dtype, shape and bits."""
    flat = values.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
    return f"{values.dtype} {tuple(values.shape)} {hashlib.sha256(flat).hexdigest()[:12]}"


def require_printable(lines: Iterable[str]) -> None:
    """What a command prints obeys no terminal."""
    for line in lines:
        assert line.isprintable(), f"prints {line!r}"
