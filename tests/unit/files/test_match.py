"""The one match of stored tensors with a model's: what fits, and the sentences about what does not."""

import pytest
import torch

from zerotrain.files.match import ModelTensor, StoredTensor, any_kind, kind_of, match, model_tensors


def stored(*names: str, shape: tuple[int, ...] = (2,), dtype: torch.dtype | None = torch.float32) -> StoredTensor:
    return StoredTensor(names, str(dtype), dtype, shape)


def test_all_that_misfits_is_told_in_one_set_of_sentences() -> None:
    own = {
        "w": torch.zeros(2),
        "table": torch.zeros(3, dtype=torch.int64),
        "bias": torch.zeros(2),
        "one": torch.ones(()),
    }
    tensors = [stored("w", dtype=torch.bfloat16), stored("table", shape=(4,)), stored("bais"), stored("head")]
    found = match([*tensors, stored("one", shape=(), dtype=torch.int32)], model_tensors(own.items()))
    assert found.problems("; or give strict=False") == [
        "it lacks bias (is it bais?); or give strict=False",
        "the model has no bais (is it bias?), head; or give strict=False",
        "table is of shape (4,) in it, and of shape (3,) in the model",
        "one is torch.int32 in it, and float32 in the model",
    ]


def test_any_name_of_a_tied_tensor_is_enough_and_the_last_of_several_is_taken() -> None:
    tied = torch.zeros(2)
    [target] = model_tensors([("first", tied), ("second", tied), ("first", tied)])
    assert target.names == ["first", "second"]
    tensors = [stored("second"), stored("elsewhere", "first")]
    assert match(tensors, [target]).problems() == []
    assert [name for name, _ in target.stored] == ["first", "second"]


@pytest.mark.parametrize(("kind", "fits"), [(kind_of, True), (str, False), (any_kind, True)])
def test_a_dtype_fits_by_its_kind_or_exactly_or_always(kind, fits: bool) -> None:
    assert (
        not match([stored("w", dtype=torch.bfloat16)], [ModelTensor(["w"], torch.zeros(2))], kind=kind).problems()
    ) is fits
    eight_bits = stored("w", dtype=torch.float8_e4m3fn)
    assert (not match([eight_bits], [ModelTensor(["w"], torch.zeros(2))], kind=kind).problems()) is (kind is any_kind)


def test_what_a_module_keeps_beside_its_tensors_fits_by_its_name_and_an_empty_tensor_by_its_shape() -> None:
    own = [ModelTensor(["_extra_state"], "kept"), ModelTensor(["none"], torch.zeros(0))]
    assert (
        match([stored("_extra_state", shape=(), dtype=None), stored("none", shape=(0,), dtype=None)], own).problems()
        == []
    )


def test_of_many_tensors_of_other_shapes_ten_are_named() -> None:
    own = {f"w{number}": torch.zeros(3) for number in range(12)}
    [*lines, more] = match([stored(name) for name in own], model_tensors(own.items())).problems()
    assert len(lines) == 10
    assert more == "and 2 more are of other shapes"
