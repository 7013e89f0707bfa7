"""Answers to 08_data_parallel_under_the_hood, one file a balise."""
