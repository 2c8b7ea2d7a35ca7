import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from zerotrain.errors import ConfigError
from zerotrain.models import GPT
from zerotrain.sharding import bucketing
from zerotrain.sharding.units import ManagedParameter, Unit, cut_units, find_units, model_parameters, walk

HUGE = 10**9


def units_of(model: nn.Module, max_numel: int, **traits: Callable[[str], Any]) -> list[Unit[ManagedParameter]]:
    """The units of a model, each trait of a parameter a function of its name."""
    traits = {"dtype": lambda name: torch.float32} | traits
    return [
        replace(
            unit,
            parameters=[
                ManagedParameter(
                    each.parameter,
                    each.names,
                    each.owners,
                    **{name: trait(each.names[0]) for name, trait in traits.items()},
                )
                for each in unit.parameters
            ],
        )
        for unit in cut_units(walk(model), None, max_numel)
    ]


def cut_buckets(model: nn.Module, max_numel: int) -> list[bucketing.BucketSpec]:
    return bucketing.cut_buckets(units_of(model, max_numel), max_numel)


def gpt(vocab_size: int = 64) -> GPT:
    return GPT(vocab_size=vocab_size, max_seq_len=8, num_layers=3, num_heads=2, hidden_size=8)


class Untied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(100, 8)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 100, bias=False)


def names(parameters: list) -> list[str]:
    return [managed.names[0] for managed in parameters]


def test_the_repeated_blocks_are_found_and_nothing_inside_them():
    assert list(find_units(walk(gpt()), None)) == ["blocks.0", "blocks.1", "blocks.2"]


def test_a_sequential_of_like_layers_is_units_and_one_of_unlike_layers_is_not():
    like = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))
    assert list(find_units(walk(like), None)) == ["0", "2"]
    unlike = nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2))
    assert find_units(walk(unlike), None) == {}


def test_patterns_name_units_and_one_that_matches_nothing_is_refused():
    assert list(find_units(walk(gpt()), ["blocks.[02]"])) == ["blocks.0", "blocks.2"]
    for pattern in ("layers.*", "dropout"):
        answer = f"no module with parameters matches '{re.escape(pattern)}'.*wte, wpe, dropout, blocks, ln_f"
        with pytest.raises(ConfigError, match=answer):
            find_units(walk(gpt()), [pattern])


def test_a_small_root_is_one_unit_and_a_large_one_has_a_late_part_behind_the_blocks():
    assert [unit.name for unit in units_of(Untied(), HUGE)] == ["root", "layers.0", "layers.1"]
    resident, _, _, late = units_of(Untied(), max_numel=500)
    assert names(resident.parameters) == ["embed.weight"]
    assert names(late.parameters) == ["norm.weight", "norm.bias", "head.weight"]
    assert [type(module) for module in late.modules] == [nn.LayerNorm, nn.Linear]


def test_a_tied_parameter_is_managed_once_under_both_names_and_lives_in_the_resident_root():
    model = Untied()
    model.head.weight = model.embed.weight
    assert len(model_parameters(model)) == len(list(model.parameters()))
    root = units_of(model, max_numel=500)[0]
    assert root.parameters[0].names == ["embed.weight", "head.weight"]


def test_buckets_hold_every_parameter_once_and_respect_the_limit_where_a_parameter_allows():
    model = gpt()
    for max_numel in (1, 100, 300, 1000, HUGE):
        specs = cut_buckets(model, max_numel)
        held = [name for spec in specs for name in names(spec.parameters)]
        assert sorted(held) == sorted(name for name, _ in model.named_parameters())
        for spec in specs:
            numels = sorted(managed.parameter.numel() for managed in spec.parameters)
            rests = 2 * (max_numel // 16)  # one before it and one behind
            assert sum(numels) <= max(max_numel, numels[-1]) + rests


def test_small_neighbouring_units_share_a_bucket_and_the_root_shares_with_none():
    specs = cut_buckets(gpt(), HUGE)
    assert [[unit.name for unit in spec.units] for spec in specs] == [["root"], ["blocks.0", "blocks.1", "blocks.2"]]


def test_no_unit_lies_inside_another():
    stages = [nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)) for _ in range(3)]
    assert list(find_units(walk(nn.Sequential(*stages)), None)) == ["0", "1", "2"]


class ThereAndBack(nn.Module):
    """Holds its layers in two lists, of which the second has another order and one more; a gate is behind them."""

    def __init__(self) -> None:
        super().__init__()
        self.there = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.turn = nn.Linear(4, 4)
        self.back = nn.ModuleList([self.turn, *reversed(self.there)])
        self.gate = nn.Linear(4, 4)


def test_blocks_in_two_lists_are_units_once_and_what_is_behind_them_all_is_late():
    units = cut_units(walk(ThereAndBack()), None, max_numel=1)
    assert [unit.name for unit in units] == ["root", "there.0", "there.1", "there.2", "back.0", "late root"]
    assert [len(unit.parameters) for unit in units] == [0, 2, 2, 2, 2, 2]
    assert names(units[-1].parameters) == ["gate.weight", "gate.bias"]


def blocks_of(num_layers: int, num_blocks: int) -> nn.Module:
    blocks = [nn.Sequential(*(nn.Linear(512, 512) for _ in range(num_layers))) for _ in range(num_blocks)]
    return nn.Sequential(*blocks)


def test_units_share_a_bucket_of_at_most_an_eighth_of_the_model():
    specs = cut_buckets(blocks_of(2, num_blocks=24), HUGE)
    assert [len(spec.units) for spec in specs] == [3] * 7 + [2, 1]


