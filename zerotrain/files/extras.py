"""Packages of extras, which not every user has installed."""

import importlib
from typing import Any


def package(name: str, *, extra: str, needed_by: str) -> Any:
    """Import a package, or a module of one, when it is needed.

    Args:
        extra: of zerotrain, which it comes with.
        needed_by: what needs it, for the message.

    Raises:
        ImportError: it is not installed.
    """
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise ImportError(
            f"{needed_by} needs {name.partition('.')[0]}, which is not installed; pip install 'zerotrain[{extra}]'"
        ) from error
