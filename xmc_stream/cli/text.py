"""Options of raw text, for commands that convert."""

from __future__ import annotations

from dataclasses import fields
from typing import TYPE_CHECKING, Any

import click

from xmc_stream.cli.options import unescaped
from xmc_stream.errors import InputError

if TYPE_CHECKING:
    from xmc_stream.convert.options import TextOptions

TEXT_FIELDS = click.option(
    "--text-field", "text_fields", multiple=True, metavar="NAME",
    help="Raw text: a field (a column) of the text; several are joined. [default: title and content, or text, ...]",
)  # fmt: skip
ID_FIELD = click.option(
    "--id-field", metavar="NAME", help="Raw text: the field of the rows' own ids, which predictions come back with."
)
TEXT = (
    TEXT_FIELDS,
    ID_FIELD,
    click.option(
        "--label-field", metavar="NAME",
        help='Raw text: the field of the labels, "" for none. [default: target_ind, labels, label, ...]',
    ),
    click.option(
        "--label-delimiter", type=unescaped, metavar="TEXT",
        help=r"Raw text: what stands between labels in a string, \t for a tab. [default: the string is one label]",
    ),
    click.option("--label-lists", is_flag=True, help="Raw text: labels in a string are a list, as \"['a', 'b']\"."),
    click.option(
        "--label-ids/--label-texts", default=False, show_default=True,
        help="Raw text: labels in a string are ids, whole numbers, or names.",
    ),
    click.option(
        "--analyzer", type=click.Choice(["word", "char", "char_wb"]), default="word", show_default=True,
        help="Raw text: features are words, or characters (char_wb: within words), as scikit-learn cuts them.",
    ),
    click.option("--ngrams", default="1,1", show_default=True, metavar="LOW,HIGH", help="Raw text: how many in a row."),
    click.option("--lowercase/--keep-case", default=True, show_default=True, help="Raw text."),
    click.option("--stop-words", type=click.Choice(["none", "english"]), default="none", show_default=True,
                 help="Raw text: words left out, scikit-learn's list."),
    click.option("--token-pattern", metavar="REGEX", help="Raw text: what a word is. [default: two letters or more]"),
    click.option("--min-df", default="1", show_default=True, metavar="NUMBER",
                 help="Raw text: least rows that a feature is in, as 5, or as a share with a point, 0.001."),
    click.option("--max-df", default="1.0", show_default=True, metavar="NUMBER", help="Raw text: most rows, likewise."),
    click.option("--max-features", type=click.IntRange(1), metavar="D", help="Raw text: the most frequent ones are kept."),
    click.option("--sublinear-tf/--linear-tf", default=True, show_default=True,
                 help="Raw text: a feature that occurs tf times in a row counts 1 + ln tf, or tf."),
    click.option("--idf/--no-idf", default=True, show_default=True,
                 help="Raw text: weigh features by 1 + ln((1 + N) / (1 + rows they are in))."),
    click.option("--hash-features", type=click.IntRange(1), metavar="D",
                 help="Raw text: hash words to a power of two of features, without a vocabulary."),
)  # fmt: skip


def text_options(values: dict[str, Any]) -> TextOptions | None:
    """Take the values of the options above out of `values`; None where all are the defaults."""
    from xmc_stream.convert.options import TextOptions

    given = {field.name: values.pop(field.name) for field in fields(TextOptions)}
    low, _, high = given["ngrams"].partition(",")
    try:
        given["ngrams"] = (int(low), int(high or low))
    except ValueError:
        raise InputError(f"--ngrams {given['ngrams']}: write two numbers as 1,2") from None
    for name in ("min_df", "max_df"):
        given[name] = _count_or_share(f"--{name.replace('_', '-')}", given[name])
    if given["stop_words"] == "none":
        given["stop_words"] = None
    if given["token_pattern"] is None:
        del given["token_pattern"]
    text = TextOptions(**given)
    return None if text == TextOptions() else text


def _count_or_share(option: str, text: str) -> int | float:
    try:
        return float(text) if "." in text or "e" in text else int(text)
    except ValueError:
        raise InputError(f"{option} {text}: write a number as 5, or a share as 0.001") from None
