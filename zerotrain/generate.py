"""`python -m zerotrain.generate`, the older name of `python -m zerotrain generate`."""

import sys

from zerotrain.__main__ import run

if __name__ == "__main__":
    run("generate", sys.argv[1:])
