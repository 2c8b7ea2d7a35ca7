"""Whether the files of a checkpoint are what was written."""

import os
from collections.abc import Collection
from pathlib import Path

from zerotrain.checkpoint.blocks import BLOCK_NBYTES
from zerotrain.checkpoint.manifest import Manifest, dtype_of, pieces_of, read_manifest
from zerotrain.checkpoint.reading import Reader
from zerotrain.errors import CheckpointError

MAX_PROBLEMS_SHOWN = 10


def verify(path: str | os.PathLike[str]) -> Manifest:
    """Read a checkpoint whole and compare every block with its hash. One process, no other rank.

    Returns:
        Its manifest.

    Raises:
        CheckpointError: it is not what was written; a line for each file or block, which names file and tensors.
    """
    folder = Path(path)
    manifest = read_manifest(folder)
    if problems := problems_in(folder, manifest):
        raise CheckpointError("\n".join(problems))
    return manifest


def problems_in(
    folder: Path, manifest: Manifest, part: int = 0, num_parts: int = 1, roles: Collection[str] | None = None
) -> list[str]:
    """The problems of the files, at most `MAX_PROBLEMS_SHOWN` lines.

    Args:
        part, num_parts: of all blocks look only at this share.
        roles: look only at blocks in which tensors of these lie, such as weight; None: at all.
    """
    problems: list[str] = []
    blocks = [(file, index) for file, each in enumerate(manifest.files) for index in range(len(each["hashes"]))]
    if roles is not None:
        blocks = _blocks_of(manifest, roles)
    mine = blocks[len(blocks) * part // num_parts : len(blocks) * (part + 1) // num_parts]
    broken: set[int] = set()
    with Reader(folder, manifest) as reader:
        for file in range(len(manifest.files)):
            try:
                reader.check_file(file)
            except CheckpointError as error:
                problems.append(str(error))
                broken.add(file)
        for file, index in mine:
            if file in broken:
                continue
            try:
                reader.check_block(file, index)
            except CheckpointError as error:
                problems.append(str(error))
                if len(problems) >= MAX_PROBLEMS_SHOWN:
                    break
    return problems


def _blocks_of(manifest: Manifest, roles: Collection[str]) -> list[tuple[int, int]]:
    found: set[tuple[int, int]] = set()
    for _, role, tensor in manifest.tensors():
        for piece in pieces_of(tensor) if role in roles else ():
            end = piece.byte + (piece.stop - piece.start) * dtype_of(tensor).itemsize
            found.update((piece.file, index) for index in range(piece.byte // BLOCK_NBYTES, -(-end // BLOCK_NBYTES)))
    return sorted(found)
