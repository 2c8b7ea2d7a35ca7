"""How far a backward has come through a unit, as a table of calls and positions."""

import gc

import pytest

from zerotrain.engine.schedule.live_unit import LiveUnit, UnitCall

NOW, EARLIER = 2, 1
"""Numbers of backwards."""


def unit_of(*calls: UnitCall, silent: int = 0, calls_units: bool = False) -> LiveUnit:
    unit = LiveUnit("blocks.1", [], [], calls_units=calls_units, num_silent_calls=silent)
    unit.reached_in = NOW if any(call.reached_in == NOW for call in calls) else None
    for call in calls:
        unit.add_call(call, is_held=False)
    return unit


def reached(first_node: int) -> UnitCall:
    return UnitCall(first_node, reached_in=NOW)


CASES = {
    # name: (calls of the unit, calls without a graph, whether it is passed at nodes 15, 10 and 9)
    "one forward from node 10 on": ([UnitCall(10)], 0, [False, False, True]),
    "one that was reached": ([reached(10)], 0, [False, False, True]),
    "two forwards": ([UnitCall(10), reached(20)], 0, [False, False, True]),
    "and one whose graph an earlier backward has freed": (
        [UnitCall(5, EARLIER, True), reached(10)],
        0,
        [False, False, True],
    ),
    "a forward of a graph kept for another backward": ([UnitCall(3, EARLIER), reached(20)], 0, [False, False, False]),
    "a later forward that is not part of this backward": ([UnitCall(90), reached(10)], 0, [False, False, True]),
    "never called": ([], 0, [True, True, True]),
    "called where its graph is made in the backward": ([], 1, [False, False, False]),
    "and made there": ([reached(10)], 1, [False, False, True]),
}


@pytest.mark.parametrize(("calls", "silent", "expected"), CASES.values(), ids=CASES)
def test_a_unit_is_passed_when_the_backward_is_below_all_nodes_its_forwards_made(calls, silent, expected):
    unit = unit_of(*calls, silent=silent)
    assert [unit.is_passed(position, NOW) for position in (15, 10, 9)] == expected


def test_a_unit_passes_next_if_the_backward_is_in_the_only_forward_that_is_left():
    assert unit_of(reached(10)).passes_next(15, NOW)
    assert unit_of(reached(10), UnitCall(90)).passes_next(15, NOW)
    assert not unit_of(reached(10), UnitCall(4)).passes_next(15, NOW), "a second forward is still to come"
    assert not unit_of(reached(10), calls_units=True).passes_next(15, NOW), "units within it come first"
    assert not unit_of(UnitCall(10)).passes_next(15, NOW), "the backward has not come through it"


def test_a_forward_whose_graph_is_gone_is_forgotten_and_one_that_nobody_holds_is_kept_until_the_update():
    unit, call = unit_of(), UnitCall(3)
    unit.add_call(call, is_held=True)
    assert not unit.is_passed(5, NOW)
    del call  # as with the graph whose hooks held it
    gc.collect()
    assert unit.is_passed(5, NOW)
    unit.add_call(UnitCall(3), is_held=False)
    unit.num_silent_calls = 1
    assert not unit.is_passed(5, NOW)
    unit.forget_calls()
    assert unit.is_passed(5, NOW)
