"""Tests on a GPU tune linear layers into a folder of the session: neither from nor into the user's cache."""

from __future__ import annotations

from collections.abc import Iterator

import pytest


@pytest.fixture(scope="session", autouse=True)
def session_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ENGINE_CACHE_DIR", str(tmp_path_factory.mktemp("cache")))
        yield
