"""What several tests share: paths, helpers that read runs, servers and small models."""
