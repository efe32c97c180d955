"""`python -m xmc_stream.cli`."""

from xmc_stream.cli import program

program()
