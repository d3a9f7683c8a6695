"""The app's configuration."""

from __future__ import annotations

from django.apps import AppConfig


class ShopConfig(AppConfig):
    """Labelled `shop`."""

    name = "tests.support.django_project.shop"
    label = "shop"
