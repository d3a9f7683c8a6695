"""What earlier attempts of a job recorded, and what a replay makes of it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from .. import canonical
from ..errors import EffectRefused, EffectResultInvalid, ReplayMismatch
from ..states import OperationStatus as Op
from ..values import Outcome
from . import failures
from .outcomes import message

if TYPE_CHECKING:
    from ..effects import Effect
    from ..store.hot import Row
    from .job import ActiveJob


class Recorded:
    """The operations that earlier attempts of a job left behind.

    Arguments:
        job: the job.
        records: its operations; what an earlier generation (before ``self.replace()``) recorded is not this body's.
    """

    def __init__(self, job: ActiveJob, records: Iterable[Row]) -> None:
        self.job = job
        self._by_key = {r.key: r for r in records if r.keyed or r.key == job.key(r.step)}
        self._last = max((record.ordinal for record in self._by_key.values()), default=0)

    def outcome(self, effect: Effect[Any, Any], step: str, key: str, digest: str) -> Outcome[Any] | None:
        """The outcome that is recorded for a call; ``None`` for a call that may be made.

        Raises:
            ReplayMismatch: another effect or other arguments are recorded.
            EffectRefused, EffectResultInvalid, Exception: what the recorded call raised.
        """
        record = self._by_key.get(key)
        if record is None:
            return None
        self.same_call(effect, record, step, digest)
        error = canonical.decode(record.error)
        behind = record.ordinal < self._last or record.ordinal <= self.job.passed
        if record.status == Op.NOT_HAPPENED and error is not None and behind:
            # The body went on from this very exception: it must do so again.
            raise failures.from_json(error)
        return self.settled(record)

    def same_call(self, effect: Effect[Any, Any], record: Row, step: str, digest: str) -> None:
        """Make sure that a record is of this very call.

        Raises:
            ReplayMismatch: it is not; the job will be parked.
        """
        if record.effect != effect.name or record.args_digest != digest:
            what = f"effect {effect.name!r}" if record.effect != effect.name else "other arguments"
            self.job.mismatch = ReplayMismatch(
                f"step {step!r} of job {self.job.id} is recorded as {record.effect!r}, the replay asks for {what}; "
                "the body must make the same calls each time it runs: put clocks, randomness, reads in repeatable "
                "effects",
                job_id=self.job.id,
                step=step,
            )
            raise self.job.mismatch

    def settled(self, record: Row) -> Outcome[Any] | None:
        """What a resolved record stands for; ``None`` for one that may be sent (again)."""
        if record.status == Op.OUTCOME_CONFIRMED:
            if not record.repeatable:
                self.job.last_ref = record.provider_ref
            if record.error is not None:
                raise EffectResultInvalid(message(canonical.decode(record.error)))
            return Outcome(record.provider_ref, canonical.decode(record.result), replayed=True)
        if record.status == Op.REFUSED:
            cause = failures.from_json(canonical.decode(record.error))
            raise EffectRefused(f"{record.effect} was refused: {cause}", key=record.key) from cause
        return None
