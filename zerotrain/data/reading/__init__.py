"""Rows by number, from the order of an epoch to a batch on the device."""
