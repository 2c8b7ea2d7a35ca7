from pathlib import Path

import pytest

from tests.unit.engine.state.weight_files import every_form


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with every form in which the same weights may lie."""
    return every_form(tmp_path_factory.mktemp("source"))
