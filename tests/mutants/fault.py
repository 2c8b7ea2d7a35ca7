"""A small fault of the kind that a hand makes: where it is planted, and which tests must notice it."""

from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Fault:
    """One text of one file, replaced."""

    file: str
    """Within the package."""
    old: str
    """Occurs exactly once in the file."""
    new: str
    why: str
    """What goes wrong."""
    tests: tuple[str, ...]
    """Within tests/: files, or "file::test". At least one must fail."""

    def planted_in(self, text: str) -> str:
        """The text of the file with the fault.

        Raises:
            ValueError: the code has moved on.
        """
        if text.count(self.old) != 1:
            raise ValueError(f"{self.file} holds {text.count(self.old)} times, not once:\n{self.old}")
        return text.replace(self.old, self.new)
