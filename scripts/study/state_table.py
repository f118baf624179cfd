"""The states of a study's runs as a table for people and programs."""

from __future__ import annotations

from collections.abc import Sequence

from report.table import Cell, Column, Table
from scripts.jobs.state import RunState
from scripts.study.plan import StudyRun


def state_table(runs: Sequence[StudyRun], states: Sequence[RunState], title: str) -> Table:
    """The states of the runs, in their order."""
    columns = (
        Column("name", "Point", is_number=False),
        Column("num_gpus", "Ranks"),
        Column("num_nodes", "#N"),
        Column("batch_size", "Batch Size"),
        Column("job_id", "Job", is_number=False),
        Column("state", "State", is_number=False),
        Column("detail", "Detail", is_number=False),
    )
    rows = tuple(
        (
            Cell(run.name, run.name),
            Cell(str(run.num_gpus), run.num_gpus),
            Cell(str(run.num_nodes), run.num_nodes),
            Cell(str(run.batch_size), run.batch_size),
            Cell(s.job_id or "", s.job_id),
            Cell(s.state, s.state),
            Cell(s.detail, s.detail),
        )
        for run, s in zip(runs, states, strict=True)
    )
    return Table("study", title, columns, rows)
