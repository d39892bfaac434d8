"""What outlives a restart."""
