"""Indices become step batches: samplers and collation."""
