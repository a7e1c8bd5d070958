"""The one clock that all servers of a store share: the database's. Those of several hosts differ."""

from __future__ import annotations

from typing import Any

import sqlalchemy as sa
from sqlalchemy.ext.compiler import compiles
from sqlalchemy.sql.functions import FunctionElement


class now(FunctionElement[float]):  # noqa: N801 - SQL's own word
    """Seconds since 1970, with fractions, when the statement runs."""

    type = sa.Float()
    inherit_cache = True


@compiles(now, "sqlite")
def _sqlite(element: now, compiler: Any, **options: Any) -> str:
    return "((julianday('now') - 2440587.5) * 86400.0)"


@compiles(now, "postgresql")
def _postgresql(element: now, compiler: Any, **options: Any) -> str:
    return "CAST(extract(epoch FROM clock_timestamp()) AS double precision)"
