"""One rank on a GPU: the same code as on the CPU, which these tests run too where they can, so that they stay true.

`make test-gpu` runs those for a GPU; nothing but torch and pytest is needed to start them.
"""

import os
import subprocess
import sys
import warnings
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from cases import SEQ_LEN, VOCAB, Case, batch, build, make_model, micro_batches, reference_weights, train, trainer_of
from torch.testing._internal.distributed.fake_pg import FakeStore

from benchmarks.rank import Prepared, RankResult, own_device
from benchmarks.workload import Workload
from tests.ranks import run_ranks
from tests.ranks.fake_wire import run_threads
from zerotrain import OffloadConfig, World, build_engine
from zerotrain.comm import collectives as process_groups
from zerotrain.comm.world import Shards, choose_device
from zerotrain.data import GlobalBatchSampler, SyntheticTokens
from zerotrain.data.loader import StepLoader
from zerotrain.device.kinds import device_of
from zerotrain.engine.buckets.update import scaled
from zerotrain.settings import ZeroConfig

ON_GPU = pytest.param("cuda", marks=pytest.mark.gpu)


@pytest.fixture(autouse=True)
def engine_is_there() -> None:
    """Skips each test, not the file: pytest takes a file without tests for a mistake and ends with exit code 5."""
    pytest.importorskip("zerotrain.run.factory")


@pytest.mark.parametrize("device", ["cpu", ON_GPU])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_one_rank_trains_as_plain_pytorch_on_the_same_device(precision: str, device: str) -> None:
    """On a GPU to a tolerance: the backward of an embedding adds in no fixed order there."""
    case = Case(ZeroConfig(stage=3), precision=precision, num_micro_batches=2)
    expected = reference_weights(case, 1, device)
    got = train(case, device).full_state_dict()
    atol = {"cpu": 0.0, "cuda": 1e-5 if precision == "fp32" else 2e-2}[device]
    for name, weight in expected.items():
        torch.testing.assert_close(got[name], weight.cpu(), rtol=0, atol=atol)


def measured_among_fake_ranks(engine: str, workload: Workload) -> RankResult:
    dist.destroy_process_group()  # that of this rank alone
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=workload.num_ranks)
    return Prepared(engine, workload, own_device(workload)).measure()


@pytest.mark.parametrize("device", ["cpu", ON_GPU])
@pytest.mark.parametrize("stage", range(4))
def test_one_rank_of_eight_trains_at_every_stage(stage: int, device: str) -> None:
    """The other ranks are fake, so its weights mean nothing; but memory is freed and filled as among real ones."""
    workload = Workload(size="tiny", precision="bf16", num_ranks=8, num_micro_batches=2, num_steps=3, device=device)
    [measured] = run_ranks(measured_among_fake_ranks, 1, f"zero{stage}", workload)
    assert measured.counted_nbytes == pytest.approx(measured.theory_nbytes, rel=0.5)  # much padding, few parameters
    assert (measured.device_peak_nbytes is not None) == (device == "cuda")