def test_the_last_unit_is_cut_smaller():
    specs = cut_buckets(blocks_of(4, num_blocks=6), HUGE)
    assert [len(spec.parameters) for spec in specs] == [8] * 5 + [2] * 4


def test_a_rest_too_small_for_a_bucket_goes_with_its_neighbour():
    """As in a block whose matrices are larger than a bucket, and whose norms have a few thousand elements."""

    def sizes(*numels: int) -> list[list[int]]:
        unit = nn.ParameterList(nn.Parameter(torch.empty(numel, device="meta")) for numel in numels)
        specs = cut_buckets(unit, max_numel=2**22)
        return [[managed.parameter.numel() for managed in spec.parameters] for spec in specs]

    big, small = 2**23, 2**12
    assert sizes(big, big, small, small) == [[big], [big, small, small]]
    assert sizes(small, big, small, big) == [[small, big, small], [big]]
    assert sizes(small, small) == [[small, small]]
    worthwhile = bucketing.WORTHWHILE_NUMEL
    assert sizes(big, worthwhile, big) == [[big], [worthwhile], [big]]
    assert sizes(big, worthwhile - 1, big) == [[big, worthwhile - 1], [big]]


def test_trainable_and_frozen_parameters_never_share_a_bucket_and_each_group_is_one_range():
    model = gpt()
    model.blocks[1].requires_grad_(False)
    dimensions = {name: each.ndim for name, each in model.named_parameters()}
    traits = {"group": lambda name: int(dimensions[name] < 2), "generation": lambda name: int("blocks.2" in name)}
    specs = bucketing.cut_buckets(units_of(model, HUGE, **traits), HUGE)
    assert [spec.trainable for spec in specs] == [True, True, False]
    for spec in specs:
        assert {managed.parameter.requires_grad for managed in spec.parameters} == {spec.trainable}
        spans = [managed.span for managed in spec.parameters]
        assert spans == sorted(spans)
    assert {managed.span for managed in specs[1].parameters} == {(0, 0), (0, 1), (1, 0), (1, 1)}


def test_buckets_hold_one_dtype_and_one_of_several_units_lies_where_the_first_of_them_does():
    units = units_of(gpt(), 1000, dtype=lambda name: torch.float32 if "ln_" in name else torch.bfloat16)
    specs = bucketing.cut_buckets(units, max_numel=1000)
    for spec in specs:
        assert {managed.dtype for managed in spec.parameters} == {spec.dtype}
    # The norms of all blocks are reduced when the backward has done the first block, and keep no other bucket waiting.
    assert [spec.name for spec in specs] == [
        "root (bfloat16)",
        "root (float32)",
        "blocks.0 (bfloat16)",
        "blocks.0..blocks.2 (float32)",
        "blocks.1 (bfloat16)",
        "blocks.2 (bfloat16)",
    ]


def test_a_bucket_is_named_by_its_units_or_by_its_parameters_where_it_is_a_part_of_one():
    units = units_of(gpt(), max_numel=10**6)
    assert [each.name for each in bucketing.cut_buckets(units, max_numel=10**6)] == ["root", "blocks.0..blocks.2"]
    in_parts = [each.name for each in bucketing.cut_buckets(units, max_numel=100)]
    assert "blocks.0.attention.qkv_proj.weight" in in_parts
    assert "blocks.0" not in in_parts


CONTAINERS: dict[str, Callable[[list[nn.Module]], nn.Module]] = {
    "list": nn.ModuleList,
    "numbers": lambda children: nn.ModuleDict({str(number): child for number, child in enumerate(children)}),
    "names": lambda children: nn.ModuleDict({f"head_{number}": child for number, child in enumerate(children)}),
    "sequential": lambda children: nn.Sequential(*children),
}


@pytest.mark.parametrize("kind", CONTAINERS)
@pytest.mark.parametrize(
    ("classes", "in_a_list", "in_a_sequential"),
    [("LLL", 3, 3), ("LLN", 3, 0), ("LNLN", 4, 0), ("LDLD", 2, 2), ("LN", 0, 0), ("L", 0, 0), ("LD", 0, 0), ("", 0, 0)],
)
def test_blocks_of_a_list_are_units_if_a_class_comes_twice_and_those_of_a_sequential_if_all_are_of_one(
    classes: str, in_a_list: int, in_a_sequential: int, kind: str
):
    """D has no parameters. A dict with numbers for keys is a list; of one with names a rank may call what it likes."""
    makers = {"L": lambda: nn.Linear(2, 2), "N": lambda: nn.LayerNorm(2), "D": nn.Dropout}
    blocks = CONTAINERS[kind]([makers[letter]() for letter in classes])
    num_units = {"sequential": in_a_sequential, "names": 0}.get(kind, in_a_list)
    assert len(find_units(walk(nn.ModuleDict({"blocks": blocks})), None)) == num_units


def test_integer_parameters_are_left_alone():
    model = nn.Linear(2, 2)
    model.register_parameter("table", nn.Parameter(torch.zeros(3, dtype=torch.int64), requires_grad=False))
    assert names(model_parameters(model)) == ["weight", "bias"]


def test_experts_are_no_units_since_ranks_may_call_different_ones():
    def layer() -> nn.Module:
        return nn.ModuleDict({"experts": nn.ModuleList(nn.Linear(2, 2) for _ in range(4)), "router": nn.Linear(2, 4)})

    assert find_units(walk(layer()), None) == {}
    assert list(find_units(walk(nn.ModuleList([layer(), layer()])), None)) == ["0", "1"]
    deep = nn.ModuleDict({"experts": nn.ModuleList(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)) for _ in range(4))})
    assert find_units(walk(deep), None) == {}
    assert list(find_units(walk(layer()), ["experts.*"])) == [f"experts.{index}" for index in range(4)]
