"""The commands of `zerotrain`: a file each."""
