"""What every route shares: bodies, callers, routes, the format of errors."""
