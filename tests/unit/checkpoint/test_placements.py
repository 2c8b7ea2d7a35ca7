"""What one placement saves another loads. All pairs: tests/attack."""

from pathlib import Path

import pytest

from tests.unit.checkpoint.runs import KINDS, assert_loads, same_mean, saved_run

PAIRS = [((0, 3), (3, 2)), ((1, 2), (0, 1)), ((2, 4), (1, 3)), ((3, 1), (2, 4)), ((3, 3), (3, 4)), ((2, 2), (0, 4))]
DIAGONAL = [(kind, *PAIRS[(index + more) % 6]) for index, kind in enumerate(KINDS) for more in (0, 2)]


@pytest.mark.case(
    "checkpoints",
    "saved at a stage on n ranks, loaded at any stage on m, with other buckets; tied, frozen, "
    "transposed, empty and odd parameters, AdamW, momentum, Muon, adapters on a frozen base, "
    "fp32, bf16, fp16",
    "the same state, bit for bit, and one step more is the same",
)
@pytest.mark.parametrize(("kind", "saving", "loading"), DIAGONAL, ids=str)
@pytest.mark.thinned(2)
def test_another_stage_number_of_ranks_and_size_of_buckets_goes_on_as_the_run_that_saved(
    kind: str, saving: tuple[int, int], loading: tuple[int, int], tmp_path: Path
) -> None:
    saved = saved_run(tmp_path / "step", KINDS[kind], *saving)
    after = assert_loads(saved, KINDS[kind], *loading, bucket_mb=0.0015)
    if same_mean(saving[1], loading[1]):
        assert after == saved.after
    else:
        assert after == assert_loads(saved, KINDS[kind], 0, loading[1])
