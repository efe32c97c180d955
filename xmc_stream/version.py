"""The version, for the package's metadata, and for runs, whose last bits may depend on it."""

__version__ = "0.1.0"
