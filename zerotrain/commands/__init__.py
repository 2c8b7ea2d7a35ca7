"""The commands of `python -m zerotrain`: a file each."""
