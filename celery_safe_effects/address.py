"""Where the truth lives: the database's URL and the schema's name, checked and put into the form that SQL takes."""

from __future__ import annotations

import re

import psycopg
from psycopg.conninfo import make_conninfo

from .errors import ConfigurationError


def conninfo_from_url(url: str) -> str:
    """Turn a SQLAlchemy database URL (or a libpq one) into libpq's form.

    Arguments:
        url: such as ``postgresql+psycopg://user@host/name``.

    Returns:
        a conninfo string or URI for psycopg.

    Raises:
        ConfigurationError: when it is not a PostgreSQL URL.
    """
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
