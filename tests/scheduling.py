"""Which of the slow tests run in the same worker of pytest-xdist, because they share something expensive."""

from __future__ import annotations

from xdist.scheduler import LoadScopeScheduling

#: Folders and files whose tests share a Ray cluster, a browser, a server or a training run.
TOGETHER = (
    "tests/cluster/",
    "tests/browser/",
    *(f"tests/integration/test_{name}.py" for name in ("llama_server", "plugins")),
)


class SharedFixtures(LoadScopeScheduling):
    """Tests of a folder or file of `TOGETHER` run in one worker, every other test in the next free one."""

    def _split_scope(self, nodeid: str) -> str:
        return next((place for place in TOGETHER if nodeid.startswith(place)), nodeid)
