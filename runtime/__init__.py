"""Runtime: serve an engine. Scheduling and block tables are plain Python; only engines touch tensors."""
