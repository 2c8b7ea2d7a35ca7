"""`python -m zerotrain.evaluate`, the older name of `python -m zerotrain evaluate`."""

import sys

from zerotrain.__main__ import run

if __name__ == "__main__":
    run("evaluate", sys.argv[1:])
