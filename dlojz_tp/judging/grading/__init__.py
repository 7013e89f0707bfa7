"""Judge the answers in a notebook or a file from the shell."""