class Layers(torch.nn.Sequential):
    """Without an embedding, whose backward has no fixed order on a GPU; returns its loss."""

    def __init__(self) -> None:
        super().__init__(*(torch.nn.Linear(256, 256) for _ in range(8)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).tanh().float().square().mean()


def rows(step: int, number: int, device: torch.device, num_rows: int = 32) -> torch.Tensor:
    generator = torch.Generator().manual_seed(10 * step + number)
    return torch.randn(num_rows, 256, generator=generator).to(device)


def hash_of_layers(stage: int, precision: str, world: World, reduction: str = "ordered") -> str:
    torch.manual_seed(0)
    engine = build_engine(
        Layers().to(world.device),
        optimizer=partial(torch.optim.AdamW, lr=1e-2, fused=True),
        zero=ZeroConfig(stage=stage, bucket_mb=0.2, reduction=reduction),
        precision=precision,
        max_grad_norm=0.1,
        virtual_ranks=4 if reduction == "ordered" else None,
        world=world,
    )
    for step in range(4):
        if step == 2:
            engine.set_stage((stage + 1) % 4)
        numbers = engine.virtual_ranks if reduction == "ordered" else range(4)
        engine.train_step([(rows(step, number, world.device),) for number in numbers])
    return engine.weights_sha256()


@pytest.mark.parametrize("device", ["cpu", ON_GPU])
@pytest.mark.parametrize("factor", [None, 0.3, 2.0**-16])
def test_a_gradient_is_widened_before_it_is_multiplied(factor: float | None, device: str) -> None:
    """A GPU does both in one kernel, which must not round to 16 bits between."""
    gradient = torch.randn(1000, generator=torch.Generator().manual_seed(0)).to(device, torch.bfloat16)
    given = None if factor is None else torch.tensor(factor, dtype=torch.float64, device=device)
    out = torch.empty(1000, device=device)
    assert scaled(gradient, given, out) is out
    expected = gradient.float() * torch.tensor(1.0 if factor is None else factor).to(device)
    assert torch.equal(out, expected)


@pytest.mark.parametrize(
    ("precision", "device"),
    [("bf16", "cpu"), *(pytest.param(each, "cuda", marks=pytest.mark.gpu) for each in ("fp32", "bf16", "fp16"))],
)
def test_ranks_that_share_a_device_end_with_the_bits_of_one(precision: str, device: str) -> None:
    """Ranks are threads, so that one GPU is enough for several; each stage, which changes in the midst."""
    found = {
        sha256
        for num_ranks in (1, 2, 4)
        for stage in range(4)
        for sha256 in run_threads(
            partial(hash_of_layers, stage, precision), num_ranks, late_rank=num_ranks - 1, in_turns=True, device=device
        )[0]
    }
    assert len(found) == 1


def hashes_through_a_communicator(device: str, precision: str, reduction: str) -> set[str]:
    """Of a rank alone, and of the same one as a group of the device's backend, which all it sends goes through."""
    dist.destroy_process_group()  # gloo's
    kind = device_of(choose_device(device, 0))
    kind.use()
    dist.init_process_group(kind.backend, store=dist.HashStore(), rank=0, world_size=1)
    groups = Shards(0, 1, dist.group.WORLD, dist.new_group())
    process_groups.MAX_RANKS_OF_EXCHANGE = 0  # gloo's own collectives, as with many ranks
    make_wire = partial(process_groups.process_groups, groups, kind.device)
    alone = World.current(kind.device)
    through = replace(alone, shards=replace(groups, make_wire=lambda ordered: make_wire(ordered=ordered)))
    return {hash_of_layers(stage, precision, world, reduction) for stage in range(4) for world in (alone, through)}


COMMUNICATORS = [("bf16", "native", "cpu")]  # on a CPU the other files have all of them
COMMUNICATORS += [
    pytest.param(precision, reduction, "cuda", marks=pytest.mark.gpu)
    for precision in ("fp32", "bf16")
    for reduction in ("ordered", "native", "fp32")
]


@pytest.mark.parametrize(("precision", "reduction", "device"), COMMUNICATORS)
def test_a_communicator_of_one_rank_changes_no_bits(precision: str, reduction: str, device: str) -> None:
    """On a GPU it is one of NCCL."""
    [found] = run_ranks(hashes_through_a_communicator, 1, device, precision, reduction)
    assert len(found) == 1


@pytest.mark.parametrize("device", ["cpu", ON_GPU])
def test_a_run_trains_evaluates_and_traces_on_the_device(device: str, tmp_path: Path) -> None:
    body = trainer_of(
        build(Case(ZeroConfig(stage=3), precision="bf16"), make_model().to(device)),
        SyntheticTokens(seq_len=SEQ_LEN, vocab_size=VOCAB, num_sequences=64),
        tmp_path,
        max_steps=8,
        micro_batch_size=4,
        gradient_accumulation_steps=2,
        eval_every=4,
        eval_batches=2,
        profile=True,
        memory_snapshot=True,
    ).run()
    assert body["status"] == "completed"
    assert body["skipped_steps"] == 0
    assert body["final_val_loss"] < 6  # the log of VOCAB is 5.5
    snapshot = {"memory_rank0.pickle"} if device == "cuda" else set()
    assert {path.name for path in (tmp_path / "profile").iterdir()} == {"rank0.json"} | snapshot


GROWS = """
import torch
from pathlib import Path
from zerotrain.launching.worker import tell_torch_of_gpus

tell_torch_of_gpus(Path())
kept = torch.ones(2**22, device="cuda")
print([each["is_expandable"] for each in torch.cuda.memory_snapshot()])
"""


@pytest.mark.gpu
def test_the_memory_that_torch_reserves_for_a_run_grows() -> None:
    """Though torch is imported when it is told so."""
    given = {name: value for name, value in os.environ.items() if "ALLOC_CONF" not in name}
    told = subprocess.run([sys.executable, "-c", GROWS], env=given, capture_output=True, text=True, check=True).stdout
    assert told.strip() == "[True]"


@pytest.mark.gpu
@pytest.mark.parametrize("max_grad_norm", [None, 1.0])
def test_the_host_does_not_wait_for_all_that_the_device_was_told(max_grad_norm: float | None) -> None:
    """It waits for the norm alone, while the device updates."""
    case = Case(ZeroConfig(stage=2), max_grad_norm=max_grad_norm)
    engine = build(case, make_model().to("cuda"))
    inputs = micro_batches(batch(0, 1, 2).to("cuda"), 0)
    engine.train_step(inputs)
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            engine.train_step(inputs)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert not [each for each in caught if "synchroniz" in str(each.message)]


@pytest.mark.gpu
def test_a_learning_rate_on_the_device_is_compared_without_a_wait_for_it() -> None:
    engine = build(Case(ZeroConfig(stage=2)), make_model().to("cuda"))
    rate = engine.param_groups[0]["lr"] = torch.tensor(0.1, device="cuda")
    torch.cuda.set_sync_debug_mode("error")
    try:
        stamps = [engine.stamps.stamp(engine.param_groups)]
        rate.mul_(2)
        stamps.append(engine.stamps.stamp(engine.param_groups))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert (stamps[0] == stamps[1]).tolist() == [True, True, False, True, True, True]


@pytest.mark.gpu
def test_tf32_changes_the_bits_of_a_matrix_product() -> None:
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(512, 512, generator=generator).cuda() for _ in range(2))
    before = torch.backends.cuda.matmul.allow_tf32
    products = []
    try:
        for allowed in (False, True):
            torch.backends.cuda.matmul.allow_tf32 = allowed
            products.append(a @ b)
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before
    assert not torch.equal(*products)


