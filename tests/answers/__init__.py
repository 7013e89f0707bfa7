"""Right and wrong answers to every balise: what trainees write, and what must be said of it."""
