"""Runs of a store that are searched for. Does not import MLflow; ``tracking.Tracker`` gives it the client."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

TAG = "lit."
"""Prefix of our tags."""
PAGE = 1000
"""Runs, or experiments, that are read in one call."""
FEW = 500
"""Keys that are searched for one by one; for more, all runs of the store are read, as a search knows no alternatives
among tags."""


@dataclass
class Run:
    """What MLflow knows about one key."""

    run_id: str
    status: str
    params: dict[str, str] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)
    tags: dict[str, str] = field(default_factory=dict)

    @property
    def own_tags(self) -> dict[str, str]:
        """Our tags without their prefix."""
        return {name.removeprefix(TAG): value for name, value in self.tags.items() if name.startswith(TAG)}


def search(client: Any, *filters: str) -> Iterator[list[Run]]:
    """The runs of every filter, the newest first."""
    ids = [e.experiment_id for e in pages(client.search_experiments)]
    for text in filters:
        found = pages(client.search_runs, ids, text, order_by=["attributes.start_time DESC"])
        yield [Run(r.info.run_id, r.info.status, r.data.params, r.data.metrics, r.data.tags) for r in found]


def pages(call: Callable[..., Any], *arguments: Any, **options: Any) -> Iterator[Any]:
    """What a call finds in all its pages; the first is one of many on a server that a team shares."""
    token = None
    while token != "":
        page = call(*arguments, max_results=PAGE, page_token=token, **options)
        yield from page
        token = page.token or ""


def of_keys(client: Any, keys: Sequence[str]) -> Iterator[list[Run]]:
    """The runs of every key, the newest first; without retired ones."""
    kind = f"tags.`{TAG}kind` = 'run'"
    if len(keys) <= FEW:
        yield from search(client, *(f"tags.`{TAG}key` = '{key}' and {kind}" for key in keys))
        return
    by_key: dict[str, list[Run]] = {}
    (every,) = search(client, kind)
    for run in every:
        by_key.setdefault(run.tags.get(f"{TAG}key", ""), []).append(run)
    yield from (by_key.get(key, []) for key in keys)


def finished_among(client: Any, ids: Sequence[str]) -> list[Run]:
    """The FINISHED runs among those with these ids."""
    parts = [", ".join(f"'{run_id}'" for run_id in ids[i : i + PAGE]) for i in range(0, len(ids), PAGE)]
    found = search(client, *(f"attributes.run_id IN ({part}) and attributes.status = 'FINISHED'" for part in parts))
    return [run for runs in found for run in runs]
