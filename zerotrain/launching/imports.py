"""How a process of ours imports torch."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def importing() -> Iterator[None]:
    """Without the garbage collector, which looks again and again through all that is being imported and finds nothing:
    0.7 of the 3.4 s that torch and torch._dynamo take. What is there at the end it leaves alone for good."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
