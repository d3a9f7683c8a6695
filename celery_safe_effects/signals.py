"""Signals, sent in the process where the thing was seen. ``sender`` is the task's name.

================== ======================================== ====================================================
signal             keyword arguments                        sent when
================== ======================================== ====================================================
job_transition     ``row`` (TransitionRow)                  a job changed its state
operation_transition ``row`` (TransitionRow)                an operation changed its state
lease_lost         ``job_id``, ``fence``                    a worker found that it no longer owns a job
admission_rejected ``error`` (AdmissionRejected)            an enqueue was refused
stale_delivery     ``job_id``, ``reason``                   a broker message was not allowed to run
double_effect      ``operation_key``, ``job_id``, ``ref``   evidence shows that an effect happened twice
================== ======================================== ====================================================

Receivers that raise are logged and do not disturb the job.
"""

from __future__ import annotations

from celery.utils.dispatch import Signal

job_transition = Signal(name="safe_effects_job_transition", providing_args={"row"})
operation_transition = Signal(name="safe_effects_operation_transition", providing_args={"row"})
lease_lost = Signal(name="safe_effects_lease_lost", providing_args={"job_id", "fence"})
admission_rejected = Signal(name="safe_effects_admission_rejected", providing_args={"error"})
stale_delivery = Signal(name="safe_effects_stale_delivery", providing_args={"job_id", "reason"})
double_effect = Signal(name="safe_effects_double_effect", providing_args={"operation_key", "job_id", "ref"})

__all__ = [
    "admission_rejected",
    "double_effect",
    "job_transition",
    "lease_lost",
    "operation_transition",
    "stale_delivery",
]
