import re

import pytest
import torch
from torch import nn

from zerotrain.errors import ConfigError
from zerotrain.models import GPT
from zerotrain.sharding.bucketing import cut_buckets, cut_units, find_units, managed_parameters

HUGE = 10**9


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


def test_the_repeated_blocks_are_found_and_nothing_inside_them() -> None:
    assert list(find_units(gpt(), None)) == ["blocks.0", "blocks.1", "blocks.2"]


def test_a_sequential_of_like_layers_is_units_and_one_of_unlike_layers_is_not() -> None:
    like = nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Linear(2, 2))
    assert list(find_units(like, None)) == ["0", "2"]
    unlike = nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2))
    assert find_units(unlike, None) == {}


def test_patterns_name_units_and_one_that_matches_nothing_is_refused() -> None:
    assert list(find_units(gpt(), ["blocks.[02]"])) == ["blocks.0", "blocks.2"]
    for pattern in ("layers.*", "dropout"):
        answer = f"no module with parameters matches '{re.escape(pattern)}'.*wte, wpe, dropout, blocks, ln_f"
        with pytest.raises(ConfigError, match=answer):
            find_units(gpt(), [pattern])


def test_a_small_root_is_one_head_and_a_large_one_has_a_tail_behind_the_blocks() -> None:
    assert [unit.name for unit in cut_units(Untied(), None, HUGE)] == ["head", "layers.0", "layers.1"]
    head, _, _, tail = cut_units(Untied(), None, max_numel=500)
    assert names(head.parameters) == ["embed.weight"]
    assert names(tail.parameters) == ["norm.weight", "norm.bias", "head.weight"]
    assert [type(module) for module in tail.modules] == [nn.LayerNorm, nn.Linear]


def test_a_tied_parameter_is_managed_once_under_both_names_and_lives_in_the_head() -> None:
    model = Untied()
    model.head.weight = model.embed.weight
    assert len(managed_parameters(model)) == len(list(model.parameters()))
    head = cut_units(model, None, max_numel=500)[0]
    assert head.parameters[0].names == ["embed.weight", "head.weight"]


def test_buckets_hold_every_parameter_once_and_respect_the_limit_where_a_parameter_allows() -> None:
    model = gpt()
    for max_numel in (1, 100, 300, 1000, HUGE):
        specs = cut_buckets(cut_units(model, None, max_numel), max_numel)
        held = [name for spec in specs for name in names(spec.parameters)]
        assert sorted(held) == sorted(name for name, _ in model.named_parameters())
        for spec in specs:
            numel = sum(managed.parameter.numel() for managed in spec.parameters)
            assert numel <= max_numel or len(spec.parameters) == 1


def test_small_neighbouring_units_share_a_bucket_and_the_head_shares_with_none() -> None:
    specs = cut_buckets(cut_units(gpt(), None, HUGE), HUGE)
    assert [[unit.name for unit in spec.units] for spec in specs] == [["head"], ["blocks.0", "blocks.1", "blocks.2"]]


def test_no_unit_lies_inside_another() -> None:
    stages = [nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)) for _ in range(3)]
    assert list(find_units(nn.Sequential(*stages), None)) == ["0", "1", "2"]


def blocks_of(num_layers: int, num_blocks: int) -> nn.Module:
    blocks = [nn.Sequential(*(nn.Linear(512, 512) for _ in range(num_layers))) for _ in range(num_blocks)]
    return nn.Sequential(*blocks)


def test_units_share_a_bucket_of_at_most_an_eighth_of_the_model() -> None:
    specs = cut_buckets(cut_units(blocks_of(2, num_blocks=24), None, HUGE), HUGE)
    assert [len(spec.units) for spec in specs] == [3] * 7 + [2, 1]


def test_the_last_unit_is_cut_smaller() -> None:
    specs = cut_buckets(cut_units(blocks_of(4, num_blocks=6), None, HUGE), HUGE)
    assert [len(spec.parameters) for spec in specs] == [8] * 5 + [2] * 4


def test_trainable_and_frozen_parameters_never_share_a_bucket_and_each_group_is_one_range() -> None:
    model = gpt()
    model.blocks[1].requires_grad_(False)
    units = cut_units(model, None, HUGE)
    for managed in (managed for unit in units for managed in unit.parameters):
        managed.group = int(managed.parameter.ndim < 2)
        managed.born = int(managed.names[0].startswith("blocks.2"))
    specs = cut_buckets(units, HUGE)
    assert [spec.trainable for spec in specs] == [True, True, False]
    for spec in specs:
        assert {managed.parameter.requires_grad for managed in spec.parameters} == {spec.trainable}
        spans = [managed.span for managed in spec.parameters]
        assert spans == sorted(spans)
    assert {managed.span for managed in specs[1].parameters} == {(0, 0), (0, 1), (1, 0), (1, 1)}


def test_buckets_hold_one_dtype_and_one_of_several_units_lies_where_the_first_of_them_does() -> None:
    units = cut_units(gpt(), None, max_numel=1000)
    for unit in units:
        for managed in unit.parameters:
            managed.dtype = torch.float32 if "ln_" in managed.names[0] else torch.bfloat16
    specs = cut_buckets(units, max_numel=1000)
    for spec in specs:
        assert {managed.dtype for managed in spec.parameters} == {spec.dtype}
    # The norms of all blocks are reduced when the backward has done the first block, and keep no other bucket waiting.
    assert [spec.name for spec in specs] == [
        "head (bfloat16)",
        "head (float32)",
        "blocks.0 (bfloat16)",
        "blocks.0..blocks.2 (float32)",
        "blocks.1 (bfloat16)",
        "blocks.2 (bfloat16)",
    ]


def test_a_bucket_belongs_to_the_units_that_have_parameters_in_it_alone() -> None:
    model = gpt()
    model.blocks[1].requires_grad_(False)
    *_, frozen = cut_buckets(cut_units(model, None, HUGE), HUGE)
    assert [unit.name for unit in frozen.units] == ["blocks.1"]


def test_a_bucket_is_named_by_its_units_or_by_its_parameters_where_it_is_a_part_of_one() -> None:
    units = cut_units(gpt(), None, max_numel=10**6)
    assert [spec.name for spec in cut_buckets(units, max_numel=10**6)] == ["head", "blocks.0..blocks.2"]
    in_parts = [spec.name for spec in cut_buckets(units, max_numel=100)]
    assert "blocks.0.attention.qkv_proj.weight" in in_parts
    assert "blocks.0" not in in_parts


def test_integer_parameters_are_left_alone() -> None:
    model = nn.Linear(2, 2)
    model.register_parameter("table", nn.Parameter(torch.zeros(3, dtype=torch.int64), requires_grad=False))
    assert names(managed_parameters(model)) == ["weight", "bias"]
