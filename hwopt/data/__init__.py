"""A file becomes step batches: sources, readers, token stores, samplers, collation."""
