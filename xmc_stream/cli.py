"""The command line: thin wrappers that read options, call the library and print."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from xmc_stream.errors import InputError, XmcStreamError
from xmc_stream.memory import format_size

if TYPE_CHECKING:
    from xmc_stream.solvers.ppdsparse import PPDSparseParameters

_PATH = click.Path(path_type=Path)


class _OneLine(click.Group):
    """Ends any expected failure with one line on stderr and exit code 1; --debug shows where it came from."""

    def main(self, args: Sequence[str] | None = None, *rest: Any, **kwargs: Any) -> Any:
        arguments = list(sys.argv[1:] if args is None else args) or ["--help"]
        try:
            return super().main(arguments, *rest, **{**kwargs, "standalone_mode": False})
        except click.exceptions.Abort:
            click.echo(
                "xmc-stream: interrupted; training goes on where it was when the same command is given again", err=True
            )
        except click.ClickException as error:
            hint = (
                f" (see {error.ctx.command_path} --help)" if isinstance(error, click.UsageError) and error.ctx else ""
            )
            click.echo(f"xmc-stream: {' '.join(error.format_message().split())}{hint}", err=True)
        except (XmcStreamError, OSError, MemoryError) as error:
            if "--debug" in arguments:
                raise
            click.echo(f"xmc-stream: {' '.join(str(error).split()) or type(error).__name__}", err=True)
        sys.exit(1)


def _common(command: Callable[..., Any]) -> Callable[..., Any]:
    """Options that every command takes."""
    command = click.option("--debug", is_flag=True, help="On an error, show the traceback.")(command)
    return click.option("--json", "as_json", is_flag=True, help="Print one JSON object on stdout.")(command)


def _limited(command: Callable[..., Any]) -> Callable[..., Any]:
    """The option of commands that keep within a memory limit."""
    return click.option(
        "--memory-limit", metavar="SIZE", help="Peak resident memory, as 512MB or 4GiB. [default: 3/4 of what is free]"
    )(command)


def _executed(command: Callable[..., Any]) -> Callable[..., Any]:
    """Options of commands that run jobs; none of them changes results."""
    for option in (
        click.option("--scheduler", metavar="ADDRESS", help="A dask scheduler to run on. [default: this process]"),
        click.option("--threads", type=click.IntRange(1), help="Threads of this process. [default: all processors]"),
    ):
        command = option(command)
    return _limited(command)


def _show(figures: dict[str, Any], as_json: bool, lines: list[str]) -> None:
    click.echo(json.dumps(figures) if as_json else "\n".join(lines))


@click.group(cls=_OneLine, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(package_name="xmc-stream")
def main() -> None:
    """Extreme multi-class and multi-label classification from disk, within a memory limit."""


@main.command()
@click.argument("source", type=_PATH)
@click.argument("target", type=_PATH)
@click.option(
    "--labels", type=_PATH,
    help="The file of Y, when SOURCE is that of X alone. [default: NAME_X_Y.txt beside NAME_X_Xf.txt]",
)  # fmt: skip
@click.option("--like", type=_PATH, help="The training set: its numbers of features and labels, its normalisation.")
@click.option("--normalize", type=click.Choice(["none", "l2"]), help="Scale rows. [default: none, or as --like]")
@click.option("--overwrite", is_flag=True, help="Replace TARGET if it exists.")
@_limited
@_common
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
    _show(figures, as_json, [
        f"{dataset.path}: {figures['n_samples']:,} samples, {figures['n_features']:,} features, "
        f"{figures['n_labels']:,} labels, {figures['nnz_features']:,} values, {figures['nnz_labels']:,} positives"
        + "".join(f" (labels of {name})" for name in [dataset.attributes.get("source_labels")] if name),
        f"{format_size(figures['bytes_on_disk'])} on disk, {figures['seconds']:.1f} s, "
        f"peak memory {format_size(figures['peak_rss'])}",
    ])  # fmt: skip


@main.command()
@click.argument("path", type=_PATH)
@click.option("--digest", is_flag=True, help="Hash the content: two models with one digest are the same model.")
@_common
def info(path: Path, digest: bool, as_json: bool, debug: bool) -> None:
    """Say what the dataset or model at PATH is."""
    from xmc_stream.models import describe, is_model, load_model
    from xmc_stream.store.dataset import open_dataset
    from xmc_stream.store.encoding import folder_bytes

    if is_model(path):
        model = load_model(path)
        figures = {"kind": "model", **describe(model)}
        if digest:
            figures["digest"] = model.digest()
    else:
        dataset = open_dataset(path)
        figures = {"kind": "dataset", **dataset.attributes, "bytes_on_disk": folder_bytes(path)}
        if digest:
            figures["digest"] = dataset.fingerprint
    _show(figures, as_json, [f"{name:16} {_plain(value)}" for name, value in figures.items()])


def _plain(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{name}={_plain(item)}" for name, item in value.items())
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


def _setting(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not equals:
        raise InputError(f"--set {text}: write it as name=value, for instance --set lam=0.01")
    try:
        return name, json.loads({"none": "null", "inf": "Infinity"}.get(value.lower(), value.replace("True", "true")))
    except ValueError:
        return name, value


def _parameters(solver: str, settings: tuple[str, ...]) -> PPDSparseParameters:
    from xmc_stream.solvers.ppdsparse import DISMEC, PPDSparseParameters

    preset = DISMEC if solver == "dismec" else {}
    return PPDSparseParameters.of({**preset, **dict(map(_setting, settings))})


@main.command()
@click.argument("data", type=_PATH)
@click.argument("model", type=_PATH)
@click.option("--solver", type=click.Choice(["ppdsparse", "dismec"]), default="ppdsparse", show_default=True)
@click.option(
    "--set", "settings", multiple=True, metavar="NAME=VALUE", help="A parameter of the solver, e.g. lam=0.01."
)
@click.option("--seed", type=click.IntRange(0), default=0, show_default=True)
@click.option("--warm-start", type=_PATH, metavar="MODEL", help="Begin from the weights of this model.")
@click.option("--overwrite", is_flag=True, help="Replace MODEL, or an unfinished run of other data or parameters.")
@click.option("--force", is_flag=True, help="Resume on another processor type or package versions.")
@click.option("--check/--no-check", default=True, show_default=True, help="Compare the data with its checksums first.")
@_executed
@_common
def train(
    data: Path, model: Path, solver: str, settings: tuple[str, ...], seed: int, warm_start: Path | None,
    overwrite: bool, force: bool, check: bool, memory_limit: str | None, threads: int | None, scheduler: str | None,
    as_json: bool, debug: bool,
) -> None:  # fmt: skip
    """Train MODEL from the dataset DATA. A run that was killed goes on when the same command is given again.

    \b
    Parameters of ppdsparse (--set NAME=VALUE):
      lam=0.01        weight of the l1 term            tau=1          weight of the l2 term
      C=1             weight of the loss               loss=squared_hinge  or hinge
      bias=true       a bias for each class            tol=0.01       violation at which a class is done
      max_rounds=3    solves of a class, or none       epochs=2       passes over the active set in a round
      last_epochs=6   and in the last round            added=50       a round adds max(|A|, added) violators
      prune=0         the finished model leaves out weights |w| < prune; objective and gap are those before

    
    Searches between rounds may be approximate (the last is exact); the more values a row has, the more it saves:
      delta=0         try 2: scores from 2 |w|_1^2 / delta^2 random draws of the weights of a class
      min_value=0     try 0.1 for rows of length one: scores from entries |x| > min_value

    dismec is ppdsparse with lam=0, C=2, max_rounds=5, prune=0.01, unless --set says otherwise.
    """
    from xmc_stream.estimators import train as train_model
    from xmc_stream.models import Execution, load_model
    from xmc_stream.store.dataset import open_dataset

    parameters = _parameters(solver, settings)
    dataset = open_dataset(data)
    norm = float(dataset.row_norms(0, min(dataset.n_samples, 10_000)).mean()) if dataset.n_samples else 1.0
    if not 0.5 < norm < 2.0:
        hint = "the defaults are for rows of length one (xmc-stream convert --normalize l2)"
        click.echo(f"note: rows of {data} have a length of {norm:.3g} on average; {hint}", err=True)
    execution = Execution(memory_limit, threads, scheduler, True)
    start = load_model(warm_start) if warm_start else None
    _, figures = train_model(dataset, model.absolute(), parameters, seed, execution, overwrite, force, check, start)
    figures["model"] = str(model)
    work, exact = figures["search_work"], figures["search_work_exact"]
    _show(figures, as_json, [
        f"{model}: {figures['nnz']:,} weights, {format_size(figures['model_bytes'])}"
        + (" (resumed)" if figures["resumed"] else ""),
        f"objective {figures['objective']:.6g}; duality gap / objective: {figures['duality_gap_mean']:.2g} on average, "
        f"{figures['duality_gap']:.2g} for the worst class; {figures['n_open']:,} classes stopped at the cap on rounds",
        f"{figures['seconds']:.1f} s, {figures['passes']:g} passes over the data, {format_size(figures['bytes_read'])} "
        f"read, peak memory {format_size(figures['peak_rss'])} of {format_size(figures['memory_limit'])}",
        *([f"searches did {work / exact:.0%} of the exact multiply-adds"] if exact else []),
    ])  # fmt: skip


@main.command()
@click.argument("model", type=_PATH)
@click.argument("data", type=_PATH)
@click.argument("out", type=_PATH)
@click.option("-k", "k", type=click.IntRange(1), default=5, show_default=True, help="Labels for each sample.")
@click.option("--filter", "pairs", type=_PATH, help="A file of lines `row label`: pairs that are not predicted.")
@click.option("--overwrite", is_flag=True, help="Replace OUT if it exists.")
@_executed
@_common
def predict(
    model: Path, data: Path, out: Path, k: int, pairs: Path | None, overwrite: bool, memory_limit: str | None,
    threads: int | None, scheduler: str | None, as_json: bool, debug: bool,
) -> None:  # fmt: skip
    """Write the best k labels of each sample of DATA to OUT: a zarr group, or a .npz or .txt file by its name."""
    from xmc_stream.models import Execution, load_model
    from xmc_stream.models import predict as predict_to
    from xmc_stream.store.dataset import open_dataset

    execution = Execution(memory_limit, threads, scheduler, True)
    figures = predict_to(load_model(model), open_dataset(data), out.absolute(), k, execution, overwrite, pairs)
    figures["predictions"] = str(out)
    _show(figures, as_json, [
        f"{out}: the best {k} labels of {figures['n_samples']:,} samples",
        f"{figures['seconds']:.1f} s, {figures['ms_per_sample']:.3g} ms a sample, "
        f"peak memory {format_size(figures['peak_rss'])}",
    ])  # fmt: skip


@main.command()
@click.argument("predictions", type=_PATH)
@click.argument("data", type=_PATH)
@click.option("--train", "train_data", type=_PATH, help="The training set, for propensity-scored figures.")
@click.option("-k", "ks", type=click.IntRange(1), multiple=True, default=(1, 3, 5), show_default=True)
@click.option("--propensity", default="default", show_default=True, help="A,B, or default, amazon or wikipedia.")
@click.option("--filter", "pairs", type=_PATH, help="A file of lines `row label`: pairs that are left out.")
@click.option("--threshold", default=0.0, show_default=True, help="Of a model: a label is predicted if it scores more.")
@_executed
@_common
def evaluate(
    predictions: Path, data: Path, train_data: Path | None, ks: tuple[int, ...], propensity: str, pairs: Path | None,
    threshold: float, memory_limit: str | None, threads: int | None, scheduler: str | None, as_json: bool, debug: bool,
) -> None:  # fmt: skip
    """Compare PREDICTIONS (or what a model at that path predicts) with the labels of DATA; figures in per cent.

    A model also gives what needs every score: average_auc and hamming_loss, as fractions, macro_F1 over all labels and
    macro_F1_present over those that occur in DATA, in per cent.

    Pairs of --filter (filter_labels_test.txt of the Extreme Classification Repository) are taken out of the predictions
    and out of the true labels. Of stored predictions those behind move up: predict more than are compared, or predict
    with --filter.
    """
    from xmc_stream.evaluation import evaluate as evaluate_predictions
    from xmc_stream.models import Execution
    from xmc_stream.store.dataset import open_dataset

    pair: str | tuple[float, float] = propensity
    if "," in propensity:
        try:
            a, b = map(float, propensity.split(","))
        except ValueError:
            raise InputError(f"--propensity {propensity}: write two numbers as 0.55,1.5, or a name") from None
        pair = (a, b)
    began = time.perf_counter()
    train_set = None if train_data is None else open_dataset(train_data)
    execution = Execution(memory_limit, threads, scheduler, True)
    figures = evaluate_predictions(predictions, open_dataset(data), train_set, ks, pair, execution, pairs, threshold)
    lines = [f"{figures['n_samples']:,} samples, {time.perf_counter() - began:.1f} s"]
    shown = {name: value for name, value in figures.items() if name != "n_samples"}
    width, fractions = max(8, *map(len, shown)), ("average_auc", "hamming_loss")
    lines += [f"{name:{width}} {value:{'.6f' if name in fractions else '6.2f'}}" for name, value in shown.items()]
    _show(figures, as_json, lines)


@main.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@click.argument("command")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def plan(command: str, arguments: tuple[str, ...]) -> None:
    """Say what another command would do: put `plan` before it, as in `xmc-stream plan train DATA MODEL ...`.

    Passes over the data, bytes to read, peak memory by component, a time estimated from a short measured probe, and the
    least --memory-limit that works. Nothing is written. COMMAND: convert, train, predict or evaluate; `plan DATA` is
    for train.
    """
    from xmc_stream.models import Execution, is_model, load_model
    from xmc_stream.store.dataset import open_dataset

    if command not in main.commands:  # the dataset to train from; the model has no name yet
        command, arguments = "train", (command, "MODEL", *arguments)
    o = main.commands[command].make_context(f"xmc-stream {command}", list(arguments)).params
    if command not in ("train", "predict", "convert", "evaluate"):
        raise InputError(f"there is no plan for `{command}`: plan train, predict, evaluate or convert")
    execution = Execution(o["memory_limit"], o.get("threads"), o.get("scheduler"), True)
    if command == "evaluate" and not is_model(o["predictions"]):
        from xmc_stream.evaluation import plan_comparison

        train_set = None if o["train_data"] is None else open_dataset(o["train_data"])
        figures = plan_comparison(o["predictions"], open_dataset(o["data"]), train_set, execution)

    from xmc_stream import planning

    if command == "convert":
        figures = planning.plan_conversion(o["source"], o["labels"], o["like"], o["memory_limit"])
    elif command == "train":
        start = None if o["warm_start"] is None else load_model(o["warm_start"])
        parameters = _parameters(o["solver"], o["settings"])
        figures = planning.plan_training(open_dataset(o["data"]), parameters, o["seed"], execution, start)
    elif command == "predict" or is_model(o["predictions"]):
        model = load_model(o["model"] if command == "predict" else o["predictions"])
        k = o["k"] if command == "predict" else max(o["ks"])
        data, filtered = open_dataset(o["data"]), o["pairs"] is not None
        figures = planning.plan_prediction(model, data, k, execution, filtered, command == "evaluate")
    _show(figures, o["as_json"], planning.plan_lines(figures))


@main.command()
@click.argument("folder", type=_PATH, default=Path("xmc-stream-demo"))
@click.option(
    "--source", "sources", type=_PATH, multiple=True, metavar="DIR",
    help="Read the packages in this folder; may be repeated. [default: the standard library and what is installed]",
)  # fmt: skip
@_common
def demo(folder: Path, sources: tuple[Path, ...], as_json: bool, debug: bool) -> None:
    """Run the main job on a real text set: which package, module and class does a docstring belong to?

    The docstrings come from the Python source on this machine (up to 100 MB of it, parsed, never run). The text set,
    the datasets, the model and the predictions stay in FOLDER (xmc-stream-demo), each command is shown as it runs, and
    all takes about a minute. An earlier demo's files in FOLDER are replaced; a folder of anything else is refused.
    """
    from xmc_stream.demo import run_demo

    figures = run_demo(folder, sources, sys.stderr if as_json else sys.stdout)
    if as_json:
        click.echo(json.dumps(figures))


if __name__ == "__main__":
    main()
