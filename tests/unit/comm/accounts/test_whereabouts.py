"""A rank that has waited in vain says who is silent, and never waits long for the store that the ranks have met in."""

import threading
from datetime import timedelta

import pytest
import torch.distributed as dist

from zerotrain.comm import whereabouts
from zerotrain.comm.whereabouts import Whereabouts, named

HOSTS = ("n0", "n0", "n1", "n1")
TIMED_OUT = RuntimeError("Timed out waiting 40000ms for recv operation to complete")


@pytest.mark.parametrize(
    ("ranks", "hosts", "said"),
    [
        ([], (), ""),
        ([1], (), "rank 1"),
        ([0, 2], (), "ranks 0, 2"),
        ([2, 3], HOSTS, "n1 (ranks 2, 3)"),
        ([1, 2, 3], HOSTS, "rank 1 on n0, n1 (ranks 2, 3)"),
    ],
)
def test_ranks_are_named_with_their_hosts(ranks: list[int], hosts: tuple[str, ...], said: str) -> None:
    assert named(ranks, hosts) == said


def test_a_store_that_does_not_answer_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its host was cut off: the others waited for it until TCP gave up, a quarter of an hour (2026-11-24)."""
    monkeypatch.setattr(whereabouts, "GRACE_S", 0.1)
    monkeypatch.setattr(whereabouts, "_STORE_S", 0.1)
    over = threading.Event()
    late = threading.Timer(5.0, over.set)  # who waits longer than it may takes it for one that answers
    late.start()

    class Silent(dist.HashStore):
        def set(self, *_: object) -> None:
            over.wait()

    monkeypatch.setattr(whereabouts, "_get_default_store", Silent)
    monkeypatch.setattr(whereabouts.dist, "PrefixStore", lambda _, store: store)
    error = Whereabouts(2, 4, hosts=HOSTS).lost_others(TIMED_OUT, "gather of a", 40.0)
    late.cancel()
    over.set()
    assert (
        "no answer from n0 (ranks 0, 1), rank 3 on n1, which may compute, sleep or be gone; no answer from the"
        in str(error)
    )
    assert error.unheard == (0, 1)  # rank 3 may have spoken, to nobody


def test_ranks_that_have_left_their_words_are_not_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(whereabouts, "GRACE_S", 0.1)
    store = dist.HashStore()
    store.set_timeout(timedelta(seconds=1))
    dist.PrefixStore("zerotrain/failed/", store).set("3", "gather of b")
    monkeypatch.setattr(whereabouts, "_get_default_store", lambda: store)
    error = Whereabouts(2, 4, hosts=HOSTS).lost_others(TIMED_OUT, "gather of a", 40.0)
    assert "rank 3 failed in gather of b; no answer from n0 (ranks 0, 1), which may" in str(error)
    assert "the store" not in str(error)
    assert error.unheard == (0, 1)
