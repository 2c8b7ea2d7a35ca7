"""What is gathered ahead, what stays full and what is freed, on buckets that only write down what is asked."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
from torch import nn

from tests.unit.engine.parts import alone
from zerotrain.engine.buckets.bucket import Bucket
from zerotrain.engine.buckets.life import Phase, WeightState
from zerotrain.engine.options import EngineOptions
from zerotrain.engine.schedule.gathers import Gathers
from zerotrain.engine.schedule.live_unit import LiveUnit
from zerotrain.settings import EngineConfig, ZeroConfig


class Weights:
    """Writes down what it is told, in one list for all buckets."""

    are_away = False
    gather = refresh = None

    def __init__(self, name: str, told: list[str]) -> None:
        self.spec, self.layout, self.told = SimpleNamespace(name=name), None, told
        self.life, self.home = SimpleNamespace(state=WeightState.SHARD), SimpleNamespace(moves=self.are_away)

    @property
    def is_full(self) -> bool:
        return self.life.state is WeightState.FULL

    def _go(self, start: WeightState, to: WeightState, word: str) -> None:
        if self.life.state is start:
            self.life.state = to
            self.told.append(f"{word} {self.spec.name}")

    def start_gather(self) -> None:
        self._go(WeightState.SHARD, WeightState.GATHERING, "gather")

    def fetch_shard(self) -> None:
        """Where shards lie off the device: nothing here."""

    def finish_gather(self) -> None:
        self._go(WeightState.GATHERING, WeightState.FULL, "wait")

    def reshard(self) -> None:
        self._go(WeightState.FULL, WeightState.SHARD, "free")

    def prepare_gather(self) -> None:
        self.told.append(f"prepare {self.spec.name}")


class FetchedWeights(Weights):
    """Whose shards lie off the device."""

    are_away = True

    def fetch_shard(self) -> None:
        if self.life.state is WeightState.SHARD:
            self.told.append(f"fetch {self.spec.name}")


class Model:
    """A root and three blocks a, b and c with a bucket each, which may share more."""

    def __init__(self, *, shared: dict[str, str] | None = None, kind: type[Weights] = Weights, **zero: Any) -> None:
        self.told: list[str] = []
        self.buckets = {name: Bucket(kind(name, self.told)) for name in ("root", "a", "b", "c")}  # type: ignore[arg-type]
        of_unit = {name: [name] for name in self.buckets}
        for name, units in (shared or {}).items():
            self.buckets[name] = Bucket(Weights(name, self.told))  # type: ignore[arg-type]
            for unit in units:
                of_unit[unit].append(name)
        self.units = {
            name: LiveUnit(name, [] if name == "root" else [nn.Module()], [self.buckets[each] for each in names])
            for name, names in of_unit.items()
        }
        options = EngineOptions.resolve(EngineConfig(ZeroConfig(**({"stage": 3} | zero))), alone())
        self.gathers = Gathers(list(self.units.values()), list(self.buckets.values()), options)

    def says(self) -> str:
        """What was told since the last question."""
        told, self.told[:] = " ".join(self.told), []
        return told

    def forward(self, names: str = "abc", *, backward_follows: bool = True) -> str:
        self.gathers.before_forward(self.units["root"], Phase.FORWARD)
        for name in names:
            self.gathers.before_forward(self.units[name], Phase.FORWARD)
            self.gathers.after_forward(self.units[name], Phase.FORWARD)
        self.gathers.end_forward(backward_follows=backward_follows)
        return self.says()

    def evaluate(self) -> str:
        return self.forward(backward_follows=False)

    def rest(self) -> str:
        self.gathers.rest()
        return self.says()

    def backward(self, names: str = "cba", done: str = "cba") -> str:
        self.gathers.begin_backward()
        for name in names:
            self.gathers.before_backward(self.units[name])
            if name in done:
                self.gathers.gradient_done(self.buckets[name])
        self.gathers.end_backward()
        return self.says()


FORWARD = "gather root gather a wait root gather b wait a free a gather c wait b free b wait c"
FULL = "gather root wait root gather a wait a gather b wait b gather c wait c"
BACKWARD = "gather b free c gather a wait b free b wait a free a free root"
FETCHED = "gather root gather a fetch b wait root gather b fetch c wait a free a gather c wait b free b wait c"
NOT_AHEAD = (
    "gather root fetch a wait root gather a fetch b wait a free a gather b fetch c wait b free b gather c wait c"
)
SAID: dict[str, tuple[dict[str, Any], list[tuple[Callable[[Model], str], str]]]] = {
    # A forward gathers the next unit before it waits, and frees each but the last and the root; a backward finds the
    # last unit full, and gathers each before it is reached.
    "a step": ({}, [(Model.forward, FORWARD), (Model.backward, BACKWARD), (Model.rest, "")]),
    **{
        f"stage {stage}": ({"stage": stage}, [(Model.forward, FULL), (Model.backward, ""), (Model.rest, "")])
        for stage in range(3)
    },
    "behind a forward without a backward all is free": ({}, [(Model.evaluate, FORWARD + " free root free c")]),
    "once a step is over no backward waits for anything": (
        {},
        [
            (Model.forward, FORWARD),
            (Model.rest, "free root free c"),
            (lambda model: (model.gathers.begin_backward(), model.says())[1], ""),
        ],
    ),
    "shards off the device are fetched one unit before they are gathered": (
        {"kind": FetchedWeights, "prefetch": 1},
        [(Model.forward, FETCHED), (Model.backward, BACKWARD.replace("free c", "fetch a free c"))],
    ),
    "so they are where nothing is gathered ahead": (
        {"kind": FetchedWeights, "prefetch": 0},
        [
            (Model.forward, NOT_AHEAD),
            (Model.backward, "fetch b free c gather b fetch a wait b free b gather a wait a free a free root"),
        ],
    ),
    "kept from forward to backward all stay full until the step is over": (
        {"reshard_after_forward": False},
        [
            (Model.forward, "gather root gather a wait root gather b wait a gather c wait b wait c"),
            (Model.backward, ""),
            (Model.rest, "free root free a free b free c"),
        ],
    ),
}


@pytest.mark.parametrize("name", SAID)
def test_what_is_gathered_waited_for_and_freed(name):
    how, calls = SAID[name]
    model = Model(**how)
    for call, said in calls:
        assert call(model) == said


def test_an_evaluation_frees_what_the_backward_then_gathers_again():
    model = Model()
    model.forward()
    model.evaluate()
    assert {bucket.weights.life.state for bucket in model.buckets.values()} == {WeightState.SHARD}
    assert model.backward().startswith("gather root gather c wait root wait c")


def names(buckets: list[Bucket]) -> list[str]:
    return [bucket.spec.name for bucket in buckets]


def test_what_was_gathered_ahead_and_not_used_is_freed_too():
    model = Model()
    model.forward("a", backward_follows=False)
    assert {bucket.weights.life.state for bucket in model.buckets.values()} == {WeightState.SHARD}


def test_a_bucket_of_several_units_is_freed_behind_the_last_of_them_alone():
    model = Model(shared={"x": "ab"})
    assert [names(unit.last_of) for unit in model.units.values()] == [["root"], ["a"], ["b", "x"], ["c"]]
    told = model.forward()
    assert told.count("gather x") == 1
    assert told.index("free x") > told.index("wait b")


def test_a_backward_frees_the_unit_behind_also_where_no_gradient_was_done():
    """Frozen units have none."""
    model = Model()
    model.units["c"].buckets[0].stays_full = False
    model.forward()
    told = model.backward(done="")
    assert told.index("free b") < told.index("wait a")
    assert told.index("free c") < told.index("wait b")


@pytest.mark.parametrize("units", ["cba", "cbaba"])
def test_a_backward_frees_no_bucket_that_the_unit_it_comes_to_shares(units):
    """Also of two forwards, where a later unit comes behind the first."""
    model = Model(shared={"x": "ab"})
    model.forward()
    told = model.backward(units, done="")
    assert told.count("gather x") == 1
    assert told.index("free x") > told.rindex("wait a")


def test_a_backward_frees_no_bucket_that_a_unit_further_on_shares_whichever_units_a_rank_skips():
    """Of blocks a and c, that is, with b frozen between them."""
    told = []
    for names_of_units in ("cba", "ba"):
        model = Model(shared={"x": "ac"})
        for name in "cx":
            model.buckets[name].stays_full = False
        model.forward()
        told.append(model.backward(names_of_units, done=""))
    assert [each.count("gather x") for each in told] == [1, 1]
    assert told[0].index("free x") > told[0].index("wait a")


def test_a_unit_within_whose_forward_others_run_is_not_freed_where_these_are_reached():
    model = Model()
    for name in ("root", "a", "b"):
        model.gathers.before_forward(model.units[name], Phase.FORWARD)
    for name in ("b", "a"):
        model.gathers.after_forward(model.units[name], Phase.FORWARD)
    assert [model.units[name].calls_units for name in "abc"] == [True, False, False]
    model.gathers.end_forward(backward_follows=True)
    model.says()
    model.gathers.begin_backward()
    model.gathers.before_backward(model.units["a"])
    model.gathers.before_backward(model.units["b"])
    assert "free a" not in model.says()


def test_behind_a_unit_within_another_a_bucket_that_the_outer_one_needs_stays_full():
    model = Model(shared={"x": "ab"})
    for name in ("root", "a", "b"):
        model.gathers.before_forward(model.units[name], Phase.FORWARD)
    model.gathers.after_forward(model.units["b"], Phase.FORWARD)
    assert model.buckets["x"].weights.is_full
    model.gathers.after_forward(model.units["a"], Phase.FORWARD)
    model.gathers.end_forward(backward_follows=True)
    assert not model.buckets["x"].weights.is_full


def test_a_recomputation_in_a_backward_gathers_ahead_backwards_and_frees_nothing():
    model = Model()
    model.gathers.before_forward(model.units["b"], Phase.BACKWARD)
    model.gathers.after_forward(model.units["b"], Phase.BACKWARD)
    assert model.says() == "gather b gather a wait b"


@pytest.mark.parametrize(("stage", "gathers"), [(0, False), (1, True), (2, True), (3, False)])
def test_updated_weights_are_gathered_at_once_where_only_the_optimizer_is_sharded(stage, gathers):
    model = Model(stage=stage)
    model.gathers.prepare_updated([model.buckets["a"], model.buckets["b"]])
    model.gathers.gather_updated(model.buckets["a"])
    assert model.says() == ("prepare a prepare b gather a" if gathers else "")
