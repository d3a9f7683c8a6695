"""Retention: finished jobs go in bounded batches; ``unknown`` ones never; their keys stay as tombstones for a while."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ..store.hot import Store


@dataclass
class Pruned:
    """What one pruning deleted."""

    jobs: int = 0
    tombstones: int = 0


class Pruner:
    """Deletes what is past its retention.

    Arguments:
        store: the database.
    """

    BATCH = 500
    COUNTED = 500_000

    def __init__(self, store: Store) -> None:
        self.store = store

    def run(self, by: str, progress: Callable[[int, int], object] | None = None) -> Pruned:
        """Delete everything that is past its retention, batch by batch.

        Arguments:
            by: who prunes.
            progress: told how many jobs of how many are gone; some may stay, since a provider retains their keys.
        """
        self.store.row("MAINTENANCE_BEGIN", name="prune", by=by, idle_for=None)
        pruned = Pruned()
        due = self.store.due_for_pruning(self.COUNTED) if progress is not None else 0
        while batch := self.store.prune(self.BATCH):
            pruned.jobs += batch
            if progress is not None:
                progress(pruned.jobs, max(due, pruned.jobs))
        retention = self.store.config.tombstone_retention
        while rows := self.store.rows("PRUNE_TOMBSTONES", retention=retention, limit=self.BATCH):
            pruned.tombstones += len(rows)
        self.store.rows("PRUNE_CHORDS", retention=retention)
        self.store.row("MAINTENANCE_END", name="prune")
        return pruned
