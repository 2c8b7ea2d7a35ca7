"""Weights with what adapters add to them, under the names that others know."""

from types import SimpleNamespace

import torch

from zerotrain.commands.export_formats import adapters, is_of_adapter, merged, name_of_hugging_face, plain


def saved_of(tensors: dict[str, torch.Tensor]) -> SimpleNamespace:
    """A checkpoint of these."""
    names = {name: (tensor.dtype, list(tensor.shape)) for name, tensor in tensors.items()}
    return SimpleNamespace(names=names, read=lambda name: tensors[name])


def adapted() -> dict[str, torch.Tensor]:
    """Square ones: a matrix that lies the other way round has the same shape."""
    torch.manual_seed(0)
    layer = "model.base_model.model.h.0.default.attn"
    return {
        f"{layer}.base_layer.weight": torch.randn(4, 4).bfloat16(),
        f"{layer}.base_layer.bias": torch.randn(4),
        f"{layer}.lora_A.default.weight": torch.randn(2, 4),
        f"{layer}.lora_B.default.weight": torch.randn(4, 2),
        "model.base_model.model.ids": torch.arange(3),
    }


def test_adapters_are_added_as_the_layer_holds_its_weights() -> None:
    tensors = adapted()
    base, _, down, up, _ = tensors.values()
    for turned in (False, True):
        found = merged(saved_of(tensors), None, {"scaling": 0.5, "fan_in_fan_out": turned})
        assert list(found) == ["h.0.default.attn.weight", "h.0.default.attn.bias", "ids"]
        weight = found["h.0.default.attn.weight"]
        added = 0.5 * (up @ down)
        assert torch.equal(weight.read(), base.float() + (added.t() if turned else added))
        assert weight.dtype == torch.bfloat16
        assert torch.equal(found["h.0.default.attn.bias"].read(), tensors[f"{next(iter(tensors))[:-6]}bias"])


def test_files_of_adapters_hold_them_alone_under_the_names_of_peft() -> None:
    found = adapters(saved_of(adapted()), None)
    layer = "base_model.model.h.0.default.attn"  # a module of this name is no adapter's
    assert list(found) == [f"{layer}.lora_A.weight", f"{layer}.lora_B.weight"]
    assert all(map(is_of_adapter, found))


def test_a_dtype_is_for_numbers_with_a_point_alone() -> None:
    found = plain(saved_of(adapted()), torch.float16, name_of_hugging_face)
    assert found["base_model.model.ids"].dtype == torch.int64
    assert {each.dtype for name, each in found.items() if not name.endswith("ids")} == {torch.float16}
