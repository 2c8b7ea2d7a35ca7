"""One CPU thread, as each rank has: the bits of a matrix product depend on the number of threads. And no network."""

import fcntl
import functools
import gc
import importlib
import os
import pickle
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

gc.disable()  # until all tests are collected: in vain it would look through torch and 3,000 tests again and again

import pytest  # noqa: E402
import torch  # noqa: E402

from tests.zygote.client import SOCKET, STAND_INS, Server, Zygote  # noqa: E402
from tests.zygote.rank_server import fork_rank_server  # noqa: E402
from tests.zygote.server import take_large_pages  # noqa: E402

torch.set_num_threads(1)
os.environ["HF_HUB_OFFLINE"] = "1"  # read when its packages are imported; the ranks of a test inherit it


def pytest_collection_finish() -> None:
    gc.freeze()  # nor does a test's own collection look there
    if "PYTEST_XDIST_WORKER" in os.environ:
        take_large_pages()
    fork_rank_server()
    gc.enable()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--slow", action="store_true", help="run the tests that are marked as slow too")
    parser.addoption(
        "--all-rows", action="store_true", help="likewise, and each row of a test that is marked as thinned"
    )


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what is slow, and of a thinned test the rows that are not its turn: a diagonal of the product stays, so
    each value of each parameter is still there. Nothing that is named on the command line is left out. Tests that wait
    for long begin: at the end nothing would run beside them."""
    with_all_rows, named = config.getoption("--all-rows"), any("::" in each for each in config.args)
    with_slow = with_all_rows or config.getoption("--slow")

    def is_run(item: pytest.Item) -> bool:
        return (with_all_rows or is_its_turn(item)) and (with_slow or item.get_closest_marker("slow") is None)

    if not named:
        config.hook.pytest_deselected(items=[item for item in items if not is_run(item)])
        items[:] = [item for item in items if is_run(item)]
    items.sort(key=lambda item: item.get_closest_marker("waits") is None)


def is_its_turn(item: pytest.Item) -> bool:
    mark = item.get_closest_marker("thinned")
    if mark is None or not isinstance(item, pytest.Function):
        return True
    number, place = max(item.callspec.indices.values()), 0
    for each in reversed(list(item.iter_markers("parametrize"))):  # the last one varies fastest
        number, index = divmod(number, len(each.args[1]))
        place += index
    return place % mark.args[0] == mark.kwargs.get("first", 0)


def pytest_runtest_setup(item: pytest.Item) -> None:
    torch.set_num_threads(1)  # whatever the test before it has left
    if item.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("needs a CUDA GPU")


@pytest.fixture(scope="session")
def all_rows(pytestconfig: pytest.Config) -> bool:
    """Whether a test that goes through many cases by itself leaves none out."""
    return bool(pytestconfig.getoption("--all-rows"))


@pytest.fixture(scope="session")
def once(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, Callable[[], Any]], Any]:
    """`once(name, make)` is `make()`, called by the first worker of pytest-xdist that asks, pickled for the others."""
    folder = tmp_path_factory.getbasetemp()
    folder = folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder

    def value(name: str, make: Callable[[], Any]) -> Any:
        path = folder / f"{name}.pickle"
        with (folder / f"{name}.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not path.exists():
                path.write_bytes(pickle.dumps(make()))
            return pickle.loads(path.read_bytes())

    return value


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_setupnodes(config: pytest.Config, specs: list[Any]) -> None:
    """Fork the workers too, from one server for all of them."""
    server = Server(Path(tempfile.mkdtemp(prefix="zerotrain_server_")))
    config.add_cleanup(lambda: shutil.rmtree(server.folder))
    config.add_cleanup(server.close)
    server.wait_until_ready()
    os.environ[STAND_INS] = str(server.folder / SOCKET)
    for spec in specs:
        spec.python = str(server.folder / "python")


@pytest.fixture(scope="session")
def zygote(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Zygote]:
    """The process that commands are forked from where a test is not about their start."""
    folder, own = tmp_path_factory.mktemp("zygote"), None
    if STAND_INS not in os.environ:
        own = Server(folder)
        own.wait_until_ready()
    zygote = Zygote(Path(os.environ[STAND_INS]).parent if own is None else folder, folder)
    yield zygote
    zygote.close()
    if own is not None:
        own.close()


@pytest.fixture
def evaluates_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """An evaluation on one rank computes in this process, and starts none; on more it is as ever."""
    from zerotrain.launching import spawn
    from zerotrain.launching.job import num_threads_per_rank
    from zerotrain.saved import evaluating

    start = spawn.run_ranks

    def run_ranks(attempts: Any, num_ranks: int) -> int:
        if num_ranks > 1:
            return start(attempts, num_ranks)
        job = attempts.job
        torch.set_num_threads(num_threads_per_rank(job.config, 1))
        evaluating.run(job.config, job.run_dir, **job.evaluates)
        return 0

    monkeypatch.setattr(spawn, "run_ranks", run_ranks)


@pytest.fixture(scope="session")
def launch(zygote: Zygote) -> Callable[..., Any]:
    """`commands.by_hand`, where a test is not about the start."""
    return functools.partial(importlib.import_module("commands").by_hand, zygote=zygote)


@pytest.fixture(scope="session")
def torchrun(zygote: Zygote) -> Callable[..., Any]:
    """`commands.by_torchrun`, where a test is not about the start."""
    return functools.partial(importlib.import_module("commands").by_torchrun, zygote=zygote)
