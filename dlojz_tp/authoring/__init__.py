"""What authors and maintainers use: one source in, two notebooks out."""
