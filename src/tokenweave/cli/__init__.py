"""The `tokenweave` command."""
