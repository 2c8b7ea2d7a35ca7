"""What an attack is, and how one is carried out."""

import json
import shlex
import subprocess
from dataclasses import dataclass, field
from pathlib import Path

from tests.zygote.client import Zygote

MAX_LINE = 2100
"""Characters of a line that a user reads."""


@dataclass(frozen=True)
class Attack:
    """A command line of launch.py that is wrong, and what becomes of it.

    It prints no traceback and no control character, and starts no rank.
    """

    command: str | list[str]
    """What is typed behind `python launch.py`, as for a shell; or the arguments where a shell would be in the way."""
    says: str | tuple[str, ...]
    """The beginning of the line on stderr; several where it prints several, in any order."""
    code: int = 2
    before: str = ""
    """Shell commands run in the folder before."""
    environment: dict[str, str] = field(default_factory=dict)
    left: tuple[str, ...] = ()
    """What else it leaves but the run folder of a job that was refused: `.lock` and `result.json`."""

    @property
    def arguments(self) -> list[str]:
        return shlex.split(self.command) if isinstance(self.command, str) else self.command

    def __str__(self) -> str:
        shown = self.command if isinstance(self.command, str) else shlex.join(self.command)
        return f"{shown} {self.before.splitlines()[0] if self.before else ''}".strip()[:100]


def carry_out(attack: Attack, zygote: Zygote, folder: Path) -> None:
    """Run an attack in an empty folder, and check what became of it."""
    if attack.before:
        subprocess.run(["bash", "-c", attack.before], cwd=folder, check=True)
    before = files_in(folder)
    ending = zygote.run(attack.arguments, folder, attack.environment)
    said = f"exit code {ending.code}\n{ending.out}\n{ending.err}"
    assert "Traceback" not in said, said
    assert ending.code == attack.code, said
    expected = (attack.says,) if isinstance(attack.says, str) else attack.says
    lines = ending.err.splitlines()
    assert len(lines) == len(expected), said
    for line, beginning in zip(sorted(lines), sorted(expected), strict=True):
        assert line.startswith(beginning), said
        assert line.isprintable(), said
        assert len(line) <= MAX_LINE, said
    assert "run folder" not in ending.out, said
    # Nothing is there which was not, but the folder of a job that was refused.
    left = files_in(folder) - before
    refused = {path for path in left if Path(path).name in (".lock", "result.json")}
    for path in refused:
        if path.endswith("result.json"):
            result = json.loads((folder / path).read_text())
            assert (result["status"], result["world_size"]) == ("failed", 0)
            assert result["error"]
    assert left - refused - {path for path in left if Path(path).name in attack.left} == set()


def files_in(folder: Path) -> set[str]:
    """But for what Python keeps of the modules of a user."""
    paths = (path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
    return {str(path) for path in paths if "__pycache__" not in path.parts}
