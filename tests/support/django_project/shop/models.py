"""Business rows."""

from __future__ import annotations

from typing import ClassVar

from django.db import models


class Order(models.Model):
    """An order, and the provider's reference of its charge."""

    id: ClassVar[models.CharField] = models.CharField(primary_key=True, max_length=50)
    cents: ClassVar[models.IntegerField] = models.IntegerField()
    ref: ClassVar[models.CharField] = models.CharField(max_length=50, default="")
