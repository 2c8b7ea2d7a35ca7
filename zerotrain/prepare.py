"""`python -m zerotrain.prepare`, the older name of `python -m zerotrain prepare`."""

import sys

from zerotrain.__main__ import run

if __name__ == "__main__":
    run("prepare", sys.argv[1:])
