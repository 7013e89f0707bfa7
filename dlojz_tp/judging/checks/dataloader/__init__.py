"""Checks of 05_dataloader: files, timeline, seeds, options, streams, the prefetcher, shards."""