@pytest.mark.parametrize("device", ["cpu", ON_GPU])
def test_what_is_read_ahead_stays_whole_while_the_device_is_late(device: str) -> None:
    """Memory that the copies' stream gives away while the model's still reads it would hold rows of a later step."""
    dataset = SyntheticTokens(seq_len=4096, vocab_size=1000, num_sequences=64).train
    sampler = GlobalBatchSampler(num_sequences=64, micro_batch_size=4, num_micro_batches=2, rank=0, num_ranks=1, seed=0)
    sums = []
    with StepLoader(dataset, sampler, device=torch.device(device), num_steps=20) as loader:
        for _ in range(20):
            micro_batches = loader.next_step().micro_batches
            if device == "cuda":
                torch.cuda._sleep(20_000_000)  # of its clock: the host is steps ahead
            sums.append(torch.stack([part.sum() for batch in micro_batches for part in batch]))
    expected = [
        [
            sum(int(dataset[row][part].sum()) for row in rows)
            for rows, _ in sampler.micro_batches(8 * step)
            for part in (0, 1)
        ]
        for step in range(20)
    ]
    assert torch.stack(sums).tolist() == expected


OFFLOADS = {
    "to the host": OffloadConfig("cpu", "cpu"),
    "to a disk": OffloadConfig("disk", "disk"),
    "half of the optimizer to a disk": OffloadConfig("disk", keep=0.5),
    "updated on the host, from a disk": OffloadConfig("disk", "cpu", update="host"),
    "updated on the host": OffloadConfig("cpu", update="host"),
    "activations to the host": OffloadConfig(activations="cpu"),
    "activations to a disk": OffloadConfig(activations="disk"),
}
MOVED = [("to a disk", "cpu"), ("activations to a disk", "cpu")]
MOVED += [pytest.param(name, "cuda", marks=pytest.mark.gpu) for name in OFFLOADS]


