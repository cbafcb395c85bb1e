"""What a stream stores: records, files of changes, digests, and the way to a version."""
