"""Pages for operators: pressure, open questions, one job's time line, and what may be done about it.

The same pages stand in Flower (:mod:`celery_safe_effects.contrib.flower`) and alone (``safe-effects console``). They
need the extra ``console``, carry no scripts, and read a bounded number of rows.
"""
