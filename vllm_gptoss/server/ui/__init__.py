"""The built-in web page: static files and the routes that serve them. The page uses only the server's own API."""
