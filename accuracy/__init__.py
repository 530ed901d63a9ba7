"""What `make accuracy` measures."""
