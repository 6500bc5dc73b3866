"""The schemas and the README that is generated from them."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest

from harness.tables import TABLES, SchemaError, check_frame, column
from harness.tables.document import main, readme

README = Path(__file__).parents[2] / "results" / "README.md"


def test_results_readme_is_current() -> None:
    assert README.read_text(encoding="utf-8") == readme(), "run: python -m harness.tables"


def test_readme_states_every_column_with_type_and_unit() -> None:
    text = readme()
    for table in TABLES.values():
        assert len({c.name for c in table.columns}) == len(table.columns)
        for c in table.columns:
            assert f"| `{c.name}` | {c.dtype} | {c.unit} | {c.definition} | {c.null} |" in text
            assert c.definition
            assert "|" not in c.definition + c.null


def test_units_are_in_the_names() -> None:
    suffix = {"ms": "_ms", "s": "_s", "bytes": "bytes", "tokens/s": "_tok_s", "requests/s": "request_s"}
    for table in TABLES.values():
        for c in table.columns:
            if c.unit in suffix:
                assert c.name.endswith(suffix[c.unit])


def test_check_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "README.md"
    assert main(["--check", "--path", str(path)]) == 1
    assert main(["--path", str(path)]) == 0
    assert main(["--check", "--path", str(path)]) == 0
    path.write_text("old", encoding="utf-8")
    assert main(["--check", "--path", str(path)]) == 1
    assert "python -m harness.tables" in capsys.readouterr().out


def test_frames_are_checked() -> None:
    config = {"run_id": ["r"], "field": ["a"], "value": ["1"], "source": ["user"]}
    check_frame("config", pd.DataFrame(config, dtype="string"))
    with pytest.raises(SchemaError, match=r"missing columns \['source'\]"):
        check_frame("config", pd.DataFrame({k: v for k, v in config.items() if k != "source"}, dtype="string"))
    with pytest.raises(SchemaError, match="'field' is object, must be string"):
        check_frame("config", pd.DataFrame(config, dtype="string").astype({"field": object}))
    with pytest.raises(KeyError, match="no column 'ttft'"):
        column("runs", "ttft")
