"""Making a store or a file in a work folder beside its name: the ledger, the name at the end, and what a kill left.

`NAME.partial` holds `ledger`, `store`, which becomes NAME, and what else the work needs. What is done is not done again
when the same work is asked for again. The ledger goes last: as long as anything is left, it says what it was.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

from xmc_stream.errors import NO_ROOM, InputError, JobError, ResumeError, StoreError, XmcStreamError
from xmc_stream.runtime.job import Receipt
from xmc_stream.runtime.ledger import IDENTITY, Ledger, read_ledger
from xmc_stream.store.dataset import Dataset
from xmc_stream.store.places import (
    LOCK,
    empty,
    fsync_tree,
    is_ours,
    publish,
    put_back,
    refuse_foreign_names,
    remove_held,
    remove_left,
    remove_tree,
    work_folder,
)

MARK = "conversion"  # the attribute of a dataset that tells which work it came of: `digest_of` its identity
COMMAND = "command"  # in an identity: which command it is of, where that is not convert
WHOLE = "whole"  # the note of a ledger that all is written
STORE = "store"  # what is made, in its work folder


def digest_of(identity: Mapping[str, Any]) -> str:
    """What "the same work" means."""
    return hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()


def make(
    targets: Path | Sequence[Path],
    identity: Mapping[str, Any],
    run: Callable[[Path, Ledger], Receipt],
    refuse: Callable[[Path], None],
    spoilt: tuple[type[XmcStreamError], ...] = (InputError,),
    anew: bool = False,
) -> Receipt:
    """Make what stands at `targets` in the end, from where a killed process was.

    Returns what `run` does (it has `said`, if the work of something else is to be told of), and `resumed`.

    run: makes `store`, a folder or a file, in the work folder of each target. It gets that of the first one, as an absolute
    path. refuse: raises InputError where something stands at a target that must not be replaced. spoilt: errors after which
    nothing that was done is of use. anew: it never goes on, so any error leaves nothing. Several targets get their names
    in one step: a kill between them is put right when the same work is asked for again. Raises ResumeError where another
    process makes one of them, and StoreError where it cannot be written.
    """
    targets = [targets] if isinstance(targets, Path) else list(targets)
    works = [work_folder(target) for target in targets]
    for target in targets:
        refuse_foreign_names(target)
        put_back(target)
        _refuse_other_command(work_folder(target), identity)
    if not _whole(works[0], identity):
        refuse_all(targets, refuse, _command(identity) if anew else None)
    with ExitStack() as held, _written(targets[0], works[0]):
        ledgers: list[Ledger] = []
        try:
            for work in works:
                ledgers.append(held.enter_context(Ledger(work / LOCK, identity, renew=True)))
            ledger = ledgers[0]
            result = ledger.get(WHOLE)
            if result is None:
                for target in targets:  # another process may have ended since
                    refuse(target)
                for work in works:
                    if anew or not ledger.resumed:
                        empty(work, work / LOCK)
                    for left in [*work.rglob("*.partial"), *work.rglob("*.old")]:  # by copies of jobs that were killed
                        remove_tree(left)
                result = run(works[0].absolute(), ledger)  # a worker has a folder of its own
            if ledger.renewed and "said" in result:
                result["said"] += f"; an unfinished conversion of something else, in {works[0].name}, was dropped"
            for work in works:
                fsync_tree(work / STORE)  # before anything says that it is whole, and what it was made of goes
            ledger.add(WHOLE, result)
        except BaseException as error:
            if isinstance(error, spoilt) or anew or not any(True for each in ledgers for _ in each.items()):
                _drop(works[: len(ledgers)])
            raise
        with ThreadPoolExecutor(1) as beside:  # publishing waits for the disk; nothing else is needed any more
            for work in works:
                beside.submit(empty, work, work / LOCK, work / STORE)
            for target, work in zip(targets, works, strict=True):
                if os.path.lexists(work / STORE):
                    publish(work / STORE, target)
        _drop(works)
        return {**result, "resumed": ledger.resumed}


def refuse_all(targets: Sequence[Path], refuse: Callable[[Path], None], anew: str | None = None) -> None:
    """Call `refuse` of each target. Where it raises, what a kill left beside is removed, if nothing goes on from there.

    anew: a command that never goes on, whatever its work folders hold.
    """
    try:
        for target in targets:
            refuse(target)
    except InputError:
        for work in map(work_folder, targets):
            if anew is not None and _command(_begun(work).get(IDENTITY, {COMMAND: anew})) == anew:
                remove_left(work / LOCK)
            else:
                remove_unbegun(work / LOCK)
        raise


def remove_unbegun(file: Path) -> None:
    """Remove a work folder, by its ledger, that a kill left before a job was done or after all was removed."""
    with suppress(StoreError):  # of a damaged one nobody knows
        if is_ours(file.parent) and not (file.exists() and len(read_ledger(file)[0]) > 1):
            remove_left(file)


def _command(identity: Mapping[str, Any]) -> str:
    return str(identity.get(COMMAND, "convert"))


def all_but_named(target: Path) -> bool:
    """Whether a process was killed when all of `target` was made, but for the name: the same command gives it that."""
    return WHOLE in _begun(work_folder(target))


def _begun(work: Path) -> dict[str, Receipt]:
    """What the ledger of a work folder says, if there is one."""
    return read_ledger(work / LOCK)[0] if is_ours(work) and (work / LOCK).exists() else {}


def _refuse_other_command(work: Path, identity: Mapping[str, Any]) -> None:
    """Raise InputError where a work folder is of another command, which may go on from there."""
    begun = _begun(work)
    command = _command(begun.get(IDENTITY, identity))
    if command != _command(identity) and len(begun) > 1:
        raise InputError(
            f"{work} is of a {command} command that has not ended: let it go on, remove the folder, or give another name"
        )


def _whole(work: Path, identity: Mapping[str, Any]) -> bool:
    """Whether a process was killed when this work was done, but for the names."""
    begun = _begun(work)
    return WHOLE in begun and begun.get(IDENTITY) == json.loads(json.dumps(identity))


@contextmanager
def _written(target: Path, work: Path) -> Iterator[None]:
    """Errors of the system in the block become one that says what cannot be written, and what is kept."""
    try:
        yield
    except (OSError, JobError) as failure:
        cause = failure.__cause__ if isinstance(failure, JobError) else failure
        if isinstance(cause, XmcStreamError) or not isinstance(cause, OSError):
            raise
        if is_ours(work) and {path.name for path in work.glob("*")} <= {LOCK}:  # there was no room to begin
            remove_left(work / LOCK)
        advice = f"{'make room there' if cause.errno in NO_ROOM else 'mend that'} and give the same command again"
        if work.is_dir():
            advice += f" (what is done is in {work.name}, and goes on)"
        at = f"{cause.filename}: " if cause.filename and not str(cause.filename).startswith(str(work)) else ""
        raise StoreError(
            f"{target} cannot be written ({at}{cause.strerror or cause}): {advice}, or name another place"
        ) from None


def made_before(target: Path, identity: Mapping[str, Any]) -> Receipt | None:
    """What was said of work that was killed when its dataset had its name already; its work folder is removed."""
    work = work_folder(target)
    if not target.exists() or os.path.lexists(work / STORE) or not _whole(work, identity):
        return None
    with suppress(ResumeError), Ledger(work / LOCK, identity) as ledger:
        whole = ledger.get(WHOLE)
        if whole is not None:
            put_back(target)
            _drop([work])
            return {**whole, "resumed": True}
    return None


def stands(target: Path, identity: Mapping[str, Any]) -> bool:
    """Whether the dataset is there and came of the same work; what a kill left of its work folder is removed."""
    try:
        attributes = Dataset(target).attributes
    except StoreError:
        return False
    if attributes.get(MARK) != digest_of(identity):
        return False
    if not _begun(work_folder(target)):  # else it is unfinished work of something else
        remove_left(work_folder(target) / LOCK)
    put_back(target)
    return True


def _drop(works: Sequence[Path]) -> None:
    """Remove work folders that are held, that with the ledger of the whole last."""
    for work in reversed(works):
        remove_held(work / LOCK)
