"""Where the truth lives: the database's URL and the schema's name, checked and put into the form that SQL takes."""

from __future__ import annotations

import re
import sys
from typing import Any, Final

import psycopg
from psycopg import pq
from psycopg.conninfo import make_conninfo

from .errors import ConfigurationError

DJANGO: Final = "django:"
"""Begins a URL that stands for one of Django's databases, by its alias."""


def django_alias(url: Any) -> str | None:
    """The alias in ``django:<alias>``; ``None`` for any other URL."""
    return url[len(DJANGO) :] if isinstance(url, str) and url.startswith(DJANGO) else None


def is_of_django_tests(url: str) -> bool:
    """Whether this is a database that Django's test runner will drop, which no open connection must prevent."""
    return django_alias(url) is not None and hasattr(sys.modules.get("django.core.mail"), "outbox")


def conninfo_from_url(url: str) -> str:
    """Turn a SQLAlchemy database URL (or a libpq one) into libpq's form.

    Arguments:
        url: such as ``postgresql+psycopg://user@host/name``, or ``django:<alias>`` for one of Django's ``DATABASES``.

    Returns:
        a conninfo string or URI for psycopg.

    Raises:
        ConfigurationError: when it is not a PostgreSQL URL.
    """
    alias = django_alias(url)
    if alias is not None:
        return _conninfo_from_django(alias)
    scheme, sep, rest = url.partition("://")
    if not sep:
        if "=" in url:
            return url
        raise ConfigurationError(
            "safe_effects_database_url is not a database URL; write postgresql+psycopg://user:password@host/name"
        )
    dialect = scheme.partition("+")[0]
    if dialect not in ("postgresql", "postgres"):
        raise ConfigurationError(
            f"safe_effects_database_url names {dialect!r}; only PostgreSQL can hold the truth "
            "(postgresql+psycopg://user:password@host/name)"
        )
    conninfo = f"postgresql://{rest}"
    try:
        return make_conninfo(conninfo)
    except psycopg.ProgrammingError as exc:
        raise ConfigurationError(f"safe_effects_database_url cannot be parsed: {exc}") from None


def _conninfo_from_django(alias: str) -> str:
    """Where Django's database is; the test runner's database while tests run."""
    named = f"safe_effects_database_url = {DJANGO + alias!r}"
    try:
        from django.db import connections

        settings = connections[alias].settings_dict
        vendor = connections[alias].vendor
    except Exception as exc:
        raise ConfigurationError(f"{named}: Django has no such database here: {exc}") from exc
    if vendor != "postgresql":
        raise ConfigurationError(f"{named}: it is {vendor}; only PostgreSQL can hold the truth")
    options = dict(settings.get("OPTIONS") or {})
    if options.get("assume_role"):
        raise ConfigurationError(
            f"{named}: its OPTIONS have assume_role, which needs session state; give a URL with a user of its own"
        )
    # Start-up options are session state, too.
    known = {one.keyword.decode() for one in pq.Conninfo.get_defaults()} - {"options"}
    params = {name: value for name, value in options.items() if name in known}
    fields = {"NAME": "dbname", "USER": "user", "PASSWORD": "password", "HOST": "host", "PORT": "port"}
    params |= {name: settings[field] for field, name in fields.items() if settings.get(field)}
    return make_conninfo(**params)


def quote_schema(schema: str) -> str:
    """Quote a schema name for use in SQL text.

    Raises:
        ConfigurationError: for a name that no statement can carry safely.
    """
    if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_$]{0,62}", schema):
        raise ConfigurationError(
            f"safe_effects_schema {schema!r} is not a plain identifier (letters, digits, underscores; at most 63)"
        )
    return f'"{schema}"'
