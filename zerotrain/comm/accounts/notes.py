"""Small texts that ranks exchange in the store, apart from the collectives of the training."""

import json
from typing import Any

import torch.distributed as dist

from zerotrain.errors import CommError


class Notes:
    """Notes of one subject, by name. No call waits for another rank, so any thread may make it.

    A note is read whole or not at all; of one that is left again, the newer. Others find it once the store has answered
    another call of who left it, and maybe a moment before.

    Args:
        store: see `Wire.store`.
        subject: of these notes alone, the same on every rank.

    Its methods raise CommError where the store is gone with the rank that kept it.
    """

    def __init__(self, store: dist.Store, subject: str) -> None:
        self._store = dist.PrefixStore(f"zerotrain/{subject}", store)
        self.timeout_s = store.timeout.total_seconds()  # type: ignore[attr-defined]  # as torch has it
        """For how long the ranks wait for each other in their collectives."""

    def leave(self, name: str, said: Any) -> None:
        """Leave a note for all ranks: what JSON can hold."""
        try:
            self._store.set(name, json.dumps(said))
        except RuntimeError as error:
            raise _gone(error) from error

    def read(self, name: str) -> Any:
        """The note of this name; None as long as nobody has left it."""
        try:
            return json.loads(self._store.get(name)) if self._store.check([name]) else None
        except RuntimeError as error:
            raise _gone(error) from error

    def count(self, name: str, added: int = 0) -> int:
        """The sum of what all ranks have added under a name so far, this call included."""
        try:
            return int(self._store.add(name, added))
        except RuntimeError as error:
            raise _gone(error) from error


def _gone(error: RuntimeError) -> CommError:
    said = str(error).split("\n")[0]
    return CommError(f"the store in which the ranks met is gone, with the rank that kept it: {said}")
