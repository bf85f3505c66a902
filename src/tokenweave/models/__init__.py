"""One decoder flattened to stages; families as differences; checkpoint loading and sharding."""