@pytest.mark.case("offload: Activations off the device", "On a GPU", "same bits on one rank; `make test-gpu`")
@pytest.mark.parametrize(("name", "device"), MOVED)
def test_what_is_offloaded_has_the_bits_of_what_is_not_through_a_save_and_a_load(
    name: str, device: str, tmp_path: Path
) -> None:
    """A host's update has other bits on a GPU."""

    def trained(offload: OffloadConfig, folder: Path) -> dict[str, torch.Tensor]:
        torch.manual_seed(0)
        engine = build_engine(
            Layers().to(device),
            optimizer=partial(torch.optim.AdamW, lr=1e-3, fused=True),
            zero=ZeroConfig(stage=3, bucket_mb=0.2),
            precision="bf16",
            offload=replace(offload, path=str(tmp_path)),
            max_grad_norm=0.1,
            world=World.current(torch.device(device)),
        )
        for step in range(8):
            # So many rows that a layer saves more of them than is left where it is.
            engine.train_step([(rows(step, 0, engine.world.device, 256),)])
            if step == 3:
                engine.save(folder)
            if step == 5:
                engine.load(folder)
        return engine.full_state_dict()

    wanted = trained(OffloadConfig(), tmp_path / "device")
    found = trained(OFFLOADS[name], tmp_path / "offloaded")
    atol = 2e-2 if device == "cuda" and OFFLOADS[name].update == "host" else 0.0
    for key, weight in wanted.items():
        torch.testing.assert_close(found[key], weight, rtol=0, atol=atol)


GRAPHED = [("cpu", 2), *(pytest.param("cuda", stage, marks=pytest.mark.gpu) for stage in range(4))]


@pytest.mark.parametrize(("device", "stage"), GRAPHED)
def test_twenty_replayed_steps_have_the_bits_of_steps_without_graphs(device: str, stage: int) -> None:
    """A CPU has no graphs, and says so. Rates are exact in fp32: an older torch computes with others in fp64."""

    def trained(graphs: str) -> tuple[str, list[float], int, list[str]]:
        torch.manual_seed(0)
        engine = build_engine(
            Layers().to(device),
            optimizer=partial(torch.optim.AdamW, lr=2**-10, fused=True),
            zero=ZeroConfig(stage=stage, bucket_mb=0.2),
            precision="bf16",
            max_grad_norm=0.1,
            graphs=graphs,
            world=World.current(torch.device(device)),
        )
        losses = []
        for step in range(22 if device == "cuda" else 2):
            engine.param_groups[0]["lr"] = 2**-10 * (1 + step / 32)
            inputs = [(rows(step, index, engine.world.device),) for index in range(2)]
            losses.append(engine.train_step(inputs).loss)
        return engine.weights_sha256(), torch.stack(losses).tolist(), engine.num_replayed, engine.graph_reasons

    wanted = trained("off")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = trained("auto")
    assert found[:2] == wanted[:2]
    reason = "graphs need a GPU"
    assert found[2:] == ((20, []) if device == "cuda" else (0, [reason]))
    said = [str(each.message) for each in caught if "graphs" in str(each.message)]
    assert said == ([] if device == "cuda" else [f"graphs='auto': steps are computed without graphs: {reason}"])
