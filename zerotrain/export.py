"""`python -m zerotrain.export`, the older name of `python -m zerotrain export`."""

import sys

from zerotrain.__main__ import run

if __name__ == "__main__":
    run("export", sys.argv[1:])
