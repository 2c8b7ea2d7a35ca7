"""Weights to start from out of what torch itself writes: files of torch.save, and folders of its DCP."""

import argparse
import collections
import json
import os
import pickle
import re
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from tests.ranks.fake_wire import run_threads
from tests.ranks.processes import run_ranks
from tests.unit.checkpoint.runs import Kind, Matrices, build
from tests.unit.engine.parts import alone
from tests.unit.engine.state.weight_files import (
    HARD,
    MODELS,
    Tensors,
    assert_holds,
    assert_loaded_whole,
    assert_refused_alike,
    load_at_some_places,
    nbytes_read,
    plain,
    saved,
    tensors_of,
)
from zerotrain.checkpoint import tensor_file
from zerotrain.checkpoint.others.weights import find_weights
from zerotrain.comm.world import World
from zerotrain.errors import CheckpointError

MATRICES = Kind(Matrices)


def save_shards(folder: str, tensors: Tensors) -> None:
    """As FSDP2 with tensor parallelism: each tensor cut in its first, its second or both dimensions, or in none."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "tensor"))
    state = {}
    for number, (name, value) in enumerate(tensors.items()):
        across = Shard(1) if value.dim() > 1 and number % 2 else Replicate()
        along = Shard(0) if value.dim() > 0 and number % 3 else Replicate()
        state[name] = distribute_tensor(value, mesh, [along, across])
    dcp.save({"model": state}, checkpoint_id=folder)


def in_shards(tensors: Tensors, path: Path) -> Path:
    run_ranks(save_shards, 4, str(path), tensors)
    return path


def in_one_piece(tensors: Tensors, path: Path) -> Path:
    dcp.save(dict(tensors), checkpoint_id=path, no_dist=True)
    return path


def in_a_file(tensors: Tensors, path: Path) -> Path:
    torch.save(tensors, path)
    return path


WRITERS = {"torch.save": in_a_file, "DCP of one process": in_one_piece, "DCP of four ranks": in_shards}


@pytest.mark.case(
    "checkpoints",
    "a file of `torch.save`, a folder of DCP of one process or of four, cut in rows, columns or both",
    "the same",
    under="weights out of a safetensors file",
)
@pytest.mark.filterwarnings("ignore:.*single process:UserWarning")
@pytest.mark.parametrize("writer", WRITERS)
@pytest.mark.parametrize("name", MODELS)
@pytest.mark.thinned(2)
def test_it_is_loaded_at_any_placement_as_plain_pytorch_loads_it(name: str, writer: str, tmp_path: Path) -> None:
    state = tensors_of(plain(MODELS[name], 7))
    path, number = WRITERS[writer](state, tmp_path / "weights"), list(MODELS).index(name) + list(WRITERS).index(writer)
    said = load_at_some_places(path, MODELS[name], state, number)
    assert said[0].startswith(f"{len(state)} tensors loaded from {path}")


@pytest.mark.case(
    "checkpoints",
    "a file of `torch.save`, a folder of DCP of one process or of four, cut in rows, columns or both",
    under="weights out of a safetensors file",
)
@pytest.mark.parametrize("num_elements", [1, 50])
def test_pieces_that_have_a_part_of_each_row_are_read_some_rows_at_a_time(
    num_elements: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tensor_file, "CHUNK_NUMEL", num_elements)
    state = tensors_of(plain(MATRICES, 7))
    path = in_shards(state, tmp_path / "weights")
    assert_loaded_whole(path, MATRICES, state)


def save_dtensor(path: str) -> None:
    mesh = init_device_mesh("cpu", (2,))
    state = {"output.bias": distribute_tensor(torch.ones(37), mesh, [Shard(0)])}
    if mesh.get_rank() == 0:
        torch.save(state, path)
    torch.distributed.barrier()


@pytest.mark.case(
    "checkpoints", "views with gaps, sparse tensors, the DTensor of one rank", under="weights out of a safetensors file"
)
def test_the_shard_of_a_rank_that_torch_save_has_written_is_told(tmp_path: Path) -> None:
    run_ranks(save_dtensor, 2, str(tmp_path / "weights.pt"))
    engine = build(alone(), MATRICES, 2)
    loaded = engine.load_weights(tmp_path / "weights.pt", strict=False)
    assert loaded.wrong_dtype == ("output.bias is a DTensor in it, and float32 in the model",)


def turned(value: torch.Tensor) -> torch.Tensor:
    """The same numbers, in memory in the opposite order of dimensions."""
    dims = tuple(range(value.dim()))[::-1]
    return value.permute(dims).contiguous().permute(dims)


@pytest.mark.case(
    "checkpoints",
    "that share one memory in the file, or lie there in another order",
    under="weights out of a safetensors file",
)
@pytest.mark.filterwarnings("ignore:.*single process:UserWarning")
@pytest.mark.parametrize("writer", list(WRITERS)[:2])
def test_the_order_in_which_elements_lie_in_memory_may_be_any(writer: str, tmp_path: Path) -> None:
    state = {name: turned(value) for name, value in tensors_of(plain(HARD, 7)).items()}
    path = WRITERS[writer](state, tmp_path / "weights")
    assert_loaded_whole(path, HARD, state)


@pytest.mark.case(
    "checkpoints",
    "that share one memory in the file, or lie there in another order",
    "the same",
    under="weights out of a safetensors file",
)
def test_tensors_of_a_file_that_share_one_memory_are_told_apart(tmp_path: Path) -> None:
    tensors = tensors_of(plain(MATRICES, 7))
    flat = torch.cat([value.reshape(-1) for value in tensors.values()])
    parts = flat.split([value.numel() for value in tensors.values()])
    state = {name: part.view(tensors[name].shape) for name, part in zip(tensors, parts, strict=True)}
    path = in_a_file(state, tmp_path / "weights.pt")
    assert path.stat().st_size < 1.5 * flat.nbytes  # one memory in the file too
    engine = build(alone(), MATRICES, 2, seed=1)
    engine.load_weights(path)
    assert_holds(engine, MATRICES, tensors)


def optimizer_state(tensors: Tensors) -> dict[str, Any]:
    model = plain(MATRICES, 7)
    model.load_state_dict(tensors)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.arange(9)).backward()
    optimizer.step()
    return optimizer.state_dict()


FORMS: dict[str, tuple[Callable[[Tensors], dict[str, Any]], str]] = {
    "alone": (lambda state: state, ""),
    "an ordered dict": (collections.OrderedDict, ""),
    "a dict of parameters": (lambda state: {name: torch.nn.Parameter(value) for name, value in state.items()}, ""),
    "beside other things": (
        lambda state: {"model": state, "optimizer": optimizer_state(state), "epoch": 3, "lr": 0.1, "name": "tiny"},
        "; its 'model' was read, and nothing of optimizer",
    ),
    "as of Lightning": (
        lambda state: {"state_dict": {f"net.{name}": value for name, value in state.items()}, "epoch": 3},
        "; its 'state_dict' was read; 'net.', with which all names in it begin, was left out",
    ),
    "beside a tensor": (
        lambda state: {"rng": torch.get_rng_state(), "weights": state},
        "; its 'weights' was read, and nothing of rng",
    ),
    "deeper": (
        lambda state: {"app": {"model": state, "optim": optimizer_state(state)}},
        "; its 'app.model' was read, and nothing of app.optim",
    ),
    "compiled": (
        lambda state: {f"_orig_mod.{name}": value for name, value in state.items()},
        "; '_orig_mod.', with which all names in it begin, was left out",
    ),
}


@pytest.mark.case(
    "checkpoints",
    "beside an optimizer, an epoch, random numbers, or deeper",
    "loaded, with a line that says so; a file with two models is refused",
    under="weights out of a safetensors file",
)
@pytest.mark.filterwarnings("ignore:.*single process:UserWarning")
@pytest.mark.parametrize("writer", list(WRITERS)[:2])
@pytest.mark.parametrize("form", FORMS)
def test_weights_lie_beside_other_things_as_users_save_them(form: str, writer: str, tmp_path: Path) -> None:
    tensors = tensors_of(plain(MATRICES, 7))
    make, said = FORMS[form]
    path = WRITERS[writer](make(tensors), tmp_path / "weights")

    def on_a_rank(world: World) -> None:
        engine = build(world, MATRICES, 3, seed=1)
        assert engine.load_weights(path).told() == [f"{len(tensors)} tensors loaded from {path}{said}"]
        assert_holds(engine, MATRICES, tensors)

    run_threads(on_a_rank, 2)


@pytest.mark.case(
    "checkpoints",
    "a folder of Hugging Face in one file or several, a checkpoint, a run",
    under="weights out of a safetensors file",
)
def test_a_folder_of_hugging_face_may_have_the_files_of_torch(tmp_path: Path) -> None:
    tensors = tensors_of(plain(MATRICES, 7))
    names = list(tensors)
    files = {"pytorch_model-00001-of-00002.bin": names[:3], "pytorch_model-00002-of-00002.bin": names[3:]}
    places = {name: file for file, part in files.items() for name in part}
    (tmp_path / "pytorch_model.bin.index.json").write_text(json.dumps({"weight_map": places}))
    for file, part in files.items():
        torch.save({name: tensors[name] for name in part}, tmp_path / file)
    engine = build(alone(), MATRICES, 2, seed=1)
    engine.load_weights(tmp_path)
    assert_holds(engine, MATRICES, tensors)


def test_a_header_of_640_bytes_is_no_pickle(tmp_path: Path) -> None:
    """Its length begins as pickles do."""
    name = "w" * (640 - len('{"":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}'))
    path = saved({name: torch.ones(1)}, tmp_path / "weights.safetensors")
    assert path.read_bytes()[:2] == b"\x80\x02"
    weights = find_weights(path)
    weights.close()
    assert [tensor.names for tensor in weights.tensors] == [[name]]


@pytest.mark.case(
    "checkpoints",
    "views with gaps, sparse tensors, the DTensor of one rank",
    "likewise",
    under="weights out of a safetensors file",
)
def test_kinds_of_tensors_that_cannot_be_read_are_told_with_the_rest(tmp_path: Path) -> None:
    tensors = tensors_of(plain(MATRICES, 7))
    odd = {
        "blocks.0.weight": torch.zeros(24, 30)[:, :24],
        "blocks.0.bias": torch.zeros(1).expand(24),
        "output.bias": torch.empty(37, device="meta"),
    }
    if torch.__version__ < "2.14":  # torch 2.15 looks into it as it opens the file, which is then refused whole
        odd["blocks.1.weight"] = torch.eye(24).to_sparse()
    path = in_a_file(tensors | odd, tmp_path / "weights.pt")
    engine = build(alone(), MATRICES, 2, seed=1)
    with pytest.raises(CheckpointError) as error:
        engine.load_weights(path)
    said = [line.partition("engine: ")[2] for line in str(error.value).splitlines()]
    assert sorted(line.split()[0] for line in said) == sorted(odd)
    assert {line.partition(" ")[2] for line in said} == {
        "is a view, sparse or the like in it, and float32 in the model"
    }
    loaded = engine.load_weights(path, strict=False)
    assert loaded.num_loaded == len(tensors) - len(odd)


@pytest.mark.case(
    "checkpoints", "beside an optimizer, an epoch, random numbers, or deeper", under="weights out of a safetensors file"
)
def test_two_parts_that_hold_the_model_are_refused_by_name(tmp_path: Path) -> None:
    tensors = tensors_of(plain(MATRICES, 7))
    path = in_a_file({"model": tensors, "ema": tensors, "step": 4}, tmp_path / "weights.pt")
    engine = build(alone(), MATRICES, 2, seed=1)
    with pytest.raises(CheckpointError, match="the names of the model several times, in model, ema: give a file that"):
        engine.load_weights(path, strict=False)


class RunsCode:
    """What an attacker pickles."""

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (os.environ["ZEROTRAIN_TEST_TRACE"],)


def changed(path: Path, change: Callable[[bytes], bytes]) -> Path:
    path.write_bytes(change(path.read_bytes()))
    return path


def zipped_again(path: Path) -> Path:
    """The same archive as another tool packs it."""
    again = path.with_suffix(".zip")
    with zipfile.ZipFile(path) as old, zipfile.ZipFile(again, "w", zipfile.ZIP_DEFLATED) as new:
        for each in old.infolist():
            new.writestr(each.filename, old.read(each))
    return again


def other_order(path: Path) -> Path:
    again = path.with_suffix(".big")
    with zipfile.ZipFile(path) as old, zipfile.ZipFile(again, "w") as new:
        for each in old.infolist():
            new.writestr(each.filename, b"big" if each.filename.endswith("/byteorder") else old.read(each))
    return again


def scripted(path: Path) -> Path:
    torch.jit.script(torch.nn.Linear(2, 2)).save(str(path))
    return path


def file_of(value: Any, **how: Any) -> Callable[[Path], Path]:
    def write(at: Path) -> Path:
        torch.save(value, at / "f.pt", **how)
        return at / "f.pt"

    return write


def damaged_metadata(at: Path, change: Callable[[bytes], bytes]) -> Path:
    changed(at / "dcp" / ".metadata", change)
    return at / "dcp"


def without_a_piece(at: Path) -> Path:
    [file] = (at / "dcp").glob("*.distcp")
    file.unlink()
    return at / "dcp"


def cut_piece(at: Path) -> Path:
    [file] = (at / "dcp").glob("*.distcp")
    os.truncate(file, 1000)
    return at / "dcp"


ONES = {"weight": torch.ones(64)}
# Made in a folder with a folder `dcp` of DCP and a `file` of torch.save.
UNREADABLE: dict[str, tuple[Callable[[Path], Path], str]] = {
    "before torch 1.6": (
        file_of(ONES, _use_new_zipfile_serialization=False),
        "f.pt is a pickle, as torch.save wrote it before torch 1.6, and cannot be read in parts: write it again, with",
    ),
    "code": (file_of({"weight": RunsCode()}), r"f.pt holds more than weights \(posix.mkdir\), and making such objects"),
    "an object of a user's": (
        file_of({"model": ONES, "args": argparse.Namespace(lr=1)}),
        r"f.pt holds more than weights \(argparse.Namespace\), and making such objects may run any code; write only",
    ),
    "no tensors": (file_of({"epoch": 3}), "f.pt holds a dict without tensors that have names; write only the weights"),
    "quantized": (
        file_of({"weight": torch._make_per_tensor_quantized_tensor(torch.ones(3, dtype=torch.int8), 0.1, 0)}),
        "f.pt is damaged, or holds tensors that cannot be read in parts",
    ),
    "cut": (lambda at: changed(at / "file", lambda old: old[:-30]), "file is cut or damaged: it begins like a"),
    "packed again": (
        lambda at: zipped_again(at / "file"),
        "file.zip was packed again, and cannot be read in parts; write only the weights",
    ),
    "the other order of bytes": (
        lambda at: other_order(at / "file"),
        "file.big was written on a machine that orders b",
    ),
    "TorchScript": (
        lambda at: scripted(at / "f.pt"),
        "f.pt is a zip archive, but none of torch.save; write only the weights",
    ),
    "a folder of files": (
        lambda at: file_of(ONES)(at).parent,
        "has no model.safetensors: name the file itself, such as",
    ),
    "DCP, a file missing": (without_a_piece, "__0_0.distcp is not there"),
    "DCP, a file cut": (cut_piece, r"__0_0.distcp is cut: 1000 bytes, and .metadata says \d+"),
    "DCP, .metadata cut": (
        lambda at: damaged_metadata(at, lambda old: old[: len(old) // 2]),
        ".metadata is no .metadata of torch.distributed.checkpoint, or damaged",
    ),
    "DCP, .metadata with code": (
        lambda at: damaged_metadata(at, lambda old: pickle.dumps(RunsCode())),
        ".metadata holds posix.mkdir, which no .metadata of torch.distributed.checkpoint does, and making such an obje",
    ),
}


@pytest.mark.case(
    "checkpoints",
    "pickles with code in them",
    "one sentence on every rank; none of it runs",
    under="weights out of a safetensors file",
)
@pytest.mark.filterwarnings("ignore:.*single process:UserWarning")
@pytest.mark.parametrize("case", UNREADABLE)
def test_what_cannot_be_read_is_one_sentence_on_every_rank_and_runs_no_code(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ZEROTRAIN_TEST_TRACE", str(tmp_path / "trace"))
    make, said = UNREADABLE[case]
    in_a_file(tensors_of(plain(MATRICES, 7)), tmp_path / "file")
    in_one_piece(tensors_of(plain(MATRICES, 7)), tmp_path / "dcp")
    path = make(tmp_path)

    assert_refused_alike(path, MATRICES, said)
    assert not (tmp_path / "trace").exists()


def pickle_to(value: Any, path: Path) -> None:
    path.write_bytes(pickle.dumps(value))


def unpickled(path: Path) -> Any:
    return pickle.loads(path.read_bytes())


@pytest.mark.case("checkpoints", "cut, damaged, missing, of another kind", under="weights out of a safetensors file")
@pytest.mark.parametrize("offsets", [(0, 0), (0, 1), (30, 0)], ids=["twice", "over another", "beyond the end"])
def test_pieces_that_do_not_make_up_their_tensor_are_refused(offsets: tuple[int, int], tmp_path: Path) -> None:
    path = in_shards({"blocks.0.bias": torch.ones(24), "blocks.0.weight": torch.ones(24, 24)}, tmp_path / "dcp")
    metadata = unpickled(path / ".metadata")
    chunk = metadata.state_dict_metadata["model.blocks.0.weight"].chunks[1]
    [index] = [
        each
        for each in metadata.storage_data
        if each.fqn == "model.blocks.0.weight" and tuple(each.offset) == tuple(chunk.offsets)
    ]
    chunk.offsets = torch.Size(offsets)
    metadata.storage_data[type(index)(index.fqn, chunk.offsets)] = metadata.storage_data[index]
    pickle_to(metadata, path / ".metadata")
    with pytest.raises(CheckpointError, match=re.escape(f"{path / '.metadata'} is no .metadata of torch")):
        find_weights(path)


@pytest.mark.filterwarnings("ignore:.*single process:UserWarning")
@pytest.mark.parametrize("writer", [*WRITERS, "safetensors"])
def test_each_rank_reads_the_elements_that_it_holds(writer: str, tmp_path: Path, monkeypatch) -> None:
    """And the heads of what torch.save has written, some KiB each: of DCP, the ranks share those out first."""

    class Wide(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = torch.nn.ModuleList(torch.nn.Linear(512, 512, bias=False) for _ in range(4))

    kind = Kind(Wide)
    tensors = tensors_of(plain(kind, 7))
    path = WRITERS.get(writer, saved)(tensors, tmp_path / "weights")

    per_rank = nbytes_read(path, kind, monkeypatch)
    data_nbytes = sum(tensor.nbytes for tensor in tensors.values())
    assert data_nbytes < sum(per_rank) < 1.1 * data_nbytes
    assert max(per_rank) < 0.4 * data_nbytes
