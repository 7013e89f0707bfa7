"""Checks of 00_welcome."""
