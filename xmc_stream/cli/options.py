"""What commands share: options, what they show while they work, and how they print.

On a terminal a bar is shown, and lines of the library's log; elsewhere lines alone.
"""

from __future__ import annotations

import functools
import json
import logging
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import click

from xmc_stream.arguments import MOST_INT
from xmc_stream.errors import InputError, in_urls
from xmc_stream.system.progress import LOG, STEPS, current, working


class _Place(click.Path):
    """A path. stores: also the URL of a store that is read, which becomes the folder of what is fetched from it.

    made: of what the command makes, or "-".
    """

    def __init__(self, stores: bool = False, made: bool = False) -> None:
        super().__init__(path_type=Path)
        self.stores, self.made = stores, made

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """The path."""
        if self.made and str(value) != "-":
            from xmc_stream.store.places import target_path

            return target_path(value)
        if not isinstance(value, str) or "://" not in value:
            return super().convert(value, param, ctx)
        from xmc_stream.store.remote import as_path, local_path

        return as_path(value) if self.stores else local_path(value)


class _Beam(click.IntRange):
    """A number of nodes, or none, which is 0 here."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """The number."""
        return 0 if value == "none" else int(super().convert(value, param, ctx))


PATH = _Place()
STORE = _Place(stores=True)
TARGET = _Place(made=True)
SOLVER = click.option(
    "--solver",
    metavar="NAME",
    default="ppdsparse",
    show_default=True,
    help="The method: a name that `train --help` lists.",
)
SEED = click.option(
    "--seed", type=click.IntRange(0, MOST_INT), default=0, help="Of all draws.  [default: 0; below 2^63]"
)
BEAM = click.option(
    "--beam",
    type=_Beam(1),
    metavar="N|none",
    help="Of a label tree: nodes of a level that a row goes on from; none: all. [default: as trained]",
)
QUIET = click.option("-q", "--quiet", is_flag=True, help="No bar, and no lines but warnings and errors.")
_LIMITED = (
    click.option(
        "--memory-limit",
        metavar="SIZE",
        help="Peak resident memory, as 512MB or 4GiB. [default: what the process holds, and 3/4 of what is free]",
    ),
    click.option("-v", "--verbose", is_flag=True, help="A line for each phase."),
    QUIET,
)
_EXECUTED = (
    click.option("--threads", type=click.IntRange(1), help="Threads of this process. [default: all processors]"),
    click.option("--scheduler", metavar="ADDRESS", help="A dask scheduler to run on. [default: this process]"),
)


def with_options(options: Sequence[Callable[..., Any]]) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """A decorator that adds options, in this order."""

    def decorated(command: Callable[..., Any]) -> Callable[..., Any]:
        for option in reversed(options):
            command = option(command)
        return command

    return decorated


def common(command: Callable[..., Any]) -> Callable[..., Any]:
    """Options that every command takes."""
    command = click.option("--debug", is_flag=True, help="On an error, show the traceback.")(command)
    return click.option("--json", "as_json", is_flag=True, help="Print one JSON object on stdout.")(command)


class _Lines(logging.Handler):
    """Writes lines to stderr, above a bar where there is one, which says itself how far the work is."""

    def emit(self, record: logging.LogRecord) -> None:
        line, bar = record.getMessage(), sys.stderr.isatty()
        if record.name == STEPS.name:
            if bar and record.levelno >= logging.INFO:
                return
            line = f"{time.strftime('%H:%M:%S', time.localtime(record.created))} {line}"
        if bar:
            from tqdm import tqdm  # see `progress`

            tqdm.write(line, file=sys.stderr)
        else:
            sys.stderr.write(line + "\n")
        sys.stderr.flush()


@contextmanager
def seen(what: str, verbose: bool = False, quiet: bool = False) -> Iterator[None]:
    """A command that works long, from its first second to its end."""
    handler, level = _Lines(), LOG.level
    LOG.setLevel(logging.WARNING if quiet else logging.DEBUG if verbose else logging.INFO)
    LOG.addHandler(handler)
    try:
        with working(what, not quiet):
            yield
    finally:
        LOG.removeHandler(handler)
        LOG.setLevel(level)


def limited(command: Callable[..., Any]) -> Callable[..., Any]:
    """Options of commands that keep within a memory limit, and work long: these have a bar from their first second on."""

    @functools.wraps(command)
    def watched(*arguments: Any, **options: Any) -> Any:
        with seen(click.get_current_context().info_name or "", options.pop("verbose"), options.pop("quiet")):
            return command(*arguments, **options)

    return with_options(_LIMITED)(watched)


def executed(command: Callable[..., Any]) -> Callable[..., Any]:
    """Options of commands that run jobs; none of them changes results."""
    return limited(with_options(_EXECUTED)(command))


def checked(what: str) -> Callable[..., Any]:
    """The option that leaves out comparing stores with their checksums."""
    return click.option(
        "--check/--no-check",
        default=True,
        show_default=True,
        help=f"Compare {what} with the checksums. Without, damage may go unseen into what is made.",
    )


def unescaped(word: str) -> str:
    """A tab or a newline for what a shell passes on in its place."""
    return {r"\t": "\t", r"\n": "\n"}.get(word, word)


def setting_of(text: str) -> tuple[str, Any]:
    """Name and value behind `--set`."""
    name, equals, value = text.partition("=")
    if not equals:
        raise InputError(f"--set {text}: write it as name=value, for instance --set lam=0.01")
    return name, value_of(value)


def value_of(word: str) -> Any:
    """A parameter as it is written on the command line."""
    try:
        return json.loads({"none": "null", "inf": "Infinity"}.get(word.lower(), word.replace("True", "true")))
    except ValueError:
        return word


def show(report: dict[str, Any], as_json: bool, lines: list[str], err: bool = False) -> None:
    """Print what a command found, in the place of its bar."""
    current().finish()
    click.echo(in_urls(json.dumps(report) if as_json else "\n".join(lines)), err=err)


def plain(value: Any) -> str:
    """A value as people read it; of a long list the beginning."""
    if isinstance(value, dict):
        return ", ".join(f"{name}={plain(item)}" for name, item in value.items())
    if isinstance(value, list):
        return ", ".join(map(plain, value[:10])) + (f" and {len(value) - 10:,} more" if len(value) > 10 else "")
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)
