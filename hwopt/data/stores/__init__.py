"""Rows become arrays on disk: token ids and images, read by index."""
