"""A time limit for a call that has none of its own."""

import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


def within(limit_s: float, call: Callable[[], T]) -> T:
    """Make a call in a thread of its own; returns its result, within a time limit.

    Torch's own limits do not serve: a store takes twice its timeout to say that nobody listens, and waits for ever
    where who listens says nothing, or where a cable was pulled; the timeout that a gloo group is made with stays that
    of its sends and receives (torch 2.13), and nothing bounds how NCCL makes a communicator.

    Raises:
        TimeoutError: it has not returned. The thread goes on with it, and ends with the process.
        RuntimeError: of the call itself, or there is no thread.
    """
    returned: list[T] = []
    raised: list[BaseException] = []

    def run() -> None:
        try:
            returned.append(call())
        except BaseException as error:
            raised.append(error)

    thread = threading.Thread(target=run, name="zerotrain within", daemon=True)
    thread.start()
    thread.join(limit_s)
    if raised:
        raise raised.pop()
    if not returned:
        raise TimeoutError(f"no answer within {limit_s:g} s")
    return returned.pop()
