"""Commands that learn, predict and compare, and what they would do: train, predict, evaluate, plan, demo."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from xmc_stream.cli.data import BESIDE, CSV, FORMAT, ID_FIELD, TEXT_FIELDS
from xmc_stream.cli.options import (
    BEAM,
    PATH,
    SEED,
    SOLVER,
    STORE,
    TARGET,
    checked,
    common,
    executed,
    seen,
    setting_of,
    show,
    with_options,
)
from xmc_stream.errors import InputError, MemoryLimitError
from xmc_stream.system.memory import format_size
from xmc_stream.system.progress import LOG

if TYPE_CHECKING:
    from xmc_stream.methods.parameters import Parameters
    from xmc_stream.methods.weights import Given
    from xmc_stream.models import Model
    from xmc_stream.store.dataset import Dataset


_NOT_PLANNED = (
    "sources",
    "target",
    "normalize",
    "columns",
    "observed",
    "overwrite",
    "scheduler",
    "as_json",
    "debug",
    "verbose",
    "quiet",
)


def _parameters(
    solver: str, settings: tuple[str, ...], class_weight: Path | None = None, tree: Path | None = None
) -> Parameters:
    """Those of --set. What files have is said to be given, where the method knows of it."""
    from xmc_stream.methods.registry import declared, parameters

    files, known = {"class_weight": class_weight, "tree": tree}, declared(solver).rules()
    given = {name: "given" for name, path in files.items() if path is not None and name in known}
    return parameters(solver, {**given, **dict(map(setting_of, settings))})


def _given(
    sample_weight: Path | None, class_weight: Path | None, tree: Path | None, dataset: Dataset, memory_limit: str | None
) -> Given | None:
    """Weights, and a tree of the dataset's labels, in files."""
    from xmc_stream.methods.weights import Given, read_weights

    if sample_weight is None and class_weight is None and tree is None:
        return None
    samples, labels = (None if path is None else read_weights(path) for path in (sample_weight, class_weight))
    if tree is None:
        return Given(samples, labels)
    from xmc_stream.tree.given import structure_of  # only where it is asked for

    return Given(samples, labels, structure_of(tree, dataset, memory_limit).arrays())


