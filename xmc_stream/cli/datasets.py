"""Commands on finished stores: verify, info, append, split, select-features, compact, export, copy."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from xmc_stream.cli.options import (
    PATH,
    QUIET,
    SEED,
    STORE,
    TARGET,
    checked,
    common,
    executed,
    limited,
    plain,
    seen,
    show,
)
from xmc_stream.errors import InputError, StoreError
from xmc_stream.system.memory import format_size, peak_resident

if TYPE_CHECKING:
    from xmc_stream.store.inventory import StoredArrays

_SHOWN = 20  # lines of a long list that are shown, from its beginning and as many from its end


@click.command()
@click.argument("path", type=STORE)
@executed
@common
def verify(
    path: Path, memory_limit: str | None, threads: int | None, scheduler: str | None, as_json: bool, debug: bool
) -> None:
    """Check that the dataset, model or predictions at PATH are whole and true; exit code 1 if not.

    \b
    Compared are: the files there with those that must be; every file with its checksum; sizes and fingerprints with the
    attributes; order and range of all indices; rows with columns; counts and norms with the values. --json lists
    all damage found (the first 100).
    """
    from xmc_stream.datasets.verify import verify as verify_store
    from xmc_stream.store.inventory import UNREAD

    report = verify_store(path, memory_limit=memory_limit, threads=threads, scheduler=scheduler)
    if report["sound"] or as_json:
        show(report, as_json, [
            f"{path}: {report['kind']}, sound: {report['n_files']:,} files, {format_size(report['bytes_read'])} read "
            f"in {report['seconds']:.1f} s, peak memory {format_size(report['peak_rss'])}"
        ])  # fmt: skip
    if not report["sound"]:
        more = report["n_damage"] - 1
        passing = all(UNREAD in line for line in report["damage"])
        advice = "look at the disk and verify it again" if passing else "make it again"
        raise StoreError(
            f"{path} {'could not be verified' if passing else 'is damaged'}: {report['damage'][0]}"
            + (f" (and {more:,} more: --json lists them)" if more else "")
            + f": {advice}"
        )


@click.command()
@click.argument("path", type=STORE)
@click.option(
    "--digest", is_flag=True,
    help="Hash the content: two models with one digest are the same model. And all arrays alone, without what is said of them.",
)  # fmt: skip
@click.option(
    "--tree", is_flag=True, help="Of a label tree: only that, as lines `child parent`, which `train --tree` takes."
)
@common
def info(path: Path, digest: bool, tree: bool, as_json: bool, debug: bool) -> None:
    """Say what the dataset, model or predictions at PATH are: sizes, sparsity, label frequencies, bytes, where it came from.

    Of a model also how its training went: seconds, memory and bytes read of each phase; of label trees what they look like;
    of what is not finished, how far it is.

    Nothing passes over the data: numbers a row are of a sample of the rows where there are more than a million. --digest
    reads all of it.
    """
    from xmc_stream.datasets.info import describe, summarise, unfinished
    from xmc_stream.models import load_model
    from xmc_stream.runtime.check import checked_reading
    from xmc_stream.store.dataset import open_dataset
    from xmc_stream.store.encoding import folder_bytes
    from xmc_stream.store.inventory import LOGS, SEAL, log_damage, refuse_broken_seal
    from xmc_stream.store.model import is_model
    from xmc_stream.store.nodes import understood
    from xmc_stream.store.predictions import Predictions, is_predictions

    if tree:
        _show_tree(path, as_json)
        return
    if is_model(path):
        model = load_model(path)
        refuse_broken_seal(path)
        for line in log_damage(path, model.attributes.get(LOGS, {})):
            raise StoreError(f"{line}: the store is damaged; make it again")
        with understood(path):  # attributes and logs, which nothing has looked at
            shapes, drawn = model.pictured()
            report = {"kind": "model", **describe(model)}
            if digest:
                report |= {"digest": model.digest(), **_of_arrays(model)}
            lines = [*_model_lines(report), *drawn]
        show({**report, **shapes}, as_json, lines)
        return
    with understood(path):
        if under_way := unfinished(path):
            show(under_way, as_json, _model_lines(under_way) if "run" in under_way else _plain_lines(under_way))
            return
    if is_predictions(path):
        predictions = Predictions(path)
        report = {
            "kind": "predictions",
            "n_samples": predictions.n_samples,
            **predictions.attributes,
            "k": predictions.k,
        }
        report = {name: value for name, value in report.items() if name not in ("format", SEAL, LOGS)}
        report["bytes_on_disk"] = folder_bytes(path)
        if digest:
            report |= _of_arrays(predictions)
        lines = _plain_lines(report)
    else:
        dataset = open_dataset(path)
        with checked_reading(path.absolute()):
            report = {"kind": "dataset", **dataset.attributes, **summarise(dataset)}
        if digest:
            report |= {"digest": dataset.fingerprint, **_of_arrays(dataset)}
        lines = _summary_lines(path, report)
    show(report, as_json, lines)


@click.command()
@click.argument("data", type=STORE)
@click.argument("news", type=STORE, nargs=-1, required=True, metavar="NEW...")
@click.argument("out", type=TARGET)
@click.option(
    "--columns/--rows-only", default=False, show_default=True, help="X by columns too, not only when a solver asks."
)
@click.option("--overwrite", is_flag=True, help="Replace OUT if it exists.")
@executed
@common
def append(
    data: Path, news: tuple[Path, ...], out: Path, columns: bool, overwrite: bool, memory_limit: str | None,
    threads: int | None, scheduler: str | None, as_json: bool, debug: bool,
) -> None:  # fmt: skip
    """Make OUT, the dataset DATA with the rows of the datasets NEW below its own.

    Rows of DATA are not written again: OUT shares its files, by hard links, and DATA stays as it is. On another disk, or
    where DATA is a URL, they are copied.

    \b
    NEW must have the same features: make it by `convert --like DATA`, with --new-labels where it has new labels.
    Labels are the same that have one name; new ones come behind those of DATA, which keep their numbers.
    Where no set has names of labels, they are the same that have one number.

    When it was killed, the same command goes on.
    """
    from xmc_stream.datasets.append import append_report

    _, report = append_report(
        data, list(news), out, columns=columns, memory_limit=memory_limit, threads=threads, scheduler=scheduler,
        overwrite=overwrite, progress=True,
    )  # fmt: skip
    copied = report["bytes_copied"]
    show(report, as_json, [
        report["said"] + (" (resumed)" if report["resumed"] else ""),
        f"{out}: {report['n_samples']:,} samples, {report['n_features']:,} features, {report['n_labels']:,} labels, "
        f"{report['nnz_features']:,} values, {report['nnz_labels']:,} positives",
        f"{format_size(report['bytes_on_disk'])} on disk"
        + (f", {format_size(report['bytes_linked'])} of it in files of {data} too" if report["bytes_linked"] else ""),
        *([f"{format_size(copied)} of full chunks were copied: there are no hard links to {data} here"] if copied else []),
        f"{report['seconds']:.1f} s, peak memory {format_size(report['peak_rss'])}",
    ])  # fmt: skip


@click.command()
@click.argument("data", type=STORE)
@click.argument("train", type=TARGET)
@click.argument("valid", type=TARGET)
@click.option(
    "--fraction",
    type=click.FloatRange(0, 1, min_open=True, max_open=True),
    default=0.1,
    show_default=True,
    help="Share of the samples, and of each label's positives, that goes to VALID.",
)
@SEED
@click.option("--rows", type=PATH, metavar="FILE", help="Instead: the samples of VALID, numbers from 0, one a line.")
@click.option("--overwrite", is_flag=True, help="Replace TRAIN and VALID if they exist.")
@checked("DATA")
@limited
@common
def split(
    data: Path, train: Path, valid: Path, fraction: float, seed: int, rows: Path | None, overwrite: bool, check: bool,
    memory_limit: str | None, as_json: bool, debug: bool,
) -> None:  # fmt: skip
    """Split the dataset DATA into the datasets TRAIN and VALID, the same way every time.

    Each sample belongs to its rarest label, and of each label's samples the fraction goes to VALID, but never the last
    positive of a label; so labels with few positives make VALID smaller than the fraction.
    """
    from xmc_stream.datasets.split import split as split_dataset

    report = split_dataset(
        data, train, valid, fraction=fraction, seed=seed, rows=rows, check=check, memory_limit=memory_limit,
        overwrite=overwrite, progress=True,
    )  # fmt: skip
    show(report, as_json, [
        f"{train}: {report['n_train']:,} samples",
        f"{valid}: {report['n_valid']:,} samples ({report['share']:.2%}), with {report['labels_in_valid']:,} of "
        f"{report['labels_in_data']:,} labels",
        f"{report['seconds']:.1f} s, peak memory {format_size(report['peak_rss'])}",
    ])  # fmt: skip


@click.command("select-features")
@click.argument("data", type=STORE)
@click.argument("out", type=TARGET)
@click.option("--model", type=STORE, help="Take the features that this row-sparse model selects.")
@click.option("--features", type=PATH, metavar="FILE", help="Or take these: numbers from 0, one a line.")
@click.option("--overwrite", is_flag=True, help="Replace OUT if it exists.")
@checked("DATA and the model")
@limited
@common
def select_features(
    data: Path, out: Path, model: Path | None, features: Path | None, overwrite: bool, check: bool, memory_limit: str | None,
    as_json: bool, debug: bool,
) -> None:  # fmt: skip
    """Make OUT, a dataset that has some features of the dataset DATA as its only columns.

    Samples and labels stay as they are; the files of labels are shared with DATA. A compact model (see `compact`), or one
    that is trained on OUT, predicts on such data.

    With --model, DATA may be any data that were converted like the model's training set: a test set, new data.
    """
    from xmc_stream.datasets.select import select_features as select
    from xmc_stream.models import load_model
    from xmc_stream.store.encoding import folder_bytes

    if (model is None) == (features is None):
        raise InputError("give either --model, whose selected features are taken, or --features")
    began = time.perf_counter()
    chosen = features if model is None else load_model(model)
    dataset = select(data, out, chosen, check=check, memory_limit=memory_limit, overwrite=overwrite, progress=True)
    sizes = {name: dataset.attributes[name] for name in ("n_samples", "n_features", "nnz_features")}
    report = {
        "selected": str(out), **sizes, "of": dataset.attributes["selected_features"]["of"],
        "bytes_of_x": folder_bytes(out / "X"), "seconds": round(time.perf_counter() - began, 3),
        "peak_rss": peak_resident(),
    }  # fmt: skip
    show(report, as_json, [
        f"{out}: {report['n_features']:,} features of {report['of']:,}, {report['nnz_features']:,} values of "
        f"{report['n_samples']:,} samples in {format_size(report['bytes_of_x'])}",
        f"{report['seconds']:.1f} s, peak memory {format_size(report['peak_rss'])}",
    ])  # fmt: skip


@click.command()
@click.argument("model", type=STORE)
@click.argument("out", type=TARGET)
@click.option("--overwrite", is_flag=True, help="Replace OUT if it exists.")
@checked("MODEL")
@limited
@common
def compact(
    model: Path, out: Path, overwrite: bool, check: bool, memory_limit: str | None, as_json: bool, debug: bool
) -> None:
    """Make OUT, the row-sparse MODEL with the features that it selects as its only columns.

    OUT predicts on what `select-features --model MODEL` makes of a dataset, and its scores are those of MODEL.
    """
    from xmc_stream.models import load_model
    from xmc_stream.store.encoding import folder_bytes

    small = load_model(model).compact(out, overwrite, memory_limit, check)
    report = {
        "compact": str(out), "n_features": small.n_features, "of": small.attributes["selected_features"]["of"],
        "n_labels": small.n_labels, "model_bytes": folder_bytes(out), "peak_rss": peak_resident(),
    }  # fmt: skip
    show(report, as_json, [
        f"{out}: {report['n_features']:,} features of {report['of']:,}, {format_size(report['model_bytes'])}",
        f"peak memory {format_size(report['peak_rss'])}",
    ])  # fmt: skip


@click.command()
@click.argument("data", type=STORE)
@click.argument("out", type=TARGET)
@click.option("--format", "format_", type=click.Choice(["xmlrepo", "libsvm", "npz"]), help="[default: by the name]")
@click.option(
    "--base", type=click.IntRange(0, 1), help="The first feature's and label's number in libsvm text. [default: 1]"
)
@click.option("--labels", type=TARGET, help="The file of Y beside X in a .npz. [default: NAME-labels.npz]")
@click.option("--overwrite", is_flag=True, help="Replace OUT if it exists.")
@checked("DATA")
@limited
@common
def export(
    data: Path, out: Path, format_: str | None, base: int | None, labels: Path | None, overwrite: bool, check: bool,
    memory_limit: str | None, as_json: bool, debug: bool,
) -> None:  # fmt: skip
    """Write the dataset DATA as text or scipy matrices, or the weights of a model as a scipy matrix.

    \b
    OUT says as what by its name:
      NAME.npz    X for scipy.sparse.load_npz, and Y in NAME-labels.npz; of a model: D x K weights, `bias`, calibration
                  (of a label tree: of all nodes and labels, see docs/tree.md)
      -           standard output, which gets text
      any other   XMLRepo text, or with --format libsvm lines without a header; .gz is compressed
    Values are written so that the same float32 is read back.
    """
    from xmc_stream.datasets.export import export as export_to

    report = export_to(
        data, out, format=format_, base=base, labels=labels, check=check, memory_limit=memory_limit, overwrite=overwrite,
        progress=True,
    )  # fmt: skip
    also = f" and {report['labels']}" if "labels" in report else ""
    blank = report.get("blank_lines") if report["format"] == "libsvm" else 0
    show(report, as_json, [
        f"{out}{also}: " + (f"{format_size(report['bytes_out'])} in " if "bytes_out" in report else "")
        + f"{report['seconds']:.1f} s, "
        f"peak memory {format_size(report['peak_rss'])}",
        *([f"{blank:,} samples without labels and features are blank lines, which some programs skip"] if blank else []),
    ], err=str(out) == "-")  # fmt: skip


@click.command()
@click.argument("source", type=STORE)
@click.argument("target")
@click.option("--overwrite", is_flag=True, help="Replace a store at TARGET, or half a copy of another one.")
@QUIET
@common
def copy(source: Path, target: str, overwrite: bool, quiet: bool, as_json: bool, debug: bool) -> None:
    """Copy the dataset, model or predictions SOURCE to TARGET; each is a folder or a URL, as s3://bucket/train.xmc.

    Files are compared with their checksums on the way. A copy that was killed goes on when the same command is given
    again. Credentials come from fsspec's configuration, as AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY or AWS_PROFILE.
    """
    from xmc_stream.datasets.copy import copy as copy_store

    with seen("copy", quiet=quiet):
        report = copy_store(source, target, overwrite)
    passed = report["n_files"] - report["copied_files"]
    show(report, as_json, [
        f"{target}: {report['n_files']:,} files, {format_size(report['bytes'])}"
        + (f" ({passed:,} files were there)" if passed else ""),
        f"{format_size(report['copied_bytes'])} copied in {report['seconds']:.1f} s",
    ])  # fmt: skip


def _show_tree(path: Path, as_json: bool) -> None:
    """What `info --tree` says of a model."""
    from xmc_stream.models import load_model
    from xmc_stream.store.inventory import refuse_broken_seal
    from xmc_stream.tree.given import lines_of

    model = load_model(path)
    refuse_broken_seal(path)
    pairs = model.tree()
    show({"kind": "model", "tree": pairs}, as_json, [] if as_json else list(lines_of(pairs)))


def _of_arrays(store: StoredArrays) -> dict[str, str]:
    """What `info --digest` says of any store."""
    with seen("info"):
        return {"arrays_digest": store.arrays_digest()}


def _plain_lines(report: dict[str, Any]) -> list[str]:
    return [f"{name:16} {plain(value)}" for name, value in report.items()]


def _history_line(done: dict[str, Any]) -> str:
    """What a method noted of a pass, an alternation or a sweep: the first number is which."""
    (first, *others) = (
        f"{name} {value:.6g}" if isinstance(value, float) else f"{name} {plain(value)}" for name, value in done.items()
    )
    return f"{first}: {', '.join(others)}"


def _model_lines(report: dict[str, Any]) -> list[str]:
    """Attributes of a model and how its training went, for people."""
    run = report["run"]
    lines = [f"{name:16} {plain(value)}" for name, value in report.items() if name not in ("run", "history")]
    history = _shortened([_history_line(done) for done in report.get("history", ())])
    lines += [f"{'history' if n == 0 else '':16} {line}" for n, line in enumerate(history)]
    if not run["sessions"]:
        return lines
    lines.append(
        f"{'training':16} {run['seconds']:,.1f} s in {run['sessions']} session{'s' * (run['sessions'] > 1)}, memory limit "
        + ", ".join(map(format_size, run["limits"]))
        + f", peak memory {format_size(run['peak_resident'])}"
    )
    lines.append(
        f"  {'phase':26}{'jobs':>7}{'seconds':>10}{'read':>10}{'a second':>10}{'resident':>10}{'private':>10}{'mapped':>10}"
    )
    sizes = ("bytes_read", "bytes_per_second", "peak_resident", "peak_private", "peak_mapped")
    lines += _shortened([
        f"  {phase['phase']:26}{phase['jobs']:7,}{phase['seconds']:10,.1f}"
        + "".join(f"{format_size(phase[name]):>10}" for name in sizes)
        for phase in run["phases"]
    ])  # fmt: skip
    if len(run["workers"]) > 1:
        lines.append(f"  {'worker':26}{'jobs':>7}{'seconds':>10}{'read':>10}{'':10}{'resident':>10}")
        lines += _shortened([
            f"  {of['process']:26}{of['jobs']:7,}{of['job_seconds']:10,.1f}{format_size(of['bytes_read']):>10}{'':10}"
            f"{format_size(of['peak_resident']):>10}"
            for of in sorted(run["workers"], key=lambda of: -of["job_seconds"])
        ])  # fmt: skip
    return lines


def _shortened(lines: list[str]) -> list[str]:
    """Of many lines the beginning and the end."""
    if len(lines) <= 2 * _SHOWN:
        return lines
    return [*lines[:_SHOWN], f"  ... {len(lines) - 2 * _SHOWN:,} more (--json has them all)", *lines[-_SHOWN:]]


def _summary_lines(path: Path, report: dict[str, Any]) -> list[str]:
    """Attributes and numbers of a dataset, for people."""
    f = dict(report)
    n, read = f.pop("n_samples"), f.pop("rows_read")
    of = "" if read == n else f" of {read:,} rows looked at"
    parts = ", ".join(f"{name} {format_size(size)}" for name, size in f.pop("bytes_by_part").items())
    lines = [
        ("samples", f"{n:,}"),
        ("features", f"{f.pop('n_features'):,}; {f.pop('nnz_features'):,} values, density {f.pop('density'):.3g}"),
        ("labels", f"{f.pop('n_labels'):,}; {f.pop('nnz_labels'):,} positives"),
        ("features a row", _words(f.pop("features_per_row")) + f"; {f.pop('rows_without_features'):,} without{of}"),
        ("labels a row", _words(f.pop("labels_per_row")) + f"; {f.pop('rows_without_labels'):,} without{of}"),
        ("label frequency", _words(f.pop("label_frequency"))),
        ("head", f"the {f.pop('head_labels'):,} most frequent labels have {f.pop('head_share'):.1%} of the positives"),
        (
            "tail",
            f"{f.pop('labels_up_to_5'):,} labels have at most 5 positives, {f.pop('labels_once'):,} one, "
            f"{f.pop('labels_without'):,} none",
        ),
        ("mean row norm", f"{f.pop('mean_row_norm'):.6g}{of}"),
        ("on disk", f"{format_size(f.pop('bytes_on_disk'))}: {parts}"),
    ]
    skipped = f.pop("skipped_rows", None)
    hidden = ("kind", "format", "metadata_sha256", "conversion")
    lines += [(name, plain(value)) for name, value in f.items() if name not in hidden]
    if skipped:
        lines += [("skipped", ":".join(map(str, row[:2])) + f": {row[2]}") for row in skipped[:10]]
        lines += [("", f"and {len(skipped) - 10:,} more, in --json")] if len(skipped) > 10 else []
    return [f"{path}: {f['kind']}", *(f"  {name:16} {value}" for name, value in lines)]


def _words(spread: dict[str, float]) -> str:
    rest = ", ".join(f"{name} {value:,}" for name, value in spread.items() if name != "mean")
    return f"{spread['mean']:.4g} on average ({rest})"
