"""What a micro-batch of any structure is to a model."""

from collections import UserDict
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch

from zerotrain.data.fetch import as_inputs, labels_of, num_labels, to_device

IDS, LABELS = torch.arange(6).view(2, 3), torch.tensor([[1, 2, -100], [-100, 5, -100]])


class Named(NamedTuple):
    ids: torch.Tensor
    mask: torch.Tensor
    labels: torch.Tensor


@dataclass
class LabelledRow:
    labels: torch.Tensor
    ids: torch.Tensor


@pytest.mark.case("losses", "Items that are dicts, named tuples, single tensors; a batch that is a dataclass")
@pytest.mark.parametrize(
    "batch",
    [
        (IDS, LABELS),
        [IDS, LABELS, IDS],
        {"labels": LABELS, "input_ids": IDS},
        UserDict(input_ids=IDS, labels=LABELS),
        Named(IDS, IDS, LABELS),
        LabelledRow(LABELS, IDS),
    ],
    ids=["pair", "triple", "dict", "mapping", "named tuple", "dataclass"],
)
def test_labels_are_found_in_any_structure_and_stay_there_on_the_way_to_the_device(batch: Any) -> None:
    moved = to_device(batch, torch.device("meta"))
    found = labels_of(moved)
    assert labels_of(batch) is LABELS
    assert num_labels(batch, num_rows=2) == 3
    assert found is not None
    assert found.is_meta
    assert len(as_inputs(moved)) == len(as_inputs(batch))


def test_without_labels_a_micro_batch_weighs_its_rows() -> None:
    assert num_labels(IDS, num_rows=2) == num_labels({"pixels": IDS}, num_rows=2) == 2
    assert as_inputs(IDS) == (IDS,)
    assert as_inputs(LabelledRow(LABELS, IDS)) == {"labels": LABELS, "ids": IDS}