class _TrainCommand(click.Command):
    """Its help names every parameter of every method, from their declarations."""

    def format_epilog(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """A list for each method; of a preset what it changes."""
        from xmc_stream.methods.parameters import spelled
        from xmc_stream.methods.registry import declared, names

        for name in names():
            found = declared(name)
            if name in found.presets:
                changed = ", ".join(f"{key}={spelled(value)}" for key, value in found.presets[name].items())
                formatter.write_paragraph()
                formatter.write_text(f"{name} is {found.solver} with {changed}, unless --set says otherwise.")
                continue
            defaults = found.defaults()
            rows = [
                (f"{key}={spelled(defaults[key])}", f"{rule.help} [{rule.what()}]")
                for key, rule in found.rules().items()
            ]
            with formatter.section(f"--set for {name}, {found.title}"):
                formatter.write_dl(rows, col_max=26)


@click.command(cls=_TrainCommand)
@click.argument("data", type=STORE)
@click.argument("model", type=TARGET)
@SOLVER
@click.option(
    "--set", "settings", multiple=True, metavar="NAME=VALUE",
    help="A parameter of the method, e.g. lam=0.01; none and true, false are words. All are listed below.",
)  # fmt: skip
@SEED
@click.option("--warm-start", type=STORE, metavar="MODEL", help="Begin from the weights of this model.")
@click.option(
    "--calibrate", type=click.FloatRange(0, 1, min_open=True, max_open=True), metavar="FRACTION",
    help="Calibrate scores (see `calibrate`) by a second training without this share of the rows, as 0.1: as long again.",
)  # fmt: skip
@click.option("--sample-weight", type=PATH, metavar="FILE.npy", help="A vector: how many times C counts for each row.")
@click.option(
    "--class-weight",
    type=PATH,
    metavar="FILE.npy",
    help="A vector: of each label's positives. Sets class_weight=given.",
)
@click.option(
    "--tree",
    type=PATH,
    metavar="FILE",
    help="A tree of the labels that is taken as it is: lines `child parent`, see docs/tree.md. Sets tree=given.",
)
@click.option("--overwrite", is_flag=True, help="Replace MODEL, or an unfinished run of other data or parameters.")
@click.option("--force", is_flag=True, help="Resume on another processor type or package versions.")
@checked("DATA")
@executed
@common
def train(
    data: Path, model: Path, solver: str, settings: tuple[str, ...], seed: int, warm_start: Path | None,
    calibrate: float | None, sample_weight: Path | None, class_weight: Path | None, tree: Path | None, overwrite: bool,
    force: bool, check: bool, memory_limit: str | None, threads: int | None, scheduler: str | None, as_json: bool,
    debug: bool,
) -> None:  # fmt: skip
    """Train MODEL from the dataset DATA. A run that was killed goes on when the same command is given again."""
    from xmc_stream.methods.contract import Task
    from xmc_stream.methods.registry import method_of
    from xmc_stream.models import Execution, load_model
    from xmc_stream.store.dataset import open_dataset
    from xmc_stream.store.nodes import understood
    from xmc_stream.training.plan import passes_in_words
    from xmc_stream.training.train import train as train_model
    from xmc_stream.training.train import train_calibrated

    parameters, dataset = _parameters(solver, settings, class_weight, tree), open_dataset(data)
    given = _given(sample_weight, class_weight, tree, dataset, memory_limit)
    norm = float(dataset.row_norms(0, min(dataset.n_samples, 10_000)).mean()) if dataset.n_samples else 1.0
    if not 0.5 < norm < 2.0:
        hint = "the defaults are for rows of length one (xmc-stream convert --normalize l2)"
        LOG.info("note: rows of %s have a length of %.3g on average; %s", data, norm, hint)
    execution = Execution(memory_limit, threads, scheduler, True)
    start = load_model(warm_start) if warm_start else None
    path = model.absolute()
    task = Task(dataset, parameters, seed, start, given=given)
    if calibrate is None:
        _, report = train_model(task, path, execution, overwrite=overwrite, force=force, check=check)
    else:
        _, report = train_calibrated(task, path, execution, calibrate, overwrite, force, check)
    report["model"] = str(model)
    with understood(model):  # report of a model that was finished before come from its attributes
        show(report, as_json, [
            f"{model}: {report['nnz']:,} weights, {format_size(report['model_bytes'])}"
            + (" (resumed)" if report["resumed"] else ""),
            *method_of(parameters).summary(report),
            f"{report['seconds']:.1f} s, {passes_in_words(report['passes'])}, {format_size(report['bytes_read'])} "
            f"read, peak memory {format_size(report['peak_rss'])} of {format_size(report['memory_limit'])}",
            *([_of_calibration(report["calibration"])] if "calibration" in report else []),
        ])  # fmt: skip


def _of_calibration(about: dict[str, Any]) -> str:
    precisions = ", ".join(f"{k} {v[0]:.2f} -> {v[1]:.2f}" for k, v in about.items() if k.startswith("P@"))
    gain = f"{about['gain']:+.2f}, standard error {about['standard_error']:.2f}"
    return (
        f"{'calibrated' if about['applied'] else 'not calibrated, as it does not surely help'}: on {about['rows']:,} rows "
        f"held out {precisions}; their mean {gain}"
    )


@click.command()
@click.argument("model", type=PATH)
@click.argument("data", type=STORE, required=False)
@click.option("--scores-of", type=STORE, metavar="MODEL", help="A model of the same parameters that has not seen DATA.")
@click.option("--remove", is_flag=True, help="Drop the calibration instead; no DATA.")
@checked("the models and DATA")
@executed
@common
def calibrate(
    model: Path, data: Path | None, scores_of: Path | None, remove: bool, check: bool, memory_limit: str | None,
    threads: int | None, scheduler: str | None, as_json: bool, debug: bool,
) -> None:  # fmt: skip
    """Make scores of rare and frequent labels of MODEL comparable, as held-out rows of the dataset DATA say.

    A few numbers for the whole model are learned and kept with it: the slope and shift of a label's scores by its
    frequency. From then on all commands use the calibrated scores; up to a cap they are the logit of how likely the label is
    right. They are only applied where the rows say that they raise the mean of P@1, P@3 and P@5 by more than two
    standard errors.

    MODEL must not have been trained on DATA. If it was, give --scores-of a model of the same parameters that was
    trained without (`split`); `train --calibrate 0.1` does all of that.
    """
    from xmc_stream.evaluation.calibrate import calibrate as calibrate_model
    from xmc_stream.evaluation.calibrate import uncalibrate

    if remove == (data is not None):
        raise InputError("give either the held-out rows to calibrate by, or --remove")
    if data is None:
        uncalibrate(model)
        show({"model": str(model), "applied": False}, as_json, [f"{model}: not calibrated"])
        return
    about = calibrate_model(
        model, data, scores_of=scores_of, check=check, memory_limit=memory_limit, threads=threads, scheduler=scheduler
    )
    show({"model": str(model), **about}, as_json, [f"{model}: {_of_calibration(about)}"])


@click.command()
@click.argument("model", type=STORE)
@click.argument("data", type=STORE)
@click.argument("out", type=TARGET)
@click.option("-k", "k", type=click.IntRange(1), default=5, show_default=True, help="Labels for each sample.")
@click.option("--filter", "pairs", type=PATH, help="A file of lines `row label`: pairs that are not predicted.")
@BEAM
@click.option("--overwrite", is_flag=True, help="Replace OUT if it exists.")
@with_options((FORMAT, BESIDE, TEXT_FIELDS, ID_FIELD, *CSV))
@checked("the model and DATA")
@executed
@common
def predict(
    model: Path, data: Path, out: Path, k: int, pairs: Path | None, beam: int | None, overwrite: bool, check: bool,
    memory_limit: str | None, threads: int | None, scheduler: str | None, as_json: bool, debug: bool, **reading: Any,
) -> None:  # fmt: skip
    """Write the best k labels of each sample of DATA to OUT: a .npz, .txt or .jsonl file by its name, else a zarr group.

    DATA is a dataset, or a file that `convert --like MODEL` takes (raw text for a model of raw text), or - for standard
    input; it needs no labels, and any that it has count for nothing. Fields are those of the training set, or as you say.
    OUT.jsonl has the names of labels where the model knows them. As OUT, - is standard output, which gets what OUT.jsonl
    would. Rows that have ids (--id-field) keep them.
    """
    from xmc_stream.models import Execution, predict_with

    execution = Execution(memory_limit, threads, scheduler, True)
    report = predict_with(_model(model, beam), data, out, k, execution, overwrite, pairs, check, **_of_rows(reading))
    report["predictions"] = str(out)
    show(report, as_json, [
        f"{out}: the best {k} labels of {report['n_samples']:,} samples",
        f"{report['seconds']:.1f} s, {report['ms_per_sample']:.3g} ms a sample, "
        f"peak memory {format_size(report['peak_rss'])}",
    ], err=str(out) == "-")  # fmt: skip


def _model(path: Path, beam: int | None) -> Model:
    """The model at a path, by the beam that was given."""
    from xmc_stream.models import load_model
    from xmc_stream.store.model import is_model

    if beam is not None and path.exists() and not is_model(path):
        raise InputError(f"{path} is no model, and --beam says how a model predicts: leave it out, or give the model")
    model = load_model(path)
    return model if beam is None else model.with_beam(beam or None)


def _of_rows(values: dict[str, Any]) -> dict[str, Any]:
    """What `predict` was told of the rows that it reads, as `convert` takes it."""
    from xmc_stream.convert.options import TextOptions

    fields, ids = values.pop("text_fields"), values.pop("id_field")
    text = TextOptions(text_fields=fields, id_field=ids) if fields or ids else None
    given = {
        **values,
        "text": text,
        "header": values["header"] and None,
    }
    return {name: value for name, value in given.items() if value not in (None, ())}


@click.command()
@click.argument("predictions", type=STORE)
@click.argument("data", type=STORE)
@click.option("--train", "train_data", type=STORE, help="The training set, for propensity-scored metrics.")
@click.option("-k", "ks", type=click.IntRange(1), multiple=True, default=(1, 3, 5), show_default=True)
@click.option("--propensity", default="default", show_default=True, help="A,B, or default, amazon or wikipedia.")
@click.option("--filter", "pairs", type=PATH, help="A file of lines `row label`: pairs that are left out.")
@click.option(
    "--threshold", type=float,
    help="Of a model: a label is predicted if it scores more. [default: the model decides, see below]",
)  # fmt: skip
@BEAM
@checked("a model, DATA and the training set")
@executed
@common
def evaluate(
    predictions: Path, data: Path, train_data: Path | None, ks: tuple[int, ...], propensity: str, pairs: Path | None,
    threshold: float | None, beam: int | None, check: bool, memory_limit: str | None, threads: int | None,
    scheduler: str | None, as_json: bool, debug: bool,
) -> None:  # fmt: skip
    """Compare PREDICTIONS (or what a model at that path predicts) with the labels of DATA; metrics in per cent.

    PREDICTIONS is what predict wrote, or another program alike: a zarr group, or a .npz, .txt or .jsonl file. Labels are
    ranked by their scores; one that DATA does not have, or that stands twice in a row, is refused.

    A model also gives what needs every score: average_auc and hamming_loss, as fractions, macro_F1 over all labels and
    macro_F1_present over those that occur in DATA, in per cent. The last three count the labels that are predicted: the best
    one, where every training row had one label; else those above a threshold, which is 0, or 0.5 (leml with the squared loss,
    cplst), or was learned from rows held out (pdsparse, memoir, group-lasso with loss=label-ranking). Of label trees
    average_auc needs --beam none, and one tree.

    Pairs of --filter (filter_labels_test.txt of the Extreme Classification Repository) are taken out of the predictions
    and out of the true labels. Of stored predictions those behind move up: predict more than are compared, or predict
    with --filter.
    """
    from xmc_stream.evaluation.evaluate import evaluate as evaluate_predictions

    pair: Any = tuple(propensity.split(",")) if "," in propensity else propensity
    began = time.perf_counter()
    of = predictions if beam is None else _model(predictions, beam)
    metrics = evaluate_predictions(
        of, data, train_data, ks, pair, filter=pairs, threshold=threshold, check=check,
        memory_limit=memory_limit, threads=threads, scheduler=scheduler,
    )  # fmt: skip
    lines = [f"{metrics['n_samples']:,} samples, {time.perf_counter() - began:.1f} s"]
    shown = {name: value for name, value in metrics.items() if name != "n_samples"}
    width, fractions = max(8, *map(len, shown)), ("average_auc", "hamming_loss")
    lines += [f"{name:{width}} {value:{'.6f' if name in fractions else '6.2f'}}" for name, value in shown.items()]
    show(metrics, as_json, lines)


@click.command(context_settings={"ignore_unknown_options": True, "allow_interspersed_args": False})
@click.argument("command")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
@click.option(
    "--workers", type=click.IntRange(1), metavar="N",
    help="Of a cluster that is not there yet, each with the command's --threads and --memory-limit: the time with N, fewer "
    "and more. As fast as this machine; before COMMAND.",
)  # fmt: skip
@click.pass_context
def plan(context: click.Context, command: str, arguments: tuple[str, ...], workers: int | None) -> None:
    """Say what another command would do: put `plan` before it, as in `xmc-stream plan train DATA MODEL ...`.

    Passes over the data, bytes to read, peak memory by component, a time estimated from a short measured probe, and the
    least --memory-limit that works. Nothing is written. COMMAND: convert, train, predict or evaluate; `plan DATA` is
    for train.
    """
    commands = context.find_root().command.commands  # type: ignore[attr-defined]
    if command not in commands:  # the dataset to train from; the model has no name yet
        command, arguments = "train", (command, "MODEL", *arguments)
    o = commands[command].make_context(f"xmc-stream {command}", list(arguments)).params
    if command not in ("train", "predict", "convert", "evaluate"):
        raise InputError(f"there is no plan for `{command}`: plan train, predict, evaluate or convert")
    with seen("plan", o["verbose"], o["quiet"]):
        report = _planned(command, o, workers)
        if report["fits"]:
            from xmc_stream.training.plan import plan_lines

            show(report, o["as_json"], plan_lines(report))
            return
        error = MemoryLimitError(report["why"], report["least_limit"])
        if o["as_json"]:
            show({**report, "why": error.in_shell}, True, [])
            sys.exit(1)
        raise MemoryLimitError(f"{command} does not fit: " + report["why"], error.least)


def _planned(command: str, o: dict[str, Any], workers: int | None) -> dict[str, Any]:
    """What a command with these options would do."""
    from xmc_stream.models import Execution, load_model
    from xmc_stream.store.dataset import open_dataset
    from xmc_stream.store.model import is_model
    from xmc_stream.training import plan as planning

    if workers is not None and (command not in ("train", "predict", "evaluate") or o.get("scheduler")):
        raise InputError("--workers is for plans of train, predict and evaluate by a model, without --scheduler")
    execution = Execution(o["memory_limit"], o.get("threads"), o.get("scheduler"))
    if command == "convert":
        from xmc_stream.cli.data import reading

        options = reading({name: o[name] for name in o if name not in _NOT_PLANNED})
        return planning.plan_conversion(list(o["sources"]), **options)
    data = open_dataset(_sealed(o["data"]))
    if command == "train":
        start = None if o["warm_start"] is None else load_model(_sealed(o["warm_start"]))
        parameters = _parameters(o["solver"], o["settings"], o["class_weight"], o["tree"])
        given = _given(o["sample_weight"], o["class_weight"], o["tree"], data, o["memory_limit"])
        return planning.plan_training(data, parameters, o["seed"], execution, start, workers, given, o["calibrate"])
    train_set = None if o.get("train_data") is None else open_dataset(_sealed(o["train_data"]))
    if command == "evaluate" and o["beam"] is None and not is_model(o["predictions"]):
        from xmc_stream.evaluation.evaluate import plan_comparison

        return plan_comparison(o["predictions"], data, train_set, execution)
    model = _model(_sealed(o["model"] if command == "predict" else o["predictions"]), o["beam"])
    k = o["k"] if command == "predict" else max(o["ks"])
    filtered = o["pairs"] is not None
    return planning.plan_prediction(
        model, data, k, execution, filtered, command == "evaluate", workers, o.get("out"), train_set
    )


def _sealed(store: Path) -> Path:
    """A store whose numbers can be planned by. Raises StoreError where they are not those that were written."""
    from xmc_stream.store.inventory import refuse_broken_seal

    if (store / "zarr.json").exists():
        refuse_broken_seal(store)
    return store


@click.command()
@click.argument("folder", type=PATH, default=Path("xmc-stream-demo"))
@click.option(
    "--source", "sources", type=PATH, multiple=True, metavar="DIR",
    help="Read the packages in this folder; may be repeated. [default: the standard library and what is installed]",
)  # fmt: skip
@common
def demo(folder: Path, sources: tuple[Path, ...], as_json: bool, debug: bool) -> None:
    """Run the main job on a real text set: which package, module and class does a docstring belong to?

    The docstrings come from the Python source on this machine (up to 100 MB of it, parsed, never run). The text set,
    the datasets, the model and the predictions stay in FOLDER (xmc-stream-demo), each command is shown as it runs, and
    all takes about a minute. An earlier demo's files in FOLDER are replaced; a folder of anything else is refused.
    """
    from xmc_stream.demo import run_demo

    report = run_demo(folder, sources, sys.stderr if as_json else sys.stdout)
    if as_json:
        click.echo(json.dumps(report))
