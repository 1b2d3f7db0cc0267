"""From token lengths to reproducible, full batches: buckets, plans, packs, shards, streams."""
