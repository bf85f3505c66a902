"""TokenWeave inside other engines."""
