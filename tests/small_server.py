"""A server of ranks that imports torch and what a rank needs itself, and no more: it starts in two thirds of the time.

For tests that end servers. What ranks find imported beside that, they import themselves.
"""

from dlojz_tp.launch import client

BOOT = client.BOOT.replace(
    "main(spec)",
    "from dlojz_tp.launch import server; server.PRELOAD = (*server.PRELOAD[:3], server.PRELOAD[-1]); main(spec)",
)
assert BOOT != client.BOOT


def use():
    """From here on, each server that this process starts is small. Returns what undoes it."""
    before, running = client.BOOT, client._server

    def undo():
        client.BOOT = before
        if client._server is not running:
            client.close()

    client.BOOT = BOOT
    return undo
