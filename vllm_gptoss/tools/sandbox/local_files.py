"""Files of a program with its data directory on the host, where the server opens them itself."""

from __future__ import annotations

import asyncio

from . import datafiles
from .launcher import SandboxError


class LocalFiles:
    """The file methods of `launcher.Sandbox` for a process with files in `_data`."""

    _data: str

    async def list_files(self) -> list[tuple[str, int, int, int]]:
        return await asyncio.to_thread(datafiles.regular_files, self._data)

    async def open_file(self, path: str) -> int:
        try:
            return datafiles.open_regular(self._data, path)
        except (OSError, ValueError) as error:
            raise SandboxError(str(error)) from error
