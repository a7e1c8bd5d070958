"""Code that all routes share: bodies, callers, routes, the format of errors."""
