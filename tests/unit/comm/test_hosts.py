"""Ranks of several hosts listen where the others reach them, or say which interface does."""

import json
import os
import socket

import pytest

from zerotrain.comm.hosts import AUTO, RankHost, choose_interface, names_of_hosts
from zerotrain.config.words import words_of_config
from zerotrain.errors import ConfigError
from zerotrain.files.untrusted import UntrustedFileError

GLOO, NCCL = "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the variables, which are as they were afterwards."""
    for name in (GLOO, NCCL):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)


def place(host: int, address: str, **more: str) -> RankHost:
    return RankHost(2, f"machine {host}", f"n{host}", (f"e{host}", address), **more)


TWO = [place(0, "10.78.0.1"), place(1, "10.78.0.2")]


def test_ranks_of_one_host_choose_nothing():
    one = [place(0, "127.0.0.1", fixed="127.0.0.1", fixed_by=f"{GLOO}=lo"), place(0, "127.0.0.1")]
    choose_interface(one, 0, AUTO)
    assert names_of_hosts(one) == ()
    assert GLOO not in os.environ


def test_ranks_of_several_hosts_take_the_interface_of_the_route():
    choose_interface(TWO, 1, AUTO)
    assert (os.environ[GLOO], os.environ[NCCL]) == ("e1", "=e1")
    assert names_of_hosts(TWO) == ("n0", "n1")


@pytest.mark.parametrize(("given", "taken"), [("eth9", ("eth9", "=eth9")), (None, (None, None))])
def test_what_was_given_is_taken_and_null_leaves_the_choice_to_the_backends(given, taken):
    choose_interface(TWO, 1, given)
    assert (os.environ.get(GLOO), os.environ.get(NCCL)) == taken


def test_a_users_own_variable_stays(monkeypatch):
    monkeypatch.setenv(GLOO, "mine")
    choose_interface(TWO, 1, AUTO)
    assert (os.environ[GLOO], os.environ[NCCL]) == ("mine", "=e1")


def test_the_host_of_the_store_which_reaches_itself_by_its_loopback_takes_the_way_to_another():
    """Many machines have their own name on 127.0.1.1."""
    [own] = {name for name, each in _route() if each}
    choose_interface([place(0, "127.0.1.1"), place(1, "192.0.2.1")], 0, AUTO)
    assert os.environ[GLOO] == own


def _route() -> list[tuple[str, str]]:
    route = RankHost.of_this_process(2, "192.0.2.1", "gloo", AUTO).route
    if not route:
        pytest.skip("this machine has no way to any other")
    return [(route[0], route[1])]


@pytest.mark.parametrize(
    ("fixed_by", "remedy"),
    [
        (f"{GLOO}=lo", f"unset {GLOO}"),
        ("World.from_environment(interface='lo')", "use launch.interface=e1"),
        ("World.from_environment(interface=None)", "use launch.interface=e1"),
    ],
)
def test_a_rank_that_would_listen_on_the_loopback_is_refused_on_all(fixed_by, remedy):
    places = [TWO[0], place(1, "10.78.0.2", fixed="127.0.0.1", fixed_by=fixed_by)]
    for rank in (0, 1):
        with pytest.raises(ConfigError) as refusal, words_of_config():
            choose_interface(places, rank, AUTO)
        [line] = refusal.value.problems
        assert "rank 1 on n1 would listen at 127.0.0.1, where no other host reaches it: e1 (10.78.0.2) " in line
        assert line.endswith(f"reaches MASTER_ADDR; {remedy}")
    assert GLOO not in os.environ


def test_an_interface_that_is_not_there_is_refused_with_those_that_are(monkeypatch):
    says = r"launch\.interface=nope: .* has no such network .*; it has .*lo"
    with pytest.raises(ConfigError, match=says) as refusal, words_of_config():
        RankHost.of_this_process(2, "localhost", "gloo", "nope")
    assert refusal.value.problems[0].endswith("use launch.interface=auto, or one of these")
    monkeypatch.setenv(GLOO, "nope")
    with pytest.raises(ConfigError, match=f"^{GLOO}=nope: .*; unset {GLOO}, and the interface that reaches"):
        RankHost.of_this_process(2, "localhost", "gloo", AUTO)


def test_a_place_is_what_was_sent_and_nothing_else_is_one(monkeypatch):
    monkeypatch.setenv(GLOO, "lo")
    here = RankHost.of_this_process(2, "127.0.0.1", "gloo", AUTO)
    assert RankHost.from_json(here.to_json().encode()) == here
    assert (here.fixed, here.route[1], here.name) == ("127.0.0.1", "127.0.0.1", socket.gethostname())
    said = json.loads(here.to_json())
    assert RankHost.from_json(json.dumps(said | {"name": "\x1b[2J"}).encode()).name == "\\x1b[2J"
    for other in ({"size": "2"}, {"route": 1}, {"name": None}):
        with pytest.raises(UntrustedFileError):
            RankHost.from_json(json.dumps(said | other).encode())
