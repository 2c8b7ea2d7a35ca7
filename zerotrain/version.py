"""The version of zerotrain, which stands nowhere else; this file imports nothing."""

__version__ = "0.1.0"
