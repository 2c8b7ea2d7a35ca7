"""From one command to ranks that train: `python launch.py` and `torchrun launch.py`, one job or a sweep."""
