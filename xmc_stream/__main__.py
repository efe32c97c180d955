"""`python -m xmc_stream` is the command `xmc-stream`."""

from xmc_stream.cli import main

if __name__ == "__main__":
    main()
