"""The notebook that reads over the network runs to its end, against the real XRootD services."""

from __future__ import annotations

import importlib
import os
import tempfile
from pathlib import Path
from types import ModuleType

import pytest
from nbclient import NotebookClient

from tests.conftest import ROOT

NOTEBOOK = ROOT / "docs" / "notebooks" / "pelican_into_pytorch.ipynb"


@pytest.mark.osdf
@pytest.mark.timeout(300)
def test_the_notebook_runs_to_its_end_in_a_fresh_kernel(osdf: ModuleType, tmp_path: Path) -> None:
    notebook = importlib.import_module("nbformat").read(NOTEBOOK, as_version=4)
    place = {"metadata": {"path": str(NOTEBOOK.parent)}}  # where a reader's Jupyter starts it
    client = NotebookClient(notebook, timeout=240, startup_timeout=240, resources=place)
    own = {name: str(tmp_path) for name in ("TMPDIR", "IPYTHONDIR", "MPLCONFIGDIR")}
    client.execute(env=os.environ | own | {"TRAINYARD_TMPDIR": tempfile.gettempdir()})
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    text = "".join(output.get("text", "") for output in outputs)
    assert "whole and equal: True" in text
    assert "a range, unverified: WRONG" in text and "streamed: right" in text
    assert any("image/png" in output.get("data", {}) for output in outputs)
