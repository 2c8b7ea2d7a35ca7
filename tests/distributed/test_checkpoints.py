"""Checkpoints of real ranks: over gloo, and how much memory they take."""

import ctypes
import functools
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from cases import memory_nbytes, reset_peak
from safetensors.torch import save_file

import zerotrain
from tests.ranks.processes import run_ranks
from zerotrain.checkpoint.manifest import read_manifest

MIB = 2**20
M_MMAP_THRESHOLD = -3
"""Of mallopt(3)."""


class Wide(torch.nn.Module):
    """48 MiB of weights in fp32, in six blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList(torch.nn.Linear(2048, 1024, bias=False) for _ in range(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(torch.cat([x, x], dim=-1))
        return x.square().mean()


def engine_at(stage: int) -> zerotrain.ZeroEngine:
    # What is freed goes back to the system at once. By itself malloc keeps blocks like those freed before, and how many
    # depends on which threads have freed them: a load rose by 12 MiB, or by 22 (2026-11-22).
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 64 * 1024)
    torch.manual_seed(stage)
    optimizer = functools.partial(torch.optim.SGD, lr=0.1, momentum=0.9)
    zero = zerotrain.ZeroConfig(stage=stage, bucket_mb=8)
    return zerotrain.build_engine(Wide(), optimizer=optimizer, zero=zero)


def train(engine: zerotrain.ZeroEngine, step: int) -> None:
    engine.backward(engine(torch.randn(2, 1024, generator=torch.Generator().manual_seed(step))))
    engine.step()


def saved_and_trained(path: str) -> tuple[str, int, str]:
    """The weights after one step more, and by how much the save has raised the peak; the weights after another step,
    with a save beside it."""
    engine = engine_at(3)
    train(engine, 0)
    before = reset_peak()
    engine.save(path, extra={"rows": 4})
    risen = memory_nbytes("VmHWM") - before
    train(engine, 1)
    after_one = engine.weights_sha256()
    save = engine.begin_save(f"{path}-beside", own={"rank": engine.world.rank})
    train(engine, 2)
    assert save.wait() == Path(f"{path}-beside")
    return after_one, risen, engine.weights_sha256()


def loaded_and_trained(path: str) -> tuple[str, int, str]:
    engine = engine_at(2)
    train(engine, 7)
    before = reset_peak()
    assert engine.load(path) == {"rows": 4}
    risen = memory_nbytes("VmHWM") - before
    train(engine, 1)
    after_one = engine.weights_sha256()
    engine.load(f"{path}-beside")
    assert engine.own_of(f"{path}-beside") == {"rank": engine.world.rank}
    assert engine.weights_sha256() == after_one
    train(engine, 2)
    return after_one, risen, engine.weights_sha256()


def begun_with(path: str) -> tuple[list[str], list[int]]:
    """The weights that were taken from a checkpoint, whose optimizer state is damaged, and from a file of them of each
    kind; and by how much each has raised the peak."""
    engine, written = engine_at(3), [Path(path).with_name(f"weights.{kind}") for kind in ("safetensors", "pt", "dcp")]
    if engine.world.rank == 0:
        damage(Path(path), "momentum_buffer")
    hashes, risen = [engine.weights_sha256()], []
    for source in (Path(path), *written):
        if source is written[0] and (state := engine.full_state_dict()):
            save_file(state, written[0])
            torch.save({"model": state, "step": 7}, written[1])
            dcp.save({"model": state}, checkpoint_id=written[2], no_dist=True)
            state.clear()
        engine.freeze("blocks.0.weight") if source is written[0] else None
        before = reset_peak()
        engine.load_weights(source)
        risen.append(memory_nbytes("VmHWM") - before)
        hashes.append(engine.weights_sha256())
    return hashes, risen


def damage(checkpoint: Path, role: str) -> None:
    """Flip a byte in the midst of what was kept of a block as `role`."""
    piece = read_manifest(checkpoint).parameters["blocks.3.weight"].tensors[role].pieces[0]
    file = checkpoint / f"rank-{piece.file:05d}.safetensors"
    content = bytearray(file.read_bytes())
    content[piece.byte + 2 * MIB] ^= 1
    file.write_bytes(content)


@pytest.mark.slow
@pytest.mark.case(
    "checkpoints", "memory of a save, a load and of weights to start from; real ranks", "some MiB above the run's"
)
def test_real_ranks_save_and_load_in_a_few_mib(tmp_path: Path) -> None:
    saved = run_ranks(saved_and_trained, 2, str(tmp_path / "step"))
    loaded = run_ranks(loaded_and_trained, 2, str(tmp_path / "step"))
    assert len({(after_one, after_two) for after_one, _, after_two in (*saved, *loaded)}) == 1
    assert max(risen for _, risen, _ in saved) < 8 * MIB
    assert max(risen for _, risen, _ in loaded) < 16 * MIB
    begun = run_ranks(begun_with, 2, str(tmp_path / "step"))
    for hashes, risen in begun:
        assert hashes[0] != hashes[1] == hashes[2] == hashes[3] == hashes[4]
        assert max(risen) < 8 * MIB


@dataclass
class Change:
    """In bytes of this rank: resident before a change of the stage and behind it, and at most in between; what it holds
    before and behind by the engine's own count and by ZeRO's formulas; buffers of the last step, which go."""

    stages: tuple[int, int]
    resident: tuple[int, int]
    peak: int
    held: tuple[int, int]
    theory: tuple[int, int]
    scratch: int


def change_stages() -> list[Change]:
    engine, seen = engine_at(0), []
    train(engine, 0)
    for stage in (3, 0, 2, 3, 1, 0):
        before, (held, theory) = engine.options.zero.stage, held_nbytes(engine)
        reset_peak()
        resident, scratch = memory_nbytes("VmRSS"), engine.memory_bytes()["scratch"]
        engine.set_stage(stage)
        held_now, theory_now = held_nbytes(engine)
        of_process = (resident, memory_nbytes("VmRSS")), memory_nbytes("VmHWM")
        seen.append(Change((before, stage), *of_process, (held, held_now), (theory, theory_now), scratch))
    return seen


def held_nbytes(engine: zerotrain.ZeroEngine) -> tuple[int, int]:
    """At rest, by the engine's own count and by ZeRO's formulas."""
    memory = engine.memory_bytes()
    return sum(memory[name] for name in memory["theory"]), sum(memory["theory"].values())


@pytest.mark.case(
    "stages",
    "memory meanwhile and behind it",
    "a bucket, old and new, beside the larger of the two stages; resident memory falls and rises "
    "by the formulas, within 4 MiB",
)
def test_a_change_of_the_stage_needs_a_bucket_beside_the_larger_of_the_two() -> None:
    """A bucket is 8 MiB. At stage 0 a rank holds 144 MiB, at stage 3 half of it."""
    for seen in run_ranks(change_stages, 2):
        for each in seen:
            assert each.peak - max(each.resident) < 20 * MIB, each
            risen, wanted = (after - before for before, after in (each.resident, each.theory))
            assert abs(risen + each.scratch - wanted) < 4 * MIB, each
            assert each.held == each.theory
