"""Checks of 25_race: a timed run, a result, an audit, progressive resizing, rectangles, an average, costs, an entry."""
