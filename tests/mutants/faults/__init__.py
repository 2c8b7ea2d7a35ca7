"""All faults by name."""

from tests.mutants.fault import Fault
from tests.mutants.faults import comm, data, engine, launching, state, training

ROOMS = (comm, engine, state, data, training, launching)
FAULTS: dict[str, Fault] = {name: fault for room in ROOMS for name, fault in room.FAULTS.items()}
