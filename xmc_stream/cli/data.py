"""The command that makes data sets: convert."""

from __future__ import annotations

from pathlib import Path

import click

from xmc_stream.cli.options import PATH, common, limited, show
from xmc_stream.memory import format_size


@click.command()
@click.argument("source", type=PATH)
@click.argument("target", type=PATH)
@click.option(
    "--labels", type=PATH,
    help="The file of Y, when SOURCE is that of X alone. [default: NAME_X_Y.txt beside NAME_X_Xf.txt]",
)  # fmt: skip
@click.option("--like", type=PATH, help="The training set: its numbers of features and labels, its normalisation.")
@click.option("--normalize", type=click.Choice(["none", "l2"]), help="Scale rows. [default: none, or as --like]")
@click.option("--overwrite", is_flag=True, help="Replace TARGET if it exists.")
@limited
@common
def convert(
    source: Path, target: Path, labels: Path | None, like: Path | None, normalize: str | None, overwrite: bool,
    memory_limit: str | None, as_json: bool, debug: bool,
) -> None:  # fmt: skip
    """Convert SOURCE to the dataset TARGET, once.

    \b
    SOURCE is one of these, told by its content; a text may be compressed by gzip, bzip2, xz or zstd:
      XMLRepo text        first line N D K, then a line `label,label feature:value feature:value ...` a sample
      text of features    first line N D, then `feature:value ...`; --labels: first line N K, then `label:1 ...`
      .npz of scipy       features (N x D); --labels: labels (N x K)
    """
    from xmc_stream.convert import convert_report

    dataset, figures = convert_report(
        source, target, labels=labels, like=like, normalize=normalize, overwrite=overwrite, memory_limit=memory_limit,
        progress=True,
    )  # fmt: skip
    show(figures, as_json, [
        f"{dataset.path}: {figures['n_samples']:,} samples, {figures['n_features']:,} features, "
        f"{figures['n_labels']:,} labels, {figures['nnz_features']:,} values, {figures['nnz_labels']:,} positives"
        + "".join(f" (labels of {name})" for name in [dataset.attributes.get("source_labels")] if name),
        f"{format_size(figures['bytes_on_disk'])} on disk, {figures['seconds']:.1f} s, "
        f"peak memory {format_size(figures['peak_rss'])}",
    ])  # fmt: skip
