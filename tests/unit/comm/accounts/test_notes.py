"""Notes that ranks leave each other in a real store."""

import pytest
import torch.distributed as dist

from zerotrain.comm.ledger import Notes
from zerotrain.errors import CommError


def test_notes_are_read_by_all_and_kept_apart_by_subject_and_a_store_that_is_gone_is_told() -> None:
    kept = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    store = dist.TCPStore("127.0.0.1", kept.port, is_master=False)
    mine, other, apart = Notes(kept, "save/1"), Notes(store, "save/1"), Notes(store, "save/2")
    assert other.read("end") is None
    mine.leave("end", ["a", None, 1.5])
    # torch's store does not answer who leaves something. Who then asks it is answered when it is there, and so is any
    # other from then on (asked at once, another found nothing, twice in a busy run of the suite, 2026-11-22).
    assert mine.read("end") == other.read("end") == ["a", None, 1.5]
    mine.leave("end", [])
    assert mine.read("end") == other.read("end") == []
    assert apart.read("end") is None
    assert (mine.count("done", 1), other.count("done", 1), mine.count("done"), apart.count("done")) == (1, 2, 2, 0)
    assert mine.timeout_s == 300.0
    del kept, mine
    for call in (lambda: other.read("end"), lambda: other.leave("end", 1), lambda: other.count("done", 1)):
        with pytest.raises(CommError, match="the store in which the ranks met is gone, with the rank that kept it: "):
            call()
