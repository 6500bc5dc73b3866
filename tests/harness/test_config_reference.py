"""Every key is explained where it is defined, and the page of all of them is the one that the schemas make."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import pytest

from harness.app import main
from harness.config_reference import about, attributes, documented, groups, markdown, top_level
from harness.config_schemas import BenchConfig, ContinuousEngineConfig

PAGE = Path(__file__).parents[2] / "docs" / "configuration.md"


def test_every_key_is_explained():
    assert top_level().keys() == {f.name for f in fields(BenchConfig)}
    found = groups()
    assert {"engine", "model", "arrival", "workload", "generation", "measure", "slo", "experiment"} == set(found)
    keys = [(group, key) for group, schemas in found.items() for schema in schemas for key in schema.keys]
    assert len(keys) > 250
    assert [f"{group}.{key.name}" for group, key in keys if not key.explanation] == []


def test_every_option_belongs_to_one_schema_and_says_what_it_is():
    for group, schemas in groups().items():
        options = [option for schema in schemas for option in schema.options]
        shipped = {p.stem for p in (PAGE.parents[1] / "sweeps" / group).glob("*.yaml")}
        assert sorted(name for name, _ in options) == sorted(shipped)
        assert all(len(text) > 8 for _, text in options), group


def test_the_page_is_made_of_them():
    assert PAGE.read_text() == markdown(), "run python -m harness.config_reference > docs/configuration.md"


def test_explanations_of_docstrings():
    text = """Settings.

    Attributes:
        a: one
            and more.
        b, c_d: both; None = ``nothing``.

    Note: not a key.
    """
    assert documented(text) == {"a": "one and more.", "b": "both; null = `nothing`.", "c_d": "both; null = `nothing`."}
    assert documented("Without a section.") == {}


def test_the_engines_own_words_explain_its_keys():
    from engine.config import ContinuousBatchingConfig

    own = documented(ContinuousBatchingConfig.__doc__ or "")
    assert attributes(ContinuousEngineConfig)["safety_margin"] == own["safety_margin"] != ""


def test_defaults_are_those_of_the_schema_or_the_file():
    measure = {key.name: key.default for key in groups()["measure"][0].keys}
    assert (measure["repeats"], measure["aa"], measure["torch_threads"]) == ("1", "false", "null")
    (null,) = (schema for schema in groups()["engine"] if schema.name == "null")
    assert {key.name: key.default for key in null.keys}["tokens_per_delivery"] == "1"


@pytest.mark.parametrize(
    "command, expected",
    [
        ("--help measure.repeats", "measure.repeats  runs of each config, each in a process of its own"),
        ("--help dry_run", "dry_run  list the runs"),
        ("-h arrival", "== arrival=poisson  Independent exponential gaps."),
        (
            "--help workload.prompt_tokens.sigma",
            "workload.prompt_tokens.sigma (synthetic)  deviation of their logarithm",
        ),
    ],
)
def test_help_explains_a_group_or_a_key(command, expected, capsys):
    assert main(command.split()) == 0
    assert expected in capsys.readouterr().out


def test_help_begins_with_this_engine_and_explains_a_key_once():
    text = about(["engine"])
    assert text.index("== engine=ours  ") < text.index("== engine=transformers  ")
    assert text.count("tokens a page of one layer holds") == 1
    shared = text[text.index("== engine=transformers  ") : text.index("== engine=static  ")]
    assert "  as above, null unless stated: name [transformers], env [{}], attn_implementation, page_size," in shared
    assert "engine.page_size" not in shared


def test_help_of_an_unknown_name_is_one_line(capsys):
    assert main(["--help", "measure.repeat"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert "Did you mean 'measure.repeats'" in err
