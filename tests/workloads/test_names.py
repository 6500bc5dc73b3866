"""Names that do not exist are answered with the nearest that do, in one wording."""

from __future__ import annotations

from workloads.names import did_you_mean, nearest, unknown, unknown_name


def test_nearest_are_the_best_first_and_none_if_none_is_close():
    assert nearest("statik", ["ours", "static", "statics"], most=3) == ("static", "statics")
    assert nearest("statik", ["ours", "static", "statics"]) == ("static",)
    assert nearest("zzz", ["ours", "static"]) == ()


def test_one_wording():
    assert unknown("engine", "ourz", ["static", "ours"]) == (
        "unknown engine 'ourz'. Did you mean 'ours'? Available: ours, static."
    )
    assert unknown("engine", None, ["zz", "yy"]) == "unknown engine None. Available: yy, zz."
    assert unknown("engine", "a", []) == "unknown engine 'a'. Available: none."
    assert did_you_mean(("a", "b")) == " Did you mean 'a' or 'b'?"
    assert did_you_mean(()) == ""
    assert str(unknown_name("engine", "a", [])) == unknown("engine", "a", [])
