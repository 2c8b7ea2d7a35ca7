"""The settings given to an engine when it is built, and their consequences in this world."""

from collections.abc import Iterable, Sequence
from copy import deepcopy
from dataclasses import asdict, dataclass, fields, replace

from zerotrain.comm.world import World
from zerotrain.device.kinds import device_of
from zerotrain.engine.model.precision import PRECISIONS, LossScaler, Precision
from zerotrain.errors import ConfigError, argument
from zerotrain.files.untrusted import dotted
from zerotrain.settings import AUTO, HOST, EngineConfig, OffloadConfig, ZeroConfig, problems_in
from zerotrain.sharding.plan import STAGES, Plan
from zerotrain.sharding.units import ManagedParameter, Unit

DEFAULT_MB, MAX_AUTO_MB = 25.0, 512.0
"""MiB of a bucket with `zero.bucket_mb=auto`: on a CPU, and on a GPU at most. A link is busy long before 512 MiB, and a
rank holds several of them at once."""


@dataclass(frozen=True)
class EngineOptions:
    """The settings of an engine (sharding, communication, precision, clipping), with open ones decided.

    Meaning and units of what was given are in `zerotrain.settings`, which also the config reads: a new setting is there
    and in `settings` at once, without a line here; whoever needs it reads `zero`, `offload` or `config`.
    """

    config: EngineConfig
    plan: Plan
    precision: Precision
    ordered: bool
    """Reduce by one tree over all leaves in fp32; False: by the backend's reduce-scatter."""
    leaves_per_rank: int
    """Virtual ranks that a rank runs one after the other: a power of two."""
    holds_units: bool
    """Whether a bucket holds a whole unit, up to `MAX_AUTO_MB`."""

    @classmethod
    def resolve(cls, config: EngineConfig, world: World) -> "EngineOptions":
        """Decide what a config, with values in range, leaves to the world. Later changes of it change nothing.

        Raises:
            ConfigError: virtual ranks that the ranks cannot share, or whose micro-batches are to be reduced one by one;
                a mesh that they cannot form.
        """
        zero, precision, on_gloo = config.zero, config.precision, device_of(world.device).backend == "gloo"
        shard_size_of(zero.shard_size, world.shards.size)
        return cls(
            config=deepcopy(config),
            plan=STAGES[zero.stage],
            precision=replace(
                PRECISIONS[precision.name],
                state=PRECISIONS[precision.state].compute,
                keep_fp32=tuple(precision.keep_fp32),
            ),
            ordered=zero.reduction == "ordered" or (zero.reduction == "auto" and on_gloo),
            leaves_per_rank=leaves_per_rank(config.virtual_ranks, world.shards.size, zero.accumulate),
            holds_units=zero.bucket_mb == AUTO and not device_of(world.device).is_host,
        )

    def at_stage(self, stage: int) -> "EngineOptions":
        """The same with everything placed as another stage has it; ConfigError where there is no such stage."""
        config = replace(self.config, zero=replace(self.config.zero, stage=stage))
        if problems := problems_in(config.zero):
            raise ConfigError(*problems)
        return replace(self, config=config, plan=STAGES[stage])

    @property
    def zero(self) -> ZeroConfig:
        return self.config.zero

    @property
    def offload(self) -> OffloadConfig:
        return self.config.offload

    @property
    def bucket_numel(self) -> int:
        """Elements of a bucket, at most, if it need not hold a unit; a larger parameter is one of its own."""
        return self._numel_of(DEFAULT_MB if self.zero.bucket_mb == AUTO else self.zero.bucket_mb)

    def bucket_numel_for(self, units: Iterable[Unit[ManagedParameter]]) -> int:
        """Elements of a bucket of these units, at most."""
        if not self.holds_units:
            return self.bucket_numel
        blocks = [sum(managed.parameter.numel() for managed in unit.parameters) for unit in units if not unit.is_root]
        return max(self.bucket_numel, min(max(blocks, default=0), self._numel_of(MAX_AUTO_MB)))

    def _numel_of(self, mb: float) -> int:
        return max(1, int(mb * 2**20) // self.precision.compute.itemsize)

    @property
    def reduces_each(self) -> bool:
        """Whether each micro-batch is reduced."""
        return self.zero.accumulate == "reduced"

    @property
    def widens(self) -> bool:
        """Whether a leaf travels in the master dtype, and is not rounded to the compute dtype before."""
        return self.zero.reduction == "fp32"

    def loss_scaler(self) -> LossScaler | None:
        """A new one for fp16: with 5 bits of exponent, where fp32 has 8, gradients would leave its range."""
        if self.precision.name != "fp16":
            return None
        numerics = self.config.precision
        return LossScaler(scale=numerics.initial_scale, growth_interval=numerics.growth_interval)

    def settings(self) -> dict[str, object]:
        """The settings that must be equal on all ranks: all, by the names that the reader of a message knows."""
        placements = ", ".join(f"{field.name} {getattr(self.plan, field.name).value}" for field in fields(self.plan))
        # As decided: auto is another reduction on a CPU than on a GPU.
        decided = {
            "zero.stage": f"{self.zero.stage}: {placements}",
            "zero.reduction": "ordered" if self.ordered else self.zero.reduction.replace("auto", "native"),
        }
        return {argument(name): value for name, value in (dotted(asdict(self.config)) | decided).items()}


def leaves_per_rank(virtual_ranks: int | None, num_ranks: int, accumulate: str) -> int:
    """Virtual ranks that each rank runs.

    Raises:
        ConfigError: they cannot share them, or what is reduced would be less than a virtual rank.
    """
    leaves, left_over = divmod(virtual_ranks or num_ranks, num_ranks)
    if left_over or leaves < 1 or leaves & (leaves - 1):
        numbers = [virtual_ranks or num_ranks]  # of ranks that can
        while numbers[0] % 2 == 0 and numbers[0] > 0:
            numbers.insert(0, numbers[0] // 2)
        raise ConfigError(
            f"{argument('virtual_ranks', virtual_ranks)}: {num_ranks} ranks cannot share them evenly, "
            f"{', '.join(map(str, numbers))} can; it must "
            f"be the number of ranks times a power of two, such as {num_ranks} or {2 * num_ranks}"
        )
    if leaves > 1 and accumulate == "reduced":
        raise ConfigError(
            f"{argument('zero.accumulate', 'reduced')} adds micro-batches up over ranks, and with "
            f"{argument('virtual_ranks', virtual_ranks)} each rank adds up {leaves} virtual ranks first; take "
            f"{argument('zero.accumulate', 'local')}, or as many ranks"
        )
    return leaves


def shard_size_of(shard_size: int | str | None, num_ranks: int, hosts: Sequence[int] = ()) -> int:
    """Ranks that hold sharded parameters once.

    Args:
        shard_size: `zero.shard_size`.
        hosts: the number of each rank's host, by rank; none: they are not known yet, and "host" counts as all ranks.

    Raises:
        ConfigError: the ranks cannot be cut so.
    """
    if shard_size is None or num_ranks == 1:
        return num_ranks
    got, size = argument("zero.shard_size", shard_size), num_ranks
    if shard_size != HOST:
        size = int(shard_size)
    elif hosts:
        size = hosts.count(hosts[0])
        if any(host != hosts[rank - rank % size] for rank, host in enumerate(hosts)) or num_ranks % size:
            counts = [str(hosts.count(host)) for host in dict.fromkeys(hosts)]
            raise ConfigError(
                f"{got}: the hosts have {', '.join(counts)} ranks; all must have as many, numbered host by host"
            )
    sizes = [2**power for power in range(1, num_ranks.bit_length()) if num_ranks % 2**power == 0]
    if size not in sizes and size != num_ranks:
        what = f"a host has {size} of" if shard_size == HOST else "does not divide the"
        allowed = " or ".join([*map(str, sizes), "null for all"])
        raise ConfigError(f"{got}: {what} {num_ranks} ranks; give {allowed}")
    return size
