"""Faults of the machine, injected: no false verdict, nothing lost, one clear line. docs/reliability.md lists them."""
