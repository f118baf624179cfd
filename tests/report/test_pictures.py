"""The command that takes the pictures of the docs; pictures.py itself needs a browser."""

from __future__ import annotations

import pytest

from dataset.errors import UserError
from tests.report import pictures


def test_help_is_shown_and_a_wrong_word_refused_before_a_browser_starts(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(pictures, "start_browser", None)  # a call would be a TypeError
    monkeypatch.setattr("sys.argv", ["pictures.py", "--help"])
    with pytest.raises(SystemExit) as end:
        pictures.main()
    assert end.value.code == 0
    assert "writes docs/pictures/*.png" in capsys.readouterr().out
    monkeypatch.setattr("sys.argv", ["pictures.py", "x"])
    with pytest.raises(UserError, match=r"unrecognized arguments: x; python -m tests\.report\.p"):
        pictures.main()
