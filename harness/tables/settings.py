"""Tables of how a run was made: settings, surroundings, and what the backend counted."""

from __future__ import annotations

from harness.tables.table import RUN_ID, Column, Table

CONFIG = Table(
    "config",
    "One row a resolved setting of a run.",
    (
        RUN_ID,
        Column("field", "string", "", "setting of the engine"),
        Column("value", "string", "", "resolved value, as JSON"),
        Column("source", "string", "", "user, default, or derived: from what"),
    ),
)

ENVIRONMENT = Table(
    "environment",
    "One row a fact about machine, software or run.",
    (
        RUN_ID,
        Column("key", "string", "", "what is described; identity.* is what the run was called beyond the runs table"),
        Column("value", "string", "", "as JSON"),
    ),
)

COUNTERS = Table(
    "counters",
    "One row a count of the backend.",
    (
        RUN_ID,
        Column("name", "string", "", "what the backend counted while measuring, in its own words"),
        Column("value", "Float64", "", "the count or gauge", "counter known but not read"),
    ),
)
