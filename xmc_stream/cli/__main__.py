"""`python -m xmc_stream.cli`."""

from xmc_stream.__main__ import program

program()
