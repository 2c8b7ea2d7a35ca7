"""Every pair (stage a, n ranks) to (stage b, m ranks), 1536 in all: what one saves the other holds, bit for bit, and
one step more is the same. On threads as ranks. Without --all-rows a tenth of them."""

import itertools
from pathlib import Path

import pytest

from tests.unit.checkpoint.runs import KINDS, assert_loads, same_mean, saved_run

PLACEMENTS = list(itertools.product(range(4), range(1, 5)))
AFTER: dict[tuple[str, bool, bool], str] = {}
"""By the kind, and whether three ranks saved and load: what all come to with one step more."""


@pytest.mark.case(
    "checkpoints",
    "saved at a stage on n ranks, loaded at any stage on m, with other buckets; tied, frozen, "
    "transposed, empty and odd parameters, AdamW, momentum, Muon, adapters on a frozen base, "
    "fp32, bf16, fp16",
)
@pytest.mark.parametrize(("stage", "size"), PLACEMENTS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.thinned(5)
def test_what_is_saved_at_a_placement_loads_at_every_placement(
    kind: str, stage: int, size: int, all_rows: bool, tmp_path: Path
) -> None:
    saved = saved_run(tmp_path / "step", KINDS[kind], stage, size)
    # Every second one, as the squares of a chessboard: each stage and each number of ranks is among them.
    for other_stage, other_size in [each for each in PLACEMENTS if all_rows or not sum((*each, stage, size)) % 2]:
        after = assert_loads(saved, KINDS[kind], other_stage, other_size, bucket_mb=0.0015)
        expected = saved.after if same_mean(size, other_size) else after
        assert after == expected
        assert after == AFTER.setdefault((kind, size == 3, other_size == 3), after)
