"""`python -m xmc_stream` is the command `xmc-stream`."""

from xmc_stream.cli import program

if __name__ == "__main__":
    program()
