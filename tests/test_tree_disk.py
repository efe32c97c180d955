"""What lies on disk: nodes are read as rows reach them; what a unit or a shape was made from is gone when it is there."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.compiler import needs_compiler
from helpers.problems import LIMIT
from helpers.trees import array, run_tree, stored, topics, unpacked

import xmc_stream as xs
from xmc_stream.kernels.blocks import CSR
from xmc_stream.methods.contract import Task
from xmc_stream.models.runs import filter_pairs
from xmc_stream.runtime.plan import MIB, MemoryPlan
from xmc_stream.tree import nodes, plan, predict
from xmc_stream.tree.forecast import TreeForecaster
from xmc_stream.tree.nodes import OpenUnit, Unit, shared_units
from xmc_stream.tree.parameters import TreeParameters
from xmc_stream.tree.predict import HeldTrees, OpenTrees, TreeTask, TreeWeights
from xmc_stream.tree.solve import LANE_BYTES
from xmc_stream.tree.streaming import StreamJob

pytestmark = needs_compiler

TREE: dict[str, Any] = {"max_leaf": 3, "root": 4, "branching": 2, "beam": 2, "C": 2}  # 16 leaves


@pytest.fixture(scope="module", params=[1, 2], ids=["one tree", "two trees"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[xs.Model, xs.Dataset, Any]:
    folder = tmp_path_factory.mktemp("model")
    X, Y = topics()
    data = stored(folder, X, Y)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nodes, "CHILDREN", 12)
        made = xs.LabelTree(**TREE, n_trees=request.param, memory_limit=LIMIT).fit(data, model=folder / "m").model_
    return made, data, X


def test_parents_of_a_unit_are_read_one_by_one(model: tuple[xs.Model, xs.Dataset, Any]) -> None:
    of = TreeWeights(model[0].path)
    structures, several = of.structures(), 0
    for unit, _ in of.tiles:
        opened, whole = of.open_unit(unit, structures), of.unit(unit, structures)
        panels, at = list(unpacked(whole)), 0
        for parent in range(unit.first, unit.last):
            one = opened.read(parent, parent + 1)
            assert one.first == parent
            for found in unpacked(one):
                for got, want in zip(found, panels[at], strict=True):
                    assert np.array_equal(got, want)
                at += 1
            assert one.bias.tolist() == whole.bias[one.children[0] - whole.children[0] :][: len(one.bias)].tolist()
        assert at == len(panels)
        several += unit.last - unit.first > 1
    assert several > 2


def test_few_rows_read_the_parents_that_they_reach(model: tuple[xs.Model, xs.Dataset, Any]) -> None:
    of = TreeWeights(model[0].path)
    structures = of.structures()
    level = structures[0].levels[-1]
    tiles, parents = of.tiles_of(0, level.number), np.array([2])
    (unit,) = (unit for unit, _ in tiles if unit.first <= 2 < unit.last)
    (panels,) = OpenUnit(of.path, unit, level, of.n_features).met(parents)
    assert (panels.first, len(panels.panels)) == (2, 2)
    parents = np.array([2, 8, 9])
    read = [
        (panels.first, len(panels.panels) - 1)
        for unit, _ in tiles
        for panels in OpenUnit(of.path, unit, level, of.n_features).met(parents)
    ]
    assert sum(n for _, n in read) == 3
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(nodes, "_MANY", 1)  # any are few
        shared = list(shared_units(of.path, level, of.n_features, tiles, parents, 0))  # with no room for a unit
    assert [(panels.first, len(panels.panels) - 1) for panels in shared] == read


def test_a_model_that_does_not_fit_ranks_rows_alike(
    model: tuple[xs.Model, xs.Dataset, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    made, data, _ = model
    of, x = TreeWeights(made.path), data.X_rows().block(0, data.n_samples)
    needs = predict.held_needs(of, 0)
    assert (
        needs["trees"]
        < predict.held_needs(of, 1 << 40)["trees"] + nodes.OPEN_UNIT * len(of.tiles) + nodes.OPEN_PARENT * 99
    )
    found = []
    for room in (1 << 40, 0):
        held = HeldTrees(of, room)
        labels, scores = np.empty((x.n, 7), np.int64), np.empty((x.n, 7), np.float32)
        held.rank(x, labels, scores)
        found.append((labels.tobytes(), scores.tobytes()))
    assert found[0] == found[1]
    monkeypatch.setattr(nodes, "_MANY", 1)
    labels, scores = made.predict_topk(data, 7, memory_limit="4GB", threads=2)
    assert (labels.tobytes(), scores.tobytes()) == found[0]


def test_levels_from_the_root_on_are_held_as_many_as_there_is_room_for(
    model: tuple[xs.Model, xs.Dataset, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    of, opened = TreeWeights(model[0].path), list[Unit]()
    n_levels, rooms = len(of.levels[0]), list[int]()
    for n in range(n_levels + 1):  # that are held
        largest = max((size for unit, size in of.tiles if unit.level >= n), default=0)
        rooms.append(nodes.PARENT_BYTES + 2 * largest + sum(size for unit, size in of.tiles if unit.level < n))
    assert rooms == sorted(rooms)
    open_unit = TreeWeights.open_unit

    def noted(of: TreeWeights, unit: Unit, structures: Any) -> OpenUnit:
        opened.append(unit)
        return open_unit(of, unit, structures)

    monkeypatch.setattr(TreeWeights, "unit", lambda *_: None)
    monkeypatch.setattr(TreeWeights, "open_unit", noted)
    for n, least in enumerate(rooms):
        for room in (least, rooms[n + 1] - 1 if n < n_levels else 2 * least):
            opened.clear()
            OpenTrees(of, of.width, None, room=room)
            assert opened == [unit for unit, _ in of.tiles if unit.level >= n]


def test_no_rows_reach_nothing(model: tuple[xs.Model, xs.Dataset, Any]) -> None:
    of, none = TreeWeights(model[0].path), CSR.of(model[1].X_rows().block(0, 0))
    for room in (None, 9 * nodes.PARENT_BYTES, 1 << 30):
        assert OpenTrees(of, of.width, None, room=room).best(none, filter_pairs(), 3).labels.shape == (0, 3)


def test_parents_that_rows_reached_stay_as_far_as_there_is_room(
    model: tuple[xs.Model, xs.Dataset, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    made, data, _ = model
    of, reads = TreeWeights(made.path), list[int]()
    monkeypatch.setattr(predict, "_upper", lambda *_: {})  # no level is held whole
    plenty, little = (OpenTrees(of, of.width, None, room=room) for room in (1 << 30, 6 * nodes.PARENT_BYTES))
    read = OpenUnit.read

    def counted(unit: OpenUnit, first: int, last: int) -> nodes.Panels:
        panels = read(unit, first, last)
        taken = sum(part.nbytes for part in panels if isinstance(part, np.ndarray))
        assert taken < unit.size(first) < taken + nodes.PARENT_BYTES
        reads.append(unit.size(first))
        return panels

    monkeypatch.setattr(OpenUnit, "read", counted)

    def bytes_read(trees: OpenTrees, start: int, stop: int) -> int:
        reads.clear()
        for i in range(start, stop):
            trees.best(CSR.of(data.X_rows().block(i, i + 1)), filter_pairs(), 3)
        return sum(reads)

    first = bytes_read(plenty, 0, 20)
    assert first > 0
    assert bytes_read(plenty, 0, 20) == 0
    assert bytes_read(plenty, 20, data.n_samples) > 0
    assert bytes_read(little, 0, 20) > first
    assert bytes_read(little, 0, 20) > first


def test_blocks_have_more_rows_where_weights_do_not_stay(model: tuple[xs.Model, xs.Dataset, Any]) -> None:
    made, data, _ = model
    task = TreeTask(made, data, 5)  # type: ignore[arg-type]
    task.model.tiles = [(unit, 40 * MIB) for unit, _ in task.model.tiles]
    total = 40 * MIB * len(task.model.tiles)
    kept, not_kept = (task.sizes(MemoryPlan(2**40, budget, 1)) for budget in (2 * total, 2 * total // 3))
    assert kept.keeps
    assert not not_kept.keeps
    assert not_kept.rows > kept.rows
    assert not_kept.cache_bytes < total


# ----------------------------------------------------------------------------------------------------------------------
# trainings


def test_rows_and_alpha_lie_in_files_that_have_no_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "LARGE", 200)
    X, Y = topics()
    run = run_tree(stored(tmp_path, X, Y), tmp_path, TreeParameters(**TREE))
    job = next(job for job in run.of(StreamJob) if job.level == 1)
    (tmp_path / "again").mkdir()
    again = replace(job, spare=0, out=str(tmp_path / "again" / "pack"))
    again.run()
    assert [path.name for path in (tmp_path / "again").iterdir()] == ["pack"]
    for name in ("values", "bias", "gaps"):
        assert array(again.out, name).tobytes() == array(job.out, name).tobytes()


def test_the_plan_counts_alpha_where_it_fits(tmp_path: Path) -> None:
    X, Y = topics()
    data, p = stored(tmp_path, X, Y), TreeParameters(**{**TREE, "max_leaf": 1, "root": 32})
    forecaster, budget = TreeForecaster(Task(data, p, 0)), MemoryPlan(2**40, 2**30, 1)
    root = forecaster._levels()[0]
    assert root.groups == 2
    sizes, alpha = plan.plan_tree(budget, data, p, forecaster._shape), root.groups * LANE_BYTES * data.n_samples
    spares = (0, alpha // 2, 4 * alpha)
    held = [forecaster._held(root, replace(sizes, spare=spare), budget) for spare in spares]
    assert all(bytes_held <= spare for bytes_held, spare in zip(held, spares, strict=True))
    assert held[1] >= alpha // 2
    assert alpha <= held[2] < 2 * alpha
