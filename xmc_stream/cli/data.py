"""The command that makes data sets: convert, and the options of how an input is read, also of raw text."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from xmc_stream.cli.options import PATH, STORE, TARGET, common, executed, show, unescaped, with_options
from xmc_stream.errors import InputError
from xmc_stream.system.memory import format_size
from xmc_stream.system.progress import LOG

if TYPE_CHECKING:
    from xmc_stream.convert.options import TextOptions

FORMATS = ["xmlrepo", "libsvm", "jsonl", "csv", "parquet", "npz", "npy", "anndata"]
NOTED = {
    "skipped": "bad rows left out",
    "dropped_features": "values of unseen features left out",
    "dropped_labels": "unseen labels left out",
    "summed_duplicates": "values added to another of the same feature and row",
    "rows_without_class": "rows without a class",
    "blank_lines": "blank lines and comments passed over",
}


FORMAT = click.option("--format", type=click.Choice(FORMATS), help="Of SOURCE. [default: recognised by its content]")
BESIDE = click.option(
    "--beside", type=PATH, multiple=True,
    help="A matrix (.npy, .npz) with a row for each row of SOURCE: its columns are features too, behind SOURCE's.",
)  # fmt: skip
CSV = (
    click.option(
        "--delimiter", type=unescaped, metavar="CHARACTER",
        help=r"CSV: what stands between columns, \t for a tab. [default: recognised: tab, comma, semicolon or |]",
    ),
    click.option("--quote", metavar="CHARACTER", help="CSV: what texts are put in, '' for nothing. [default: \"]"),
    click.option(
        "--header/--no-header", default=True, show_default=True,
        help="CSV: the first row has the names of the columns; else they are called 1, 2, 3, ...",
    ),
)  # fmt: skip
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
_READING = (  # how the input is read: by the names of ConvertOptions, but for a few words of the shell's own
    FORMAT,
    click.option(
        "--labels", type=PATH, multiple=True,
        help="The file of Y, when SOURCE is that of X alone; as many as there are SOURCEs. "
        "[default: NAME_X_Y.txt beside NAME_X_Xf.txt]",
    ),
    BESIDE,
    click.option("--like", type=STORE, help="The training set: its sizes, base of ids, vocabulary, normalisation."),
    click.option("--zero-based/--one-based", default=None, help="Ids in a text begin with 0, or 1. [default: recognised]"),
    click.option(
        "--on-error", type=click.Choice(["stop", "skip"]), default="stop", show_default=True,
        help="A bad row: end, or leave it out, counted and listed in the dataset.",
    ),
    click.option(
        "--duplicates", type=click.Choice(["stop", "sum"]), default="stop", show_default=True,
        help="A feature twice in a row: an error, or its values added up (a label counts once).",
    ),
    click.option(
        "--unseen", type=click.Choice(["stop", "drop"]), default="stop", show_default=True,
        help="Features and labels that --like does not have: an error, or left out and counted.",
    ),
    click.option("--new-labels", is_flag=True, help="With --like: take its features alone, labels are SOURCE's own."),
    click.option("--features", "n_features", type=click.IntRange(0), help="D, where SOURCE does not say it."),
    click.option("--labels-count", "n_labels", type=click.IntRange(0), help="K, where SOURCE does not say it."),
    click.option("--label-names", type=PATH, help="A file with the names of the labels: one a line, or lbl.json."),
    click.option("--feature-names", type=PATH, help="A file with the names of the features, one a line."),
    *CSV,
    click.option("--layer", metavar="NAME", help="AnnData: this layer instead of X."),
    click.option(
        "--label-key", metavar="KEY",
        help="AnnData: the column of obs, or the matrix of obsm, that holds the labels; obs/KEY and obsm/KEY say which.",
    ),
)  # fmt: skip


def reading(values: dict[str, Any]) -> dict[str, Any]:
    """The values of the options above, by the names of `ConvertOptions`."""
    zero = values.pop("zero_based")
    return {
        "text": text_options(values),
        "base": None if zero is None else 1 - int(zero),
        "skip": values.pop("on_error") == "skip",
        "sum_duplicates": values.pop("duplicates") == "sum",
        "drop_unseen": values.pop("unseen") == "drop",
        **values,
    }


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


@click.command()
@click.argument("sources", type=PATH, nargs=-1, required=True, metavar="SOURCE...")
@click.argument("target", type=TARGET)
@with_options(_READING)
@with_options(TEXT)
@click.option(
    "--normalize", type=click.Choice(["none", "l2"]), help="Scale rows. [default: none, l2 of raw text, or as --like]"
)
@click.option(
    "--columns/--rows-only", default=False, show_default=True, help="X by columns too, not only when a solver asks."
)
@click.option(
    "--observed", type=PATH, help="A file of lines `row label`, from zero: the pairs whose labels are known (for leml)."
)
@click.option("--overwrite", is_flag=True, help="Replace TARGET if it exists.")
@executed
@common
def convert(sources: tuple[Path, ...], target: Path, as_json: bool, debug: bool, **options: Any) -> None:
    """Convert SOURCE (several are one set, in this order; - is standard input) to the dataset TARGET, once.

    \b
    A SOURCE is one of these, recognised by its content; texts may be compressed by gzip, bzip2, xz or zstd:
      XMLRepo text        first line N D K, then a line `label,label feature:value feature:value ...` a sample
      text of features    first line N D, then `feature:value ...`; --labels: first line N K, then `label:1 ...`
      libsvm text         `label,label feature:value ...` without a first line of sizes; ids from 0 or 1 are told apart
      JSONL, raw text     an object a line, as {"text": "...", "labels": ["...", "..."]}: features are tf-idf of words
      CSV, TSV, raw text  columns with names instead of fields; texts in quotes may have newlines in them
      Parquet, raw text   columns instead of fields (needs pyarrow: pip install 'xmc-stream[parquet]')
      .npz of scipy       features (N x D); --labels: labels (N x K)
      .npz of NumPy       dense features X (N x D) and labels y, a matrix or the class of each row, as id or text
      .npy of NumPy       dense features, or a folder with indptr.npy, indices.npy, data.npy; --labels
      AnnData             .h5ad or a zarr folder, --label-key (needs h5py: pip install 'xmc-stream[anndata]')

    A line says how labels were understood, with three of them, and whether most seem to be several in one text.

    A conversion that was killed goes on when the same command is given again. Bad input ends in a line that names
    file and line.
    """
    from xmc_stream.convert import convert_report
    from xmc_stream.convert.labels import understood
    from xmc_stream.convert.options import ConvertOptions

    dataset, report = convert_report(list(sources), target, ConvertOptions(progress=True, **reading(options)))
    report["labels"] = understood(dataset)
    LOG.info("%s", report["labels"]["said"])
    notes = [
        f"{dataset.attributes[name]:,} {words}"
        for name, words in NOTED.items()
        if isinstance(dataset.attributes.get(name), int) and dataset.attributes[name]
    ]
    show(report, as_json, [
        f"{report['said']}" + (" (resumed)" if report["resumed"] else ""),
        *notes,
        f"{dataset.path}: {report['n_samples']:,} samples, {report['n_features']:,} features, "
        f"{report['n_labels']:,} labels, {report['nnz_features']:,} values, {report['nnz_labels']:,} positives"
        + "".join(f" (labels of {name})" for name in [dataset.attributes.get("source_labels")] if name),
        f"{format_size(report['bytes_on_disk'])} on disk, {report['seconds']:.1f} s, "
        f"peak memory {format_size(report['peak_rss'])}",
    ])  # fmt: skip
