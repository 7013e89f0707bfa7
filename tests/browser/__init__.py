"""JupyterLab as a trainee sees it, in a real browser: `make test-browser`."""
