"""The hosts of a run's ranks: their names, and each one's network interface to the others.

Gloo listens at the address of its machine's name. On many machines it is on the loopback. The default is the
interface on a rank's way to the store of the run: it reaches the other hosts too.
"""

import fcntl
import json
import os
import socket
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from zerotrain.errors import ConfigError, argument
from zerotrain.files.untrusted import Natural, parse_json, printable

AUTO = "auto"
_VARIABLES = {"gloo": "GLOO_SOCKET_IFNAME", "nccl": "NCCL_SOCKET_IFNAME"}
"""By backend."""
_SIOCGIFADDR = 0x8915
"""Linux' request for the IPv4 address of an interface."""


def host_name() -> str:
    """Identifies a host: a boot of a machine, and a network namespace."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.stat('/proc/self/ns/net').st_ino}"
    except OSError:  # where they are hidden
        return socket.gethostname()


@dataclass(frozen=True)
class RankHost:
    """The place of a rank. It tells the others when they meet."""

    size: Natural
    """Number of ranks, as it was told."""
    machine: str
    """See `host_name`."""
    name: str
    """The machine's, for people."""
    route: tuple[str, ...] = ()
    """Its interface and address on the way to the meeting of the ranks; none where they are not known."""
    fixed: str = ""
    """The listening address of its collectives; nothing if it is not known, or follows from the route."""
    fixed_by: str = ""
    """The setting behind it."""

    @classmethod
    def of_this_process(cls, size: int, meets_at: str, backend: str, interface: str | None) -> "RankHost":
        """Ask the system for it.

        Args:
            meets_at: the host of the store.
            interface: see `World.from_environment`.

        Raises:
            ConfigError: there is no such interface.
        """
        fixed, fixed_by = _fixed(backend, interface)
        return cls(size, host_name(), socket.gethostname(), _route_to(meets_at), fixed, fixed_by)

    def to_json(self) -> str:
        """For the store of the ranks."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: bytes) -> "RankHost":
        """Read what `to_json` wrote; ValueError where it is something else."""
        place: RankHost = parse_json(text, cls)
        texts: dict[str, Any] = {name: printable(getattr(place, name)) for name in ("name", "fixed", "fixed_by")}
        return replace(place, route=tuple(map(printable, place.route)), **texts)


def names_of_hosts(places: Sequence[RankHost]) -> tuple[str, ...]:
    """The name of each rank's host, by rank; none where all are on one."""
    return tuple(place.name for place in places) if len({place.machine for place in places}) > 1 else ()


def choose_interface(places: Sequence[RankHost], rank: int, interface: str | None) -> None:
    """Have the backends of this process listen where the other hosts reach it: set their variables, where they are not
    set and several hosts are.

    Args:
        places: of all ranks, by rank.
        interface: see `World.from_environment`.

    Raises:
        ConfigError: a rank would listen where no other host reaches it; on all ranks alike.
    """
    other_places = [place for place in places if place.machine != places[rank].machine]
    if not other_places:
        return
    for number, place in enumerate(places):
        if is_loopback(place.fixed):
            raise ConfigError(_unreachable(number, place))
    if interface == AUTO:
        # To itself the host of the store may be on its loopback: it takes the way to another.
        routes = (places[rank].route, *(_route_to(place.route[1]) for place in other_places if place.route))
        interface = next((route[0] for route in routes if route and not is_loopback(route[1])), None)
    if interface:
        os.environ.setdefault(_VARIABLES["gloo"], interface)
        os.environ.setdefault(_VARIABLES["nccl"], f"={interface}")  # without the sign it would be a beginning of names


def _fixed(backend: str, interface: str | None) -> tuple[str, str]:
    """The listening address of this process's collectives, and the setting behind it; nothing twice where it is not
    fixed, or not known."""
    variable = _VARIABLES[backend]
    if variable in os.environ:
        name, setting = os.environ[variable].removeprefix("="), f"{variable}={os.environ[variable]}"
        remedy = f"unset {variable}, and the interface that reaches the other ranks is taken"
    elif interface == AUTO:
        return "", ""
    elif interface is None:
        if backend != "gloo":
            return "", ""
        address = "127.0.0.1"  # where gloo listens if the name of its machine has no address
        with suppress(OSError):
            address = str(socket.getaddrinfo(socket.gethostname(), None, type=socket.SOCK_STREAM)[0][4][0])
        return address, argument("World.from_environment(interface)", None)
    else:
        name, setting = interface, argument("World.from_environment(interface)", interface)
        remedy = f"use {argument('World.from_environment(interface)', AUTO)}, or one of these"
    addresses = _addresses()
    if name in addresses or not addresses:
        return addresses.get(name, ""), setting
    # Both take lists of names, and NCCL from its variable beginnings of names too.
    if "," in name or (variable in os.environ and backend == "nccl"):
        return "", setting
    raise ConfigError(
        f"{setting}: {socket.gethostname()} has no such network interface with an address; "
        f"it has {', '.join(addresses)}; {remedy}"
    )


def _unreachable(rank: int, place: RankHost) -> str:
    reaches, remedy = "", "use an interface that the other hosts reach"
    if place.route and not is_loopback(place.route[1]):
        interface = place.route[0]
        reaches = f": {interface} ({place.route[1]}) reaches MASTER_ADDR"
        remedy = f"use {argument('World.from_environment(interface)', interface)}"
    if place.fixed_by.startswith(tuple(_VARIABLES.values())):
        remedy = f"unset {place.fixed_by.partition('=')[0]}"
    return (
        f"{place.fixed_by}: rank {rank} on {place.name} would listen at {place.fixed}, where no other host reaches "
        f"it{reaches}; {remedy}"
    )


def _addresses() -> dict[str, str]:
    """The first address of each network interface of this machine; nothing where the system does not tell."""
    addresses: dict[str, str] = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as udp:
        for _, name in socket.if_nameindex():
            with suppress(OSError):  # it has none
                request = name.encode()[:15].ljust(40, b"\0")
                addresses[name] = socket.inet_ntoa(fcntl.ioctl(udp, _SIOCGIFADDR, request)[20:24])
    for address, name in _ipv6_addresses():
        addresses.setdefault(name, address)
    return addresses


def _ipv6_addresses() -> Iterator[tuple[str, str]]:
    """Each IPv6 address of this machine, and its interface."""
    with suppress(OSError, ValueError):
        for line in Path("/proc/net/if_inet6").read_text().splitlines():
            digits, *_, name = line.split()
            yield socket.inet_ntop(socket.AF_INET6, bytes.fromhex(digits)), name


def _route_to(host: str) -> tuple[str, ...]:
    """This machine's interface and address on the way to a host. Sends nothing."""
    with suppress(OSError, ValueError):
        family, kind, _, _, target = socket.getaddrinfo(host, 9, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as udp:
            udp.connect(target)
            source = str(udp.getsockname()[0])
        interfaces = [*_addresses().items(), *((name, address) for address, name in _ipv6_addresses())]
        return next(((name, address) for name, address in interfaces if address == source), ())
    return ()


def is_loopback(address: str) -> bool:
    """Whether only this machine reaches an address."""
    return address.startswith("127.") or address == "::1"
