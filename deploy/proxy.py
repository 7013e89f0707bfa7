#!/usr/bin/env python3
"""The proxy that the hub starts: configurable-http-proxy in Python, for a class that waits in a queue.

While a trainee's server starts, the page waits for one long answer that says "ready". As it comes, the proxy gives an
answer up after 20 s, and asks for no more than ten at a time: whoever waits longer would look at that page for ever,
and ten who wait would keep out all others.
"""

import sys

from configurable_http_proxy.cli import main
from tornado.httpclient import AsyncHTTPClient

PATIENCE = 1200  # seconds: longer than a server may take to start
AT_ONCE = 2000  # answers that are waited for

if __name__ == "__main__":
    AsyncHTTPClient.configure(None, max_clients=AT_ONCE)
    sys.argv += [f"--proxy-timeout={1000 * PATIENCE}"]
    main()
