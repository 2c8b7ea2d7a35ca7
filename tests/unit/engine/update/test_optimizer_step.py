"""The order in which buckets are updated, on parts that only write down what is asked."""

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import torch

from zerotrain.engine.optimizer_step import update_all


class Written:
    """Buckets whose updates pause so many times, and what gathers them.

    Args:
        fetches: whether to write down too when a bucket is asked to bring in what lies off the device.
    """

    def __init__(self, pauses: dict[str, int], fetches: bool) -> None:
        self.fetches = fetches
        self.told: list[str] = []
        self.buckets: list[Any] = [self.bucket(name, number) for name, number in pauses.items()]

    def bucket(self, name: str, number: int) -> Any:
        def run(factor: torch.Tensor | None, average_share: float | None) -> Iterator[None]:
            self.told.append(f"update {name}")
            for _ in range(number):
                yield
                self.told.append(f"resume {name}")

        def fetch() -> None:
            if self.fetches and f"fetch {name}" not in self.told:  # again is nothing
                self.told.append(f"fetch {name}")

        gradient = SimpleNamespace(drop=lambda: self.told.append(f"drop {name}"))
        update = SimpleNamespace(run=run, fetch=fetch, is_away=self.fetches)
        return SimpleNamespace(name=name, update=update, gradient=gradient)

    def prepare_updated(self, buckets: Any) -> None:
        self.told.append("prepare " + "".join(bucket.name for bucket in buckets))

    def gather_updated(self, bucket: Any) -> None:
        self.told.append(f"gather {bucket.name}")


def told(fetches: bool = False, **pauses: int) -> str:
    written = Written(pauses, fetches)
    update_all(written.buckets, written, None)  # type: ignore[arg-type]
    return ", ".join(written.told)


def test_all_are_prepared_for_then_each_is_updated_gathered_and_its_gradient_dropped() -> None:
    assert told(a=0, b=0) == "prepare ab, update a, gather a, drop a, update b, gather b, drop b"


def test_while_one_has_something_on_the_wire_the_next_goes_on_and_sends_first() -> None:
    assert told(a=1, b=1) == "prepare ab, update a, drop a, update b, resume a, gather a, drop b, resume b, gather b"


def test_what_is_still_travelling_behind_the_last_is_waited_for() -> None:
    assert told(a=3) == "prepare a, update a, drop a, resume a, resume a, resume a, gather a"


def test_what_the_next_needs_is_being_fetched_while_one_is_updated() -> None:
    done = "prepare abc, fetch a, fetch b, update a, gather a, drop a, fetch c, update b, gather b, drop b, "
    assert told(fetches=True, a=0, b=0, c=0) == done + "update c, gather c, drop c"
