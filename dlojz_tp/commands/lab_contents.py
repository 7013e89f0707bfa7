"""The files that JupyterLab shows: as on disk, but the map is drawn anew each time it is opened."""

import asyncio
import contextlib
from pathlib import Path

from jupyter_server.services.contents.largefilemanager import AsyncLargeFileManager

from dlojz_tp import index
from dlojz_tp.commands.copies import LabError, renew
from dlojz_tp.works import state


class Contents(AsyncLargeFileManager):
    """Give to ServerApp as contents_manager_class.

    Source: Jupyter Server documentation, "Contents API".
    """

    async def get(self, path, content=True, **options):
        """As the base class. The map is written before it is read, so JupyterLab finds no change on disk later."""
        if content and path.strip("/") == index.NAME:
            await asyncio.to_thread(_draw, Path(self.root_dir))
        return await super().get(path, content=content, **options)


def _draw(work: Path):
    with contextlib.suppress(LabError, OSError):  # then the map of the last start is shown
        renew(index.NAME, index.notebook(state.folder(work)), work)
