"""The package's version, read by setup.cfg without importing torch."""

__version__ = "0.1.0"
