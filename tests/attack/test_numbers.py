"""Every setting of the schema refuses what its rule excludes and what is no value of its kind, all in one command."""

from pathlib import Path
from typing import Any

import pytest
from attacks import Attack, Zygote, carry_out

from zerotrain.config.schema import Config, DataSwitches, ModelSwitches
from zerotrain.settings import settings_in

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
SETTINGS = [*settings_in(Config()), *settings_in(ModelSwitches(), "model."), *settings_in(DataSwitches(), "data.")]
NUM_SETTINGS = len(SETTINGS)


@pytest.mark.parametrize("typed", VALUES)
def test_each_setting_that_excludes_a_value_refuses_it_in_a_line_of_its_own(typed: str, zygote: Zygote, tmp_path: Path):
    # A whole number given to a switch of the schema is one more way to write true and false.
    taken = {name for name, setting, _ in settings_in(Config()) if isinstance(setting.default, bool)}
    taken = taken if isinstance(VALUES[typed], int) else set()
    refusing = [name for name, setting, _ in SETTINGS if not setting.allows(VALUES[typed]) and name not in taken]
    assert len(refusing) > NUM_SETTINGS // 4
    command = ["data=synthetic", *(f"{name}={typed}" for name in refusing)]
    carry_out(Attack(command, tuple(f"{name}: got " for name in refusing)), zygote, tmp_path)
