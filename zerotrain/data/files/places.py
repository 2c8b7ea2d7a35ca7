"""Where what is made of the data is kept."""

import os
from pathlib import Path


def cache_folder(cache_dir: str | None) -> Path:
    """The folder for what can be made again; it need not be there yet."""
    if cache_dir is not None:
        return Path(cache_dir).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "zerotrain"
