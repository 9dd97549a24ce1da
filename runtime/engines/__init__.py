"""Engine drivers: each runs steps on one kind of engine, over a KV pool that it allocates."""
