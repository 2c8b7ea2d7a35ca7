"""Small comparisons in frames of one size, each with its name: so ranks that have come to different ones are told so.

gloo ends a process, in words of C++, that receives more bytes than it expects. Seen where one rank called
`engine.freeze` and another `engine.step`.
"""

import functools
from collections.abc import Callable

import torch

NAME_NBYTES = 56
FRAME_NBYTES = 256
_NUMBER_NBYTES = 8
_ROOM_NBYTES = FRAME_NBYTES - NAME_NBYTES - _NUMBER_NBYTES


class OtherNamesError(Exception):
    """Ranks have come to different comparisons.

    Args:
        names: what each rank compares, in rank order.
    """

    def __init__(self, names: list[str]) -> None:
        self.names = names
        super().__init__(", ".join(names))


def gather_framed(gather: Callable[[torch.Tensor], torch.Tensor], values: torch.Tensor, name: str) -> torch.Tensor:
    """(n,) on each rank -> (ranks, n) on every rank. Values that do not fit into a frame follow in a second gather.

    Args:
        gather: does so with tensors of the same n on all ranks.

    Raises:
        OtherNamesError: on every rank.
    """
    said = values.contiguous().view(torch.uint8)
    fits = said.numel() <= _ROOM_NBYTES
    frame = torch.zeros(FRAME_NBYTES, dtype=torch.uint8)
    frame[: NAME_NBYTES + _NUMBER_NBYTES] = _head(name, said.numel())
    if fits:
        frame[NAME_NBYTES + _NUMBER_NBYTES :][: said.numel()] = said
    frames = gather(frame)
    heads = frames[:, : NAME_NBYTES + _NUMBER_NBYTES]
    if (heads != heads[0]).any():
        raise OtherNamesError(_told(heads))
    everyone = frames[:, NAME_NBYTES + _NUMBER_NBYTES :][:, : said.numel()] if fits else gather(said)
    return everyone.contiguous().view(values.dtype)


@functools.cache
def _head(name: str, nbytes: int) -> torch.Tensor:
    text = name.encode("utf-8", "replace")[:NAME_NBYTES].ljust(NAME_NBYTES)
    return torch.frombuffer(bytearray(text + nbytes.to_bytes(_NUMBER_NBYTES)), dtype=torch.uint8)


def _told(heads: torch.Tensor) -> list[str]:
    """The name that each rank has come with; with the bytes it has sent where all names are the same."""
    rows = [bytes(head.tolist()) for head in heads]
    names = [row[:NAME_NBYTES].decode("utf-8", "replace").strip() for row in rows]
    if len(set(names)) > 1:
        return names
    return [f"{names[0]}, {int.from_bytes(row[NAME_NBYTES:])} bytes," for row in rows]
