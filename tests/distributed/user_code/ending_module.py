"""A user's script that ends when it is imported."""

import sys

sys.exit()
