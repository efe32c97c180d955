"""Making a dataset in a work folder beside its name: the ledger, the store, its name at the end, and what a kill left.

`NAME.partial` holds `ledger`, `store`, which becomes the dataset, and what else the work needs. What is done is not done
again when the same work is asked for again. The ledger goes last: as long as anything is left, it says what it was.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

from xmc_stream.engine.ledger import Ledger
from xmc_stream.errors import NO_ROOM, InputError, JobError, ResumeError, StoreError, XmcStreamError
from xmc_stream.jobs.job import Receipt
from xmc_stream.store.dataset import Dataset
from xmc_stream.store.encoding import fsync_tree, publish, remove_tree

MARK = "conversion"  # the attribute of a dataset that tells which work it came of: `digest_of` its identity
COMMAND = "command"  # in an identity: which command it is of, where that is not convert
WHOLE = "whole"  # the note of a ledger that all is written


def work_folder(target: Path) -> Path:
    """Where what becomes `target` is made."""
    return target.with_name(target.name + ".partial")


def digest_of(identity: Mapping[str, Any]) -> str:
    """What "the same work" means."""
    return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()


def make(
    target: Path,
    identity: Mapping[str, Any],
    run: Callable[[Path, Ledger], Receipt],
    spoilt: tuple[type[XmcStreamError], ...] = (InputError,),
    anew: bool = False,
) -> Receipt:
    """Make the dataset `target`, from where a killed process was; returns what `run` does (it has `said`), and `resumed`.

    run: makes the folder `store` in the work folder, whose path it gets as an absolute one. spoilt: errors after which
    nothing that was done is of use. anew: it never goes on, so any error leaves nothing. Raises ResumeError where another
    process makes it, and StoreError where it cannot be written.
    """
    work = work_folder(target)
    try:
        work.mkdir(parents=True, exist_ok=True)
        with Ledger(work / "ledger", identity, renew=True) as ledger:
            if not ledger.resumed:
                _clear(work, ledger.path)
            for left in [*work.rglob("*.partial"), *work.rglob("*.old")]:  # by copies of jobs that were killed
                _remove(left)
            try:
                result = ledger.get(WHOLE) or run(work.absolute(), ledger)  # a worker has a folder of its own
            except BaseException as error:
                if isinstance(error, spoilt) or anew or not any(ledger.items()):
                    shutil.rmtree(work, ignore_errors=True)  # a job that was interrupted may write there still
                raise
            if ledger.renewed:
                result["said"] += f"; an unfinished conversion of something else, in {work.name}, was dropped"
            fsync_tree(work / "store")  # before anything says that it is whole, and what it was made of goes
            ledger.add(WHOLE, result)
            with ThreadPoolExecutor(1) as beside:  # publishing waits for the disk; nothing else is needed any more
                beside.submit(_clear, work, ledger.path, work / "store")
                publish(work / "store", target)
            remove_work(ledger)
            return {**result, "resumed": ledger.resumed}
    except (OSError, JobError) as failure:
        cause = failure.__cause__ if isinstance(failure, JobError) else failure
        if isinstance(cause, XmcStreamError) or not isinstance(cause, OSError):
            raise
        if {path.name for path in work.glob("*")} <= {"ledger"}:  # there was no room to begin
            shutil.rmtree(work, ignore_errors=True)
        advice = "make room there" if cause.errno in NO_ROOM else "mend that"
        if work.is_dir():
            advice += f" (what is done is in {work.name}, and goes on)"
        raise StoreError(
            f"{target} cannot be written ({cause.strerror or cause}): {advice} or name another place"
        ) from None


def made_before(target: Path, identity: Mapping[str, Any]) -> Receipt | None:
    """What was said of work that was killed when its dataset had its name already; its work folder is removed."""
    work = work_folder(target)
    if not target.exists() or (work / "store").exists() or not (work / "ledger").exists():
        return None
    try:
        with Ledger(work / "ledger", identity) as ledger:
            whole = ledger.get(WHOLE)
            if whole is not None:
                remove_work(ledger)
                return {**whole, "resumed": True}
    except ResumeError:
        pass
    return None


def stands(target: Path, identity: Mapping[str, Any]) -> bool:
    """Whether the dataset is there and came of the same work; what a kill left of its work folder is removed."""
    try:
        attributes = Dataset(target).attributes
    except StoreError:
        return False
    if attributes.get(MARK) != digest_of(identity):
        return False
    with suppress(OSError):
        work_folder(target).rmdir()  # empty, if it is there
    return True


def remove_work(ledger: Ledger) -> None:
    """Remove a work folder, its ledger last."""
    _clear(ledger.path.parent, ledger.path)
    shutil.rmtree(ledger.path.parent, ignore_errors=True)  # a late copy of a job may write there still


def _clear(work: Path, *but: Path) -> None:
    """Remove what is in a work folder: what unfinished work of something else left, or what is of no use any more."""
    for path in work.iterdir():
        if path not in but:
            _remove(path)


def _remove(path: Path) -> None:
    if path.is_dir():
        remove_tree(path)
    else:
        path.unlink(missing_ok=True)
