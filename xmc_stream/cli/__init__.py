"""The command line: thin wrappers that read options, call the library and print."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Any

import click

from xmc_stream.cli import data, datasets, learn, tuning
from xmc_stream.cli.signals import Signals
from xmc_stream.errors import XmcStreamError

_AGAIN = dict.fromkeys(
    ("train", "convert", "append", "tune", "copy"), "give the same command again, it goes on where it was"
)
_ANEW = "the same command begins anew"


class _OneLine(click.Group):
    """Ends any expected failure with one line on stderr and exit code 1; --debug shows where it came from.

    SIGINT and SIGTERM end it likewise, with exit codes 130 and 143; a reader of standard output that goes away does
    without a line.
    """

    def main(self, args: Sequence[str] | None = None, *rest: Any, **kwargs: Any) -> Any:
        arguments = list(sys.argv[1:] if args is None else args) or ["--help"]
        try:
            with Signals(f"xmc-stream: {arguments[0]} was interrupted by {{}}: {_AGAIN.get(arguments[0], _ANEW)}"):
                return super().main(arguments, *rest, **{**kwargs, "standalone_mode": False})
        except click.ClickException as error:
            hint = (
                f" (see {error.ctx.command_path} --help)" if isinstance(error, click.UsageError) and error.ctx else ""
            )
            click.echo(f"xmc-stream: {' '.join(error.format_message().split())}{hint}", err=True)
        except BrokenPipeError:  # who reads our standard output has enough, as `head`
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # or Python would complain when it ends
        except (XmcStreamError, OSError, MemoryError) as error:
            if "--debug" in arguments:
                raise
            said = error.in_shell if isinstance(error, XmcStreamError) else str(error)
            click.echo(f"xmc-stream: {' '.join(said.split()) or type(error).__name__}", err=True)
        sys.exit(1)


@click.group(cls=_OneLine, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(package_name="xmc-stream")
def main() -> None:
    """Extreme multi-class and multi-label classification from disk, within a memory limit."""


for _command in (
    data.convert, datasets.append, datasets.info, datasets.verify, datasets.split,
    datasets.select_features, datasets.compact, datasets.export, datasets.copy,
    learn.plan, learn.train, tuning.tune, learn.calibrate, learn.predict, learn.evaluate, learn.demo,
):  # fmt: skip
    main.add_command(_command)


def program() -> None:
    """The command `xmc-stream`, in a process that is nobody else's.

    BLAS has one thread there, as it has in jobs (`blas`): others wait at full speed for work when numpy is imported, which
    takes 0.1 s of a processor.
    """
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    main()
