"""torch's caching allocator, played: what a traced step reserves."""
