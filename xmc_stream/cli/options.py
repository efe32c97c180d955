"""What commands share: options, and how they print."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import click

PATH = click.Path(path_type=Path)


def with_options(options: Sequence[Callable[..., Any]]) -> Callable[..., Any]:
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


def limited(command: Callable[..., Any]) -> Callable[..., Any]:
    """The option of commands that keep within a memory limit."""
    return click.option(
        "--memory-limit", metavar="SIZE", help="Peak resident memory, as 512MB or 4GiB. [default: 3/4 of what is free]"
    )(command)


def executed(command: Callable[..., Any]) -> Callable[..., Any]:
    """Options of commands that run jobs; none of them changes results."""
    for option in (
        click.option("--scheduler", metavar="ADDRESS", help="A dask scheduler to run on. [default: this process]"),
        click.option("--threads", type=click.IntRange(1), help="Threads of this process. [default: all processors]"),
    ):
        command = option(command)
    return limited(command)


def show(report: dict[str, Any], as_json: bool, lines: list[str]) -> None:
    click.echo(json.dumps(report) if as_json else "\n".join(lines))


def plain(value: Any) -> str:
    """A value as people read it; of a long list the beginning."""
    if isinstance(value, dict):
        return ", ".join(f"{name}={plain(item)}" for name, item in value.items())
    if isinstance(value, list):
        return ", ".join(map(plain, value[:10])) + (f" and {len(value) - 10:,} more" if len(value) > 10 else "")
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)
