"""Checks of 08_data_parallel_under_the_hood: start, shares, gradients one by one, in buckets, overlapped, and a ring."""
