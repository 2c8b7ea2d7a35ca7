"""Every setting of the schema refuses what its rule excludes and what is no value of its kind, all in one command."""

from pathlib import Path
from typing import Any, get_type_hints

import pytest
from attacks import Attack, carry_out

from tests.zygote.client import Zygote
from zerotrain.config import schema
from zerotrain.settings import OffloadConfig, settings_in

VALUES: dict[str, Any] = {
    "-1": -1,
    "0": 0,
    "nan": float("nan"),
    "-inf": float("-inf"),
    "1e300": 1e300,
    "99999999999999999999999": 10**23 - 1,
    "abc": "abc",
    "[]": [],
    "null": None,
}
SWITCHES = {"model.": schema.ModelSwitches(), "data.": schema.DataSwitches(), "optimizer.": schema.OptimizerSwitches()}
SETTINGS = [
    *settings_in(schema.Config()),
    *(each for prefix, group in SWITCHES.items() for each in settings_in(group, prefix)),
]
NUM_SETTINGS = len(SETTINGS)


@pytest.mark.parametrize("typed", VALUES)
@pytest.mark.thinned(3)
def test_each_setting_that_excludes_a_value_refuses_it_in_a_line_of_its_own(typed: str, zygote: Zygote, tmp_path: Path):
    # A whole number given to a switch of the schema is one more way to write true and false.
    switches = {
        name for name, setting, _ in settings_in(schema.Config()) if setting.allows(True) and setting.allows(False)
    }
    # A number given to a setting that is a text is the text.
    groups = {"checkpoint": schema.CheckpointConfig, "launch": schema.LaunchConfig, "offload": OffloadConfig}
    hints = {f"{group}.{name}": hint for group, kind in groups.items() for name, hint in get_type_hints(kind).items()}
    texts = {name for name, hint in hints.items() if hint == str | None}
    taken = switches if isinstance(VALUES[typed], int) else set()
    taken |= {name for name, setting, _ in SETTINGS if name in texts and setting.allows(typed)}
    refusing = [name for name, setting, _ in SETTINGS if not setting.allows(VALUES[typed]) and name not in taken]
    assert len(refusing) > NUM_SETTINGS // 4
    command = ["data=synthetic", *(f"{name}={typed}" for name in refusing)]
    carry_out(Attack(command, tuple(f"{name}: got " for name in refusing)), zygote, tmp_path)
